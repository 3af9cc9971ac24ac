"""The server's side. The caller owns the loop.

Every turn (an attempt at a round) asks some devices for an update and counts those that came in time and are good. What
devices are sent is on disk before they are sent it, and what was counted before any of them hears of it. So a server
that is killed says the same again, and devices that have answered already say the same again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import Roster
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import (
    END,
    HELLO,
    NEVER,
    REFUSAL,
    TRAIN,
    Answer,
    Lost,
    Message,
    Order,
    Transport,
    Turn,
    is_late,
    order_message,
    read_answer,
)
from fedcpsl.federation.privacy import scaled
from fedcpsl.federation.robustness import (
    BY_COORDINATE,
    Judgement,
    Limits,
    check_limits,
    judge,
    robust_sum,
    too_many_samples,
    upload_of,
)
from fedcpsl.federation.server_store import Member, Serving, load_serving, restart_control_variates, save_serving
from fedcpsl.federation.terms import Terms, digest, greeting_of, keeps_sums
from fedcpsl.runs.files import make_folder
from fedcpsl.runs.folder import locked
from fedcpsl.schedule import draw_active, draw_steps
from fedcpsl.trees import Tree, leaves, map_tensors

OFFENCES = 3  # in a row, after which a device is not asked for a while
EXCLUDED = 10  # rounds
Names = Callable[[], Iterable[str]]


class Rules(NamedTuple):
    """How the rounds go; `active`, the local work and the batches are in the terms."""

    rounds: int
    seed: int
    deadline: float  # seconds that a turn's devices have
    least: int = 1  # devices to begin with
    quorum: int = 1  # good answers that a round needs; 0: a round that nobody answered goes by too
    over_sampling: float = 1.0  # devices asked for each one wanted
    budget: float = 0.0  # seconds of work that devices are asked for; 0: no limit
    attempts: int = 10  # at a round to which updates come of which too few can be counted
    limits: Limits = Limits()


class Replies(NamedTuple):
    """What came of a turn's orders."""

    answers: dict[str, Answer]
    dropouts: dict[str, str]  # why the others count as such
    failing: set[str]  # those of them whose answer was not what it must be, or who said that they cannot, now or later

    @property
    def accuracy(self) -> dict[str, float]:
        """Of those who share it."""
        return {name: a.accuracy for name, a in self.answers.items() if a.accuracy is not None}


def serve(
    terms: Terms, rules: Rules, folder: Path, transport: Transport, to_forget: Names = tuple
) -> Iterator[Serving]:
    """Yield the state at the start, after every turn, and at last when the devices were told that it is over.

    What is in `folder` is gone on with. Until `rules.least` devices have joined, turns do nothing but greet them. A
    round whose quorum was not met is yielded too: its number stays, its attempt rises, and nothing was counted. The
    caller may wait before it asks for the next turn. Devices that `to_forget` names lose their weight.
    """
    _check_rules(terms, rules)
    make_folder(folder, private=True)
    with locked(folder):
        state = load_serving(folder, terms) or _begin(terms, folder)
        state = state._replace(failures=0)  # who starts it again wants it tried again
        yield state
        while state.round < rules.rounds:
            epoch, state = state.epoch, forget(state, terms, to_forget())
            if state.epoch != epoch:
                save_serving(folder, state)  # before any device hears of it
            state = _one_turn(terms, rules, state, transport)
            save_serving(folder, state)
            yield state
        yield _end(terms, rules, state, transport)


def draw_orders(terms: Terms, rules: Rules, state: Serving) -> dict[str, Order]:
    """Whom this turn asks, and for what: the simulator's draw. A repeated round asks others."""
    parts = terms.method.traits
    everybody = [i for i, m in enumerate(state.roster) if not m.forgotten]
    roster = [i for i in everybody if state.roster[i].excluded_until <= state.round] or everybody
    wanted = ceil(terms.work.active * rules.over_sampling)
    starting_elsewhere = np.roll(np.array(roster, np.int64), state.turn.attempt)
    chosen = roster if parts.everyone else draw_active(rules.seed, state.round, starting_elsewhere, wanted)
    sizes, orders = state.sizes, {}
    for device in chosen:
        steps = draw_steps(rules.seed, state.round, device, sizes, terms.work, parts.unlabelled)
        if steps:  # who has no samples that the algorithm uses is not asked
            orders[state.roster[device].name] = make_order(terms, rules, state, TRAIN, device, steps)
    return orders


