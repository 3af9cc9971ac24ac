"""What people see of a run: tables in the terminal, plots, and a page."""
