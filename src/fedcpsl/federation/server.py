"""The server's side. The caller owns the loop.

Every attempt at a round asks some devices for an update and counts those that arrive in time and are valid. Everything
that devices are sent, and what was counted, is written to disk before it is sent. So a server that is killed sends the
same instructions again, and devices that have already replied send the same replies again.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from math import ceil
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import Roster, optional
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation.messages import (
    END,
    HELLO,
    PROBE,
    REFUSAL,
    TRAIN,
    UNSET,
    Attempt,
    Instruction,
    Lost,
    Reply,
    Transport,
    instruction_message,
    is_late,
    read_reply,
)
from fedcpsl.federation.privacy import scale_update
from fedcpsl.federation.robustness import (
    BOUNDED,
    CLIPPED,
    COORDINATE_WISE,
    Judgement,
    Limits,
    answers_to_refuse,
    check_limits,
    judge,
    reason_to_exclude,
    robust_sum,
    upload_of,
)
from fedcpsl.federation.server_store import (
    DeviceRecord,
    ServerState,
    load_server_state,
    restart_control_variates,
    save_server_state,
)
from fedcpsl.federation.terms import Terms, digest, greeting_of, keeps_sums, sends_kinds, sent_to
from fedcpsl.schedule import draw_active, draw_by_weight, draw_extra, draw_numbers, draw_probes, draw_steps, omega
from fedcpsl.storage import locked, make_folder
from fedcpsl.trees import Tree, leaves, map_tensors

MAX_OFFENCES = 3  # in a row, after which a device is not asked for a while
EXCLUDED_ROUNDS = 10  # how long
MAX_SKIPPED = 1000  # attempts at a round after which draws by weight repeat
DeviceNames = Callable[[], Iterable[str]]


class RoundRules(NamedTuple):
    """How the server runs the rounds; `active`, the local work and the batches are in the terms."""

    rounds: int
    seed: int
    deadline: float  # seconds for the replies of one attempt
    min_devices: int = 1  # that must have joined before the first round
    quorum: int = 1  # updates that a round needs; 0: a round without any update counts too
    over_sampling: float = 1.0  # devices asked per device needed
    budget: float = 0.0  # seconds of training that devices are asked for; 0: no limit
    attempts: int = 10  # at a round in which too few of the received updates can be counted
    limits: Limits = Limits()


class Counted(NamedTuple):
    """An update that is counted, its device's index in the roster, and its share of all samples."""

    device: int
    upload: Tree
    share: float


class CollectedReplies(NamedTuple):
    """The replies to one attempt's instructions."""

    replies: dict[str, Reply]
    dropouts: dict[str, str]  # the devices without a valid reply, and why
    failing: set[str]  # those of them whose reply was invalid, or a refusal that is not temporary

    @property
    def accuracy(self) -> dict[str, float]:
        """The accuracy of the devices that share it."""
        return {name: r.accuracy for name, r in self.replies.items() if r.accuracy is not None}

    @property
    def losses(self) -> dict[str, tuple[float, int]]:
        """After a trial, the losses on labels held back, and the numbers of these labels."""
        return {name: (r.loss, r.judged) for name, r in self.replies.items() if r.loss is not None}


def serve(
    terms: Terms, rules: RoundRules, folder: Path, transport: Transport, to_forget: DeviceNames = tuple
) -> Iterator[ServerState]:
    """Yield the state at the start, after every attempt, and after the last instruction to all devices, `over`.

    A state in `folder` is resumed. Until `rules.min_devices` devices have joined, attempts only admit devices. An
    attempt without quorum is yielded too: its round stays, its number is incremented, and nothing was counted. The
    caller may wait before it continues with the next attempt. Devices that `to_forget` returns lose their weight.
    """
    check_rules(terms, rules)
    make_folder(folder, private=True)
    with locked(folder):
        state = load_server_state(folder, terms) or _begin(terms, folder)
        state = state._replace(failures=0)  # a restart gives the round new attempts
        yield state
        while state.round < rules.rounds or state.probing:
            if state.probing:  # the server was killed before it was through
                state = _second_exchange(terms, rules, state, state.probing, transport)
            else:
                epoch, state = state.epoch, forget(state, terms, to_forget())
                if state.epoch != epoch:
                    save_server_state(folder, state)  # before any device is sent it
                state = _one_attempt(terms, rules, state, transport, folder)
            save_server_state(folder, state)
            yield state
        yield _end(terms, rules, state, transport)


