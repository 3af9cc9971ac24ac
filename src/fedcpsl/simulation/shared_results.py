"""Where forked workers leave what devices have done: memory that all processes see, so that no pipe carries it."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.executors import Finished, example_of
from fedcpsl.simulation.round_request import RoundRequest
from fedcpsl.simulation.store import shared_zeros
from fedcpsl.trees import Tree, leaves, map_tensors, rebuilt

Result = tuple[Tree, Tree]  # what a device keeps, and its upload


class Note(NamedTuple):
    """What a worker says of some devices' results; the rest of them is on the shared."""

    run: int
    group: list[DeviceRound]
    row: int  # the first on the shared
    empty: list[bool]  # which tensors of the result are, where others of the run are not
    numbers: tuple[NDArray[Any], ...]  # costs and fine of `Finished`


def shared_memory_for(ask: RoundRequest) -> Result:
    """Room for as many devices as a round of the run can have; a round overwrites what the one before left.

    Its memory counts once it is used.
    """
    setup = ask.setup
    everyone = setup.method.traits.everyone or setup.personal_rounds
    rows = setup.devices if everyone else min(setup.work.active, setup.devices)
    return map_tensors(lambda t: shared_zeros((rows, *t.shape), t.dtype), example_of(ask, setup.method)[:2])


def leave(shared: Result, row: int, finished: Finished) -> Note:
    """Put results on the shared, from a row on."""
    mine, empty = slice(row, row + len(finished.group)), []
    for room, new in zip(leaves(shared), leaves((finished.device, finished.upload)), strict=True):
        empty.append(not new.numel())
        if new.numel():
            room[mine] = new
    numbers = (finished.costs, finished.fine)
    return Note(finished.run, finished.group, row, empty, tuple(t.numpy() for t in numbers))


def found(shared_results: Sequence[Result], note: Note) -> Finished:
    """The results that a note speaks of: good until the next round."""
    shared, mine = shared_results[note.run], slice(note.row, note.row + len(note.group))

    def taken(room: Tensor, *, empty: bool) -> Tensor:
        return room[mine][:, :0] if empty and room.dim() > 1 else room[mine]

    pieces = [taken(room, empty=empty) for room, empty in zip(leaves(shared), note.empty, strict=True)]
    device, upload = rebuilt(shared, pieces)
    costs, fine = map(torch.from_numpy, note.numbers)
    return Finished(note.run, note.group, device, upload, costs, fine)
