"""The rounds of a simulation. The caller owns the loop."""

from collections.abc import Iterator, Mapping, Sequence
from itertools import accumulate

import numpy as np
import torch
from numpy.typing import NDArray

from fedcpsl.algorithm import optional
from fedcpsl.edge.quantise import quantised_uploads
from fedcpsl.edge.state import copied
from fedcpsl.errors import InputError
from fedcpsl.schedule import DeviceRound, Probe, draw_active, draw_by_weight, draw_numbers, draw_tasks
from fedcpsl.simulation.aggregation import Received, keep_and_count, probed, replied, samples_at_server
from fedcpsl.simulation.edge import draw_there, played
from fedcpsl.simulation.executors import Finished, LocalRounds, local_rounds
from fedcpsl.simulation.flight import landed
from fedcpsl.simulation.round_request import RoundRequest, TrainingData, broadcasts_to, joint_data, training_data_of
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.state import COUNT_BYTES, FiniteCheck, State, initial_state, knowing_labels, load, unload
from fedcpsl.simulation.workers import choose_backend
from fedcpsl.trees import Tree, bytes_of, leaves, map_tensors

SMALLER = "use a smaller algorithm.eta"


def simulate(setup: Setup, start: State | None = None) -> Iterator[State]:
    """Yield the state at the start (unless `start` is given, to go on from) and after every round."""
    for (state,) in simulate_together([setup], None if start is None else [start]):
        yield state


def simulate_together(
    setups: Sequence[Setup],
    start: Sequence[State] | None = None,
    *,
    on_ranks: bool = True,
    may_diverge: bool = False,
) -> Iterator[list[State]]:
    """Many runs at once, in step; those of one network (see `prepare`) share what computes them.

    Yields the states of all runs at the start (unless given) and after every round. A run that has had all its rounds
    keeps its last state. Without `on_ranks` this process computes alone, also where torchrun has started others.
    A run that diverges raises RunError, unless it may: it is then computed on beside the others, and the caller looks
    at `State.finite_check`.
    """
    if len(setups) > 1 and any(setup.data.supply is not None for setup in setups):
        raise InputError("samples made on demand: such runs go one after another; simulate each alone")
    states = list(map(_with_own_edge, start) if start else map(initial_state, setups))
    if start is None:
        yield states
    data = joint_data([setup.data for setup in setups], [state.targets for state in states])
    first_rows = [0, *accumulate(len(state.targets) for state in states)]
    requests = [_largest_request(state, first) for state, first in zip(states, first_rows, strict=False)]
    with choose_backend(requests, data, on_ranks=on_ranks) as (devices, data, run):
        pieces = data.targets.split([len(state.targets) for state in states])
        states = [s._replace(devices=d, targets=t) for s, d, t in zip(states, devices, pieces, strict=True)]
        while any(state.round < state.setup.terms.total_rounds for state in states):
            states[0].setup.terms.method.network.set_precision()
            plans: list[list[DeviceRound] | None] = [None] * len(states)
            for i, state in enumerate(states):
                if state.round < state.setup.terms.total_rounds:
                    states[i], plans[i] = draw_round(state)
            states = next_states(states, plans, data, first_rows, run, may_diverge=may_diverge)
            if not may_diverge and all(state.round == state.setup.terms.total_rounds for state in states):
                raise_if_not_finite(states)
            yield states


def raise_if_not_finite(states: Sequence[State]) -> None:
    """Raise RunError if a run's last round gave NaN or inf; called before saving."""
    for run, state in enumerate(states):
        if state.finite_check:
            state.finite_check.raise_if_not_finite(run)


def draw_plan(state: State) -> list[DeviceRound]:
    """The schedule of the state's next round; the state stays as it is."""
    return draw_round(_with_own_edge(state))[1]


def _with_own_edge(state: State) -> State:
    return state if state.edge is None else state._replace(edge=copied(state.edge))


def draw_round(state: State) -> tuple[State, list[DeviceRound]]:
    """The schedule of the state's next round, and the state with the clock of its edge network after it.

    The edge network's arrays are changed in place, as device states are.
    """
    if state.setup.edge is None:
        return state, _tasks(state, _draw_devices(state))
    drawn, copies = draw_there(state, _weights(state))
    return played(state, _server_with_joiners(state), drawn, _tasks(state, copies))


