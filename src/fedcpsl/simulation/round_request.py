"""What a round's slots work with: a slot is one active device of one run; the samples of all runs lie together."""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.device_data import DeviceData
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.store import Sparse, device_rows, to_device
from fedcpsl.trees import Tree, map_tensors, rebuilt


class TrainingData(NamedTuple):
    """The samples of all runs that are simulated together; a run's training rows are one piece of it."""

    raw: Tensor  # [inputs, ...]: as in `Inputs`
    source: Tensor  # [rows]: where a training row's input is in `raw`
    targets: Tensor  # [rows, classes]: labels, and every device's pseudo-labels nu


class RoundRequest(NamedTuple):
    """One run's part of a round: its planned devices and what they work with."""

    setup: Setup
    plan: Sequence[DeviceRound]
    devices: Tree
    broadcast: Tree
    first_row: int = 0  # where the run's rows begin in the training data
    sparse: Sparse | None = None  # where only some of the device states are there
    rows: Mapping[int, int] | None = None  # a device's row of `broadcast`; None: it is the same for all

    def broadcast_to(self, device: int) -> Tree:
        """What one device is sent."""
        rows = self.rows
        return self.broadcast if rows is None else map_tensors(lambda t: t[rows[device]], self.broadcast)

    def broadcast_to_each(self, devices: Sequence[int]) -> Tree:
        """What some devices are sent, [devices, ...]; without that dimension where it is the same for all."""
        if self.rows is None:
            return self.broadcast
        index = to_device([self.rows[device] for device in devices], self.setup.data.where)
        return map_tensors(lambda t: t[index], self.broadcast)


class Slot(NamedTuple):
    """One active device of one run."""

    run: int
    request: RoundRequest
    task: DeviceRound


def broadcasts_to(
    setup: Setup, server: Tree, devices: Sequence[int], plan: Sequence[DeviceRound] = ()
) -> tuple[Tree, Mapping[int, int] | None]:
    """What the server sends to some devices, and where each finds its own; None: it is the same for all.

    `plan` has the tasks of these devices, where they have some: what was drawn for the server to choose by.
    """
    each = optional(setup.terms.algorithm, "broadcast_each")
    if each is None:
        return setup.terms.algorithm.broadcast(server), None
    ids = torch.tensor(list(devices), dtype=torch.int64, device=setup.data.where)
    rows = {device: row for row, device in enumerate(devices)}
    orders = [draw.name for draw in setup.terms.method.traits.draws if draw.of == "devices"]
    if not orders or not plan:
        return each(setup.terms.method, server, ids), rows
    drawn = {name: [task.extra[name].rows.tolist() for task in plan] for name in orders}
    return each(setup.terms.method, server, ids, drawn), rows


def training_data_of(device_data: DeviceData, targets: Tensor) -> TrainingData:
    """The training data of one run."""
    return TrainingData(device_data.inputs.raw, device_data.source, targets)


def joint_data(each_data: Sequence[DeviceData], targets: Sequence[Tensor]) -> TrainingData:
    """The training data of several runs; inputs that runs share are stored once."""
    if len(each_data) == 1:
        return training_data_of(each_data[0], targets[0])
    different = list({id(device_data.inputs.raw): device_data.inputs.raw for device_data in each_data}.values())
    first = np.concatenate([[0], np.cumsum([len(raw) for raw in different])])
    where = {id(raw): int(at) for raw, at in zip(different, first[:-1], strict=True)}
    return TrainingData(
        different[0] if len(different) == 1 else torch.cat(different),
        torch.cat([device_data.source + where[id(device_data.inputs.raw)] for device_data in each_data]),
        torch.cat(list(targets)),
    )


def hyper_of(slots: Sequence[Slot]) -> Tree:
    """The numbers of some slots, one of each."""
    tables = [
        slot.request.setup.terms.warming if slot.task.warming else slot.request.setup.terms.numbers for slot in slots
    ]
    table = np.stack([table[:, slot.task.device] for table, slot in zip(tables, slots, strict=True)], 1)
    setup = slots[0].request.setup
    return rebuilt(setup.terms.hyper, to_device(table, setup.data.where).to(setup.data.dtype).unbind())


def expanded(request: RoundRequest, devices: Sequence[int]) -> Tree:
    """What some devices of a run are sent, [devices, ...]."""
    count, sent = len(devices), request.broadcast_to_each(devices)
    return sent if request.rows is not None else map_tensors(lambda t: t.expand(count, *t.shape), sent)


def states_of(slots: Sequence[Slot]) -> tuple[Tree, Tree]:
    """What the slots' devices keep, and what each was sent, [slots, ...]; zeros where a run lacks what others have."""
    requests = {slot.run: slot.request for slot in sorted(slots, key=lambda slot: slot.run)}
    where = slots[0].request.setup.data.where
    if len(requests) == 1:
        (request,) = requests.values()
        which = [slot.task.device for slot in slots]
        return device_rows(request.devices, to_device(which, where)), request.broadcast_to_each(which)
    by_run = sorted(range(len(slots)), key=lambda i: slots[i].run)
    back = to_device(np.argsort(by_run), where)
    counts = [sum(slot.run == run for slot in slots) for run in requests]
    mine = to_device([slots[i].task.device for i in by_run], where).split(counts)

    def joined(*pieces: Tensor) -> Tensor:
        shape = max((piece.shape[1:] for piece in pieces), key=lambda shape: shape.numel())
        full = [piece if piece.shape[1:] == shape else piece.new_zeros(len(piece), *shape) for piece in pieces]
        return torch.cat(full)[back]

    kept = [device_rows(a.devices, i) for a, i in zip(requests.values(), mine, strict=True)]
    each = [[slots[i].task.device for i in by_run if slots[i].run == run] for run in requests]
    sent = [expanded(a, devices) for a, devices in zip(requests.values(), each, strict=True)]
    return map_tensors(joined, *kept), map_tensors(joined, *sent)
