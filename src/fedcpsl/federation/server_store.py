"""What the server keeps, on its disk before any device hears of it, and its last states to go back to."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcpsl.algorithm import optional
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import Turn
from fedcpsl.federation.terms import Terms, digest, shapes_of
from fedcpsl.schedule import Sizes
from fedcpsl.storage import load_tensors, save_tensors
from fedcpsl.trees import Tree, named_leaves, rebuilt

FILE = "server.safetensors"
EARLIER = "earlier"  # the folder of states after earlier rounds
KEPT = 5


class Member(NamedTuple):
    """A device of the roster, which it never leaves."""

    name: str
    labelled: int
    unlabelled: int
    counted: Turn | None = None  # the last turn in which its update was counted
    asked: int = 0  # turns in which it was asked for an update: at most so many has it let go
    factor: float = 1.0  # by which the update that was counted last was multiplied
    rate: float | None = None  # ||update|| / (eta Q~) of its latest update
    offences: int = 0  # updates in a row that were refused
    excluded_until: int = 0  # the round before which it is not asked
    forgotten: bool = False  # it has no weight any more, and is not asked

    @property
    def samples(self) -> int:
        """What its weight is made of."""
        return 0 if self.forgotten else self.labelled + self.unlabelled


class Serving(NamedTuple):
    """The server's state: what it does next is `turn`. What is said of the last turn is not kept on disk."""

    run: str
    settings: str  # digest of the terms
    server: Tree
    roster: tuple[Member, ...]  # in the order of joining, which numbers the devices
    turn: Turn
    begun: bool = False  # whether enough devices have joined for the first round
    epoch: int = 0  # rises when c and every c_i start at 0 again
    failures: int = 0  # attempts at this round in which updates came and too few could be counted
    counted: tuple[str, ...] = ()  # whose updates the last turn counted
    dropouts: dict[str, str] = {}  # noqa: RUF012 - never changed; who was asked in vain, and why
    accuracy: dict[str, float] = {}  # noqa: RUF012 - of those who share it
    events: tuple[str, ...] = ()  # what the operator should know of the last turn
    over: bool = False

    @property
    def members(self) -> int:
        """N, the devices that have a weight."""
        return sum(not member.forgotten for member in self.roster)

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

    It is the only one to go on from: devices may have acted on it. The states of some earlier rounds are kept beside
    it for `go_back`.
    """
    names = ("run", "settings", "turn", "begun", "roster", "epoch", "failures")
    header: dict[str, Any] = {name: getattr(state, name) for name in names}
    save_tensors(folder / FILE, named_leaves(state.server), header, private=True)
    _keep(folder, state.round)


def load_serving(folder: Path, terms: Terms) -> Serving | None:
    """What `save_serving` wrote; None where there is nothing yet."""
    path = folder / FILE
    if not path.exists():
        return None
    try:
        return _load(path, terms)
    except RunError as error:
        rounds = earlier_rounds(folder)
        if not rounds:
            raise
        kept = ", ".join(map(str, rounds))
        raise RunError(f"{error}; or go back to a state that is kept with --back-to ROUND: {kept}") from error


def earlier_rounds(folder: Path) -> list[int]:
    """The rounds whose states are kept, oldest first."""
    return sorted(int(path.stem.removeprefix("round-")) for path in (folder / EARLIER).glob("round-*.safetensors"))


def go_back(folder: Path, terms: Terms, round: int) -> Serving:
    """The state with theta as it was when `round` began, saved; c and every c_i start at 0 again.

    The roster stays the newest one that can be read. Localized models are the devices' own and stay as they are.
    """
    path = _earlier(folder, round)
    if not path.exists():
        kept = ", ".join(map(str, earlier_rounds(folder))) or "none"
        raise InputError(f"--back-to {round}: {folder} has no state of that round; there are: {kept}")
    old = _load(path, terms)
    try:
        newest = _load(folder / FILE, terms)
    except RunError:
        newest = old
    return save_and_return(
        folder,
        restart_control_variates(newest, terms)._replace(server=_again(old.server, terms), turn=old.turn, failures=0),
    )


def restart_control_variates(state: Serving, terms: Terms) -> Serving:
    """What both sides must agree on (c and every c_i) begins again, in a new epoch; no epoch ever comes twice.

    A device hears of it with its next order.
    """
    roster = tuple(m._replace(counted=None, factor=1.0) for m in state.roster)
    epoch = max(state.epoch + 1, int(time.time()))
    return state._replace(server=_again(state.server, terms), roster=roster, epoch=epoch)


def save_and_return(folder: Path, state: Serving) -> Serving:
    save_serving(folder, state)
    return state


def _again(server: Tree, terms: Terms) -> Tree:
    again = optional(terms.algorithm, "started_again")
    return again(server) if again else server


def _load(path: Path, terms: Terms) -> Serving:
    tensors, numbers = load_tensors(path)
    header, settings, like = dict[str, Any](numbers), digest(terms), shapes_of(terms).server
    try:
        if header["settings"] != settings:
            raise InputError(
                f"{path}: was begun with other settings (their digest is {header['settings']}, now {settings}); give "
                "the settings that it was begun with, or another folder"
            )
        server = rebuilt(like, [tensors[name].to(terms.where) for name in named_leaves(like)])
        roster = tuple(_member(*each) for each in header["roster"])
        turn, begun = Turn(*header["turn"]), header["begun"]
        epoch, failures = header.get("epoch", 0), header.get("failures", 0)  # version 0.1 had neither
        return Serving(header["run"], settings, server, roster, turn, begun, epoch, failures)
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}: not a server's state of this version: {error} is missing") from error


def _member(name: str, labelled: int, unlabelled: int, counted: list[int] | None, *rest: Any) -> Member:
    return Member(name, labelled, unlabelled, None if counted is None else Turn(*counted), *rest)


def _earlier(folder: Path, round: int) -> Path:
    return folder / EARLIER / f"round-{round:07d}.safetensors"


def _keep(folder: Path, round: int) -> None:
    """Have the state that was just written kept as that of its round, and drop the oldest."""
    path = _earlier(folder, round)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        os.link(folder / FILE, path)
    except OSError:  # a file system without links
        shutil.copyfile(folder / FILE, path)
    for old in earlier_rounds(folder)[:-KEPT]:
        with suppress(FileNotFoundError):
            _earlier(folder, old).unlink()