def _tasks(state: State, copies: Mapping[int, int]) -> list[DeviceRound]:
    """What drawn devices do; `copies`: how often each was drawn."""
    setup, round = state.setup, state.round
    plan = draw_tasks(
        setup.terms.seed,
        round,
        list(copies),
        setup.terms.sizes,
        setup.terms.work,
        **setup.terms.method.draws,
        recordings=setup.data.recordings,
    )
    if round >= setup.terms.rounds:
        # nu is fixed, once every device has labelled at theta^R
        labels = setup.terms.two_phase and round == setup.terms.rounds
        return [task._replace(personal=True, relabels=labels, lost=False) for task in plan]
    return [
        task._replace(
            warming=bool(state.active_rounds[task.device] < setup.terms.method.traits.warm_up),
            copies=copies[task.device],
        )
        for task in plan
    ]


def _draw_devices(state: State) -> dict[int, int]:
    """The devices of the state's next round and how often each was drawn: more than once only by weights."""
    terms, round = state.setup.terms, state.round
    roster = terms.roster(round)
    if round >= terms.rounds or terms.method.traits.everyone:
        return dict.fromkeys(roster.tolist(), 1)
    weights = _weights(state)
    if weights is None:
        return dict.fromkeys(draw_active(terms.seed, round, roster, terms.work.active), 1)
    return draw_by_weight(weights, draw_numbers(terms.seed, round, terms.work.active))


def _weights(state: State) -> NDArray[np.float64] | None:
    """The weights by which the server draws devices; None: all have the same."""
    terms = state.setup.terms
    weights = optional(terms.algorithm, "draw_weights")
    if weights is None or state.round >= terms.rounds or terms.method.traits.everyone:
        return None
    found: NDArray[np.float64] = weights(terms.method, _server_with_joiners(state)).cpu().numpy()
    return found


def next_state(
    state: State,
    plan: Sequence[DeviceRound],
    run: LocalRounds = local_rounds,
    probes: Sequence[Probe] | None = None,
) -> State:
    """One round of Algorithm 1 by a given schedule; that of a second exchange is drawn where it is not given."""
    return next_states([state], [plan], training_data_of(state.setup.data, state.targets), [0], run, [probes])[0]


def next_states(
    states: Sequence[State],
    plans: Sequence[Sequence[DeviceRound] | None],
    data: TrainingData,
    first_rows: Sequence[int],
    run: LocalRounds,
    probes: Sequence[Sequence[Probe] | None] | None = None,
    *,
    may_diverge: bool = False,
) -> list[State]:
    """One round of every run that has a plan; RunError if one diverges, unless it may."""
    states = [
        state if plan is None else load(_admit_joiners(state), plan) for state, plan in zip(states, plans, strict=True)
    ]
    requests = [
        _request(state, plan or (), first) for state, plan, first in zip(states, plans, first_rows, strict=False)
    ]
    all_finished = [_as_sent(states[finished.run], finished) for finished in run(requests, data)]
    if not may_diverge:  # the round before is done by now; what is not finite in this one is found in the next
        raise_if_not_finite(states)
    states, counting, arrived = _arrivals(states, plans, requests, all_finished)
    totals = _totals(states, counting, arrived)
    after = []
    for run_number, (state, plan, request, total) in enumerate(zip(states, plans, requests, totals, strict=True)):
        own = [finished for finished in arrived if finished.run == run_number]
        ended = counting[run_number].plan
        after.append(state if plan is None else _after(state, plan, request, ended, total, own))
        unload(state, request.plan)
    for i, (total, request) in enumerate(zip(totals, requests, strict=True)):
        if total is not None and request.setup.terms.method.traits.probe:
            after[i] = probed(after[i], request, data, probes[i] if probes else None)
        if total is not None:
            after[i] = replied(after[i], request)
    after = _with_finite_checks(after, plans, all_finished)
    if not may_diverge and not data.targets.is_cuda:
        raise_if_not_finite(after)
    return after


def _totals(
    states: Sequence[State], requests: Sequence[RoundRequest], arrived: Sequence[Finished]
) -> list[Tree | None]:
    """What every run's server counts, summed up in device order; None where nothing arrived."""
    totals: list[Tree | None] = [None] * len(states)
    ours = [False] * len(states)  # whether a total is memory of our own, to be added to in place
    for counted_in, counted in keep_and_count(states, requests, arrived):
        before = totals[counted_in]
        if isinstance(before, list):
            counted = before + counted
        elif before is not None:
            add = torch.Tensor.add_ if ours[counted_in] else torch.add
            counted, ours[counted_in] = map_tensors(add, before, counted), True
        totals[counted_in] = counted
    return totals