def draw_instructions(terms: Terms, rules: RoundRules, state: ServerState) -> dict[str, Instruction]:
    """Draw the devices of this attempt and their steps as the simulator does. A repeated round asks other devices."""
    sizes, instructions = state.sizes, {}
    for device in draw_devices(terms, rules, state):
        steps = draw_steps(rules.seed, state.round, device, sizes, terms.work, terms.method.traits.unlabelled)
        if steps:  # a device without samples that the algorithm uses is not asked
            instructions[state.roster[device].name] = make_instruction(terms, rules, state, TRAIN, device, steps)
    return instructions


def draw_devices(terms: Terms, rules: RoundRules, state: ServerState) -> dict[int, int]:
    """Draw the devices of this attempt, and how often each is drawn: more than once only by weights."""
    known, roster = _known(state), _askable(state)
    wanted, attempt = ceil(terms.work.active * rules.over_sampling), state.attempt.number
    if terms.method.traits.everyone:
        return dict.fromkeys(roster, 1)
    weights = optional(terms.algorithm, "draw_weights")
    if weights is None:
        rotated = np.roll(np.array(roster, np.int64), attempt)
        return dict.fromkeys(draw_active(rules.seed, state.round, rotated, wanted), 1)
    of_all = weights(terms.method, state.server).cpu().numpy()
    chosen = roster if of_all[roster].any() else known
    of_chosen = np.where(np.isin(np.arange(len(of_all)), chosen), of_all, 0)
    numbers = draw_numbers(rules.seed, state.round, wanted, skip=wanted * (attempt % MAX_SKIPPED))
    return draw_by_weight(of_chosen, numbers)


def _known(state: ServerState) -> list[int]:
    """Return the devices that have a weight."""
    return [i for i, record in enumerate(state.roster) if not record.forgotten]


def _askable(state: ServerState) -> list[int]:
    """Return the devices that may be asked: those that are not excluded, or all where all are."""
    known = _known(state)
    return [i for i in known if state.roster[i].excluded_until <= state.round] or known


def count_updates(
    terms: Terms,
    state: ServerState,
    replies: Mapping[str, Reply],
    factors: Mapping[str, float],
    limits: Limits,
    copies: Mapping[int, int] = MappingProxyType({}),
) -> ServerState:
    """Return the state after a round that counts these updates, each times its factor, in the roster's order.

    An update counts as often as its device was drawn, `copies`.
    """
    counted, by_coordinate = [], limits.aggregation in COORDINATE_WISE
    joined = np.flatnonzero([not record.forgotten for record in state.roster])
    for i, record in enumerate(state.roster):
        if record.name in factors:
            upload = scale_update(upload_of(replies[record.name], terms), factors[record.name])
            share = 1 / state.device_count if by_coordinate else float(omega(state.sizes, joined, [i])[0])
            counted += [Counted(i, upload, share)] * copies.get(i, 1)
    server = _server_after(terms, state, counted, limits) if counted else state.server
    round_over = optional(terms.algorithm, "round_over")
    return state._replace(
        server=round_over(server) if round_over else server,
        roster=tuple(
            m._replace(counted=state.attempt, factor=factors[m.name]) if m.name in factors else m for m in state.roster
        ),
        attempt=Attempt(state.round + 1, 0),
        probing=state.attempt if counted and terms.method.traits.probe else None,
        failures=0,
        counted=tuple(m.name for m in state.roster if m.name in factors),
    )


