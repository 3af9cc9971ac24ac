"""fedcpsl show: past runs and comparisons."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

BESIDE = 88  # columns from which on a curve goes beside its title


def add(commands: Any) -> None:
    show = commands.add_parser("show", help="print past runs", description="Print past runs, comparisons and sweeps.")
    show.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, comparison or sweep")
    show.add_argument("--json", action="store_true", help="final metrics as one JSON object (a list for several runs)")
    show.set_defaults(command=_show)


def print_results(folders: Sequence[Path]) -> None:
    """The results of runs, comparisons and sweeps, one after another."""
    from rich.console import Console

    from fedcpsl.report.comparison import print_comparison
    from fedcpsl.report.terminal import results_table, sparkline
    from fedcpsl.report.terminal_width import print_table, room
    from fedcpsl.report.verdict import of_run
    from fedcpsl.runs.comparison import is_comparison
    from fedcpsl.runs.folder import final_metrics, read_metrics

    console = Console()
    for folder in folders:
        if is_comparison(folder):
            print_comparison(folder)
            continue
        final = final_metrics(folder)
        print_table(results_table(final), console)
        print("personal accuracy by round", end="  " if room(console) >= BESIDE else "\n")
        curve = sparkline([m["personal"]["mean"] or 0.0 for m in read_metrics(folder)], min(60, room(console)))
        print(curve + ("" if final["finished"] else "  (not finished)"))
        for text in of_run(folder, final):
            print(fill(text, room(console)))


def print_json(folders: Sequence[Path]) -> None:
    """The same as one object, or as a list where there are several."""
    from fedcpsl.runs.comparison import is_comparison, summarise
    from fedcpsl.runs.folder import final_metrics
    from fedcpsl.storage import to_json

    found = [summarise(f) if is_comparison(f) else final_metrics(f) for f in folders]
    print(to_json(found[0] if len(found) == 1 else found, indent=2))


def _show(parsed: argparse.Namespace) -> int:
    (print_json if parsed.json else print_results)(parsed.runs)
    return 0
