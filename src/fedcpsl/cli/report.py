"""fedcpsl show, report and watch: results of runs in the terminal, as a page or tables, and live."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

from fedcpsl.errors import InputError
from fedcpsl.torchrun import place

MIN_WIDTH_ONE_LINE = 88  # columns: below, the curve goes under its title
FORMATS = ("html", "md", "latex", "csv")
TABLES = ("summary", "reach", "devices", "classes", "rounds", "edge")
PORT = 8420


def add_show(commands: Any) -> None:
    show = commands.add_parser("show", help="print past runs", description="Print past runs, comparisons and sweeps.")
    show.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, comparison or sweep")
    show.add_argument("--json", action="store_true", help="final metrics as one JSON object (a list for several runs)")
    show.set_defaults(command=_show)


def print_results(folders: Sequence[Path]) -> None:
    """Print the results of runs, comparisons and sweeps."""
    from rich.console import Console

    from fedcpsl.report.comparison import print_comparison
    from fedcpsl.report.terminal import available_width, print_table, results_table, sparkline
    from fedcpsl.report.verdict import run_verdicts
    from fedcpsl.runs.comparison import is_comparison
    from fedcpsl.runs.folder import final_metrics, read_metrics

    console = Console()
    for folder in folders:
        if is_comparison(folder):
            print_comparison(folder)
            continue
        final = final_metrics(folder)
        print_table(results_table(final), console)
        means = [m["personal"]["mean"] for m in read_metrics(folder)]
        if any(mean is not None for mean in means):
            print("personal accuracy by round", end="  " if available_width(console) >= MIN_WIDTH_ONE_LINE else "\n")
            curve = sparkline([mean or 0.0 for mean in means], min(60, available_width(console)))
            print(curve + ("" if final["finished"] else "  (not finished)"))
        for text in run_verdicts(folder, final):
            print(fill(text, available_width(console)))


def print_json(folders: Sequence[Path]) -> None:
    """Print the results as one JSON object, or as a list of several."""
    from fedcpsl.runs.comparison import is_comparison, summarise
    from fedcpsl.runs.folder import final_metrics
    from fedcpsl.storage import to_json

    found = [summarise(f) if is_comparison(f) else final_metrics(f) for f in folders]
    print(to_json(found[0] if len(found) == 1 else found, indent=2))


def _show(parsed: argparse.Namespace) -> int:
    (print_json if parsed.json else print_results)(parsed.runs)
    return 0


def add_report(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="write an HTML page about runs, or their tables",
        description="Write one self-contained HTML page about runs, comparisons, sweeps or studies. Runs that differ "
        "in their seed alone are grouped. With --format md, latex or csv, print tables instead.",
        allow_abbrev=False,
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, comparison or study")
    report.add_argument("--format", choices=FORMATS, default="html", help="a page, or tables as text [html]")
    report.add_argument(
        "--table",
        choices=TABLES,
        help="which table: " + ", ".join(TABLES) + " [the first three; csv: summary]",
        metavar="NAME",
    )
    report.add_argument(
        "--out", type=Path, metavar="FILE", help="where to write [a page: RUN/report.html, report.html; tables: stdout]"
    )
    report.add_argument(
        "--alone", action="store_true", help="first train each RUN's devices without a server, into RUN/alone"
    )
    report.set_defaults(command=_report)


def _report(parsed: argparse.Namespace) -> int:
    from fedcpsl.report.loaded_runs import load_runs
    from fedcpsl.report.tables import check_report_target

    if parsed.table and parsed.format == "html":
        raise InputError("--table: a page has all of them; give it with --format md, latex or csv")
    target = parsed.out or (Path("report.html") if len(parsed.runs) > 1 and parsed.format == "html" else None)
    if target:
        check_report_target(target, parsed.format)
    if parsed.alone or parsed.format != "html" or not _is_ended_comparison(parsed.runs, parsed.out):
        load_runs(parsed.runs)
    if parsed.alone and not _train_alone(parsed.runs):
        return 130
    if parsed.alone and parsed.format == "html":
        _print_verdicts(parsed.runs)
    if parsed.format == "html":
        print(f"report   {_write(parsed.runs, parsed.out).resolve().as_uri()}")
        return 0
    text = _tables(parsed.runs, parsed.format, parsed.table)
    if parsed.out:
        from fedcpsl.storage import write_whole

        write_whole(parsed.out, text)
    else:
        print(text, end="")
    return 0


def _is_ended_comparison(runs: Sequence[Path], out: Path | None) -> bool:
    """Return whether this is one comparison, all runs finished or failed, with the page in its folder."""
    from fedcpsl.runs.comparison import is_comparison, read_plan, run_folder
    from fedcpsl.runs.folder import failure, is_finished

    if out or len(runs) > 1 or not is_comparison(runs[0]):
        return False
    plan = read_plan(runs[0])
    planned = [run_folder(runs[0], case, seed) for case in plan.cases for seed in plan.seeds]
    return all(is_finished(run) or failure(run) for run in planned)


def _print_verdicts(runs: Sequence[Path]) -> None:
    """Print what each run's devices gain, beginning with the run's name where there are several."""
    from rich.console import Console

    from fedcpsl.report.terminal import available_width
    from fedcpsl.report.verdict import verdicts
    from fedcpsl.runs.folder import is_finished

    for run in runs:
        for text in verdicts(run) if (run / "devices.csv").exists() and is_finished(run) else ():
            print(fill(f"{run}: {text}" if len(runs) > 1 else text, available_width(Console())))


def _write(runs: Sequence[Path], out: Path | None) -> Path:
    from fedcpsl.report.comparison import write_comparison
    from fedcpsl.report.loaded_runs import runs_in
    from fedcpsl.report.page import write_page, write_report

    if out or len(runs) > 1:
        return write_page(runs, out or Path("report.html"))
    (folder,) = runs
    if _is_ended_comparison(runs, out):
        return write_comparison(folder)
    return write_report(folder) if runs_in(folder) == [folder] else write_page(runs, folder / "report.html")


def _tables(runs: Sequence[Path], form: str, name: str | None) -> str:
    from fedcpsl.report import tables
    from fedcpsl.report.loaded_runs import alone_for, load_runs

    run_set = load_runs(runs)
    wanted = [name] if name else ["summary"] if form == "csv" else ["summary", "reach", "devices"]
    makers = {"summary": tables.summary, "reach": tables.reach, "rounds": tables.rounds, "edge": tables.edge}
    made: list[tables.Table] = []
    for kind in wanted:
        if kind == "devices":
            finished = [(group, run) for group in run_set.groups for run in group.runs if run.devices]
            if not finished and name:
                raise InputError(f"{runs[0]}: --table devices: no run is finished, so there is no table of devices")
            found = [tables.devices(run, alone_for(run, run_set.references), group.name) for group, run in finished]
            made += found if form == "csv" else [tables.shortened(table) for table in found]
        elif kind == "classes":
            made += tables.classes(run_set)
            if not made:
                raise InputError(f"{runs[0]}: --table classes: no run is finished, so there is no table of classes")
        else:
            made.append(makers[kind](run_set))
    if form == "csv" and len(made) > 1:
        raise InputError("--format csv: give one run, so that it is one table")
    return "\n".join(tables.WRITERS[form](table) for table in made)


def _train_alone(runs: Sequence[Path]) -> bool:
    from rich.console import Console

    from fedcpsl.report.loaded_runs import alone_for, load_runs
    from fedcpsl.report.terminal import progress
    from fedcpsl.runs.experiment import train_alone

    if place()[1] > 1:
        raise InputError("--alone: give the command without torchrun")
    with_server = [run for run in load_runs(runs).runs if not run.alone]
    if not with_server:
        raise InputError(f"{runs[0]}: its devices train alone already; --alone is for runs with a server")
    for run in with_server:
        if alone_for(run, load_runs(runs).references) is None:
            work = run.config.work
            with progress(work.rounds + work.personal_rounds, 0, Console(stderr=True)) as watch:
                if train_alone(run.folder, watch) is None:
                    return False
    return True


def add_watch(commands: Any) -> None:
    watch = commands.add_parser(
        "watch",
        help="show a run's page in your browser while it is in progress",
        description="Serve the page of a run, a comparison, a sweep or a study to this machine alone. The page updates "
        "itself. Ctrl-C ends it; the run is not affected.",
        allow_abbrev=False,
    )
    watch.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, comparison or study")
    watch.add_argument("--port", type=int, default=PORT, metavar="N", help=f"the port; 0: any free one [{PORT}]")
    watch.set_defaults(command=_watch)


def _watch(parsed: argparse.Namespace) -> int:
    if not 0 <= parsed.port <= 65535:
        raise InputError(f"--port {parsed.port}: give a number from 0 to 65535")
    from fedcpsl.report.page import serve_page

    serve_page(parsed.runs, parsed.port)
    return 0
