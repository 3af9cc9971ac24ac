"""One turn's orders and what comes of them."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from torch import Tensor

from fedcpsl.errors import RunError
from fedcpsl.federation.messages import (
    NEVER,
    REFUSAL,
    TRAIN,
    Answer,
    Lost,
    Message,
    Order,
    Transport,
    is_late,
    order_message,
    read_answer,
)
from fedcpsl.federation.server_store import Serving
from fedcpsl.federation.terms import Terms, greeting_of
from fedcpsl.trees import map_tensors


class Replies(NamedTuple):
    """What came of a turn's orders."""

    answers: dict[str, Answer]
    dropouts: dict[str, str]  # why the others count as such
    failing: set[str]  # those of them whose answer was not what it must be, or who said that they cannot, now or later

    @property
    def accuracy(self) -> dict[str, float]:
        """Of those who share it."""
        return {name: a.accuracy for name, a in self.answers.items() if a.accuracy is not None}


def ask(terms: Terms, orders: Mapping[str, Order], transport: Transport, deadline: float) -> Replies:
    """What came in time; the rest counts as dropouts."""
    found = Replies({}, {}, set())
    if not orders:
        return found
    late = {name: f"device {name!r} did not answer within {deadline:g} s" for name in orders}
    found.dropouts.update(late)
    messages = {name: order_message(order) for name, order in orders.items()}
    replies: Iterable[tuple[str, Message | Lost]] = transport.send(messages, deadline)
    for name, reply in replies:
        if name not in orders or name in found.answers:
            continue  # a late answer of somebody not asked now, or one that came twice
        if isinstance(reply, Lost):
            found.dropouts[name] = f"device {name!r}: {reply.reason}"
            found.failing.update({name} if reply.fault else set())
            continue
        try:
            answer = read_answer(reply, name, orders[name], terms)
        except RunError as error:
            found.dropouts[name] = str(error)
            found.failing.update(set() if is_late(reply, orders[name]) else {name})
            continue
        if answer.kind == REFUSAL:
            found.dropouts[name] = f"device {name!r} refused: {answer.reason}"
            found.failing.update(set() if answer.later else {name})
            continue
        found.answers[name] = answer
        found.failing.discard(name)
        found.dropouts.pop(name)
    return found


def make_order(
    terms: Terms, state: Serving, kind: str, seed: int, budget: float, device: int = NEVER, steps: int = 0
) -> Order:
    """What a device is asked for now."""
    broadcast = map_tensors(Tensor.cpu, terms.algorithm.broadcast(state.server))
    member = None if device < 0 else state.roster[device]
    return Order(
        run=state.run,
        turn=state.turn,
        kind=kind,
        settings=state.settings,
        broadcast=broadcast if kind == TRAIN else greeting_of(terms, broadcast),
        device=device,
        seed=seed,
        counted=None if member is None else member.counted,
        steps=steps,
        budget=budget,
        factor=1.0 if member is None else member.factor,
        epoch=state.epoch,
    )
