"""What the server keeps, on its disk before any device hears of it."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from fedcpsl.algorithm import Server
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import Turn
from fedcpsl.runs.checkpoint import load_tensors, save_tensors
from fedcpsl.schedule import Sizes

FILE = "server.safetensors"


class Member(NamedTuple):
    """A device of the roster, which it never leaves."""

    name: str
    labelled: int
    unlabelled: int
    counted: Turn | None = None  # the last turn in which its update was counted
    asked: int = 0  # turns in which it was asked for an update: at most so many has it let go

    @property
    def samples(self) -> int:
        return self.labelled + self.unlabelled


class Serving(NamedTuple):
    """The server's state: what it does next is `turn`. What is said of the last turn is not kept on disk."""

    run: str
    settings: str  # digest of the terms
    server: Server
    roster: tuple[Member, ...]  # in the order of joining, which numbers the devices
    turn: Turn
    begun: bool = False  # whether enough devices have joined for the first round
    counted: tuple[str, ...] = ()  # whose updates the last turn counted
    dropouts: dict[str, str] = {}  # noqa: RUF012 - never changed; who was asked in vain, and why
    accuracy: dict[str, float] = {}  # noqa: RUF012 - of those who share it
    over: bool = False

    @property
    def round(self) -> int:
        return self.turn.round

    @property
    def samples(self) -> int:
        return sum(member.samples for member in self.roster)

    @property
    def sizes(self) -> Sizes:
        counts = np.array([(m.labelled, m.unlabelled) for m in self.roster], np.int64).reshape(-1, 2)
        return Sizes(counts[:, 0], counts[:, 1])


def save_serving(folder: Path, state: Serving) -> None:
    """Write the state, and return once it is on disk.

    There is one file and no older one beside it: devices may have acted on the newest, so nothing else is good.
    """
    header: dict[str, Any] = {name: getattr(state, name) for name in ("run", "settings", "turn", "begun", "roster")}
    save_tensors(folder / FILE, {"theta": state.server.theta, "c": state.server.c}, header)


def load_serving(folder: Path, settings: str, like: Tensor) -> Serving | None:
    """What `save_serving` wrote, where `like` is; None where there is nothing yet."""
    path = folder / FILE
    if not path.exists():
        return None
    tensors, numbers = load_tensors(path)
    header = dict[str, Any](numbers)
    try:
        if header["settings"] != settings:
            raise InputError(
                f"{path}: was begun with other settings (their digest is {header['settings']}, now {settings}); give "
                "the settings that it was begun with, or another folder"
            )
        server = Server(tensors["theta"].to(like.device), tensors["c"].to(like.device))
        roster = tuple(
            Member(name, labelled, unlabelled, None if counted is None else Turn(*counted), asked)
            for name, labelled, unlabelled, counted, asked in header["roster"]
        )
        return Serving(header["run"], settings, server, roster, Turn(*header["turn"]), header["begun"])
    except KeyError as error:
        raise RunError(f"{path}: not a server's state of this version: {error} is missing") from error
