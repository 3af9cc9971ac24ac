"""fedcpsl compare and sweep: several algorithms, or every combination of settings, over seeds."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from fedcpsl.cli.options import (
    add_settings,
    add_tracker,
    chosen_tracker,
    config_of,
    given_settings,
    print_tracked,
    remove_settings,
    typed,
)
from fedcpsl.config import parse_value
from fedcpsl.errors import InputError
from fedcpsl.settings import Algorithm
from fedcpsl.torchrun import place, way_on

if TYPE_CHECKING:
    from fedcpsl.runs.comparison import Plan

BASE_SETTINGS = {f"algorithm.{f.name}" for f in fields(Algorithm)}  # of the config that all algorithms share
ALGORITHMS = "fedcpsl,apfsl,apfl,fedshvrp,fedshvr,local"


def add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="algorithms side by side, over seeds",
        description="Run several algorithms with several seeds. Runs of one seed share the split, the active devices "
        "and the minibatches, so differences are paired.",
        allow_abbrev=False,
    )
    compare.add_argument(
        "--algorithms",
        metavar="A,B,...",
        help=f"what to compare; the first is the reference for the others [{ALGORITHMS}]",
    )
    compare.add_argument(
        "--matched-steps",
        action=argparse.BooleanOptionalAction,
        help="equal local steps for all; --no-matched-steps: an epoch is a pass over what an algorithm uses, which is "
        "shorter where that is labels alone [--matched-steps]",
    )
    add_many_runs(compare)
    add_settings(compare, leave_out=("--algorithm",))
    compare.set_defaults(command=_compare)


def add_many_runs(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that make many runs."""
    command.add_argument("--seeds", type=int, metavar="N", help="how many seeds, from --seed on [5]")
    command.add_argument("--reach", metavar="A,B,...", help="report the rounds and bytes to these accuracies [0.8,0.9]")
    command.add_argument("--out", type=Path, metavar="FOLDER", help="where to write [runs/<time>-<command>-<dataset>]")
    command.add_argument("--resume", type=Path, metavar="FOLDER", help="resume an interrupted one")
    add_tracker(command)
    command.add_argument("--json", action="store_true", help="print the results as one JSON object, nothing else")


def _compare(parsed: argparse.Namespace) -> int:
    if parsed.resume:
        return resume_runs(parsed, parsed.algorithms is not None or parsed.matched_steps is not None)
    matched = parsed.matched_steps
    own = remove_settings(parsed, lambda name: name.startswith("algorithm.") and name not in BASE_SETTINGS)
    config = config_of(parsed, {} if matched is None else {"work.matched_steps": matched})
    seeds, reach = seeds_and_reach(parsed)
    from fedcpsl.runs.comparison import compare_plan

    listed = ALGORITHMS if parsed.algorithms is None else parsed.algorithms
    names = [name.strip() for name in listed.split(",") if name.strip()]
    if not names:
        raise InputError("--algorithms: give some, for example fedcpsl,apfl,local")
    return start_runs(parsed, compare_plan(config, names, seeds, reach, own))


def seeds_and_reach(parsed: argparse.Namespace) -> tuple[int, list[float]]:
    """Return --seeds and --reach, checked."""
    seeds = 5 if parsed.seeds is None else parsed.seeds
    if seeds < 1:
        raise InputError(f"--seeds {seeds}: give a whole number of at least 1")
    try:
        reach = [float(text) for text in ("0.8,0.9" if parsed.reach is None else parsed.reach).split(",") if text]
    except ValueError:
        raise InputError(f"--reach {parsed.reach}: give accuracies from 0 to 1, for example 0.9,0.95") from None
    if not all(0 < value <= 1 for value in reach):
        raise InputError(f"--reach {parsed.reach}: give accuracies from 0 to 1, for example 0.9,0.95")
    return seeds, reach


def start_runs(parsed: argparse.Namespace, plan: "Plan") -> int:
    """Create the folder and execute all runs of a plan."""
    from fedcpsl.cli.run import refuse_existing
    from fedcpsl.runs.comparison import check, create
    from fedcpsl.runs.folder import default_folder

    refuse_existing(parsed.out)
    tracker = chosen_tracker(parsed)
    first = check(plan)
    folder = parsed.out or default_folder(first, plan.kind)
    create(folder, plan)
    return _run_plan(folder, plan, tracker, as_json=parsed.json)


