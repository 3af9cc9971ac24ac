"""New pseudo-labels for the devices of a round, before their steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import alike, optional
from fedcpsl.device_round import is_relabelled, relabelled
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.minibatches import scaling_of, taken
from fedcpsl.simulation.round_request import RoundRequest, Slot, TrainingData, hyper_of, states_of
from fedcpsl.simulation.to_device import to_device
from fedcpsl.trees import map_tensors

ROWS_TOGETHER = 1 << 17  # of many devices side by side on an accelerator


def renew_labels(asks: Sequence[RoundRequest], ground: TrainingData) -> None:
    """Renew the rows of all devices that are due, in place."""
    due: dict[Any, list[Slot]] = {}
    for run, ask in enumerate(asks):
        method = ask.setup.method
        for task in ask.plan:
            if is_due(ask, task):
                together = ask.setup.vectorised and ground.targets.is_cuda
                key = (id(method.network.module), ask.setup.algorithm, alike(ask.setup.algorithm, method))
                due.setdefault(key if together else (run, task.device), []).append(Slot(run, ask, task))
    for slots in due.values():
        if len(slots) == 1:
            _renew_one(slots[0], ground)
        else:
            _renew_together(slots, ground)


def is_due(ask: RoundRequest, task: DeviceRound) -> bool:
    """Whether a device renews its pseudo-labels in a round."""
    labels = is_relabelled(ask.setup.algorithm, ask.setup.method, warming=task.warming)
    return bool(labels and task.relabels and ask.setup.sizes.unlabelled[task.device] > 0)


def _renew_one(slot: Slot, ground: TrainingData) -> None:
    setup, device, first = slot.ask.setup, slot.task.device, slot.ask.first_row
    rows = _rows(slot)
    kept = map_tensors(lambda t: t[device].to(ground.targets.device), slot.ask.devices)
    hyper, told = map_tensors(lambda t: t[0], hyper_of([slot])), slot.ask.told(device)
    nu = ground.targets[first + rows.start : first + rows.stop]

    def inputs(begin: int, end: int) -> Tensor:
        return setup.device_data.x(slice(rows.start + begin, rows.start + end))

    nu.copy_(relabelled(setup.algorithm, setup.method, hyper, told, kept, inputs, nu))


def _renew_together(slots: Sequence[Slot], ground: TrainingData) -> None:
    """As many rows of every device at a time as fit; those that have fewer drop out."""
    counts = {id(slot): _rows(slot).stop - _rows(slot).start for slot in slots}
    most_first = sorted(slots, key=lambda slot: -counts[id(slot)])
    step, begun = max(1, ROWS_TOGETHER // len(slots)), 0
    while most_first:
        left = np.array([counts[id(slot)] - begun for slot in most_first])
        first = np.array([slot.ask.first_row + _rows(slot).start + begun for slot in most_first])
        _renew_block(most_first, ground, first, np.minimum(left, step))
        begun += step
        most_first = [slot for slot in most_first if counts[id(slot)] > begun]


def _renew_block(
    slots: Sequence[Slot], ground: TrainingData, first: NDArray[np.int64], counts: NDArray[np.int64]
) -> None:
    """Some rows of every slot, `counts` from `first` on: its own last one again where it has fewer than the others."""
    setup, width = slots[0].ask.setup, int(counts.max())
    device, broadcast = states_of(slots)
    all_of_each = to_device([_rows(slot).stop - _rows(slot).start for slot in slots], ground.targets.device)
    begin, own, before = to_device(np.stack([first, counts, counts.cumsum() - counts]), ground.targets.device)
    along = torch.arange(width, device=begin.device)
    flat = (begin[:, None] + torch.minimum(along, own[:, None] - 1)).flatten()
    shape = (len(slots), width)
    x = taken(ground.raw, ground.source.index_select(0, flat), shape, *scaling_of(slots))
    nu = ground.targets.index_select(0, flat).view(*shape, -1)
    relabel = optional(setup.algorithm, "relabel")
    renewed = relabel(setup.method, hyper_of(slots), broadcast, device, x, nu, all_of_each)
    total = int(counts.sum())  # known here, so that the host need not wait to be told
    slot = torch.repeat_interleave(torch.arange(len(slots), device=begin.device), own, output_size=total)
    real = slot * width + torch.arange(total, device=begin.device) - before[slot]
    ground.targets.index_copy_(0, flat.index_select(0, real), renewed.flatten(0, 1).index_select(0, real))


def _rows(slot: Slot) -> slice:
    return slot.ask.setup.device_data.unlabelled_rows(slot.task.device)
