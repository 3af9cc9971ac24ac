"""Who calls the algorithm's functions: a loop over devices, or all of them side by side. Same answer.

A slot is one active device of one run. The slots of many runs go side by side where their networks and batches have the
same shapes: everything that may differ between them (seed, step sizes, weights, algorithm of the family) is data.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Algorithm, Device, Hyper, Local, Method, Upload, map_tensors
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.feed import Feed, feed_of, minibatches
from fedcpsl.simulation.labels import renew_labels
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.slots import Ask, Ground, Slot, hyper_of, states_of
from fedcpsl.simulation.transfer import sent


class Program(NamedTuple):
    """What the slots of a group share."""

    key: tuple[Any, ...]  # equal for groups that one captured step serves
    algorithm: Algorithm
    method: Method
    ground: Ground


class Finished(NamedTuple):
    """What some devices of one run leave behind; every field has a leading dimension, the devices of `group`."""

    run: int
    group: list[DeviceRound]
    device: Device
    upload: Upload
    costs: Tensor  # [devices, 1 or 2]: mean f_i and F_i over the steps
    fine: Tensor  # [devices]: whether all of it is finite


LocalSteps = Callable[[Program, Hyper, Local, Feed, Sequence[int]], Local]
LocalRounds = Callable[[Sequence[Ask], Ground], Iterator[Finished]]


def local_rounds(asks: Sequence[Ask], ground: Ground, take_steps: LocalSteps | None = None) -> Iterator[Finished]:
    """New pseudo-labels for the planned devices, then their local steps, group by group, in device order."""
    renew_labels(asks, ground)
    for program, group in groups(asks, ground):
        if len(group) == 1 and not group[0].ask.setup.vectorised:
            yield _one(program, group[0])
        else:
            yield from _side_by_side(program, group, take_steps or steps_one_by_one)


def groups(asks: Sequence[Ask], ground: Ground) -> Iterator[tuple[Program, list[Slot]]]:
    """The slots of all runs, those that can go side by side together, at most as many as the runs allow."""
    together: dict[tuple[Any, ...], list[Slot]] = {}
    for run, ask in enumerate(asks):
        for task in ask.plan:
            together.setdefault(_program_key(ask.setup, task), []).append(Slot(run, ask, task))
    for key, slots in together.items():
        setup = slots[0].ask.setup
        most = min((slot.ask.setup.slots or len(slots)) for slot in slots) if setup.vectorised else 1
        for piece in _even_pieces(len(slots), most):
            method = _method_for_all(slots if setup.vectorised else slots[piece])
            merged = (*key, method.parts.control_variates, method.parts.momentum)
            yield Program(merged, setup.algorithm, method, ground), slots[piece]


def _program_key(setup: Setup, task: DeviceRound) -> tuple[Any, ...]:
    """Equal for slots whose steps are one program."""
    method = setup.method_of(task)
    return (
        id(method.network.module),
        setup.vectorised,
        setup.algorithm,
        method.costs,
        method.parts.personal,
        method.parts.alone,
        method.personal_round,
        setup.batch_widths,
    )


def _method_for_all(slots: Sequence[Slot]) -> Method:
    """The first one's method, with control variates and momentum if any has them: those of the others are zero."""
    method = slots[0].ask.setup.method_of(slots[0].task)
    parts = [slot.ask.setup.method.parts for slot in slots]
    some = {name: any(getattr(each, name) for each in parts) for name in ("control_variates", "momentum")}
    return method._replace(parts=method.parts._replace(**some))


