"""The server's side. The caller owns the loop.

Every turn (an attempt at a round) asks some devices for an update and counts those that came in time and are good. What
devices are sent is on disk before they are sent it, and what was counted before any of them hears of it. So a server
that is killed says the same again, and devices that have answered already say the same again.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import torch

from fedcpsl.algorithm import Sum, Upload, map_tensors
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import (
    END,
    HELLO,
    NEVER,
    TRAIN,
    Answer,
    Lost,
    Message,
    Order,
    Transport,
    Turn,
    order_message,
    read_answer,
)
from fedcpsl.federation.server_store import Member, Serving, load_serving, save_serving
from fedcpsl.federation.terms import Terms, digest
from fedcpsl.runs.files import make_folder
from fedcpsl.runs.folder import locked
from fedcpsl.schedule import draw_active, draw_steps


class Rules(NamedTuple):
    """How the rounds go; `active`, the local work and the batches are in the terms."""

    rounds: int
    seed: int
    deadline: float  # seconds that a turn's devices have
    least: int = 1  # devices to begin with
    quorum: int = 1  # good answers that a round needs; 0: a round that nobody answered goes by too
    over_sampling: float = 1.0  # devices asked for each one wanted
    budget: float = 0.0  # seconds of work that devices are asked for; 0: no limit
    largest_norm: float = 0.0  # of an update; 0: any


def serve(terms: Terms, rules: Rules, folder: Path, transport: Transport) -> Iterator[Serving]:
    """Yield the state at the start, after every turn, and at last when the devices were told that it is over.

    What is in `folder` is gone on with. Until `rules.least` devices have joined, turns do nothing but greet them. A
    round whose quorum was not met is yielded too: its number stays, its attempt rises, and nothing was counted. The
    caller may wait before it asks for the next turn.
    """
    _check_rules(terms, rules)
    make_folder(folder)
    with locked(folder):
        state = load_serving(folder, digest(terms), terms.method.network.initial) or _begin(terms, folder)
        yield state
        while state.round < rules.rounds:
            state = _one_turn(terms, rules, state, transport)
            save_serving(folder, state)
            yield state
        yield _end(terms, rules, state, transport)


def draw_orders(terms: Terms, rules: Rules, state: Serving) -> dict[str, Order]:
    """Whom this turn asks, and for what: the simulator's draw. A repeated round asks others."""
    roster, parts = np.arange(len(state.roster)), terms.method.parts
    wanted = ceil(terms.work.active * rules.over_sampling)
    starting_elsewhere = np.roll(roster, state.turn.attempt)
    chosen = roster.tolist() if parts.everyone else draw_active(rules.seed, state.round, starting_elsewhere, wanted)
    sizes, orders = state.sizes, {}
    for device in chosen:
        steps = draw_steps(rules.seed, state.round, device, sizes, terms.work, parts.unlabelled)
        if steps:  # who has no samples that the algorithm uses is not asked
            orders[state.roster[device].name] = _order(terms, rules, state, TRAIN, device, steps)
    return orders


def count(terms: Terms, state: Serving, answers: Mapping[str, Answer]) -> Serving:
    """The state after a round in which these updates were counted, in the order of the roster."""
    algorithm, method, server = terms.algorithm, terms.method, state.server
    total: Sum | None = None
    samples = state.samples
    for member in state.roster:
        if member.name in answers:
            upload = _upload(answers[member.name], terms)
            weight = torch.tensor(member.samples / samples, dtype=terms.dtype, device=terms.where)
            added = algorithm.contribution(method, terms.hyper, upload, weight)
            total = added if total is None else map_tensors(torch.add, total, added)
    if total is not None:
        server = algorithm.apply(method, server, total, len(state.roster))
    if not all(t.isfinite().all() for t in server):
        raise RunError(f"the global model is no longer finite after round {state.round}; use a smaller algorithm.eta")
    return state._replace(
        server=server,
        roster=tuple(m._replace(counted=state.turn) if m.name in answers else m for m in state.roster),
        turn=Turn(state.round + 1, 0),
        counted=tuple(m.name for m in state.roster if m.name in answers),
    )


def _begin(terms: Terms, folder: Path) -> Serving:
    state = Serving(uuid4().hex, digest(terms), terms.algorithm.init_server(terms.method), (), Turn(0, 0))
    save_serving(folder, state)
    return state