def _as_sent(state: State, finished: Finished) -> Finished:
    """What some devices leave behind, their uploads rounded as an edge network sends them."""
    edge = state.setup.edge
    if edge is None or not edge.settings.upload_bits or state.round >= state.setup.terms.rounds:
        return finished
    bits, sizes, which = (
        edge.settings.upload_bits,
        state.setup.terms.method.network.sizes,
        [task.device for task in finished.group],
    )
    return finished._replace(upload=quantised_uploads(finished.upload, bits, sizes, edge.seed, state.round, which))


def _arrivals(
    states: Sequence[State],
    plans: Sequence[Sequence[DeviceRound] | None],
    requests: Sequence[RoundRequest],
    all_finished: Sequence[Finished],
) -> tuple[list[State], list[RoundRequest], list[Finished]]:
    """What is counted in the round: what was begun in it, or, where the server does not wait for all, what arrived."""
    states, counting, arrived = list(states), list(requests), list[Finished]()
    for i, (state, plan, request) in enumerate(zip(states, plans, requests, strict=True)):
        own = [finished for finished in all_finished if finished.run == i]
        if plan is not None and state.setup.edge is not None and state.setup.edge.semi_async:
            flight, counting[i], own = landed(state, request, i, own)
            states[i] = state._replace(flight=flight)
        arrived += own
    return states, counting, arrived


def _after(
    state: State,
    plan: Sequence[DeviceRound],
    request: RoundRequest,
    working: Sequence[DeviceRound],
    total: Tree | None,
    own: Sequence[Finished],
) -> State:
    """The state once the server has counted the round's uploads, those of `working` but for lost ones."""
    setup, server = state.setup, state.server
    if isinstance(total, list):
        receive, own_samples = optional(setup.terms.algorithm, "receive"), samples_at_server(state)
        server = receive(setup.terms.method, server, *_in_device_order(total), *own_samples)
    elif total is not None:
        server = setup.terms.algorithm.apply(setup.terms.method, server, total, len(setup.terms.roster(state.round)))
    round_over = optional(setup.terms.algorithm, "round_over")
    if round_over and state.round < setup.terms.rounds:
        server = round_over(server)
    active_rounds = state.active_rounds.copy()
    active_rounds[[task.device for task in working if not task.personal]] += 1
    sent = request.broadcast if request.rows is None else map_tensors(lambda t: t[:1], request.broadcast)
    up, down = _traffic(setup, state.round, sent, own)
    costs = {task.device: cost for each in own for task, cost in zip(each.group, each.costs.unbind(), strict=True)}
    return state._replace(
        round=state.round + 1,
        server=server,
        active_rounds=active_rounds,
        steps=state.steps + sum(task.steps for task in working),
        uplink_bytes=state.uplink_bytes + sum(task.sends for task in working) * up,
        downlink_bytes=state.downlink_bytes + _padding_apart(state, request, len(plan), len(plan) * down),
        costs=costs,
        lost=state.lost + (0 if setup.terms.method.traits.alone else sum(task.lost for task in working)),
    )


def _in_device_order(received: Sequence[Received]) -> tuple[torch.Tensor, Tree, torch.Tensor]:
    """Who sent, what, and their weights."""
    devices = [device for each in received for device in each.devices]
    order = sorted(range(len(devices)), key=devices.__getitem__)
    upload = map_tensors(lambda *t: torch.cat(t)[order], *(each.upload for each in received))
    omega = torch.cat([each.omega for each in received])[order]
    return torch.tensor([devices[i] for i in order], device=omega.device), upload, omega


def _request(state: State, plan: Sequence[DeviceRound], first_row: int) -> RoundRequest:
    """What a run's devices work with in a round; one that can do nothing changes nothing."""
    working = [task for task in plan if task.steps > 0]
    broadcast, rows = broadcasts_to(state.setup, state.server, [task.device for task in working], working)
    return RoundRequest(state.setup, working, state.devices, broadcast, first_row, state.sparse, rows)


def _largest_request(state: State, first_row: int) -> RoundRequest:
    """The largest request that a run can have, for allocating buffers."""
    setup = state.setup
    most = range(setup.terms.most_active)
    broadcast, rows = broadcasts_to(setup, state.server, most)
    return RoundRequest(setup, (), state.devices, broadcast, first_row, rows=rows)


