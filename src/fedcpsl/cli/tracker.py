"""The option --tracker, the same for every command that trains."""

import argparse
import sys
from collections.abc import Sequence

TRACKERS = ("tensorboard", "wandb", "mlflow")


def add_tracker(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "--tracker", choices=TRACKERS, metavar="NAME", help=f"send metrics there too: {', '.join(TRACKERS)}"
    )


def chosen_tracker(parsed: argparse.Namespace) -> str | None:
    """The tracker asked for, once it is known to be there."""
    name: str | None = parsed.tracker
    if name:
        from fedcpsl.runs.trackers import require

        require(name)
    return name


def say_where(where: Sequence[str]) -> None:
    """How to look at what was tracked, beside the results and never among them."""
    shown = list(dict.fromkeys(where))
    for each in shown[:3]:
        print(f"tracker  {each}", file=sys.stderr)
    if len(shown) > 3:
        print(f"tracker  and {len(shown) - 3} more", file=sys.stderr)