def resume_runs(parsed: argparse.Namespace, more: Any) -> int:
    """Resume the plan of a folder; `more`: other options that were given and are not allowed."""
    if given_settings(parsed) or parsed.out or parsed.seeds or parsed.reach or more:
        raise InputError("--resume goes on with the folder's own settings; give it alone")
    from fedcpsl.runs.comparison import read_plan

    return _run_plan(parsed.resume, read_plan(parsed.resume), chosen_tracker(parsed), as_json=parsed.json)


def _run_plan(folder: Path, plan: "Plan", tracker: str | None, *, as_json: bool) -> int:
    from rich.console import Console

    from fedcpsl.cli.run import resume_hint_on_lost_rank
    from fedcpsl.report.comparison import print_comparison, write_comparison
    from fedcpsl.report.terminal import comparison_progress
    from fedcpsl.runs.comparison import run_folder
    from fedcpsl.runs.run_groups import run_all
    from fedcpsl.runs.trackers import announcing, tracking

    count = len(plan.cases) * len(plan.seeds)
    with (
        resume_hint_on_lost_rank(plan.kind, folder),
        tracking(tracker) as tracked,
        comparison_progress(count, Console(stderr=True)) as announce,
    ):
        finished = run_all(folder, plan, announcing(announce, tracked))
    print_tracked(tracked.where)
    if not finished:
        print(f"fedcpsl: stopped; go on with: {way_on(plan.kind, folder, place()[1])}", file=sys.stderr)
        return 130
    page = write_comparison(folder)
    if as_json:
        from fedcpsl.cli.report import print_json

        print_json([folder])
    else:
        print_comparison(folder)
        print(f"results  {folder}\nreport   {page.resolve().as_uri()}")
    return report_failed([run_folder(folder, case, seed) for case in plan.cases for seed in plan.seeds])


def report_failed(runs: Sequence[Path]) -> int:
    """Print the failed runs to stderr; return the exit code, 1 if there are any."""
    from fedcpsl.runs.folder import failure

    failed = {run: reason for run in runs if (reason := failure(run))}
    for run, reason in failed.items():
        print(f"fedcpsl: {run}: {reason}", file=sys.stderr)
    if failed:
        print(
            f"fedcpsl: {len(failed)} of {len(runs)} runs failed; remove a folder to have it run again", file=sys.stderr
        )
    return 1 if failed else 0


def add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="every combination of some settings, over seeds",
        description="Run every combination of the given values with several seeds and draw a heat map. To choose "
        "settings honestly, keep samples for it: --set data.validation=0.2.",
        allow_abbrev=False,
    )
    sweep.add_argument(
        "--grid",
        action="append",
        default=[],
        metavar="SETTING=A,B,...",
        help="a setting (alpha_p or algorithm.alpha_p) and its values; give it once per setting",
    )
    add_many_runs(sweep)
    add_settings(sweep)
    sweep.set_defaults(command=_sweep)


def _sweep(parsed: argparse.Namespace) -> int:
    if parsed.resume:
        return resume_runs(parsed, parsed.grid)
    if not parsed.grid:
        raise InputError("--grid: give what to sweep, for example --grid alpha_p=.01,.03,.1")
    config = config_of(parsed)
    seeds, reach = seeds_and_reach(parsed)
    from fedcpsl.runs.comparison import full_name, sweep_plan

    grid: dict[str, list[Any]] = {}
    for given in parsed.grid:
        key, equals, text = given.partition("=")
        values = parse_value(text)
        values = values if isinstance(values, list) else [value.strip() for value in text.split(",")]
        if not equals or not text.strip():
            raise InputError(f"--grid {given}: give it as SETTING=A,B,..., for example --grid beta=.5,.75")
        name = full_name(key.strip())
        if name in grid:
            raise InputError(f"--grid {given}: {name} is given twice; give all its values at once")
        if name == "run.seed":
            raise InputError("--grid seed: seeds are what a sweep averages over; give --seeds N")
        grid[name] = [typed(name, value) if isinstance(value, str) else value for value in values]
    return start_runs(parsed, sweep_plan(config, grid, seeds, reach))
