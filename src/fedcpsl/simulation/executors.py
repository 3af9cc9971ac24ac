"""Who calls the algorithm's functions: a loop over devices, or all of them side by side. Same answer.

A slot is one active device of one run. The slots of many runs go side by side where their networks and batches have the
same shapes: everything that may differ between them (seed, step sizes, weights, algorithm of the family) is data.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Algorithm, Method, alike, merged_method
from fedcpsl.device_round import begun, device_round, prepared, reviewed, visit_if_needed
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.minibatches import BatchPlan, batch_plan, drawn_for_visit, minibatches, renew_labels, visits
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.round_request import RoundRequest, Slot, TrainingData, hyper_of, states_of
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.store import to_device
from fedcpsl.trees import Tree, leaves, map_tensors


class Program(NamedTuple):
    """What the slots of a group share."""

    key: tuple[Any, ...]  # equal for groups that one captured step serves
    algorithm: Algorithm
    method: Method
    data: TrainingData
    widest: int = 0  # slots that any round has side by side, so that layouts do not depend on the rounds before


class Finished(NamedTuple):
    """What some devices of one run leave behind; every field has a leading dimension, the devices of `group`."""

    run: int
    group: list[DeviceRound]
    device: Tree
    upload: Tree
    costs: Tensor  # [devices, models]: means over the steps
    finite: Tensor  # [devices]: whether all of it is finite
    sent: Tree | None = None  # what they were sent, where that was in an earlier round


LocalSteps = Callable[[Program, Tree, Tree, BatchPlan, Sequence[int]], Tree]
LocalRounds = Callable[[Sequence[RoundRequest], TrainingData], Iterator[Finished]]


def local_rounds(
    requests: Sequence[RoundRequest], data: TrainingData, take_steps: LocalSteps | None = None
) -> Iterator[Finished]:
    """New pseudo-labels for the planned devices, then their local steps, group by group, in device order."""
    renew_labels(requests, data)
    for program, group in groups(requests, data):
        program.method.network.set_precision()
        if len(group) == 1 and not group[0].request.setup.machine.vectorised:
            yield one_slot(program, group[0])
        else:
            yield from _side_by_side(program, group, take_steps or steps_one_by_one)


def groups(requests: Sequence[RoundRequest], data: TrainingData) -> Iterator[tuple[Program, list[Slot]]]:
    """The slots of all runs, those that can go side by side together, at most as many as the runs allow."""
    together: dict[tuple[Any, ...], list[Slot]] = {}
    for run, request in enumerate(requests):
        for task in request.plan:
            together.setdefault(_program_key(request.setup, task), []).append(Slot(run, request, task))
    for key, slots in together.items():
        setup = slots[0].request.setup
        widest = _widest(slots, _most_slots(key, requests, slots[0].task)) if setup.machine.vectorised else 1
        for piece in _even_pieces(len(slots), widest):
            method = merged_method(
                setup.terms.algorithm, [s.request.setup.terms.method_of(s.task) for s in slots[piece]]
            )
            yield Program((*key, method.rules), setup.terms.algorithm, method, data, widest), slots[piece]


def _most_slots(key: tuple[Any, ...], requests: Sequence[RoundRequest], task: DeviceRound) -> int:
    """How many slots of one program any round can have, of all runs, and each rank's share; `task` is one of them."""
    sharing = [request.setup.terms for request in requests if _program_key(request.setup, task) == key]
    return -(-sum(terms.devices if task.personal else terms.most_drawn for terms in sharing) // world()[1])


def _widest(slots: Sequence[Slot], total: int) -> int:
    """How many slots go side by side: those of a full round in even pieces, as large as its runs allow."""
    total = max(total, len(slots))
    at_a_time = min((slot.request.setup.machine.slots or total) for slot in slots)
    return -(-total // -(-total // at_a_time))


def _program_key(setup: Setup, task: DeviceRound) -> tuple[Any, ...]:
    """Equal for slots whose steps are one program."""
    method = setup.terms.method_of(task)
    return (
        id(method.network.module),
        setup.machine.vectorised,
        setup.terms.algorithm,
        alike(setup.terms.algorithm, method),
        method.traits.views,
        setup.data.axes,
        method.traits.draws,
        method.personal_round,
        method.most_unlabelled,
        setup.terms.batch_widths,
    )


def _even_pieces(count: int, most: int) -> Iterator[slice]:
    pieces = -(-count // most)
    ends = [round(count * k / pieces) for k in range(pieces + 1)]
    for first, last in pairwise(ends):
        yield slice(first, last)


def one_slot(program: Program, slot: Slot) -> Finished:
    """One device's local steps, as plain PyTorch would take them."""
    task, algorithm, method = slot.task, program.algorithm, program.method
    hyper, where = map_tensors(lambda t: t[0], hyper_of([slot])), slot.request.setup.data.where
    device = map_tensors(lambda t: t[task.device].to(where, copy=True), slot.request.devices)
    broadcast = slot.request.broadcast_to(task.device)
    visit = visit_if_needed(algorithm, lambda: slot.request.setup.data.visit(task.device))
    device = prepared(algorithm, method, hyper, broadcast, device, visit)
    batches = batch_plan([slot], program.data).of_slots(0)
    steps = minibatches(program.data, batches, range(task.steps))
    drawn = drawn_for_visit([slot], method, program.data, 0)
    trained = device_round(algorithm, method, hyper, broadcast, device, steps, drawn=drawn)
    device = reviewed(algorithm, method, hyper, broadcast, trained.device, trained.upload, visit)
    device, upload = (map_tensors(lambda t: t[None], state) for state in (device, trained.upload))
    costs = trained.costs[None] / task.steps
    return Finished(slot.run, [task], device, upload, costs, all_finite(device, upload, costs))


def _side_by_side(program: Program, group: Sequence[Slot], take_steps: LocalSteps) -> Iterator[Finished]:
    """All slots at once, those with most steps first."""
    algorithm, method = program.algorithm, program.method
    longest_first = sorted(group, key=lambda slot: -slot.task.steps)
    hyper, batches = hyper_of(longest_first), batch_plan(longest_first, program.data)
    device, broadcast = states_of(longest_first)
    visit = visit_if_needed(algorithm, lambda: visits(longest_first, program.data))
    device = prepared(algorithm, method, hyper, broadcast, device, visit)
    drawn = drawn_for_visit(longest_first, method, program.data)
    local = begun(algorithm, method, hyper, broadcast, device, drawn)
    counts = [slot.task.steps for slot in longest_first]
    local = take_steps(program, hyper, local, batches, counts)
    steps = to_device(counts, batches.rows.device)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps)
    device = reviewed(algorithm, method, hyper, broadcast, device, upload, visit)
    position = {(slot.run, slot.task.device): i for i, slot in enumerate(longest_first)}
    costs = algorithm.costs(local) / steps[:, None]
    order = [position[slot.run, slot.task.device] for slot in group]
    if order != sorted(order):
        back = to_device(order, batches.rows.device)
        device, upload, costs = map_tensors(lambda t: t[back], (device, upload, costs))
    finite = all_finite(device, upload, costs)
    for run, slots in groupby(range(len(group)), key=lambda i: group[i].run):
        first, *_, last = *(own := list(slots)), own[-1]
        mine = slice(first, last + 1)
        had = group[first].request.devices  # where a run lacks what others have, it keeps nothing of it
        kept = map_tensors(lambda t, old, i=mine: t[i] if old.numel() else t[i][:, :0], device, had)
        uploads = map_tensors(lambda t, i=mine: t[i], upload)
        yield Finished(run, [slot.task for slot in group[mine]], kept, uploads, costs[mine], finite[mine])


def example_of(request: RoundRequest, method: Method) -> tuple[Tree, Tree, Tensor]:
    """What a device of a run leaves behind, by its shapes: what it keeps, its upload and its costs."""
    setup = request.setup
    hyper = map_tensors(lambda t: t[0], setup.terms.hyper)
    device = map_tensors(lambda t: t[0].to(setup.data.where), request.devices)
    sent = request.broadcast if request.rows is None else map_tensors(lambda t: t[0], request.broadcast)
    local = setup.terms.algorithm.begin(method, hyper, sent, device)
    steps = torch.ones((), dtype=torch.int64, device=setup.data.where)
    kept, upload = setup.terms.algorithm.finish(method, hyper, sent, device, local, steps)
    return kept, upload, setup.terms.algorithm.costs(local)


def all_finite(device: Tree, upload: Tree, costs: Tensor) -> Tensor:
    """Whether every number of each device is finite, [devices]; the largest tells, in one pass."""
    numbers = [t for t in (costs, *leaves(upload), *leaves(device)) if t.numel() and t.is_floating_point()]
    flat = [t.flatten(1) if t.dim() > 1 else t[:, None] for t in numbers]
    if not costs.is_cuda and all(t.sum(-1).isfinite().all() for t in flat):  # a CPU adds far faster
        return torch.ones(len(costs), dtype=torch.bool)
    return torch.stack([torch.linalg.vector_norm(t, torch.inf, -1).isfinite() for t in flat]).all(0)


def steps_one_by_one(program: Program, hyper: Tree, local: Tree, batches: BatchPlan, counts: Sequence[int]) -> Tree:
    """The local steps of all slots, `counts` largest first: those that are done drop off the end, so none is wasted."""
    done: list[Tree] = []
    left = len(counts)
    for steps, slots in stretches(counts):
        if slots < left:
            done.insert(0, map_tensors(lambda t, n=slots: t[n:], local))
            local = map_tensors(lambda t, n=slots: t[:n], local)
        left = slots
        running = map_tensors(lambda t, n=slots: t[:n], hyper)
        for samples in minibatches(program.data, batches.of_slots(slice(0, slots)), steps):
            local = program.algorithm.step(program.method, running, local, samples)
    return map_tensors(lambda *pieces: torch.cat(pieces), local, *done) if done else local


def stretches(steps: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Step counts, largest first, as stretches of steps during which the same slots run."""
    begun = 0
    for slots in range(len(steps), 0, -1):
        if steps[slots - 1] > begun:
            yield range(begun, steps[slots - 1]), slots
            begun = steps[slots - 1]
