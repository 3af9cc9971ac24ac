"""What a device keeps, on its own disk, in one file.

An upload changes c_i only once the server has counted it, and the device hears of that in a later order. So there are
two slots: `committed`, and beside it `pending`, what c_i becomes if the last upload was counted. Both lie in one file
that is replaced as a whole, once for each order: a kill at any moment leaves the state before the order or after it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedcpsl.algorithm import Device
from fedcpsl.errors import RunError
from fedcpsl.federation.messages import TRAIN, Answer, Turn
from fedcpsl.runs.checkpoint import load_tensors, save_tensors
from fedcpsl.runs.files import make_folder

FILE = "device.safetensors"


class Pending(NamedTuple):
    """An upload of which the device does not know yet whether it was counted."""

    c: Tensor  # c_i if it was
    answer: Answer  # as it was sent, to be sent again if the order is repeated


class Kept(NamedTuple):
    """Everything that a device keeps between orders."""

    run: str
    labelled: int  # the sizes that it joined with
    unlabelled: int
    committed: Device  # theta_lc is kept whatever becomes of an upload; c is what the server has counted
    counted: Turn | None  # the last upload in c
    pending: Pending | None
    last: Turn | None  # in which it trained
    theta: Tensor  # the last one received
    nu: Tensor  # [unlabelled, classes]; no rows where unlabelled samples are not used
    active_rounds: int


def settle(kept: Kept, counted: Turn | None) -> Kept:
    """The state once it is known which upload was counted last: the pending one (take its c) or not (drop it)."""
    if counted == kept.counted:
        return kept._replace(pending=None)
    if kept.pending and counted == kept.pending.answer.turn:
        return kept._replace(committed=kept.committed._replace(c=kept.pending.c), counted=counted, pending=None)
    raise RunError(
        f"the server counted this device last in {counted or 'no round'}, but its state is of "
        f"{kept.counted or 'no round'}: one of the two was put back to an older copy; restore the newest, or join "
        "under another name"
    )


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Make the folder, and let one order at a time work on it: a second waits. A crash frees the lock."""
    make_folder(folder)
    try:
        file = (folder / ".lock").open("w")
    except OSError as error:
        raise RunError(f"{folder}: cannot be written to: {error.strerror}; give a folder that can") from error
    with file:
        if os.name == "posix":
            import fcntl

            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def save_kept(folder: Path, kept: Kept) -> None:
    """Write the state, and return once it is on disk."""
    pending, tensors = kept.pending, {"theta": kept.theta, "nu": kept.nu}
    tensors |= {f"committed.{name}": t for name, t in kept.committed._asdict().items()}
    header: dict[str, Any] = {name: getattr(kept, name) for name in ("run", "labelled", "unlabelled", "active_rounds")}
    header |= {"counted": kept.counted, "last": kept.last}
    if pending and pending.answer.delta is not None:
        tensors |= {"pending.c": pending.c, "pending.delta": pending.answer.delta}
        header["pending"] = [*pending.answer.turn, pending.answer.steps, pending.answer.accuracy]
    save_tensors(folder / FILE, tensors, header)


def load_kept(folder: Path) -> Kept | None:
    """What `save_kept` wrote; None where the device has kept nothing yet."""
    if not (folder / FILE).exists():
        return None
    tensors, numbers = load_tensors(folder / FILE)
    header = dict[str, Any](numbers)
    try:
        return Kept(
            run=header["run"],
            labelled=header["labelled"],
            unlabelled=header["unlabelled"],
            committed=Device(*(tensors[f"committed.{name}"] for name in Device._fields)),
            counted=_turn(header["counted"]),
            pending=_pending(header, tensors),
            last=_turn(header["last"]),
            theta=tensors["theta"],
            nu=tensors["nu"],
            active_rounds=header["active_rounds"],
        )
    except KeyError as error:
        raise RunError(f"{folder / FILE}: not the state of a device of this version: {error} is missing") from error


def _pending(header: dict[str, Any], tensors: dict[str, Tensor]) -> Pending | None:
    if "pending" not in header:
        return None
    round, attempt, steps, accuracy = header["pending"]
    answer = Answer(
        header["run"], Turn(round, attempt), TRAIN, steps=steps, delta=tensors["pending.delta"], accuracy=accuracy
    )
    return Pending(tensors["pending.c"], answer)


def _turn(written: list[int] | None) -> Turn | None:
    return None if written is None else Turn(*written)
