"""The rounds of a simulation. The caller owns the loop."""

from collections.abc import Iterator, Sequence
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
    state = start or initial_state(setup)
    if start is None:
        yield state
    broadcast = setup.algorithm.broadcast(state.server)
    with shared_rounds(setup, state.devices, state.targets, broadcast) as (devices, targets, run):
        state = state._replace(devices=devices, targets=targets)
        while state.round < setup.total_rounds:
            state = next_state(state, draw_plan(state), run)
            yield state


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
    setup = state.setup
    state = _admit_joiners(state)
    roster = setup.roster(state.round)
    broadcast = setup.algorithm.broadcast(state.server)
    working = [task for task in plan if task.steps > 0]  # a device that can do nothing changes nothing
    totals: list[Sum] = []
    costs: dict[int, list[float]] = {}
    for finished in run(setup, working, state.devices, state.targets, broadcast):
        _stop_if_not_finite(state.round + 1, setup, finished)
        counted = _keep(state, finished, broadcast, setup.samples_in(roster))
        totals += [counted] if counted else []
        costs |= {task.device: c for task, c in zip(finished.group, finished.costs.tolist(), strict=True)}
    server = state.server
    if totals:
        total = totals[0] if len(totals) == 1 else Sum(*(sum(f[1:], f[0]) for f in zip(*totals, strict=True)))
        server = setup.algorithm.apply(setup.method, server, total, len(roster))
        if not server.theta.isfinite().all():
            raise RunError(f"the global model is no longer finite after round {state.round + 1}; {SMALLER}")
    active_rounds = state.active_rounds.copy()
    active_rounds[[task.device for task in working if not task.personal]] += 1
    up, down = _traffic(setup, state.round, broadcast)
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


def _keep(state: State, finished: Finished, broadcast: Broadcast, samples: int) -> Sum | None:
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
    weights = torch.from_numpy(sizes / samples).to(state.targets)
    total: Sum = map_tensors(lambda t: t.sum(0), algorithm.contribution(method, hyper, upload, weights))
    return total


def _put(devices: Device, which: list[int], values: Device) -> None:
    for kept, new in zip(devices, values, strict=True):
        kept[torch.tensor(which, device=kept.device)] = new


def _stop_if_not_finite(round: int, setup: Setup, finished: Finished) -> None:
    fine = finished.costs.isfinite().all(-1)
    for kept in (finished.upload.delta, finished.device.theta_lc):
        fine = fine & kept.isfinite().all(-1)
    if not fine.all():
        device = finished.group[int((~fine).nonzero()[0])].device
        raise RunError(
            f"the loss of device {setup.names[device]} is no longer a finite number in round {round}; {SMALLER}"
        )


def _broadcast_bytes(broadcast: Broadcast) -> int:
    return sum(t.numel() * t.element_size() for t in broadcast)