def _even_pieces(count: int, most: int) -> Iterator[slice]:
    pieces = -(-count // most)
    ends = [round(count * k / pieces) for k in range(pieces + 1)]
    for first, last in pairwise(ends):
        yield slice(first, last)


def _one(program: Program, slot: Slot) -> Finished:
    task, algorithm, method = slot.task, program.algorithm, program.method
    hyper: Hyper = map_tensors(lambda t: t[0], hyper_of([slot]))
    device: Device = map_tensors(lambda t: t[task.device].to(hyper.eta.device, copy=True), slot.ask.devices)
    broadcast = slot.ask.broadcast
    feed = feed_of([slot], program.ground).of_slots(0)
    local = algorithm.begin(method, hyper, broadcast, device)
    for samples in minibatches(program.ground, feed, range(task.steps)):
        local = algorithm.step(method, hyper, local, samples)
    steps = sent(task.steps, feed.rows.device)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps)
    device, upload = (map_tensors(lambda t: t[None], state) for state in (device, upload))
    costs = local.costs[None] / task.steps
    return Finished(slot.run, [task], device, upload, costs, all_finite(device, upload, costs))


def _side_by_side(program: Program, group: Sequence[Slot], take_steps: LocalSteps) -> Iterator[Finished]:
    """All slots at once, those with most steps first."""
    algorithm, method = program.algorithm, program.method
    longest_first = sorted(group, key=lambda slot: -slot.task.steps)
    hyper, feed = hyper_of(longest_first), feed_of(longest_first, program.ground)
    device, broadcast = states_of(longest_first, method)
    local = algorithm.begin(method, hyper, broadcast, device)
    counts = [slot.task.steps for slot in longest_first]
    local = take_steps(program, hyper, local, feed, counts)
    steps = sent(counts, feed.rows.device)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps)
    position = {(slot.run, slot.task.device): i for i, slot in enumerate(longest_first)}
    costs = local.costs / steps[:, None]
    order = [position[slot.run, slot.task.device] for slot in group]
    if order != sorted(order):
        back = sent(order, feed.rows.device)
        device, upload, costs = map_tensors(lambda t: t[back], (device, upload, costs))
    fine = all_finite(device, upload, costs)
    for run, slots in groupby(range(len(group)), key=lambda i: group[i].run):
        first, *_, last = *(own := list(slots)), own[-1]
        mine = slice(first, last + 1)
        kept: Device = map_tensors(lambda t, i=mine: t[i], device)
        had = group[first].ask.devices
        kept = Device(*(new if old.numel() else new[:, :0] for new, old in zip(kept, had, strict=True)))
        uploads: Upload = map_tensors(lambda t, i=mine: t[i], upload)
        yield Finished(run, [slot.task for slot in group[mine]], kept, uploads, costs[mine], fine[mine])


def all_finite(device: Device, upload: Upload, costs: Tensor) -> Tensor:
    """Whether every number of each device is finite, [devices]; the largest tells, in one pass."""
    parts = [part for part in (costs, upload.delta, device.theta_lc) if part.numel()]
    if not costs.is_cuda and all(part.sum(-1).isfinite().all() for part in parts):  # a CPU adds far faster
        return torch.ones(len(costs), dtype=torch.bool)
    return torch.stack([torch.linalg.vector_norm(part, torch.inf, -1).isfinite() for part in parts]).all(0)


def steps_one_by_one(program: Program, hyper: Hyper, local: Local, feed: Feed, counts: Sequence[int]) -> Local:
    """The local steps of all slots, `counts` largest first: those that are done drop off the end, so none is wasted."""
    done: list[Local] = []
    for steps, slots in stretches(counts):
        if slots < len(local.costs):
            done.insert(0, map_tensors(lambda t, n=slots: t[n:], local))
            local = map_tensors(lambda t, n=slots: t[:n], local)
        running: Hyper = map_tensors(lambda t, n=slots: t[:n], hyper)
        for samples in minibatches(program.ground, feed.of_slots(slice(0, slots)), steps):
            local = program.algorithm.step(program.method, running, local, samples)
    together: Local = map_tensors(lambda *pieces: torch.cat(pieces), local, *done) if done else local
    return together


def stretches(steps: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Step counts, largest first, as stretches of steps during which the same slots run."""
    begun = 0
    for slots in range(len(steps), 0, -1):
        if steps[slots - 1] > begun:
            yield range(begun, steps[slots - 1]), slots
            begun = steps[slots - 1]
