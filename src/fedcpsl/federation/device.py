"""A device's side: it answers orders one at a time, and what it says is on its disk before it says it.

An upload changes some of what a device keeps (FedCPSL's c_i) only once the server has counted it, and the device hears
of that in a later order, together with the factor by which the server multiplied it. So there are two slots:
`committed`, and beside it `pending`, the last upload; what it was computed with is what was `received` last. Both lie
in one file that is replaced as a whole, once for each order: a kill at any moment leaves the state before the order or
after it. Nobody else on the machine can read it.
"""

import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.local_training import Clock, Holdings, first_labels, log_predictions, train
from fedcpsl.federation.messages import (
    HELLO,
    REFUSAL,
    TRAIN,
    Answer,
    Lost,
    Message,
    Order,
    Turn,
    answer_message,
    read_order,
    read_tree,
    sent_tensors,
)
from fedcpsl.federation.privacy import Protection, check_protection, protect, scaled
from fedcpsl.federation.terms import Shapes, Terms, shapes_of
from fedcpsl.runs.checkpoint import load_tensors, save_tensors
from fedcpsl.runs.files import make_folder
from fedcpsl.trees import Tree, map_tensors, named_leaves, rebuilt

LOG = logging.getLogger("fedcpsl")
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


class Participant(NamedTuple):
    """A device, and what its owner decided."""

    terms: Terms
    holdings: Holdings
    folder: Path  # for its state; one run's, and nobody else's
    budget: float = 0.0  # seconds of work in a round; 0: no limit of its own
    protection: Protection = Protection()
    share_accuracy: bool = False


def respond(participant: Participant, message: Message, clock: Clock = time.monotonic) -> Message:
    """The answer to a message from the server; where there is none, a refusal that says why."""
    try:
        return answer_message(answer(participant, read_order(message, participant.terms), clock))
    except RunError as error:
        LOG.warning("%s", printable(error))
        reason = str(error).replace(str(participant.folder), "its folder")
        return refusal(message, reason)


def answer(participant: Participant, order: Order, clock: Clock = time.monotonic) -> Answer:
    """Carry out an order, or say again what was said to it; RunError where it is not to be carried out."""
    check_protection(participant.protection)
    with opened(participant.folder):
        kept = load_kept(participant.folder, participant.terms)
        if kept is not None:
            _check_state(participant, kept, order)
            kept = kept if order.epoch == kept.epoch else restarted(participant.terms, kept, order.epoch)
        if order.kind == HELLO:
            return _greet(participant, kept, order)
        if kept is None:
            kept = _newcomer(participant, order)
        if kept.last is not None and order.turn <= kept.last:
            return _again(kept, order)
        kept = settle(participant.terms, kept, order.counted, order.factor)._replace(received=order.broadcast)
        if order.kind == TRAIN:
            kept, said = _train(participant, kept._replace(last=order.turn), order, clock)
        else:
            said = Answer(order.run, order.turn, order.kind, accuracy=_accuracy(participant, kept))
        save_kept(participant.folder, kept)
        return said


def predict(participant: Participant, x: Tensor) -> Tensor:
    """Class probabilities of inputs by the device's personal model, also while it is being trained."""
    kept = load_kept(participant.folder, participant.terms)
    if kept is None:
        raise InputError(f"{participant.folder}: no model yet; join a federation first")
    return _log_predictions(participant, kept, x).exp()


def _train(participant: Participant, kept: Kept, order: Order, clock: Clock) -> tuple[Kept, Answer]:
    """What the device keeps after a round, what depends on being counted pending, and what it sends."""
    terms, holdings = participant.terms, participant.holdings
    before = map_tensors(lambda t: t.to(terms.where), kept.committed)
    budget = min(filter(None, (participant.budget, order.budget)), default=0.0)
    warming = kept.active_rounds < terms.method.traits.warm_up
    nu = kept.nu.to(terms.where)
    device, nu, upload, steps = train(terms, holdings, before, nu, order, budget, clock, warming=warming)
    sent = map_tensors(Tensor.cpu, protect(upload, participant.protection))
    kept = kept._replace(
        committed=map_tensors(Tensor.cpu, device),
        nu=nu.cpu(),
        active_rounds=kept.active_rounds + 1,
    )
    said = Answer(
        order.run,
        order.turn,
        TRAIN,
        steps=steps,
        upload=sent,
        accuracy=_accuracy(participant, kept),
    )
    return kept._replace(pending=Pending(said)), said


