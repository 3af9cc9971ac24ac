"""What a device keeps, on its own disk, in one file.

An upload changes some of what a device keeps (FedCPSL's c_i) only once the server has counted it, and the device hears
of that in a later order, together with the factor by which the server multiplied it. So there are two slots:
`committed`, and beside it `pending`, the last upload; what it was computed with is what was `received` last. Both lie
in one file that is replaced as a whole, once for each order: a kill at any moment leaves the state before the order or
after it. Nobody else on the machine can read it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.errors import RunError
from fedcpsl.federation.messages import TRAIN, Answer, Turn, read_tree, sent_tensors
from fedcpsl.federation.protection import scaled
from fedcpsl.federation.terms import Shapes, Terms, shapes_of
from fedcpsl.storage import load_tensors, make_folder, save_tensors
from fedcpsl.trees import Tree, map_tensors, named_leaves, rebuilt

FILE = "device.safetensors"


class Pending(NamedTuple):
    """An upload of which the device does not know yet whether it was counted."""

    answer: Answer  # as it was sent, to be sent again if the order is repeated
    c: Tensor | None = None  # in files of version 0.1, which had FedCPSL's family alone: c_i if it was counted


class Kept(NamedTuple):
    """Everything that a device keeps between orders."""

    run: str
    labelled: int  # the sizes that it joined with
    unlabelled: int
    committed: Tree  # of what depends on being counted, what the server has counted
    counted: Turn | None  # the last upload in it
    pending: Pending | None
    last: Turn | None  # in which it trained
    received: Tree  # the last broadcast, or what came of one with an order that was not for training
    nu: Tensor  # [unlabelled, classes]; no rows where unlabelled samples are not used
    active_rounds: int
    epoch: int = 0  # of what both sides must agree on


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


def _with_counted(terms: Terms, kept: Kept, pending: Pending, factor: float) -> Tree:
    """What the algorithm keeps after its upload was counted, `factor` times."""
    if pending.c is not None:
        return kept.committed._replace(c=pending.c)
    upload = scaled(pending.answer.upload, factor)
    broadcast, device, sent = (
        map_tensors(lambda t: t.to(terms.where), tree) for tree in (kept.received, kept.committed, upload)
    )
    return map_tensors(Tensor.cpu, terms.algorithm.commit(terms.method, terms.hyper, broadcast, device, sent))


def restarted(terms: Terms, kept: Kept, epoch: int) -> Kept:
    """The state where the server starts again what both sides must agree on: nothing was counted yet; models stay."""
    if epoch < kept.epoch:
        raise RunError(
            f"the server's control variates are of epoch {epoch}, this device's of {kept.epoch}: the server was put "
            "back to an older copy; restore the newest, or go back with `fedcpsl serve --back-to`"
        )
    again = optional(terms.algorithm, "started_again")
    committed = again(kept.committed) if again else kept.committed
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
    pending, tensors = kept.pending, {"nu": kept.nu}
    tensors |= named_leaves(kept.committed, "committed") | named_leaves(kept.received, "received")
    names = ("run", "labelled", "unlabelled", "active_rounds", "epoch")
    header: dict[str, Any] = {name: getattr(kept, name) for name in names}
    header |= {"counted": kept.counted, "last": kept.last}
    if pending and pending.answer.upload is not None:
        tensors |= {f"pending.{name}": t for name, t in sent_tensors(pending.answer.upload).items()}
        tensors |= {} if pending.c is None else {"pending.c": pending.c}
        header["pending"] = [*pending.answer.turn, pending.answer.steps, pending.answer.accuracy]
    save_tensors(folder / FILE, tensors, header, private=True)


def load_kept(folder: Path, terms: Terms) -> Kept | None:
    """What `save_kept` wrote; None where the device has kept nothing yet."""
    if not (folder / FILE).exists():
        return None
    tensors, numbers = load_tensors(folder / FILE)
    header = dict[str, Any](numbers)
    shapes = shapes_of(terms)
    try:
        return Kept(
            run=header["run"],
            labelled=header["labelled"],
            unlabelled=header["unlabelled"],
            committed=rebuilt(shapes.device, [tensors[name] for name in named_leaves(shapes.device, "committed")]),
            counted=_turn(header["counted"]),
            pending=_pending(header, tensors, shapes),
            last=_turn(header["last"]),
            received=_received(tensors, shapes),
            nu=tensors["nu"],
            active_rounds=header["active_rounds"],
            epoch=header.get("epoch", 0),
        )
    except KeyError as error:
        raise RunError(f"{folder / FILE}: not the state of a device of this version: {error} is missing") from error


def _received(tensors: dict[str, Tensor], shapes: Shapes) -> Tree:
    """The last broadcast; versions before 0.2 kept its parts elsewhere, and had FedCPSL's family alone."""
    if "theta" in tensors:
        tensors = {"received.theta": tensors["theta"], "received.c": tensors.get("pending.c_server", torch.zeros(0))}
    return rebuilt(shapes.broadcast, [tensors[name] for name in named_leaves(shapes.broadcast, "received")])


def _pending(header: dict[str, Any], tensors: dict[str, Tensor], shapes: Shapes) -> Pending | None:
    if "pending" not in header:
        return None
    round, attempt, steps, accuracy = header["pending"]
    sent = {name: tensors[f"pending.{name}"] for name in sent_tensors(shapes.upload)}
    upload = read_tree(sent, shapes.upload, steps)
    answer = Answer(header["run"], Turn(round, attempt), TRAIN, steps=steps, upload=upload, accuracy=accuracy)
    return Pending(answer, tensors.get("pending.c"))


def _turn(written: list[int] | None) -> Turn | None:
    return None if written is None else Turn(*written)
