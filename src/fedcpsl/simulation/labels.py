"""New pseudo-labels for the devices of a round, before their steps."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcpsl.algorithm import Hyper, map_tensors
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.feed import scaling_of, taken
from fedcpsl.simulation.slots import Ask, Ground, Slot, hyper_of, states_of
from fedcpsl.simulation.transfer import sent

ROWS_AT_ONCE = 4096  # of one device
ROWS_TOGETHER = 1 << 17  # of many devices side by side on an accelerator


def renew_labels(asks: Sequence[Ask], ground: Ground) -> None:
    """Renew the rows of all devices that are due, in place."""
    due: dict[Any, list[Slot]] = {}
    for run, ask in enumerate(asks):
        method = ask.setup.method
        for task in ask.plan:
            if is_due(ask, task):
                together = ask.setup.vectorised and ground.targets.is_cuda and method.pseudo_labels == "closed_form"
                key = (id(method.network.module), method.parts.alone, method.parts.personal, method.labels_from)
                due.setdefault(key if together else (run, task.device), []).append(Slot(run, ask, task))
    for slots in due.values():
        if len(slots) == 1:
            _renew_one(slots[0], ground)
        else:
            _renew_together(slots, ground)


def is_due(ask: Ask, task: DeviceRound) -> bool:
    """Whether a device renews its pseudo-labels in a round."""
    unlabelled = ask.setup.sizes.unlabelled[task.device] > 0
    return bool(ask.setup.method.parts.unlabelled and task.relabels and not task.warming and unlabelled)


def _renew_one(slot: Slot, ground: Ground) -> None:
    setup, device = slot.ask.setup, slot.task.device
    rows = setup.shelf.unlabelled_rows(device)
    kept = map_tensors(lambda t: t[device].to(ground.targets.device), slot.ask.devices)
    hyper: Hyper = map_tensors(lambda t: t[0], hyper_of([slot]))
    for first in range(rows.start, rows.stop, ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, rows.stop)
        nu = ground.targets[slot.ask.first_row + first : slot.ask.first_row + last]
        nu.copy_(
            setup.algorithm.relabel(
                setup.method,
                hyper,
                slot.ask.broadcast,
                kept,
                setup.shelf.x(slice(first, last)),
                nu,
                rows.stop - rows.start,
            )
        )


def _renew_together(slots: Sequence[Slot], ground: Ground) -> None:
    """As many rows of every device at a time as fit; those that have fewer drop out."""
    counts = {id(slot): _rows(slot).stop - _rows(slot).start for slot in slots}
    most_first = sorted(slots, key=lambda slot: -counts[id(slot)])
    step, begun = max(1, ROWS_TOGETHER // len(slots)), 0
    while most_first:
        sizes = np.array([counts[id(slot)] for slot in most_first])
        width = min(step, int(sizes[0]) - begun)
        first = np.array([slot.ask.first_row + _rows(slot).start for slot in most_first])
        place = begun + np.arange(width)
        real = place < sizes[:, None]
        _renew_block(most_first, ground, first[:, None] + np.minimum(place, sizes[:, None] - 1), real)
        begun += width
        most_first = [slot for slot in most_first if counts[id(slot)] > begun]


def _renew_block(slots: Sequence[Slot], ground: Ground, rows: NDArray[np.int64], real: NDArray[np.bool_]) -> None:
    """A block of rows [slots, width], of which only the real ones are written."""
    setup = slots[0].ask.setup
    device, broadcast = states_of(slots, setup.method)
    place = sent(rows, ground.targets.device)
    flat = place.flatten()
    x = taken(ground.raw, ground.source.index_select(0, flat), rows.shape, *scaling_of(slots))
    nu = ground.targets.index_select(0, flat).view(*rows.shape, -1)
    renewed = setup.algorithm.relabel(setup.method, hyper_of(slots), broadcast, device, x, nu, rows.shape[1])
    chosen = sent(np.flatnonzero(real), flat.device)
    ground.targets.index_copy_(0, flat.index_select(0, chosen), renewed.flatten(0, 1).index_select(0, chosen))


def _rows(slot: Slot) -> slice:
    return slot.ask.setup.shelf.unlabelled_rows(slot.task.device)
