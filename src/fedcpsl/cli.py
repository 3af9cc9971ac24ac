"""The command line. Heavy imports happen inside the commands, so that help answers at once."""

import argparse
import sys
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn

from fedcpsl import __version__
from fedcpsl.config import FLAGS, Config, parse_value, read_config, setting, with_settings
from fedcpsl.errors import InputError, RunError, did_you_mean

EPILOG = """
examples:
  fedcpsl run                                   FedCPSL on scikit-learn's digits: 20 devices, 10 % labels
  fedcpsl run --algorithm apfl --seed 1         a baseline, another seed
  fedcpsl run --dataset mnist --data-dir data   the paper's MNIST setting: add --active 2
  fedcpsl run --data mine.npz                   your own arrays x, y (-1: unlabelled), device
  fedcpsl run --set work.unit=hlu --loss-rate .2   devices of unequal speed, uploads that get lost
  fedcpsl run --dry-run                         what would be run: config, split, steps
  fedcpsl run --resume runs/20260101-120000-fedcpsl-digits
  fedcpsl show runs/*                           past runs
"""


class Parser(argparse.ArgumentParser):
    """Errors in one line, exit code 2, with the nearest flag."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if len(unknown) and message.startswith("unrecognized") and unknown[0].startswith("-"):
            known = _flags(self)
            message = f"{unknown[0]}: no such option; {did_you_mean(unknown[0].partition('=')[0], known)}"
        raise InputError(message)


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """Every option of a parser and of its commands."""
    commands = [a.choices.values() for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    own = [flag for action in parser._actions for flag in action.option_strings]
    return own + [flag for parsers in commands for command in parsers for flag in _flags(command)]


def run_command(arguments: Sequence[str]) -> int:
    """Parse, run, and turn errors into one line and an exit code: 2 for bad input, 1 for a run that failed."""
    try:
        parsed = parser().parse_args(arguments)
        return int(parsed.command(parsed))
    except InputError as error:
        print(f"fedcpsl: {error}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"fedcpsl: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedcpsl: stopped at once; the last checkpoint is intact", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0


def parser() -> Parser:
    """The commands and their options."""
    top = Parser(
        prog="fedcpsl",
        description="Personalized semi-supervised federated learning: a personal model on every device, from few "
        "labels and much unlabelled data, without moving the data.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    top.add_argument("--version", action="version", version=f"fedcpsl {__version__}")
    commands = top.add_subparsers(title="commands", metavar="COMMAND", required=True, parser_class=Parser)
    _add_run(commands)
    show = commands.add_parser("show", help="print past runs", description="Print the results of past runs.")
    show.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="a run's folder")
    show.add_argument("--json", action="store_true", help="final metrics as one JSON object (a list for several runs)")
    show.set_defaults(command=_show)
    verify = commands.add_parser(
        "verify",
        help="replay test vectors on every executor",
        description="Replay recorded runs in float64 on every executor that this machine has; exit 1 at a difference.",
    )
    verify.add_argument("files", nargs="+", type=Path, metavar="FILE", help="an .npz test vector")
    verify.set_defaults(command=_verify)
    return top


def _add_run(commands: Any) -> None:
    run = commands.add_parser(
        "run",
        help="simulate a federation of devices",
        description="Simulate a federation: devices with few labels learn a global model together and a personal one "
        "each. With no arguments: FedCPSL on the digits that ship with scikit-learn.",
        epilog=_settings_help(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    run.add_argument("config", nargs="?", type=Path, metavar="CONFIG.toml", help="settings; flags override them")
    for flag, name in FLAGS.items():
        section, _, key = name.partition(".")
        declared = setting(section, key)
        default = getattr(getattr(Config(), section), key)
        suffix = "" if default == "" else f" [{default}]"
        run.add_argument(
            flag, dest=name, metavar=key.upper(), help=declared.metadata["help"].replace("%", "%%") + suffix
        )
    run.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="SECTION.KEY=VALUE",
        help="any other setting (see below)",
    )
    run.add_argument("--out", type=Path, metavar="FOLDER", help="where to write [runs/<time>-<algorithm>-<dataset>]")
    run.add_argument("--resume", type=Path, metavar="FOLDER", help="go on with an interrupted run, bit for bit")
    run.add_argument("--dry-run", action="store_true", help="print the resolved config, the split and the steps")
    run.set_defaults(command=_run)


def _settings_help() -> str:
    lines = ["settings for CONFIG.toml and --set (those above are flags too):"]
    for section in fields(Config):
        lines += ["", f"  [{section.name}]  {type(getattr(Config(), section.name)).__doc__}"]
        for declared in fields(getattr(Config(), section.name)):
            value = getattr(getattr(Config(), section.name), declared.name)
            lines.append(f"    {declared.name} = {value!r}".ljust(34) + f"  {declared.metadata['help']}")
    return "\n".join(lines)


def _typed(name: str, text: str) -> Any:
    """A value from the command line, read as what the setting accepts."""
    section, _, key = name.partition(".")
    accepts = setting(section, key).metadata["test"]
    value = parse_value(text)
    return text if not accepts(value) and accepts(text) else value


def _config(parsed: argparse.Namespace) -> Config:
    values = read_config(parsed.config) if parsed.config else {}
    for assignment in parsed.set:
        name, equals, text = assignment.partition("=")
        if not equals or "." not in name:
            raise InputError(f"--set {assignment}: give it as SECTION.KEY=VALUE, for example --set work.amount=5")
        values[name.strip()] = _typed(name.strip(), text.strip())
    values |= {name: _typed(name, text) for name in FLAGS.values() if (text := getattr(parsed, name)) is not None}
    return with_settings(Config(), values)


def _run(parsed: argparse.Namespace) -> int:
    if parsed.resume:
        given = [
            parsed.config,
            parsed.out,
            parsed.set,
            parsed.dry_run,
            *(getattr(parsed, n) for n in FLAGS.values()),
        ]
        if any(value not in (None, [], False) for value in given):
            raise InputError("--resume goes on with the folder's own settings; give it alone")
        return _resume(parsed.resume)
    config = _config(parsed)
    if parsed.out and parsed.out.exists():
        raise InputError(f"{parsed.out}: exists already; give another --out, or --resume {parsed.out} to go on with it")
    from fedcpsl.runs.experiment import build

    experiment = build(config)
    if parsed.dry_run:
        return _dry_run(experiment)
    from rich.console import Console

    from fedcpsl.report.terminal import progress
    from fedcpsl.runs.experiment import start
    from fedcpsl.runs.folder import default_folder

    folder = parsed.out or default_folder(experiment.config)
    with progress(experiment.setup.rounds, 0, Console(stderr=True)) as watch:
        outcome = start(experiment, folder, watch)
    return _conclude(outcome)


def _resume(folder: Path) -> int:
    from rich.console import Console

    from fedcpsl.report.terminal import progress
    from fedcpsl.runs.experiment import resume
    from fedcpsl.runs.folder import read_run_config

    rounds = read_run_config(folder).work.rounds
    with progress(rounds, 0, Console(stderr=True)) as watch:
        outcome = resume(folder, watch)
    return _conclude(outcome)


def _conclude(outcome: Any) -> int:
    if not outcome.finished:
        print(
            f"fedcpsl: stopped after round {outcome.round}; go on with: fedcpsl run --resume {outcome.folder}",
            file=sys.stderr,
        )
        return 130
    from fedcpsl.report.page import write_report

    page = write_report(outcome.folder)
    _print_results([outcome.folder])
    print(f"results  {outcome.folder}\nreport   {page.resolve().as_uri()}")
    return 0


def _print_results(folders: Sequence[Path]) -> None:
    from rich.console import Console

    from fedcpsl.report.terminal import results_table, sparkline
    from fedcpsl.runs.folder import final_metrics, read_metrics

    console = Console()
    for folder in folders:
        final = final_metrics(folder)
        console.print(results_table(final))
        curve = sparkline([m["personal"]["mean"] or 0.0 for m in read_metrics(folder)])
        console.print(f"personal accuracy by round  {curve}" + ("" if final["finished"] else "  (not finished)"))


def _show(parsed: argparse.Namespace) -> int:
    from fedcpsl.runs.files import to_json
    from fedcpsl.runs.folder import final_metrics

    if parsed.json:
        found = [final_metrics(folder) for folder in parsed.runs]
        print(to_json(found[0] if len(found) == 1 else found, indent=2))
    else:
        _print_results(parsed.runs)
    return 0


def _dry_run(experiment: Any) -> int:
    from rich.console import Console

    from fedcpsl.config import to_toml
    from fedcpsl.report.terminal import planned_steps, split_table

    console = Console()
    print(to_toml(experiment.config))
    console.print(split_table(experiment.federation))
    steps, most = planned_steps(experiment)
    setup = experiment.setup
    print(
        f"{setup.rounds} rounds of {setup.work.active} devices: {steps:,} local steps, at most {most:,} per device and "
        f"round; {setup.method.network.initial.numel():,} parameters; {setup.executor} on {setup.shelf.x.device}\n"
        "nothing was run or written"
    )
    return 0


def _verify(parsed: argparse.Namespace) -> int:
    from fedcpsl.vectors import executors, read_vector, replay

    vectors = {path: read_vector(path) for path in parsed.files}
    failed = False
    for path, vector in vectors.items():
        for executor, device in executors():
            differences = list(replay(vector, executor, device))
            first = next((d for d in differences if d.error > 1), None)
            failed |= first is not None
            worst: dict[str, float] = {}
            for d in differences:
                worst[d.quantity] = max(worst.get(d.quantity, 0.0), d.largest)
            listed = "  ".join(f"{quantity} {error:.1e}" for quantity, error in worst.items())
            print(f"{path.name}  {executor} on {device}: {'DIFFERS' if first else 'exact'}\n  worst error: {listed}")
            if first:
                print(f"  first difference at {first}")
    print("some vectors differ" if failed else f"all {len(vectors)} vectors replayed")
    return int(failed)
