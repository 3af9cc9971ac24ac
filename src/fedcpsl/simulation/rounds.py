"""The rounds of a simulation. The caller owns the loop."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Broadcast, Device, Hyper, Server, Sum, map_tensors
from fedcpsl.errors import RunError
from fedcpsl.schedule import DeviceRound, draw_active, draw_tasks
from fedcpsl.simulation.executors import Finished, LocalRounds, local_rounds
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.slots import Ask, Ground, common_ground, ground_of
from fedcpsl.simulation.workers import shared_rounds

SMALLER = "use a smaller algorithm.eta (or algorithm.alpha_p)"
COUNT_BYTES = 8  # a step count, or one of the sizes n_i and m_i


class State(NamedTuple):
    """Everything that changes, after `round` rounds. The next round overwrites `devices` and `targets` in place."""

    setup: Setup
    round: int
    server: Server
    devices: Device  # stacked, [devices, ...]
    targets: Tensor  # [training rows, classes]: labels, and every device's pseudo-labels nu
    active_rounds: NDArray[np.int64]  # how often each device has taken part
    steps: int  # local steps so far
    uplink_bytes: int
    downlink_bytes: int
    costs: dict[int, list[float]]  # mean f_i (and F_i) of this round's steps, by device
    lost: int  # uploads lost so far

    def nu(self, device: int) -> Tensor:
        """The pseudo-labels of one device, [unlabelled samples, classes]."""
        return self.targets[self.setup.shelf.unlabelled_rows(device)]

    def device(self, device: int) -> Device:
        """What one device keeps."""
        kept: Device = map_tensors(lambda t: t[device], self.devices)
        return kept

    def hyper(self, device: int) -> Hyper:
        """The numbers that one device works with."""
        numbers: Hyper = map_tensors(lambda t: t[device], self.setup.hyper)
        return numbers


def simulate(setup: Setup, start: State | None = None) -> Iterator[State]:
    """Yield the state at the start (unless `start` is given, to go on from) and after every round."""
    for (state,) in simulate_together([setup], None if start is None else [start]):
        yield state


def simulate_together(setups: Sequence[Setup], start: Sequence[State] | None = None) -> Iterator[list[State]]:
    """Many runs at once, in step; those of one network (see `prepare`) share what computes them.

    Yields the states of all runs at the start (unless given) and after every round. A run that has had all its rounds
    keeps its last state.
    """
    states = list(start or map(initial_state, setups))
    if start is None:
        yield states
    ground = common_ground([setup.shelf for setup in setups], [state.targets for state in states])
    first_rows = [0, *accumulate(len(state.targets) for state in states)]
    asks = [
        Ask(state.setup, (), state.devices, state.setup.algorithm.broadcast(state.server), first)
        for state, first in zip(states, first_rows, strict=False)
    ]
    with shared_rounds(asks, ground) as (devices, ground, run):
        pieces = ground.targets.split([len(state.targets) for state in states])
        states = [s._replace(devices=d, targets=t) for s, d, t in zip(states, devices, pieces, strict=True)]
        while any(state.round < state.setup.total_rounds for state in states):
            plans = [draw_plan(state) if state.round < state.setup.total_rounds else None for state in states]
            states = next_states(states, plans, ground, first_rows, run)
            yield states


def draw_plan(state: State) -> list[DeviceRound]:
    """The schedule of the state's next round."""
    setup, round = state.setup, state.round
    roster = setup.roster(round).tolist()
    everybody = round >= setup.rounds
    complete = everybody or setup.method.parts.everyone
    active = roster if complete else draw_active(setup.seed, round, roster, setup.work.active)
    plan = draw_tasks(
        setup.seed,
        round,
        active,
        setup.sizes,
        setup.work,
        unlabelled=setup.method.parts.unlabelled,
        dropout=setup.method.network.has_dropout,
    )
    if everybody:
        labels = setup.two_phase and round == setup.rounds  # nu is fixed, once every device has labelled at theta^R
        return [task._replace(personal=True, relabels=labels, lost=False) for task in plan]
    return [task._replace(warming=bool(state.active_rounds[task.device] < setup.warm_up)) for task in plan]


