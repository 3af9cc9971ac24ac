"""The command line. Heavy imports happen inside the commands, so that --help answers at once."""

import argparse
import errno
import sys
from collections.abc import Sequence
from typing import NoReturn

from fedcpsl import __version__
from fedcpsl.cli.compare import add_compare, add_sweep
from fedcpsl.cli.completion import add_completion
from fedcpsl.cli.data import add_data
from fedcpsl.cli.doctor import add_doctor
from fedcpsl.cli.export import add_adapt, add_export, add_predict
from fedcpsl.cli.federation import add_federation, add_join, add_keys, add_serve
from fedcpsl.cli.paper import add_paper
from fedcpsl.cli.report import add_report, add_show, add_watch
from fedcpsl.cli.run import add_run
from fedcpsl.cli.verify import add_verify
from fedcpsl.errors import InputError, RunError, did_you_mean, printable
from fedcpsl.torchrun import place

EPILOG = """
examples:
  fedcpsl run                                   FedCPSL's successor on scikit-learn's digits: 20 devices, 10 % labels
  fedcpsl run --algorithm fedcpsl               FedCPSL as published
  fedcpsl run --algorithm apfl --seed 1         a baseline, another seed
  fedcpsl run --algorithm fedcpsl --dataset mnist --active 2   the paper's MNIST setting
  fedcpsl run --data mine.csv --label kind --device-column phone
  fedcpsl run --set work.unit=hlu --loss-rate .2   devices that do unequal work, and lost uploads
  fedcpsl run --dry-run                         what would be run: config, split, steps
  fedcpsl run --resume runs/20260101-120000-fedcpsl2-digits
  fedcpsl data --partition dirichlet            how samples would be split among devices
  fedcpsl compare --algorithms fedcpsl2,fedcpsl,local --seeds 5
  fedcpsl sweep --algorithm fedcpsl --grid alpha_p=.01,.03,.1 --grid beta=.5,.75
  fedcpsl paper table --dataset mnist           the paper's table, every cell over 5 seeds
  fedcpsl show runs/*                           past runs
  fedcpsl doctor --dataset mnist                what is missing here, and the time and memory of that run
  fedcpsl export runs/mine --device 7           a device's personal model as an ONNX file
  fedcpsl predict runs/mine --device 7 new.csv  its predictions for new samples
  fedcpsl keys keys --server fl.example.org --devices phone-1 phone-2
"""

MAX_ERROR_LENGTH = 4000  # characters
RENAMED = {"--device": "what to compute on is given with --processor (cpu, cuda), how many devices with --devices"}


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line with the nearest option, and exit code 2."""

    def error(self, message: str) -> NoReturn:
        unknown = message.removeprefix("unrecognized arguments: ").split()
        if len(unknown) and message.startswith("unrecognized") and unknown[0].startswith("-"):
            flag = unknown[0].partition("=")[0]
            known = [other for other in _flags(self) if other != flag]  # other commands may have it
            message = f"{unknown[0]}: no such option; {RENAMED.get(flag) or did_you_mean(flag, known)}"
        elif message.startswith("argument COMMAND: invalid choice: "):
            name = message.split("'")[1]
            message = f"{name}: no such command; {did_you_mean(name, _commands(self))}"
        elif message.endswith("are required: COMMAND"):
            message = f"give a command: {', '.join(_commands(self))}; {self.prog} --help explains them"
        raise InputError(message)


def _commands(parser: argparse.ArgumentParser) -> list[str]:
    """The names of a parser's subcommands."""
    return [name for a in parser._actions if isinstance(a, argparse._SubParsersAction) for name in a.choices]


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """All options of a parser and of its subcommands."""
    commands = [a.choices.values() for a in parser._actions if isinstance(a, argparse._SubParsersAction)]
    own = [flag for action in parser._actions for flag in action.option_strings]
    return own + [flag for parsers in commands for command in parsers for flag in _flags(command)]


def run_command(arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; under torchrun, rank 0 runs it and the other ranks are its workers."""
    rank, size = place()
    if size == 1:
        return _run_command(arguments)
    if rank > 0:
        from fedcpsl.runs.distributed import follow

        return follow()
    from fedcpsl.runs.distributed import leading

    with leading():
        return _run_command(arguments)


def _run_command(arguments: Sequence[str]) -> int:
    """Parse and run; errors become one line and an exit code: 2 for bad input, 1 for a failed run."""
    try:
        parsed = parser().parse_args(arguments)
        return int(parsed.command(parsed))
    except InputError as error:
        print(f"fedcpsl: {printable(error, MAX_ERROR_LENGTH)}", file=sys.stderr)
        return 2
    except RunError as error:
        print(f"fedcpsl: {printable(error, MAX_ERROR_LENGTH)}", file=sys.stderr)
        return 1
    except MemoryError:
        print("fedcpsl: not enough memory for this; use smaller batches, fewer devices or less data", file=sys.stderr)
        return 1
    except RuntimeError as error:
        if type(error).__name__ != "OutOfMemoryError":  # PyTorch's, which is not imported here
            raise
        fix = "give --set run.slots=N with fewer slots, or smaller batches"
        print(f"fedcpsl: not enough memory on the GPU; {fix}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("fedcpsl: stopped at once; the last checkpoint is intact", file=sys.stderr)
        return 130
    except BrokenPipeError:
        sys.stderr.close()
        return 0
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        print("fedcpsl: no space left on the disk that this writes to; free some, or write elsewhere", file=sys.stderr)
        return 1


def parser() -> Parser:
    """Return the parser of all commands and their options."""
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
    for add in (
        add_run,
        add_data,
        add_compare,
        add_sweep,
        add_paper,
        add_show,
        add_report,
        add_watch,
        add_doctor,
        add_verify,
        add_keys,
        add_serve,
        add_join,
        add_export,
        add_predict,
        add_adapt,
        add_federation,
        add_completion,
    ):
        add(commands)
    return top
