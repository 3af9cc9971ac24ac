"""fedcpsl sweep: every combination of some settings, over seeds."""

import argparse
from typing import Any

from fedcpsl.cli.compare import add_many_runs, resume_runs, seeds_and_reach, start_runs
from fedcpsl.cli.options import add_settings, config_of, typed
from fedcpsl.config import parse_value
from fedcpsl.errors import InputError


def add(commands: Any) -> None:
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
        raise InputError("--grid: say what to sweep, for example --grid alpha_p=.01,.03,.1")
    config = config_of(parsed)
    seeds, reach = seeds_and_reach(parsed)
    from fedcpsl.runs.comparison import full_name, sweep_plan

    grid: dict[str, list[Any]] = {}
    for given in parsed.grid:
        key, equals, text = given.partition("=")
        values = parse_value(text)
        values = values if isinstance(values, list) else [typed_text.strip() for typed_text in text.split(",")]
        if not equals or not text.strip():
            raise InputError(f"--grid {given}: give it as SETTING=A,B,..., for example --grid beta=.5,.75")
        name = full_name(key.strip())
        if name in grid:
            raise InputError(f"--grid {given}: {name} stands there twice; give all its values at once")
        if name == "run.seed":
            raise InputError("--grid seed: seeds are what a sweep averages over; give --seeds N")
        grid[name] = [typed(name, value) if isinstance(value, str) else value for value in values]
    return start_runs(parsed, sweep_plan(config, grid, seeds, reach))