def _server_after(terms: Terms, state: ServerState, counted: Sequence[Counted], limits: Limits) -> Tree:
    """Return what the server keeps after these updates."""
    algorithm, method, receive = terms.algorithm, terms.method, optional(terms.algorithm, "receive")
    weights = torch.tensor([each.share for each in counted], dtype=terms.dtype, device=terms.where)
    if receive:
        devices = torch.tensor([each.device for each in counted], device=terms.where)
        uploads = map_tensors(lambda *t: torch.stack(t), *(each.upload for each in counted))
        return receive(method, state.server, devices, uploads, weights)
    each_part = zip(counted, weights, strict=True)
    contributions = [algorithm.contribution(method, terms.hyper, each.upload, weight) for each, weight in each_part]
    total = robust_sum(limits, contributions) if limits.aggregation in COORDINATE_WISE else _sum(contributions)
    return algorithm.apply(method, state.server, total, state.device_count)


def forget(state: ServerState, terms: Terms, names: Iterable[str]) -> ServerState:
    """Return the state without the weight of some devices; c and every c_i are reset to 0: c stays their mean."""
    gone = {m.name for m in state.roster if not m.forgotten} & set(names)
    if not gone:
        return state._replace(events=())
    if len(gone) == state.device_count:
        raise RunError(f"{', '.join(sorted(gone))}: no other device has a weight; start a federation in another folder")
    roster = tuple(m._replace(forgotten=m.forgotten or m.name in gone) for m in state.roster)
    event = f"forgotten: {', '.join(sorted(gone))}; control variates are reset to 0"
    after = state._replace(roster=roster)
    server = terms.algorithm.admit(terms.method, state.server, state.joined, after.joined)
    return restart_control_variates(after._replace(server=server), terms)._replace(events=(event,))


def _sum(contributions: Sequence[Tree]) -> Tree:
    total = contributions[0]
    for each in contributions[1:]:
        total = map_tensors(torch.add, total, each)
    return total


def _begin(terms: Terms, folder: Path) -> ServerState:
    state = ServerState(uuid4().hex, digest(terms), terms.algorithm.init_server(terms.method, 0), (), Attempt(0, 0))
    save_server_state(folder, state)
    return state


def _one_attempt(
    terms: Terms, rules: RoundRules, state: ServerState, transport: Transport, folder: Path
) -> ServerState:
    """Ask some devices of the roster for updates, and new devices for their numbers of samples."""
    asked = draw_instructions(terms, rules, state) if state.begun else {}
    new = set(transport.present()) - {record.name for record in state.roster}
    greetings = {name: make_instruction(terms, rules, state, HELLO) for name in sorted(new)}
    collected = collect_replies(terms, asked | greetings, transport, rules.deadline)
    updates = {name: reply for name, reply in collected.replies.items() if reply.kind == TRAIN}
    judged = judge(terms, rules.limits, state.roster, updates)
    roster = tuple(m._replace(asked=m.asked + (m.name in asked)) for m in state.roster)
    dropouts = collected.dropouts | judged.refused
    state = state._replace(roster=roster, counted=(), dropouts=dropouts, accuracy=collected.accuracy)
    if state.begun:
        state = _count_or_repeat(terms, rules, state, updates, judged, collected, len(asked))
    if state.probing:
        save_server_state(folder, state)  # before any device is sent it
        state = _second_exchange(terms, rules, state, state.probing, transport)
    replies = sorted(collected.replies.items())
    newcomers = [DeviceRecord(name, r.labelled, r.unlabelled) for name, r in replies if r.kind == HELLO]
    return _admit(terms, rules, state, newcomers)


