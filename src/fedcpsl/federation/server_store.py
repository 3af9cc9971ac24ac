"""The server's state on disk, and the states of its last rounds, to which it can be set back."""

import os
import shutil
import time
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from fedcpsl.algorithm import Roster, optional
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import Attempt
from fedcpsl.federation.terms import Terms, digest, shapes_of
from fedcpsl.schedule import Sizes
from fedcpsl.storage import load_tensors, save_tensors
from fedcpsl.trees import Tree, named_leaves, rebuilt

SERVER_FILE = "server.safetensors"
EARLIER_FOLDER = "earlier"  # with the states of earlier rounds
KEPT_STATES = 5  # earlier ones


class DeviceRecord(NamedTuple):
    """One device of the roster; records are never removed."""

    name: str
    labelled: int
    unlabelled: int
    counted: Attempt | None = None  # the last attempt in which its update was counted
    asked: int = 0  # attempts in which it was asked for an update: an upper bound of the updates that it sent
    factor: float = 1.0  # of the update that was counted last
    rate: float | None = None  # ||update|| / (eta Q~) of its latest update
    offences: int = 0  # updates in a row that were refused
    excluded_until: int = 0  # it is not asked before this round
    forgotten: bool = False  # whether its weight was removed; it is then not asked

    @property
    def samples(self) -> int:
        """The number of samples, which its weight is proportional to."""
        return 0 if self.forgotten else self.labelled + self.unlabelled


class ServerState(NamedTuple):
    """The server's state before `attempt`. The fields about the last attempt are not saved."""

    run: str
    settings: str  # digest of the terms
    server: Tree
    roster: tuple[DeviceRecord, ...]  # in the order of joining, which numbers the devices
    attempt: Attempt
    begun: bool = False  # whether enough devices have joined to start the first round
    epoch: int = 0  # raised when c and every c_i are reset to 0
    probing: Attempt | None = None  # the attempt that was counted and whose second exchange is still to come
    failures: int = 0  # attempts at this round in which too few of the received updates could be counted
    counted: tuple[str, ...] = ()  # the devices whose updates the last attempt counted
    dropouts: dict[str, str] = {}  # noqa: RUF012 - never changed; devices without a valid reply, and why
    accuracy: dict[str, float] = {}  # noqa: RUF012 - of the devices that share it
    losses: dict[str, tuple[float, int]] = {}  # noqa: RUF012 - on labels held back in a trial, and how many they were
    events: tuple[str, ...] = ()  # of the last attempt, for the operator
    over: bool = False

    @property
    def device_count(self) -> int:
        """N, the number of devices with a weight."""
        return sum(not record.forgotten for record in self.roster)

    @property
    def round(self) -> int:
        return self.attempt.round

    @property
    def samples(self) -> int:
        return sum(record.samples for record in self.roster)

    @property
    def joined(self) -> Roster:
        """The devices as the algorithm's server knows them: a forgotten one has no labelled samples."""
        labelled = [0 if record.forgotten else record.labelled for record in self.roster]
        return Roster(self.device_count, self.samples, labelled)

    @property
    def sizes(self) -> Sizes:
        counts = np.array([(m.labelled, m.unlabelled) for m in self.roster], np.int64).reshape(-1, 2)
        return Sizes(counts[:, 0], counts[:, 1])


def save_server_state(folder: Path, state: ServerState) -> None:
    """Write the state, and return once it is on disk.

    Only this one can be resumed: devices may have acted on it. The states of some earlier rounds are kept beside it
    for `go_back`.
    """
    header: dict[str, Any] = {"run": state.run, "settings": state.settings, "turn": state.attempt, "begun": state.begun}
    header |= {"roster": state.roster, "epoch": state.epoch, "failures": state.failures}
    header |= {} if state.probing is None else {"probing": state.probing}
    save_tensors(folder / SERVER_FILE, named_leaves(state.server), header, private=True)
    _keep_state(folder, state.round)