def count(
    terms: Terms, state: Serving, answers: Mapping[str, Answer], factors: Mapping[str, float], limits: Limits
) -> Serving:
    """The state after a round in which these updates were counted, each times its factor, in the roster's order."""
    algorithm, method, server = terms.algorithm, terms.method, state.server
    contributions, samples, by_coordinate = [], state.samples, limits.aggregation in BY_COORDINATE
    for member in state.roster:
        if member.name in factors:
            upload = scaled(upload_of(answers[member.name], terms), factors[member.name])
            share = 1 / state.members if by_coordinate else member.samples / samples
            weight = torch.tensor(share, dtype=terms.dtype, device=terms.where)
            contributions.append(algorithm.contribution(method, terms.hyper, upload, weight))
    if contributions:
        total = robust_sum(limits, contributions) if by_coordinate else _sum(contributions)
        server = algorithm.apply(method, server, total, state.members)
    return state._replace(
        server=server,
        roster=tuple(
            m._replace(counted=state.turn, factor=factors[m.name]) if m.name in factors else m for m in state.roster
        ),
        turn=Turn(state.round + 1, 0),
        failures=0,
        counted=tuple(m.name for m in state.roster if m.name in factors),
    )


def forget(state: Serving, terms: Terms, names: Iterable[str]) -> Serving:
    """The state without the weight of some devices; c and every c_i start at 0 again, so that c stays their mean."""
    gone = {m.name for m in state.roster if not m.forgotten} & set(names)
    if not gone:
        return state._replace(events=())
    if len(gone) == state.members:
        raise RunError(f"{', '.join(sorted(gone))}: no other device has a weight; begin a federation in another folder")
    roster = tuple(m._replace(forgotten=m.forgotten or m.name in gone) for m in state.roster)
    said = f"forgotten: {', '.join(sorted(gone))}; control variates start at 0 again"
    return restart_control_variates(state._replace(roster=roster), terms)._replace(events=(said,))


def _sum(contributions: Sequence[Tree]) -> Tree:
    total = contributions[0]
    for each in contributions[1:]:
        total = map_tensors(torch.add, total, each)
    return total


def _begin(terms: Terms, folder: Path) -> Serving:
    state = Serving(uuid4().hex, digest(terms), terms.algorithm.init_server(terms.method, 0), (), Turn(0, 0))
    save_serving(folder, state)
    return state


def _one_turn(terms: Terms, rules: Rules, state: Serving, transport: Transport) -> Serving:
    """Ask some of the roster for their updates, and whoever is not in it yet for its sizes."""
    asked = draw_orders(terms, rules, state) if state.begun else {}
    strangers = set(transport.present()) - {member.name for member in state.roster}
    greetings = {name: make_order(terms, rules, state, HELLO) for name in sorted(strangers)}
    replies = ask(terms, asked | greetings, transport, rules.deadline)
    updates = {name: a for name, a in replies.answers.items() if a.kind == TRAIN}
    judged = judge(terms, rules.limits, state.roster, updates)
    roster = tuple(m._replace(asked=m.asked + (m.name in asked)) for m in state.roster)
    dropouts = replies.dropouts | judged.refused
    state = state._replace(roster=roster, counted=(), dropouts=dropouts, accuracy=replies.accuracy)
    if state.begun:
        state = _count_or_repeat(terms, rules, state, updates, judged, replies, len(asked))
    newcomers = [Member(n, a.labelled, a.unlabelled) for n, a in sorted(replies.answers.items()) if a.kind == HELLO]
    return _admit(terms, rules, state, newcomers)


def _count_or_repeat(
    terms: Terms,
    rules: Rules,
    state: Serving,
    updates: Mapping[str, Answer],
    judged: Judgement,
    replies: Replies,
    asked: int,
) -> Serving:
    """The state after the round, or before another attempt at it where the quorum was not met."""
    offenders = (replies.failing & {m.name for m in state.roster}) | set(judged.refused)
    if len(judged.factors) >= min(rules.quorum, asked):
        after = count(terms, state, updates, judged.factors, rules.limits)
        if all(t.isfinite().all() for t in leaves(after.server)):
            return _with_offences(terms, after, judged, offenders)
        largest = max(judged.rates, key=judged.rates.__getitem__)
        offenders |= {largest}
        reason = f"the update of device {largest!r}, the largest, made the global model infinite: nobody is counted"
        state = state._replace(dropouts=state.dropouts | {largest: reason})
    state = _with_offences(terms, state, judged, offenders)
    failures = state.failures + bool(offenders)
    state = state._replace(turn=Turn(state.round, state.turn.attempt + 1), failures=failures)
    return _capped(terms, rules, state) if offenders else state


