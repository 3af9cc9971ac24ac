"""fedcpsl show: past runs and comparisons."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any


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
    from fedcpsl.runs.comparison import is_comparison
    from fedcpsl.runs.folder import final_metrics, read_metrics

    console = Console()
    for folder in folders:
        if is_comparison(folder):
            print_comparison(folder)
            continue
        final = final_metrics(folder)
        console.print(results_table(final))
        curve = sparkline([m["personal"]["mean"] or 0.0 for m in read_metrics(folder)])
        console.print(f"personal accuracy by round  {curve}" + ("" if final["finished"] else "  (not finished)"))


def _show(parsed: argparse.Namespace) -> int:
    from fedcpsl.runs.comparison import is_comparison, summarise
    from fedcpsl.runs.files import to_json
    from fedcpsl.runs.folder import final_metrics

    if parsed.json:
        found = [summarise(f) if is_comparison(f) else final_metrics(f) for f in parsed.runs]
        print(to_json(found[0] if len(found) == 1 else found, indent=2))
    else:
        print_results(parsed.runs)
    return 0
