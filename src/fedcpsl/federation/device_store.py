"""What a device keeps, on its own disk, in one file.

An upload changes c_i only once the server has counted it, and the device hears of that in a later order, together with
the factor by which the server multiplied it. So there are two slots: `committed`, and beside it `pending`, the last
upload and the c that it was computed with. Both lie in one file that is replaced as a whole, once for each order: a
kill at any moment leaves the state before the order or after it. Nobody else on the machine can read it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithms.family import Broadcast, Device, Upload
from fedcpsl.errors import RunError
from fedcpsl.federation.messages import TRAIN, Answer, Turn
from fedcpsl.federation.terms import Terms
from fedcpsl.runs.checkpoint import load_tensors, save_tensors
from fedcpsl.runs.files import make_folder
from fedcpsl.trees import map_tensors

FILE = "device.safetensors"


class Pending(NamedTuple):
    """An upload of which the device does not know yet whether it was counted."""

    answer: Answer  # as it was sent, to be sent again if the order is repeated
    c_server: Tensor | None  # the c that came with the order
    c: Tensor | None = None  # in files of version 0.1, in place of that: c_i if the upload was counted


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
    epoch: int = 0  # of the server's control variates


def settle(terms: Terms, kept: Kept, counted: Turn | None, factor: float = 1.0) -> Kept:
    """The state once it is known which upload was counted last, and times what: the pending one or an earlier one."""
    if counted == kept.counted:
        return kept._replace(pending=None)
    if kept.pending and counted == kept.pending.answer.turn:
        committed = _with_counted(terms, kept, kept.pending, factor)
        return kept._replace(committed=committed, counted=counted, pending=None)
    raise RunError(
        f"the server counted this device last in {counted or 'no round'}, but its state is of "
        f"{kept.counted or 'no round'}: one of the two was put back to an older copy; restore the newest, or join "
        "under another name"
    )


def _with_counted(terms: Terms, kept: Kept, pending: Pending, factor: float) -> Device:
    """What the algorithm keeps after its upload was counted, `factor` times."""
    if pending.c is not None:
        return kept.committed._replace(c=pending.c)
    delta, c_server, steps = pending.answer.delta, pending.c_server, pending.answer.steps
    assert delta is not None and c_server is not None  # noqa: PT018 - every upload has both
    where = terms.where
    broadcast = Broadcast(kept.theta.to(where), c_server.to(where))
    upload = Upload(scaled(delta, factor).to(where), torch.tensor(steps, device=where))
    device: Device = map_tensors(lambda t: t.to(where), kept.committed)
    after: Device = map_tensors(
        Tensor.cpu, terms.algorithm.commit(terms.method, terms.hyper, broadcast, device, upload)
    )
    return after


def scaled(delta: Tensor, factor: float) -> Tensor:
    """An update as the server counts it: the same bits on both sides."""
    return delta if factor == 1 else delta * factor


def restarted(kept: Kept, epoch: int) -> Kept:
    """The state where the server starts c and every c_i at 0 again: nothing was counted yet; theta_lc stays."""
    if epoch < kept.epoch:
        raise RunError(
            f"the server's control variates are of epoch {epoch}, this device's of {kept.epoch}: the server was put "
            "back to an older copy; restore the newest, or go back with `fedcpsl serve --back-to`"
        )
    committed = kept.committed._replace(c=torch.zeros_like(kept.committed.c))
    return kept._replace(committed=committed, counted=None, pending=None, last=None, epoch=epoch)


@contextmanager
def opened(folder: Path) -> Iterator[None]:
    """Make the folder, and let one order at a time work on it: a second waits. A crash frees the lock."""
    make_folder(folder, private=True)
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
    names = ("run", "labelled", "unlabelled", "active_rounds", "epoch")
    header: dict[str, Any] = {name: getattr(kept, name) for name in names}
    header |= {"counted": kept.counted, "last": kept.last}
    if pending and pending.answer.delta is not None:
        pair = {"pending.c_server": pending.c_server, "pending.c": pending.c}
        tensors |= {"pending.delta": pending.answer.delta} | {n: t for n, t in pair.items() if t is not None}
        header["pending"] = [*pending.answer.turn, pending.answer.steps, pending.answer.accuracy]
    save_tensors(folder / FILE, tensors, header, private=True)


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
            epoch=header.get("epoch", 0),
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
    return Pending(answer, tensors.get("pending.c_server"), tensors.get("pending.c"))


def _turn(written: list[int] | None) -> Turn | None:
    return None if written is None else Turn(*written)
