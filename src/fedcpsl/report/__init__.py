"""Results of runs: tables in the terminal, figures, and a page."""