def _second_exchange(
    terms: Terms, rules: RoundRules, state: ServerState, attempt: Attempt, transport: Transport
) -> ServerState:
    """Return the state after some devices were asked what the algorithm wants to know once it has aggregated.

    An answer that is lost, late or refused is left out; the round is not repeated for it.
    """
    draw, sizes = terms.method.traits.probe, state.sizes
    assert draw is not None
    work = terms.work._replace(loss_rate=0.0)
    probes = draw_probes(draw, rules.seed, attempt.round, _askable(state), sizes, work)
    asked = {state.roster[p.device].name: p.device for p in probes if p.drawn.rows.size}
    instructions = {name: make_instruction(terms, rules, state, PROBE, i) for name, i in asked.items()}
    collected = collect_replies(terms, instructions, transport, rules.deadline)
    refused = answers_to_refuse(rules.limits, {name: reply.upload for name, reply in collected.replies.items()})
    counted = {name: i for name, i in asked.items() if name in collected.replies and name not in refused}
    server = state.server
    if counted:
        devices = torch.tensor(list(counted.values()), device=terms.where)
        each = [upload_of(collected.replies[name], terms) for name in counted]
        uploads = map_tensors(lambda *t: torch.stack(t), *each)
        server = optional(terms.algorithm, "probe_receive")(terms.method, server, devices, uploads)
    finite = all(t.isfinite().all() for t in leaves(server))
    return state._replace(
        server=server if finite else state.server,
        roster=tuple(m._replace(asked=m.asked + (m.name in asked)) for m in state.roster),
        probing=None,
        dropouts=collected.dropouts | refused | state.dropouts,
    )


def _count_or_repeat(
    terms: Terms,
    rules: RoundRules,
    state: ServerState,
    updates: Mapping[str, Reply],
    judged: Judgement,
    collected: CollectedReplies,
    asked: int,
) -> ServerState:
    """Return the state after the round, or before another attempt at it where the quorum was not met."""
    offenders = (collected.failing & {m.name for m in state.roster}) | set(judged.refused)
    if len(judged.factors) >= min(rules.quorum, asked):
        copies = draw_devices(terms, rules, state)
        after = count_updates(terms, state, updates, judged.factors, rules.limits, copies)
        if all(t.isfinite().all() for t in leaves(after.server)):
            return _with_offences(terms, after, judged, offenders)
        largest = max(judged.rates, key=judged.rates.__getitem__)
        offenders |= {largest}
        reason = f"the update of device {largest!r}, the largest, made the global model infinite: no update is counted"
        state = state._replace(dropouts=state.dropouts | {largest: reason})
    state = _with_offences(terms, state, judged, offenders)
    failures = state.failures + bool(offenders)
    state = state._replace(attempt=Attempt(state.round, state.attempt.number + 1), failures=failures)
    return _limit_attempts(terms, rules, state) if offenders else state


def _limit_attempts(terms: Terms, rules: RoundRules, state: ServerState) -> ServerState:
    """Return the state after a failed attempt; after `rules.attempts` of them, control variates and offences are reset.

    RunError where that does not help and more than a minority of the devices fails.
    """
    round, why = state.round, "; ".join(state.dropouts.values())
    if state.failures == rules.attempts:
        event = f"round {round}: {rules.attempts} attempts failed ({why}); control variates are reset to 0"
        roster = tuple(m._replace(offences=0, excluded_until=0) for m in state.roster)
        return restart_control_variates(state._replace(roster=roster, events=(*state.events, event)), terms)
    if state.failures < 2 * rules.attempts or 2 * sum(m.offences > 0 for m in state.roster) <= state.device_count:
        return state
    raise RunError(
        f"round {round} was tried {state.failures} times and too few updates could be counted: {why}. Start the server "
        "again to retry, with --back-to ROUND to return to an earlier state, or with a smaller algorithm.eta in a new "
        "folder"
    )