def _check_state(participant: Participant, kept: Kept, order: Order) -> None:
    """Refuse to mix runs, or to go on with other samples than those that the server knows of."""
    holdings = participant.holdings
    if kept.run != order.run:
        raise RunError(
            f"{participant.folder}: holds the state of run {kept.run}, the server's run is {order.run}; "
            "give each run a folder of its own"
        )
    if (kept.labelled, kept.unlabelled) != (holdings.labelled, holdings.unlabelled):
        raise RunError(
            f"this device joined with {kept.labelled} labelled and {kept.unlabelled} unlabelled samples and now has "
            f"{holdings.labelled} and {holdings.unlabelled}; give it the same ones, or join under another name"
        )


def _greet(participant: Participant, kept: Kept | None, order: Order) -> Answer:
    """Tell the sizes, once; a model of the device's own starts at the one that comes with the question."""
    if kept is None:
        kept = _newcomer(participant, order)
    elif kept.counted is not None:
        raise RunError("the server has forgotten that it counted this device: it was put back to an older copy")
    save_kept(participant.folder, kept)
    holdings = participant.holdings
    return Answer(order.run, order.turn, HELLO, labelled=holdings.labelled, unlabelled=holdings.unlabelled)


def _newcomer(participant: Participant, order: Order) -> Kept:
    """The state of a device of which nothing was counted yet."""
    if order.counted is not None:
        raise RunError(
            f"this device's state is gone, and the server has counted it (last in {order.counted}): its control "
            "variate cannot be made again; restore its folder, or join under another name"
        )
    terms, holdings = participant.terms, participant.holdings
    device = terms.algorithm.init_device(terms.method, order.broadcast)
    return Kept(
        run=order.run,
        labelled=holdings.labelled,
        unlabelled=holdings.unlabelled,
        committed=device,
        counted=None,
        pending=None,
        last=None,
        received=order.broadcast,
        nu=first_labels(terms, holdings).cpu(),
        active_rounds=0,
        epoch=order.epoch,
    )


def _again(kept: Kept, order: Order) -> Answer:
    """The same answer to a repeated order; nothing to one that later ones have overtaken."""
    if kept.pending and order.kind == TRAIN and order.turn == kept.last:
        return kept.pending.answer
    raise RunError(f"the order is of {order.turn}, and this device is past it: it has worked in {kept.last}")


def _accuracy(participant: Participant, kept: Kept) -> float | None:
    """Of the personal model on the device's own test samples, where its owner shares that."""
    y = participant.holdings.y_test
    if not participant.share_accuracy or not len(y):
        return None
    guessed = _log_predictions(participant, kept, participant.holdings.x_test).argmax(-1)
    return float((guessed == y).double().mean())


def _log_predictions(participant: Participant, kept: Kept, x: Tensor) -> Tensor:
    where = participant.terms.where
    received, device = (map_tensors(lambda t: t.to(where), tree) for tree in (kept.received, kept.committed))
    return log_predictions(participant.terms, received, device, x)


def refusal(message: Message, reason: str, *, later: bool = False) -> Message:
    """A no to whatever was asked, as far as it can be told; `later`: only for now."""
    header = message.header
    run, round, attempt = header.get("run", ""), header.get("round", 0), header.get("attempt", 0)
    turn = Turn(round if isinstance(round, int) else 0, attempt if isinstance(attempt, int) else 0)
    return answer_message(Answer(run if isinstance(run, str) else "", turn, REFUSAL, reason=reason, later=later))


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


class Loopback(NamedTuple):
    """A transport that loses nothing."""

    participants: dict[str, Participant]

    def present(self) -> list[str]:
        return list(self.participants)

    def send(self, messages: Mapping[str, Message], deadline: float) -> Iterator[tuple[str, Message | Lost]]:  # noqa: ARG002
        for name, message in messages.items():
            yield name, respond(self.participants[name], message)
