"""Where forked workers leave what devices have done: memory that all processes see, so that no pipe carries it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Device, Upload
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.executors import Finished
from fedcpsl.simulation.slots import Ask
from fedcpsl.simulation.store import shared_zeros


class Tray(NamedTuple):
    """Room for the results of one run's round, a row for each device; a round overwrites those of the one before."""

    device: Device  # [rows, ...] each
    delta: Tensor  # [rows, parameters]


class Note(NamedTuple):
    """What a worker says of some devices' results; the rest of them is on the tray."""

    run: int
    group: list[DeviceRound]
    row: int  # the first on the tray
    uploaded: bool  # whether there is a delta
    numbers: tuple[NDArray[Any], ...]  # steps, costs and fine of `Finished`


def tray_of(ask: Ask) -> Tray:
    """A tray for as many devices as a round of the run can have; its memory counts once it is used."""
    setup, theta = ask.setup, ask.broadcast.theta
    everyone = setup.method.parts.everyone or setup.personal_rounds
    rows = setup.devices if everyone else min(setup.work.active, setup.devices)
    widths = [kept.shape[1] for kept in ask.devices]
    return Tray(
        Device(*(shared_zeros((rows, width), theta.dtype) for width in widths)),
        shared_zeros((rows, len(theta)), theta.dtype),
    )


def leave(tray: Tray, row: int, finished: Finished) -> Note:
    """Put results on the tray, from a row on."""
    mine = slice(row, row + len(finished.group))
    uploaded = finished.upload.delta.shape[1] > 0
    for kept, new in zip(tray.device, finished.device, strict=True):
        kept[mine] = new
    if uploaded:
        tray.delta[mine] = finished.upload.delta
    numbers = (finished.upload.steps, finished.costs, finished.fine)
    return Note(finished.run, finished.group, row, uploaded, tuple(t.numpy() for t in numbers))


def found(trays: Sequence[Tray], note: Note) -> Finished:
    """The results that a note speaks of: good until the next round."""
    tray, mine = trays[note.run], slice(note.row, note.row + len(note.group))
    delta = tray.delta[mine]
    steps, costs, fine = map(torch.from_numpy, note.numbers)
    return Finished(
        note.run,
        note.group,
        Device(*(kept[mine] for kept in tray.device)),
        Upload(delta if note.uploaded else delta[:, :0], steps),
        costs,
        fine,
    )