def _with_offences(terms: Terms, state: ServerState, judged: Judgement, offenders: set[str]) -> ServerState:
    """Return the state with every device's latest rate; repeated offenders are not asked for some rounds.

    If updates of such a device were refused as too large, its earlier ones in c are not trusted either: control
    variates are reset to 0.
    """
    events, roster, tainted = list(state.events), [], False
    for record in state.roster:
        record = record._replace(rate=judged.rates.get(record.name, record.rate))
        if record.name in offenders:
            record = record._replace(offences=record.offences + 1)
            if record.offences >= MAX_OFFENCES:
                until = state.round + EXCLUDED_ROUNDS
                record = record._replace(excluded_until=until, offences=MAX_OFFENCES - 1)  # then one more chance
                hostile = record.counted is not None and record.name in judged.refused
                tainted |= hostile
                why = state.dropouts.get(record.name, "")
                again = "; control variates are reset to 0" if hostile else ""
                events.append(f"device {record.name!r} is not asked before round {until + 1}{again}: {why}")
        elif record.name in judged.factors:
            record = record._replace(offences=0)
        roster.append(record)
    state = state._replace(roster=tuple(roster), events=tuple(events))
    return restart_control_variates(state, terms) if tainted else state


def _admit(terms: Terms, rules: RoundRules, state: ServerState, newcomers: Sequence[DeviceRecord]) -> ServerState:
    """Return the state with new devices in the roster, from the next attempt on: this one's broadcast must not change.

    Before the first round all devices are compared with each other, so that the order of joining does not matter.
    """
    if not newcomers:
        return state
    candidates = (*state.roster, *newcomers)
    checked = newcomers if state.begun else candidates
    refused = {
        m.name: reason
        for m in checked
        if (reason := reason_to_exclude(rules.limits, m, [other for other in candidates if other is not m]))
    }
    roster = tuple(m for m in candidates if m.name not in refused)
    after = state._replace(roster=roster, dropouts=state.dropouts | refused)
    if not after.samples:
        return after
    before = state.joined if state.begun else Roster(0, 0)  # whoever came first
    server = terms.algorithm.admit(terms.method, state.server, before, after.joined)
    return after._replace(server=server, begun=state.begun or len(roster) >= rules.min_devices)


def _end(terms: Terms, rules: RoundRules, state: ServerState, transport: Transport) -> ServerState:
    """Send all devices the last theta, and which update was counted last."""
    known = [(i, record.name) for i, record in enumerate(state.roster) if not record.forgotten]
    instructions = {name: make_instruction(terms, rules, state, END, i) for i, name in known}
    collected = collect_replies(terms, instructions, transport, rules.deadline)
    return state._replace(
        counted=(),
        dropouts=collected.dropouts,
        accuracy=collected.accuracy,
        losses=collected.losses,
        events=(),
        over=True,
    )


def held_back_loss(state: ServerState) -> float:
    """Return the mean loss over the labels that devices held back in a trial; infinite without any.

    A device has at most the weight of its labelled samples, of which it holds back no more than it keeps.
    """
    labelled = {record.name: record.labelled for record in state.roster}
    judged = {name: min(count, labelled[name]) for name, (_, count) in state.losses.items()}
    total = sum(judged.values())
    return sum(judged[name] * loss for name, (loss, _) in state.losses.items()) / total if total else float("inf")


def collect_replies(
    terms: Terms, instructions: Mapping[str, Instruction], transport: Transport, deadline: float
) -> CollectedReplies:
    """Send the instructions and return the replies that came in time; all other devices are dropouts."""
    found = CollectedReplies({}, {}, set())
    if not instructions:
        return found
    late = {name: f"device {name!r} did not reply within {deadline:g} s" for name in instructions}
    found.dropouts.update(late)
    messages = {name: instruction_message(instruction) for name, instruction in instructions.items()}
    for name, received in transport.send(messages, deadline):
        if name not in instructions or name in found.replies:
            continue  # a late reply of a device that was not asked now, or one that came twice
        if isinstance(received, Lost):
            found.dropouts[name] = f"device {name!r}: {received.reason}"
            found.failing.update({name} if received.fault else set())
            continue
        try:
            reply = read_reply(received, name, instructions[name], terms)
        except RunError as error:
            found.dropouts[name] = str(error)
            found.failing.update(set() if is_late(received, instructions[name]) else {name})
            continue
        if reply.kind == REFUSAL:
            found.dropouts[name] = f"device {name!r} refused: {reply.reason}"
            found.failing.update(set() if reply.later else {name})
            continue
        found.replies[name] = reply
        found.failing.discard(name)
        found.dropouts.pop(name)
    return found


