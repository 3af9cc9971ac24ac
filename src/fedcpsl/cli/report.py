"""fedcpsl report: one page about runs, or their tables."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError
from fedcpsl.torchrun import place

FORMATS = ("html", "md", "latex", "csv")
TABLES = ("summary", "reach", "devices", "classes", "rounds")


def add(commands: Any) -> None:
    report = commands.add_parser(
        "report",
        help="one page about runs, or their tables",
        description="Write one self-contained HTML page about runs, comparisons, sweeps or studies. Runs that differ "
        "in their seed alone are put together. With --format md, latex or csv, print tables instead.",
        allow_abbrev=False,
    )
    report.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a folder of a run, comparison or study")
    report.add_argument("--format", choices=FORMATS, default="html", help="a page, or tables as text [html]")
    report.add_argument(
        "--table", choices=TABLES, help="which table [md and latex: all but rounds; csv: summary]", metavar="NAME"
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
    from fedcpsl.report.output_path import check_target

    if parsed.table and parsed.format == "html":
        raise InputError("--table: a page has all of them; give it with --format md, latex or csv")
    target = parsed.out or (Path("report.html") if len(parsed.runs) > 1 and parsed.format == "html" else None)
    if target:
        check_target(target, parsed.format)
    if parsed.alone or parsed.format != "html" or not _ended_comparison(parsed.runs, parsed.out):
        load_runs(parsed.runs)
    if parsed.alone and not _train_alone(parsed.runs):
        return 130
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


def _ended_comparison(runs: Sequence[Path], out: Path | None) -> bool:
    """Whether it is about one comparison, whose runs are finished or failed, with the page in its folder."""
    from fedcpsl.runs.comparison import is_comparison, read_plan, run_folder
    from fedcpsl.runs.folder import failure, is_finished

    if out or len(runs) > 1 or not is_comparison(runs[0]):
        return False
    plan = read_plan(runs[0])
    planned = [run_folder(runs[0], case, seed) for case in plan.cases for seed in plan.seeds]
    return all(is_finished(run) or failure(run) for run in planned)


def _write(runs: Sequence[Path], out: Path | None) -> Path:
    from fedcpsl.report.comparison import write_comparison
    from fedcpsl.report.loaded_runs import runs_in
    from fedcpsl.report.page import write_page, write_report

    if out or len(runs) > 1:
        return write_page(runs, out or Path("report.html"))
    (folder,) = runs
    if _ended_comparison(runs, out):
        return write_comparison(folder)
    return write_report(folder) if runs_in(folder) == [folder] else write_page(runs, folder / "report.html")


def _tables(runs: Sequence[Path], form: str, name: str | None) -> str:
    from fedcpsl.report import summary_tables
    from fedcpsl.report.classes import class_tables
    from fedcpsl.report.loaded_runs import alone_for, load_runs
    from fedcpsl.report.tables import WRITERS, Table

    story = load_runs(runs)
    wanted = [name] if name else ["summary"] if form == "csv" else ["summary", "reach", "devices"]
    tables: list[Table] = []
    for each in wanted:
        if each == "devices":
            finished = [(line, run) for line in story.lines for run in line.runs if run.devices]
            if not finished and name:
                raise InputError(f"{runs[0]}: --table devices: no run is finished, so there is no table of devices")
            found = [summary_tables.devices(run, alone_for(run, story.references), line.name) for line, run in finished]
            tables += found if form == "csv" else [summary_tables.shortened(table) for table in found]
        elif each == "classes":
            tables += class_tables(story)
            if not tables:
                raise InputError(f"{runs[0]}: --table classes: no run is finished, so there is no table of classes")
        else:
            tables.append(
                {"summary": summary_tables.summary, "reach": summary_tables.reach, "rounds": summary_tables.rounds}[
                    each
                ](story)
            )
    if form == "csv" and len(tables) > 1:
        raise InputError("--format csv: give one run, so that it is one table")
    return "\n".join(WRITERS[form](table) for table in tables)


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
