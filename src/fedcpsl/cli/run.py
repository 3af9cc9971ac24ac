"""fedcpsl run: one simulation into a folder."""

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from fedcpsl.cli.options import (
    add_settings,
    add_tracker,
    chosen_tracker,
    config_of,
    given_settings,
    print_tracked,
    settings_help,
)
from fedcpsl.cli.report import print_results
from fedcpsl.errors import InputError, LostRankError, RunError
from fedcpsl.settings import SEARCH
from fedcpsl.torchrun import place, way_on


def add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="simulate a federation of devices",
        description="Simulate a federation: devices with few labels learn a global model together and a personal one "
        "each. With no arguments: FedCPSL's successor, fedcpsl2, on the digits that ship with scikit-learn.",
        epilog=settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add_settings(run)
    run.add_argument("--gaps", action="store_true", help="log the optimality gaps of the theory too (run.gaps = true)")
    run.add_argument("--out", type=Path, metavar="FOLDER", help="where to write [runs/<time>-<algorithm>-<dataset>]")
    run.add_argument("--resume", type=Path, metavar="FOLDER", help="resume an interrupted run, bit for bit")
    add_tracker(run)
    run.add_argument("--dry-run", action="store_true", help="print the resolved config, the split and the steps")
    run.set_defaults(command=_run)


def refuse_existing(folder: Path | None) -> None:
    """Raise InputError if the folder exists."""
    try:
        exists = bool(folder and folder.exists())
    except OSError as error:
        raise InputError(f"{folder}: cannot be a folder: {error.strerror}; give another --out") from error
    if exists:
        raise InputError(f"{folder}: exists already; give another --out, or --resume {folder} to resume it")


@contextmanager
def resume_hint_on_lost_rank(command: str, folder: Path) -> Iterator[None]:
    """Add the command that resumes the run to the error of a lost rank."""
    try:
        yield
    except LostRankError as error:
        raise RunError(f"{error}; resume with: {way_on(command, folder, place()[1])}") from error


def _run(parsed: argparse.Namespace) -> int:
    if parsed.resume:
        if given_settings(parsed) or parsed.out or parsed.dry_run or parsed.gaps:
            raise InputError("--resume uses the settings of the folder; give it without other options")
        return _resume(parsed.resume, chosen_tracker(parsed))
    config = config_of(parsed, {"run.gaps": True} if parsed.gaps else {})
    refuse_existing(parsed.out)
    tracker = chosen_tracker(parsed)
    from fedcpsl.runs.experiment import build, without_search

    if parsed.dry_run:
        return _dry_run(build(without_search(config)), config.algorithm)
    experiment = build(config)
    if experiment.search:
        print(experiment.search, file=sys.stderr)
    from rich.console import Console

    from fedcpsl.report.terminal import progress
    from fedcpsl.runs.experiment import start
    from fedcpsl.runs.folder import default_folder
    from fedcpsl.runs.trackers import tracking

    folder, rounds = parsed.out or default_folder(experiment.config), experiment.setup.terms.total_rounds
    with (
        resume_hint_on_lost_rank("run", folder),
        tracking(tracker) as tracked,
        progress(rounds, 0, Console(stderr=True)) as watch,
    ):
        outcome = start(experiment, folder, tracked.also(folder, watch))
    print_tracked(tracked.where)
    return _conclude(outcome)


def _resume(folder: Path, tracker: str | None) -> int:
    from rich.console import Console

    from fedcpsl.report.terminal import progress
    from fedcpsl.runs.experiment import resume
    from fedcpsl.runs.folder import read_run_config
    from fedcpsl.runs.trackers import tracking

    work = read_run_config(folder).work
    rounds = work.rounds + work.personal_rounds
    with (
        resume_hint_on_lost_rank("run", folder),
        tracking(tracker) as tracked,
        progress(rounds, 0, Console(stderr=True)) as watch,
    ):
        outcome = resume(folder, tracked.also(folder, watch))
    print_tracked(tracked.where)
    return _conclude(outcome)


def _conclude(outcome: Any) -> int:
    if not outcome.finished:
        on = way_on("run", outcome.folder, place()[1])
        print(f"fedcpsl: stopped after round {outcome.round}; resume with: {on}", file=sys.stderr)
        return 130
    from fedcpsl.report.page import write_report

    page = write_report(outcome.folder)
    print_results([outcome.folder])
    print(f"results  {outcome.folder}\nreport   {page.resolve().as_uri()}")
    return 0


def _dry_run(experiment: Any, algorithm: Any) -> int:
    from rich.console import Console

    from fedcpsl.algorithm import optional
    from fedcpsl.config import to_toml
    from fedcpsl.report.terminal import planned_steps, print_table, shown_devices, split_table

    console, searched = Console(), algorithm.eta == SEARCH
    print(to_toml(replace(experiment.config, algorithm=algorithm) if searched else experiment.config))
    print_table(split_table(shown_devices(experiment.federation, console)), console)
    steps, most = planned_steps(experiment)
    setup, terms = experiment.setup, experiment.setup.terms
    about = "about " if optional(terms.algorithm, "draw_weights") else ""  # who will be drawn is not known yet
    print(
        f"{terms.rounds} rounds of {terms.work.active} devices: {about}{steps:,} local steps, at most {most:,} per "
        f"device and round; {terms.method.network.initial.numel():,} parameters; {setup.machine.executor} on "
        f"{setup.data.where}{'; the step size will be searched first, in short runs' * searched}"
    )
    if setup.edge is not None:
        load, clock = setup.edge.load, setup.edge.cell.clock
        print(
            f"edge network {setup.edge.settings.profile!r}: {load.bits_up / 1e6:.3g} Mbit up and "
            f"{load.bits_down / 1e6:.3g} Mbit down for each visit; a step takes {load.cycles / 1e6:.3g} Mcycles, "
            f"{1e3 * load.cycles / clock.max():.3g} to {1e3 * load.cycles / clock.min():.3g} ms"
        )
    print("nothing was run or written")
    return 0