def load_server_state(folder: Path, terms: Terms) -> ServerState | None:
    """Return what `save_server_state` wrote; None where there is no file yet."""
    path = folder / SERVER_FILE
    if not path.exists():
        return None
    try:
        return _load(path, terms)
    except RunError as error:
        rounds = earlier_rounds(folder)
        if not rounds:
            raise
        kept = ", ".join(map(str, rounds))
        raise RunError(f"{error}; or go back to an earlier state with --back-to ROUND: {kept}") from error


def earlier_rounds(folder: Path) -> list[int]:
    """Return the rounds whose states are kept, oldest first."""
    return sorted(
        int(path.stem.removeprefix("round-")) for path in (folder / EARLIER_FOLDER).glob("round-*.safetensors")
    )


def go_back(folder: Path, terms: Terms, round: int) -> ServerState:
    """Save and return the state with theta as it was when `round` began; c and every c_i are reset to 0.

    The roster stays the newest one that can be read. Localized models belong to the devices and stay as they are.
    """
    path = _earlier_path(folder, round)
    if not path.exists():
        kept = ", ".join(map(str, earlier_rounds(folder))) or "none"
        raise InputError(f"--back-to {round}: {folder} has no state of that round; there are: {kept}")
    old = _load(path, terms)
    try:
        newest = _load(folder / SERVER_FILE, terms)
    except RunError:
        newest = old
    state = restart_control_variates(newest, terms)
    server = _reset_server(old.server, terms)
    state = state._replace(server=server, attempt=old.attempt, probing=old.probing, failures=0)
    save_server_state(folder, state)
    return state


def restart_control_variates(state: ServerState, terms: Terms) -> ServerState:
    """Reset what both sides must agree on (c and every c_i), in a new epoch; no epoch is ever used twice.

    A device learns of it from its next instruction.
    """
    roster = tuple(m._replace(counted=None, factor=1.0) for m in state.roster)
    epoch = max(state.epoch + 1, int(time.time()))
    return state._replace(server=_reset_server(state.server, terms), roster=roster, epoch=epoch)


def _reset_server(server: Tree, terms: Terms) -> Tree:
    reset = optional(terms.algorithm, "started_again")
    return reset(server) if reset else server


def _load(path: Path, terms: Terms) -> ServerState:
    tensors, numbers = load_tensors(path)
    header, settings, like = dict[str, Any](numbers), digest(terms), shapes_of(terms).server
    try:
        if header["settings"] != settings:
            raise InputError(
                f"{path}: was started with other settings (their digest is {header['settings']}, now {settings}); "
                "give the settings that it was started with, or another folder"
            )
        server = rebuilt(like, [tensors[name].to(terms.where) for name in named_leaves(like)])
        roster = tuple(_record(*each) for each in header["roster"])
        attempt, begun = Attempt(*header["turn"]), header["begun"]
        epoch, failures = header.get("epoch", 0), header.get("failures", 0)  # version 0.1 had neither
        probing = Attempt(*header["probing"]) if "probing" in header else None
        return ServerState(header["run"], settings, server, roster, attempt, begun, epoch, probing, failures)
    except (KeyError, TypeError) as error:
        raise RunError(f"{path}: not a server's state of this version: {error} is missing") from error


def _record(name: str, labelled: int, unlabelled: int, counted: list[int] | None, *rest: Any) -> DeviceRecord:
    return DeviceRecord(name, labelled, unlabelled, None if counted is None else Attempt(*counted), *rest)


def _earlier_path(folder: Path, round: int) -> Path:
    return folder / EARLIER_FOLDER / f"round-{round:07d}.safetensors"


def _keep_state(folder: Path, round: int) -> None:
    """Keep the state that was just written as that of its round, and remove the oldest."""
    path = _earlier_path(folder, round)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    try:
        os.link(folder / SERVER_FILE, path)
    except OSError:  # a file system without links
        shutil.copyfile(folder / SERVER_FILE, path)
    for old in earlier_rounds(folder)[:-KEPT_STATES]:
        with suppress(FileNotFoundError):
            _earlier_path(folder, old).unlink()
