"""A device's side: it answers orders one at a time, and what it says is on its disk before it says it."""

import logging
import time
from pathlib import Path
from typing import NamedTuple

from torch import Tensor

from fedcpsl.errors import InputError, RunError, printable
from fedcpsl.federation.device_store import Kept, Pending, load_kept, opened, restarted, save_kept, settle
from fedcpsl.federation.local_data import Holdings
from fedcpsl.federation.local_round import Clock, first_labels, log_predictions, train
from fedcpsl.federation.messages import (
    HELLO,
    REFUSAL,
    TRAIN,
    Answer,
    Message,
    Order,
    Turn,
    answer_message,
    read_order,
)
from fedcpsl.federation.protection import Protection, check_protection, protect
from fedcpsl.federation.terms import Terms
from fedcpsl.trees import map_tensors

LOG = logging.getLogger("fedcpsl")


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