def _with_finite_checks(
    after: Sequence[State], plans: Sequence[Sequence[DeviceRound] | None], all_finished: Sequence[Finished]
) -> list[State]:
    """The states with a check, known later on a GPU, whether all devices' results and the server's state are finite."""
    flags, errors, sizes = [], list[str](), []
    servers = [[t for t in leaves(state.server) if t.numel() and t.is_floating_point()] for state in after]
    finite_servers = _are_finite([t for server in servers for t in server]).split([len(server) for server in servers])
    for run, state in enumerate(after):
        own = [finished for finished in all_finished if finished.run == run]
        names = [state.setup.terms.names[task.device] for finished in own for task in finished.group]
        errors += [
            f"the loss of device {name} is no longer a finite number in round {state.round}; {SMALLER}"
            for name in names
        ]
        errors += [f"the global model is no longer finite after round {state.round}; {SMALLER}"] * len(servers[run])
        flags += [*(finished.finite for finished in own), finite_servers[run]]
        sizes.append(len(names) + len(servers[run]))
    finite, known = torch.cat(flags), None
    if finite.is_cuda:
        finite, known = finite.to("cpu", non_blocking=True), torch.cuda.Event()
        known.record()
    checks = []
    for each in finite.split(sizes):
        checks.append(FiniteCheck(each, known, errors[: len(each)]))
        errors = errors[len(each) :]
    return [
        state if plan is None else state._replace(finite_check=finite_check)
        for state, plan, finite_check in zip(after, plans, checks, strict=True)
    ]


def _are_finite(tensors: list[torch.Tensor]) -> torch.Tensor:
    """Whether all numbers of each tensor are finite, [tensors]; the largest decides, and those of all go at once."""
    largest = torch._foreach_norm(tensors, torch.inf)
    return torch.stack([number.to(largest[0].dtype) for number in largest]).isfinite()


def _traffic(setup: Setup, round: int, broadcast: Tree, own: Sequence[Finished]) -> tuple[int, int]:
    """Bytes that one device sends and is sent in a round."""
    if setup.terms.method.traits.alone:
        return 0, 0
    if round >= setup.terms.rounds:
        return 0, bytes_of(
            setup.terms.method.network.initial
        ) if round == setup.terms.rounds else 0  # the last theta, once
    if setup.edge is not None:
        return int(-(-setup.edge.load.bits_up // 8)), bytes_of(broadcast)
    sent = bytes_of(map_tensors(lambda t: t[0], own[0].upload)) if own else 0
    return sent, bytes_of(broadcast)


def _padding_apart(state: State, request: RoundRequest, active: int, padded: int) -> int:
    """Bytes sent to a round's devices: where what is sent differs in size, without what only fills up the stack."""
    terms = state.setup.terms
    size = optional(terms.algorithm, "broadcast_size")
    if size is None or state.round >= terms.rounds or not request.plan:
        return padded
    numbers = int(size(terms.method, request.broadcast).sum()) * terms.method.network.initial.element_size()
    return numbers + (active - len(request.plan)) * bytes_of(terms.method.network.initial)


def _joiners(state: State) -> NDArray[np.int64]:
    """The devices that join before the state's next round."""
    joins = state.setup.terms.joins
    return np.flatnonzero(joins == state.round) if state.round else np.empty(0, np.int64)


def _server_with_joiners(state: State) -> Tree:
    """What the server keeps once the devices that join before the next round have joined."""
    if not len(_joiners(state)):
        return state.server
    terms = state.setup.terms
    return terms.algorithm.admit(terms.method, state.server, terms.joined(state.round - 1), terms.joined(state.round))


def _admit_joiners(state: State) -> State:
    setup, joiners = state.setup, _joiners(state)
    if not len(joiners):
        return state
    server = _server_with_joiners(state)
    broadcast, one = setup.terms.sent_to(server, int(joiners[0])), setup.terms.first_device(server, int(joiners[0]))
    if state.sparse:
        state = state._replace(sparse=state.sparse._replace(starts=state.sparse.starts | {state.round: one}))
    else:
        for joiner in joiners.tolist():
            for kept, fresh in zip(leaves(state.devices), leaves(knowing_labels(setup, joiner, one)), strict=True):
                kept[joiner] = fresh
    return state._replace(
        server=server,
        uplink_bytes=state.uplink_bytes + 2 * COUNT_BYTES * len(joiners),
        downlink_bytes=state.downlink_bytes + len(joiners) * bytes_of(broadcast),
    )