def make_instruction(
    terms: Terms, rules: RoundRules, state: ServerState, kind: str, device: int = UNSET, steps: int = 0
) -> Instruction:
    """Return the instruction for a device in this attempt."""
    record = None if device < 0 else state.roster[device]
    return Instruction(
        run=state.run,
        attempt=state.probing if kind == PROBE and state.probing else state.attempt,
        kind=kind,
        settings=state.settings,
        broadcast=map_tensors(Tensor.cpu, _sent_with(terms, state, kind, device, rules.seed)),
        device=device,
        seed=rules.seed,
        counted=None if record is None else record.counted,
        steps=steps,
        budget=rules.budget,
        factor=1.0 if record is None else record.factor,
        epoch=state.epoch,
    )


def _sent_with(terms: Terms, state: ServerState, kind: str, device: int, seed: int) -> Tree:
    """Return what an instruction of a kind carries; a device that has not joined yet gets what it would if it had."""
    if kind == PROBE:
        return optional(terms.algorithm, "probe_broadcast")(terms.method, state.server)
    server, joined = state.server, state.joined
    if device < 0 and optional(terms.algorithm, "broadcast_each"):
        device, with_one = len(state.roster), Roster(joined.devices + 1, joined.samples + 1, [*joined.labelled, 1])
        server = terms.algorithm.admit(terms.method, server, joined if state.begun else Roster(0, 0), with_one)
    orders = [draw for draw in terms.method.traits.draws if draw.of == "devices"] if kind == TRAIN else []
    drawn = {
        draw.name: [draw_extra(draw, seed, state.round, device, 0, state.sizes, terms.work).rows.tolist()]
        for draw in orders
    }
    broadcast = sent_to(terms, server, device, drawn)
    return broadcast if kind == TRAIN else greeting_of(terms, broadcast)


def check_rules(terms: Terms, rules: RoundRules) -> None:
    """Refuse rules under which no round could ever be counted."""
    asked = ceil(terms.work.active * rules.over_sampling)
    if rules.over_sampling < 1:
        raise InputError(f"over_sampling = {rules.over_sampling:g}: give at least 1")
    if rules.quorum < 0 or (rules.quorum > asked and not terms.method.traits.everyone):
        raise InputError(f"quorum = {rules.quorum}: {asked} devices are asked in a round; give 0 to {asked}")
    for name in ("min_devices", "rounds", "attempts"):
        if getattr(rules, name) < 1:
            raise InputError(f"{name} = {getattr(rules, name)}: give at least 1")
    if rules.deadline <= 0:
        raise InputError(f"deadline = {rules.deadline:g}: give more than 0 seconds")
    check_limits(rules.limits)
    if rules.limits.aggregation in COORDINATE_WISE and keeps_sums(terms):
        raise InputError(
            f"aggregation = {rules.limits.aggregation!r}: this algorithm's server keeps a sum of device states, such "
            f"as control variates; give {BOUNDED!r} or {CLIPPED!r}"
        )
    if rules.limits.aggregation in COORDINATE_WISE and sends_kinds(terms):
        raise InputError(
            f"aggregation = {rules.limits.aggregation!r}: this algorithm's devices send different kinds of updates; "
            f"give {BOUNDED!r} or {CLIPPED!r}"
        )
    if rules.limits.aggregation in COORDINATE_WISE and optional(terms.algorithm, "receive"):
        raise InputError(
            f"aggregation = {rules.limits.aggregation!r}: this algorithm's server must know which device sent which "
            f"update; give {BOUNDED!r} or {CLIPPED!r}"
        )