def initial_state(setup: Setup) -> State:
    """Round 0: every device in the roster has been sent theta^0."""
    server = setup.algorithm.init_server(setup.method)
    one = setup.algorithm.init_device(setup.kept_method, setup.algorithm.broadcast(server))
    devices: Device = map_tensors(lambda t: t.expand(setup.devices, -1).clone(), one)
    return State(
        setup=setup,
        round=0,
        server=server,
        devices=devices,
        targets=setup.shelf.one_hot.clone(),
        active_rounds=np.zeros(setup.devices, np.int64),
        steps=0,
        uplink_bytes=0 if setup.method.parts.alone else 2 * COUNT_BYTES * len(setup.roster(0)),
        downlink_bytes=0,
        costs={},
        lost=0,
    )


def next_state(state: State, plan: Sequence[DeviceRound], run: LocalRounds = local_rounds) -> State:
    """One round of Algorithm 1 by a given schedule."""
    return next_states([state], [plan], ground_of(state.setup.shelf, state.targets), [0], run)[0]


def next_states(
    states: Sequence[State],
    plans: Sequence[Sequence[DeviceRound] | None],
    ground: Ground,
    first_rows: Sequence[int],
    run: LocalRounds,
) -> list[State]:
    """One round of every run that has a plan."""
    states = [_admit_joiners(state) if plan is not None else state for state, plan in zip(states, plans, strict=True)]
    asks = [  # a device that can do nothing changes nothing
        Ask(
            state.setup,
            [task for task in plan or () if task.steps > 0],
            state.devices,
            state.setup.algorithm.broadcast(state.server),
            first,
        )
        for state, plan, first in zip(states, plans, first_rows, strict=False)
    ]
    totals: list[list[Sum]] = [[] for _ in states]
    costs: list[dict[int, list[float]]] = [{} for _ in states]
    all_finished = list(run(asks, ground))  # whatever the host waits for below, everything is under way by now
    _stop_if_not_finite(states, all_finished)
    for finished in all_finished:
        counted = _keep(states[finished.run], finished, asks[finished.run].broadcast)
        totals[finished.run] += [counted] if counted else []
    for finished, values in zip(all_finished, _on_host([f.costs for f in all_finished]), strict=True):
        costs[finished.run] |= dict(zip((task.device for task in finished.group), values.tolist(), strict=True))
    after = [
        state if plan is None else _after(state, plan, ask, total, cost)
        for state, plan, ask, total, cost in zip(states, plans, asks, totals, costs, strict=True)
    ]
    fine = torch.stack([state.server.theta.isfinite().all() for state in after]).tolist()
    if not all(fine):
        where = fine.index(False)
        raise _of_run(where, f"the global model is no longer finite after round {after[where].round}; {SMALLER}")
    return after