def _capped(terms: Terms, rules: Rules, state: Serving) -> Serving:
    """No round repeats for ever: everybody begins again without control variates and offences, once.

    Where that does not help, and it is not just a minority that fails, it is an error.
    """
    round, why = state.round, "; ".join(state.dropouts.values())
    if state.failures == rules.attempts:
        said = f"round {round}: {rules.attempts} attempts failed ({why}); control variates start at 0 again"
        roster = tuple(m._replace(offences=0, excluded_until=0) for m in state.roster)
        return restart_control_variates(state._replace(roster=roster, events=(*state.events, said)), terms)
    if state.failures < 2 * rules.attempts or 2 * sum(m.offences > 0 for m in state.roster) <= state.members:
        return state
    raise RunError(
        f"round {round} was tried {state.failures} times and too few updates could be counted: {why}. Start the server "
        "again to try on, with --back-to ROUND to go back to an earlier state, or with a smaller algorithm.eta in a "
        "new folder"
    )


def _with_offences(terms: Terms, state: Serving, judged: Judgement, offenders: set[str]) -> Serving:
    """The roster with everybody's latest rate; who offends time and again is not asked for some rounds.

    What was counted of one whose updates are too large is in c, and not to be trusted either: control variates then
    start at 0 again.
    """
    events, roster, tainted = list(state.events), [], False
    for member in state.roster:
        member = member._replace(rate=judged.rates.get(member.name, member.rate))
        if member.name in offenders:
            member = member._replace(offences=member.offences + 1)
            if member.offences >= OFFENCES:
                until = state.round + EXCLUDED
                member = member._replace(excluded_until=until, offences=OFFENCES - 1)  # and then has one more chance
                hostile = member.counted is not None and member.name in judged.refused
                tainted |= hostile
                why = state.dropouts.get(member.name, "")
                again = "; control variates start at 0 again" if hostile else ""
                events.append(f"device {member.name!r} is not asked before round {until + 1}{again}: {why}")
        elif member.name in judged.factors:
            member = member._replace(offences=0)
        roster.append(member)
    state = state._replace(roster=tuple(roster), events=tuple(events))
    return restart_control_variates(state, terms) if tainted else state


def _admit(terms: Terms, rules: Rules, state: Serving, newcomers: Sequence[Member]) -> Serving:
    """The state with newcomers in the roster. It is for the next turn: what this one was asked with must not change.

    Before the first round all are judged by each other, so that it does not matter who came first.
    """
    if not newcomers:
        return state
    everybody = (*state.roster, *newcomers)
    doubtful = newcomers if state.begun else everybody
    refused = {
        m.name: reason
        for m in doubtful
        if (reason := too_many_samples(rules.limits, m, [other for other in everybody if other is not m]))
    }
    roster = tuple(m for m in everybody if m.name not in refused)
    after = state._replace(roster=roster, dropouts=state.dropouts | refused)
    if not after.samples:
        return after
    rosters = [Roster(len(each.roster), each.samples) for each in (state, after)]
    server = terms.algorithm.admit(terms.method, state.server, *rosters)
    return after._replace(server=server, begun=state.begun or len(roster) >= rules.least)


def _end(terms: Terms, rules: Rules, state: Serving, transport: Transport) -> Serving:
    """Send everybody the last theta, and what was counted last."""
    orders = {m.name: make_order(terms, rules, state, END, i) for i, m in enumerate(state.roster) if not m.forgotten}
    replies = ask(terms, orders, transport, rules.deadline)
    return state._replace(counted=(), dropouts=replies.dropouts, accuracy=replies.accuracy, events=(), over=True)


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


def make_order(terms: Terms, rules: Rules, state: Serving, kind: str, device: int = NEVER, steps: int = 0) -> Order:
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
        seed=rules.seed,
        counted=None if member is None else member.counted,
        steps=steps,
        budget=rules.budget,
        factor=1.0 if member is None else member.factor,
        epoch=state.epoch,
    )


def _check_rules(terms: Terms, rules: Rules) -> None:
    """Refuse rules under which no round could ever be counted."""
    asked = ceil(terms.work.active * rules.over_sampling)
    if rules.over_sampling < 1:
        raise InputError(f"over_sampling = {rules.over_sampling:g}: give at least 1")
    if rules.quorum < 0 or (rules.quorum > asked and not terms.method.traits.everyone):
        raise InputError(f"quorum = {rules.quorum}: {asked} devices are asked in a round; give 0 to {asked}")
    if rules.least < 1 or rules.deadline <= 0 or rules.rounds < 1 or rules.attempts < 1:
        raise InputError("least, rounds, attempts and deadline: give at least 1, and more than 0 seconds")
    check_limits(rules.limits)
    if rules.limits.aggregation in BY_COORDINATE and keeps_sums(terms):
        raise InputError(f"aggregation = {rules.limits.aggregation!r}: works without control variates alone")
