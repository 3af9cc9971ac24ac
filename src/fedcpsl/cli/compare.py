"""fedcpsl compare and sweep: several algorithms, or every combination of settings, over seeds."""

import argparse
import sys
from collections.abc import Mapping, Sequence
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
from fedcpsl.settings import DEFAULT_ALGORITHM, UNNAMED_ALGORITHM, Algorithm
from fedcpsl.torchrun import place, way_on

if TYPE_CHECKING:
    from fedcpsl.config import Config
    from fedcpsl.runs.comparison import Plan

BASE_SETTINGS = {f"algorithm.{f.name}" for f in fields(Algorithm)}  # of the config that all algorithms share
PAPERS = ("fedcpsl", "apfsl", "apfl", "fedshvrp", "fedshvr", "local")
ALGORITHMS = ",".join(dict.fromkeys((DEFAULT_ALGORITHM, *PAPERS)))


def add_compare(commands: Any) -> None:
    compare = commands.add_parser(
        "compare",
        help="compare algorithms over several seeds",
        description="Run several algorithms with several seeds. Runs of one seed share the split, the active devices "
        "and the minibatches, so differences are paired.",
        allow_abbrev=False,
    )
    compare.add_argument(
        "--algorithms",
        metavar="A,B,...",
        help="algorithms to compare; the others are compared with the first. Groups: all, family (FedCPSL's), related "
        f"(by others), each without those that cannot run on the data [{ALGORITHMS}]",
    )
    compare.add_argument(
        "--matched-steps",
        action=argparse.BooleanOptionalAction,
        help="equal local steps for all algorithms; --no-matched-steps: an epoch is a pass over the samples that an "
        "algorithm uses, which is shorter if it uses labels alone [--matched-steps]",
    )
    add_many_runs(compare)
    add_settings(compare, leave_out=("--algorithm",))
    compare.set_defaults(command=_compare)


def add_many_runs(command: argparse.ArgumentParser) -> None:
    """Add the options of commands that make many runs."""
    command.add_argument("--seeds", type=int, metavar="N", help="number of seeds, starting with --seed [5]")
    command.add_argument("--reach", metavar="A,B,...", help="report rounds and bytes until these accuracies [0.8,0.9]")
    command.add_argument("--out", type=Path, metavar="FOLDER", help="where to write [runs/<time>-<command>-<dataset>]")
    command.add_argument("--resume", type=Path, metavar="FOLDER", help="resume an interrupted comparison or sweep")
    add_tracker(command)
    command.add_argument("--json", action="store_true", help="print the results as one JSON object, nothing else")


def _compare(parsed: argparse.Namespace) -> int:
    if parsed.resume:
        return resume_runs(parsed, parsed.algorithms is not None or parsed.matched_steps is not None)
    matched = parsed.matched_steps
    own = remove_settings(parsed, lambda name: name.startswith("algorithm.") and name not in BASE_SETTINGS)
    config = config_of(parsed, {} if matched is None else {"work.matched_steps": matched}, UNNAMED_ALGORITHM)
    seeds, reach = seeds_and_reach(parsed)
    from fedcpsl.runs.comparison import compare_plan

    named, of_groups = listed_algorithms(ALGORITHMS if parsed.algorithms is None else parsed.algorithms)
    return start_runs(parsed, compare_plan(config, [*named, *of_groups], seeds, reach, own), of_groups)


def listed_algorithms(listed: str) -> tuple[list[str], list[str]]:
    """Return the algorithms of --algorithms: those that it names, then all others of the groups that it names."""
    from fedcpsl.algorithms import GROUPS, members

    given = [name.strip() for name in listed.split(",") if name.strip()]
    if not given:
        raise InputError("--algorithms: give some, for example fedcpsl,apfl,local, or all")
    named = [name for name in given if name not in GROUPS]
    of_groups = dict.fromkeys(name for group in given if group in GROUPS for name in members(group))
    return named, [name for name in of_groups if name not in named]


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


def start_runs(parsed: argparse.Namespace, plan: "Plan", may_leave_out: Sequence[str] = ()) -> int:
    """Create the folder and execute all runs of a plan, without cases that do not fit and may be left out."""
    from fedcpsl.cli.run import refuse_existing
    from fedcpsl.runs.comparison import check_plan, create_comparison
    from fedcpsl.runs.folder import default_folder

    refuse_existing(parsed.out)
    tracker = chosen_tracker(parsed)
    plan, first, left_out = check_plan(plan, may_leave_out)
    for name, reason in left_out.items():
        print(f"fedcpsl: {name} is left out: {reason}", file=sys.stderr)
    folder = parsed.out or default_folder(first, plan.kind)
    create_comparison(folder, plan)
    return _run_plan(folder, plan, tracker, as_json=parsed.json)


def resume_runs(parsed: argparse.Namespace, more: Any) -> int:
    """Resume the plan of a folder; `more`: other options that were given and are not allowed."""
    if given_settings(parsed) or parsed.out or parsed.seeds or parsed.reach or more:
        raise InputError("--resume uses the settings of the folder; give it without other options")
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
        print(f"fedcpsl: stopped; resume with: {way_on(plan.kind, folder, place()[1])}", file=sys.stderr)
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
        again = "to run one of them again, remove its folder and resume"
        print(f"fedcpsl: {len(failed)} of {len(runs)} runs failed; {again}", file=sys.stderr)
    return 1 if failed else 0


def add_sweep(commands: Any) -> None:
    sweep = commands.add_parser(
        "sweep",
        help="run every combination of some settings over several seeds",
        description="Run every combination of the given values with several seeds and draw a heat map. To choose "
        "settings, hold back validation samples: --set data.validation=0.2.",
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
    seeds, reach = seeds_and_reach(parsed)
    from fedcpsl.runs.comparison import sweep_plan

    grid = _grid(parsed.grid)
    return start_runs(parsed, sweep_plan(_base_of(parsed, grid), grid, seeds, reach))


def _base_of(parsed: argparse.Namespace, grid: Mapping[str, Sequence[Any]]) -> "Config":
    """Return the config of a sweep; where it makes sense with values of the grid alone, with its first point."""
    try:
        return config_of(parsed)
    except InputError:
        return config_of(parsed, {name: values[0] for name, values in grid.items()})


def _grid(listed: Sequence[str]) -> dict[str, list[Any]]:
    """Return the values of each setting of --grid."""
    from fedcpsl.runs.comparison import full_name

    grid: dict[str, list[Any]] = {}
    for given in listed:
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
    return grid
