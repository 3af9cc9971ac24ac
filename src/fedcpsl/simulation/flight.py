"""Uploads on their way, where the server does not wait for all: kept as they were made, counted once they arrive."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray

from fedcpsl.edge.state import COUNTED
from fedcpsl.edge.weights import staleness_weight
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.executors import Finished
from fedcpsl.simulation.round_request import RoundRequest
from fedcpsl.simulation.state import Flight, State
from fedcpsl.trees import Tree, map_tensors

TASK_NUMBERS = ("device", "steps", "copies", "lost", "sends", "warming")  # of a task that is under way


def begun(request: RoundRequest, own: Sequence[Finished]) -> tuple[Flight, ...]:
    """The uploads of devices that have begun; copies, since what is finished may be overwritten."""
    same = map_tensors(torch.clone, request.broadcast) if request.rows is None else None
    found = []
    for finished in own:
        trees = finished.device, finished.upload, finished.costs
        for i, task in enumerate(finished.group):
            kept, upload, costs = map_tensors(lambda t, i=i: t[i].clone(), trees)
            sent = map_tensors(torch.clone, request.broadcast_to(task.device)) if same is None else same
            found.append(Flight(task, kept, upload, sent, costs))
    return tuple(found)


def landed(state: State, request: RoundRequest, run: int) -> tuple[tuple[Flight, ...], RoundRequest, list[Finished]]:
    """What is still on its way after the round, and those whose part ended: as a request that has what each was sent,
    and as devices that are finished, lost ones among them.
    """
    records = None if state.edge is None else state.edge.records
    assert state.setup.edge is not None
    assert records is not None
    weights = staleness_weight(records.staleness, state.setup.edge.settings.staleness).tolist()
    ended = {device: i for i, device in enumerate(records.device.tolist())}
    staying = tuple(each for each in state.flight if each.task.device not in ended)
    here = sorted((each for each in state.flight if each.task.device in ended), key=lambda each: each.task.device)
    if not here:
        return staying, request._replace(plan=()), []
    tasks = []
    for each in here:
        i = ended[each.task.device]
        tasks.append(each.task._replace(lost=bool(records.outcome[i] != COUNTED), weight=weights[i]))
    different = {id(each.sent): each.sent for each in here}
    place = {key: row for row, key in enumerate(different)}
    rows = {each.task.device: place[id(each.sent)] for each in here}
    kept, upload, costs = stacked([(each.kept, each.upload, each.costs) for each in here])
    finite = torch.ones(len(tasks), dtype=torch.bool, device=costs.device)  # as was checked when they began
    finished = Finished(run, tasks, kept, upload, costs, finite)
    return staying, request._replace(plan=tasks, broadcast=stacked([*different.values()]), rows=rows), [finished]


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