def _one_turn(terms: Terms, rules: Rules, state: Serving, transport: Transport) -> Serving:
    """Ask some of the roster for their updates, and whoever is not in it yet for its sizes."""
    asked = draw_orders(terms, rules, state) if state.begun else {}
    strangers = set(transport.present()) - {member.name for member in state.roster}
    greetings = {name: _order(terms, rules, state, HELLO) for name in sorted(strangers)}
    answers, dropouts = _ask(terms, rules, asked | greetings, transport)
    updates = {name: a for name, a in answers.items() if a.kind == TRAIN}
    roster = tuple(m._replace(asked=m.asked + (m.name in asked)) for m in state.roster)
    state = state._replace(roster=roster, counted=(), dropouts=dropouts, accuracy=_shared(answers))
    if len(updates) < min(rules.quorum, len(asked)):
        state = state._replace(turn=Turn(state.round, state.turn.attempt + 1))
    elif state.begun:
        state = count(terms, state, updates)
    newcomers = [Member(name, a.labelled, a.unlabelled) for name, a in sorted(answers.items()) if a.kind == HELLO]
    return _admit(terms, rules, state, newcomers)


def _admit(terms: Terms, rules: Rules, state: Serving, newcomers: Sequence[Member]) -> Serving:
    """The state with newcomers in the roster. It is for the next turn: what this one was asked with must not change."""
    if not newcomers:
        return state
    after = state._replace(roster=(*state.roster, *newcomers))
    server = terms.algorithm.admit(terms.method, state.server, state.samples, after.samples)
    return after._replace(server=server, begun=state.begun or len(after.roster) >= rules.least)


def _end(terms: Terms, rules: Rules, state: Serving, transport: Transport) -> Serving:
    """Send everybody the last theta, and what was counted last."""
    orders = {m.name: _order(terms, rules, state, END, i) for i, m in enumerate(state.roster)}
    answers, dropouts = _ask(terms, rules, orders, transport)
    return state._replace(counted=(), dropouts=dropouts, accuracy=_shared(answers), over=True)


def _shared(answers: Mapping[str, Answer]) -> dict[str, float]:
    return {name: a.accuracy for name, a in answers.items() if a.accuracy is not None}


def _ask(
    terms: Terms, rules: Rules, orders: Mapping[str, Order], transport: Transport
) -> tuple[dict[str, Answer], dict[str, str]]:
    """The good answers by device, and why the others count as dropouts."""
    if not orders:
        return {}, {}
    answers: dict[str, Answer] = {}
    problems = {name: f"device {name!r} did not answer within {rules.deadline:g} s" for name in orders}
    messages = {name: order_message(order) for name, order in orders.items()}
    replies: Iterable[tuple[str, Message | Lost]] = transport.send(messages, rules.deadline)
    for name, reply in replies:
        if name not in orders or name in answers:
            continue  # a late answer of somebody not asked now, or one that came twice
        try:
            if isinstance(reply, Lost):
                raise RunError(f"device {name!r}: {reply.reason}")
            answers[name] = read_answer(reply, name, orders[name], terms, rules.largest_norm)
        except RunError as error:
            problems[name] = str(error)
    return answers, {name: reason for name, reason in problems.items() if name not in answers}


def _order(terms: Terms, rules: Rules, state: Serving, kind: str, device: int = NEVER, steps: int = 0) -> Order:
    broadcast = terms.algorithm.broadcast(state.server)
    return Order(
        run=state.run,
        turn=state.turn,
        kind=kind,
        settings=state.settings,
        theta=broadcast.theta.cpu(),
        c=broadcast.c.cpu() if kind == TRAIN else broadcast.c.cpu()[:0],
        device=device,
        seed=rules.seed,
        counted=None if device < 0 else state.roster[device].counted,
        steps=steps,
        budget=rules.budget,
    )


def _upload(answer: Answer, terms: Terms) -> Upload:
    assert answer.delta is not None
    return Upload(answer.delta.to(terms.where), torch.tensor(answer.steps, device=terms.where))


def _check_rules(terms: Terms, rules: Rules) -> None:
    """Refuse rules under which no round could ever be counted."""
    asked = ceil(terms.work.active * rules.over_sampling)
    if rules.over_sampling < 1:
        raise InputError(f"over_sampling = {rules.over_sampling:g}: give at least 1")
    if rules.quorum < 0 or (rules.quorum > asked and not terms.method.parts.everyone):
        raise InputError(f"quorum = {rules.quorum}: {asked} devices are asked in a round; give 0 to {asked}")
    if rules.least < 1 or rules.deadline <= 0 or rules.rounds < 1:
        raise InputError("least, rounds and deadline: give at least 1 device, 1 round and more than 0 seconds")