def _on_host(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors brought to the host all at once, in place of waiting for each."""
    if not tensors:
        return []
    flat = torch.cat([t.flatten() for t in tensors]).cpu().split([t.numel() for t in tensors])
    return [piece.view(t.shape) for piece, t in zip(flat, tensors, strict=True)]


def _of_run(run: int, text: str) -> RunError:
    error = RunError(text)
    error.run = run
    return error


def _after(
    state: State, plan: Sequence[DeviceRound], ask: Ask, totals: list[Sum], costs: dict[int, list[float]]
) -> State:
    """The state once the server has counted the round's uploads."""
    setup, server, working = state.setup, state.server, ask.plan
    if totals:
        total = totals[0] if len(totals) == 1 else Sum(*(sum(f[1:], f[0]) for f in zip(*totals, strict=True)))
        server = setup.algorithm.apply(setup.method, server, total, len(setup.roster(state.round)))
    active_rounds = state.active_rounds.copy()
    active_rounds[[task.device for task in working if not task.personal]] += 1
    up, down = _traffic(setup, state.round, ask.broadcast)
    return state._replace(
        round=state.round + 1,
        server=server,
        active_rounds=active_rounds,
        steps=state.steps + sum(task.steps for task in working),
        uplink_bytes=state.uplink_bytes + len(working) * up,
        downlink_bytes=state.downlink_bytes + len(plan) * down,
        costs=costs,
        lost=state.lost + (0 if setup.method.parts.alone else sum(task.lost for task in working)),
    )


def _traffic(setup: Setup, round: int, broadcast: Broadcast) -> tuple[int, int]:
    """Bytes that one device sends and is sent in a round."""
    if setup.method.parts.alone:
        return 0, 0
    theta = broadcast.theta.numel() * broadcast.theta.element_size()
    if round >= setup.rounds:
        return 0, theta if round == setup.rounds else 0  # the last theta, once
    return theta + COUNT_BYTES, _broadcast_bytes(broadcast)


def _admit_joiners(state: State) -> State:
    setup = state.setup
    joiners = np.flatnonzero(setup.joins == state.round) if state.round else np.empty(0, np.int64)
    if not len(joiners):
        return state
    before, after = setup.roster(state.round - 1), setup.roster(state.round)
    server = setup.algorithm.admit(setup.method, state.server, setup.samples_in(before), setup.samples_in(after))
    broadcast = setup.algorithm.broadcast(server)
    one = setup.algorithm.init_device(setup.kept_method, broadcast)
    for kept, fresh in zip(state.devices, one, strict=True):
        kept[torch.from_numpy(joiners).to(kept.device)] = fresh
    return state._replace(
        server=server,
        uplink_bytes=state.uplink_bytes + 2 * COUNT_BYTES * len(joiners),
        downlink_bytes=state.downlink_bytes + len(joiners) * _broadcast_bytes(broadcast),
    )


def _keep(state: State, finished: Finished, broadcast: Broadcast) -> Sum | None:
    """Store what the devices keep; sum what the server counts, and let those devices know."""
    setup, algorithm = state.setup, state.setup.algorithm
    method = setup.method_of(finished.group[0])
    everyone = [task.device for task in finished.group]
    _put(state.devices, everyone, finished.device)
    if method.trains_localized_alone:
        return None
    arrived = [slot for slot, task in enumerate(finished.group) if not task.lost]
    if not arrived:
        return None
    slots = torch.tensor(arrived, device=state.targets.device)
    counted = [everyone[slot] for slot in arrived]
    hyper: Hyper = map_tensors(lambda t: t[torch.tensor(counted, device=t.device)], setup.hyper)
    device, upload = (map_tensors(lambda t: t[slots], group) for group in (finished.device, finished.upload))
    _put(state.devices, counted, algorithm.commit(method, hyper, broadcast, device, upload))
    sizes = setup.sizes.labelled[counted] + setup.sizes.unlabelled[counted]
    samples = setup.samples_in(setup.roster(state.round))
    weights = torch.from_numpy(sizes / samples).to(state.targets)
    total: Sum = map_tensors(lambda t: t.sum(0), algorithm.contribution(method, hyper, upload, weights))
    return total


def _put(devices: Device, which: list[int], values: Device) -> None:
    for kept, new in zip(devices, values, strict=True):
        kept[torch.tensor(which, device=kept.device)] = new


def _stop_if_not_finite(states: Sequence[State], all_finished: Sequence[Finished]) -> None:
    """A run whose numbers are lost ends here, before anything is kept."""

    def fine(finished: Finished) -> Tensor:
        parts = (finished.costs, finished.upload.delta, finished.device.theta_lc)
        return torch.stack([part.isfinite().all(-1) for part in parts]).all(0)

    for finished, each in zip(all_finished, _on_host([fine(f) for f in all_finished]), strict=True):
        if not each.all():
            state, device = states[finished.run], finished.group[int((~each).nonzero()[0])].device
            raise _of_run(
                finished.run,
                f"the loss of device {state.setup.names[device]} is no longer a finite number in round "
                f"{state.round + 1}; {SMALLER}",
            )


def _broadcast_bytes(broadcast: Broadcast) -> int:
    return sum(t.numel() * t.element_size() for t in broadcast)
