"""Slots, and the ground they stand on: one active device of one run each, and the samples of all runs."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcpsl.algorithm import Broadcast, Device, Hyper, Method, map_tensors
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.setup import Setup
from fedcpsl.simulation.shelf import Shelf
from fedcpsl.simulation.store import Sparse, rows_of
from fedcpsl.simulation.transfer import sent


class Ground(NamedTuple):
    """The samples of all runs that are simulated together; a run's training rows are one piece of it."""

    raw: Tensor  # [inputs, ...]: as in `Inputs`
    source: Tensor  # [rows]: where a training row's input is in `raw`
    targets: Tensor  # [rows, classes]: labels, and every device's pseudo-labels nu


class Ask(NamedTuple):
    """One run's part of a round: its planned devices and what they work with."""

    setup: Setup
    plan: Sequence[DeviceRound]
    devices: Device
    broadcast: Broadcast
    first_row: int = 0  # where the run's training rows begin on the ground
    sparse: Sparse | None = None  # where only some of the device states are there


class Slot(NamedTuple):
    """One active device of one run."""

    run: int
    ask: Ask
    task: DeviceRound


def ground_of(shelf: Shelf, targets: Tensor) -> Ground:
    """The ground of one run."""
    return Ground(shelf.inputs.raw, shelf.source, targets)


def common_ground(shelves: Sequence[Shelf], targets: Sequence[Tensor]) -> Ground:
    """One ground for several runs; inputs that runs share are there once."""
    if len(shelves) == 1:
        return ground_of(shelves[0], targets[0])
    different = list({id(shelf.inputs.raw): shelf.inputs.raw for shelf in shelves}.values())
    first = np.concatenate([[0], np.cumsum([len(raw) for raw in different])])
    where = {id(raw): int(at) for raw, at in zip(different, first[:-1], strict=True)}
    return Ground(
        different[0] if len(different) == 1 else torch.cat(different),
        torch.cat([shelf.source + where[id(shelf.inputs.raw)] for shelf in shelves]),
        torch.cat(list(targets)),
    )


def hyper_of(slots: Sequence[Slot]) -> Hyper:
    """The numbers of some slots, one of each; a device that warms up has no unlabelled terms."""
    table = np.stack([slot.ask.setup.numbers[:, slot.task.device] for slot in slots], 1)
    warming = np.array([slot.task.warming for slot in slots])
    for name in ("alpha_p", "alpha_r"):
        table[Hyper._fields.index(name), warming] = 0
    like = slots[0].ask.setup.shelf.one_hot
    return Hyper(*sent(table, like.device).to(like.dtype).unbind())


def states_of(slots: Sequence[Slot], method: Method) -> tuple[Device, Broadcast]:
    """What the slots' devices keep, and what each was sent, [slots, ...]; zeros where a run lacks what others have."""
    asks = {slot.run: slot.ask for slot in sorted(slots, key=lambda slot: slot.run)}
    theta = slots[0].ask.broadcast.theta
    if len(asks) == 1:
        (ask,) = asks.values()
        index = sent([slot.task.device for slot in slots], theta.device)
        if ask.broadcast.c.numel() or not method.parts.control_variates:
            return rows_of(ask.devices, index), ask.broadcast
    by_run = sorted(range(len(slots)), key=lambda i: slots[i].run)
    back = sent(np.argsort(by_run), theta.device)
    counts = [sum(slot.run == run for slot in slots) for run in asks]
    mine = sent([slots[i].task.device for i in by_run], theta.device).split(counts)

    def joined(name: str, pieces: list[Tensor]) -> Tensor:
        there = name != "c" or method.parts.control_variates
        width = len(theta) if there and (name == "c" or any(piece.numel() for piece in pieces)) else 0
        full = [piece if piece.shape[1] == width else piece.new_zeros(len(piece), width) for piece in pieces]
        return torch.cat(full)[back]

    kept = [rows_of(a.devices, i) for a, i in zip(asks.values(), mine, strict=True)]
    told = [
        map_tensors(lambda t, n=n: t.expand(n, -1), a.broadcast) for a, n in zip(asks.values(), counts, strict=True)
    ]
    return (
        Device(*(joined(name, [getattr(each, name) for each in kept]) for name in Device._fields)),
        Broadcast(*(joined(name, [getattr(each, name) for each in told]) for name in Broadcast._fields)),
    )
