"""Where forked workers leave what devices have done: memory that all processes see, so that no pipe carries it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.executors import Finished, example_of
from fedcpsl.simulation.slots import Ask
from fedcpsl.simulation.store import shared_zeros
from fedcpsl.trees import Tree, leaves, map_tensors, rebuilt

Result = tuple[Tree, Tree]  # what a device keeps, and its upload


class Note(NamedTuple):
    """What a worker says of some devices' results; the rest of them is on the tray."""

    run: int
    group: list[DeviceRound]
    row: int  # the first on the tray
    empty: list[bool]  # which tensors of the result are, where others of the run are not
    numbers: tuple[NDArray[Any], ...]  # costs and fine of `Finished`


def tray_of(ask: Ask) -> Result:
    """Room for as many devices as a round of the run can have; a round overwrites what the one before left.

    Its memory counts once it is used.
    """
    setup = ask.setup
    everyone = setup.method.traits.everyone or setup.personal_rounds
    rows = setup.devices if everyone else min(setup.work.active, setup.devices)
    return map_tensors(lambda t: shared_zeros((rows, *t.shape), t.dtype), example_of(ask, setup.method)[:2])


def leave(tray: Result, row: int, finished: Finished) -> Note:
    """Put results on the tray, from a row on."""
    mine, empty = slice(row, row + len(finished.group)), []
    for room, new in zip(leaves(tray), leaves((finished.device, finished.upload)), strict=True):
        empty.append(not new.numel())
        if new.numel():
            room[mine] = new
    numbers = (finished.costs, finished.fine)
    return Note(finished.run, finished.group, row, empty, tuple(t.numpy() for t in numbers))


def found(trays: Sequence[Result], note: Note) -> Finished:
    """The results that a note speaks of: good until the next round."""
    tray, mine = trays[note.run], slice(note.row, note.row + len(note.group))

    def taken(room: Tensor, *, empty: bool) -> Tensor:
        return room[mine][:, :0] if empty and room.dim() > 1 else room[mine]

    pieces = [taken(room, empty=empty) for room, empty in zip(leaves(tray), note.empty, strict=True)]
    device, upload = rebuilt(tray, pieces)
    costs, fine = map(torch.from_numpy, note.numbers)
    return Finished(note.run, note.group, device, upload, costs, fine)
