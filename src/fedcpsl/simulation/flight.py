"""Uploads on their way, where the server does not wait for all: kept as they were made, counted once they arrive."""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedcpsl.edge.state import COUNTED
from fedcpsl.edge.weights import staleness_weight
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.executors import Finished
from fedcpsl.simulation.round_request import RoundRequest
from fedcpsl.simulation.state import Flight, State
from fedcpsl.trees import Tree, bytes_of, map_tensors

SMALL = 1 << 18  # bytes of what a device keeps and sends, up to which a copy takes less time than a call of its own
TASK_NUMBERS = ("device", "steps", "copies", "lost", "sends", "warming")  # of a task that is under way


def landed(
    state: State, request: RoundRequest, run: int, begun: Sequence[Finished]
) -> tuple[tuple[Flight, ...], RoundRequest, list[Finished]]:
    """What is on its way after the round, the tasks that ended as a request's plan, and their devices as finished.

    `begun` is what the round's own devices made. Where they are large, those who end in the round in which they began
    stay together and are counted as in any round; small ones are counted with the late ones, at once. Late ones go in
    the order of devices, so that it does not matter with whom each began.
    """
    tasks = _ended_tasks(state, request)
    late = [each for each in state.flight if each.task.device in tasks]
    at_once = bool(late) and all(_is_small(each.device, each.upload, len(each.group)) for each in begun)
    staying, own = list[Flight](), list[Finished]()
    for finished in begun:
        here = [i for i, task in enumerate(finished.group) if task.device in tasks]
        away = [i for i, task in enumerate(finished.group) if task.device not in tasks]
        if at_once:
            late += [_on_its_way(request, finished, i, copied=False) for i in here]
        else:
            own += [_some_of(finished, rows, tasks) for rows in _pieces(finished, here)]
        staying += [_on_its_way(request, finished, i) for i in away]
    own += _late(run, sorted(late, key=lambda each: each.task.device), tasks)
    before = [each for each in state.flight if each.task.device not in tasks]
    working = sorted((task for finished in own for task in finished.group), key=lambda task: task.device)
    return (*before, *staying), request._replace(plan=working), own


def _ended_tasks(state: State, request: RoundRequest) -> dict[int, DeviceRound]:
    """The tasks of the devices whose part ended in the round, with what became of them and what they weigh."""
    records = None if state.edge is None else state.edge.records
    assert state.setup.edge is not None
    assert records is not None
    weights = staleness_weight(records.staleness, state.setup.edge.settings.staleness)
    under_way = {task.device: task for task in (*request.plan, *(each.task for each in state.flight))}
    rows = zip(records.device.tolist(), (records.outcome != COUNTED).tolist(), weights.tolist(), strict=True)
    return {
        device: under_way[device]._replace(lost=lost, weight=weight)
        for device, lost, weight in rows
        if device in under_way
    }


def _late(run: int, late: Sequence[Flight], tasks: Mapping[int, DeviceRound]) -> Iterator[Finished]:
    """Devices that are counted with what each was sent: small ones at once, large ones where they are, uncopied."""
    small = all(_is_small(each.kept, each.upload) for each in late)
    for some in [late] if small and late else [[each] for each in late]:
        trees = [(each.kept, each.upload, each.costs, each.sent) for each in some]
        kept, upload, costs, sent = stacked(trees) if len(some) > 1 else map_tensors(lambda t: t[None], trees[0])
        finite = torch.ones(len(some), dtype=torch.bool, device=costs.device)  # as was checked when they began
        yield Finished(run, [tasks[each.task.device] for each in some], kept, upload, costs, finite, sent)


def _pieces(finished: Finished, rows: Sequence[int]) -> list[list[int]]:
    """Rows as they are counted at once: all, or where they are large, runs without gaps, which are not copied."""
    if not rows or len(rows) == len(finished.group) or _is_small(finished.device, finished.upload, len(finished.group)):
        return [list(rows)] if rows else []
    found = [[rows[0]]]
    for row in rows[1:]:
        if row == found[-1][-1] + 1:
            found[-1].append(row)
        else:
            found.append([row])
    return found


def _is_small(kept: Tree, upload: Tree, devices: int = 1) -> bool:
    return bytes_of((kept, upload)) <= SMALL * devices


def _some_of(finished: Finished, rows: Sequence[int], tasks: Mapping[int, DeviceRound]) -> Finished:
    """Some of those that finished together, with their tasks as they ended."""
    group = [tasks[finished.group[row].device] for row in rows]
    if len(rows) == len(finished.group):
        return finished._replace(group=group)
    last = rows[-1] + 1
    which = slice(rows[0], last) if last - rows[0] == len(rows) else torch.tensor(rows, device=finished.costs.device)
    trees = finished.device, finished.upload, finished.costs, finished.finite
    device, upload, costs, finite = map_tensors(lambda t: t[which], trees)
    return Finished(finished.run, group, device, upload, costs, finite)


def _on_its_way(request: RoundRequest, finished: Finished, row: int, *, copied: bool = True) -> Flight:
    """One of the devices that finished together, in memory of its own: others may be released, results overwritten."""
    if len(finished.group) == 1 and request.setup.machine.processes == 1:
        copied = False  # it is its own already
    trees = finished.device, finished.upload, finished.costs
    kept, upload, costs = map_tensors(lambda t: t[row].clone() if copied else t[row], trees)
    task, sent = finished.group[row], request.broadcast
    if request.rows is not None:
        sent = map_tensors(torch.clone, request.broadcast_to(task.device))
    return Flight(task, kept, upload, sent, costs)


def stacked(trees: Sequence[Tree]) -> Tree:
    """Trees of one shape as one, [trees, ...]."""
    return map_tensors(lambda *t: torch.stack(t), *trees)


def flight_numbers(flight: Sequence[Flight]) -> dict[str, NDArray[np.int64]]:
    """What a checkpoint has of the tasks on their way."""
    return {name: np.array([int(getattr(each.task, name)) for each in flight], np.int64) for name in TASK_NUMBERS}


def flight_of(
    numbers: dict[str, NDArray[np.int64]], trees: tuple[Tree, Tree, Tree, torch.Tensor]
) -> tuple[Flight, ...]:
    """Uploads on their way as a checkpoint has them, stacked: how each was drawn is not needed any more."""
    nothing = np.empty((0, 0), np.int64)
    tasks = [
        DeviceRound(
            int(device),
            int(steps),
            nothing,
            nothing,
            copies=int(copies),
            lost=bool(lost),
            sends=bool(sends),
            warming=bool(warming),
        )
        for device, steps, copies, lost, sends, warming in zip(*numbers.values(), strict=True)
    ]
    return tuple(Flight(task, *map_tensors(lambda t, i=i: t[i], trees)) for i, task in enumerate(tasks))
