"""A round on several ranks: each runs its share of the devices, then all know what every device left behind.

Every rank holds the state of all devices. After its share, it sends what those devices keep, their uploads, their costs
and their new pseudo-labels to all others, as one flat buffer. Every rank then sums the uploads in device order, so that
all ranks, and every repetition with as many of them, come to the same bits.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedcpsl.algorithm import Device, Upload
from fedcpsl.errors import RunError
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.executors import Finished, all_finite
from fedcpsl.simulation.labels import is_due
from fedcpsl.simulation.ranks import all_numbers, all_values, join, texts
from fedcpsl.simulation.slots import Ask, Ground

Plans = Sequence[Sequence[DeviceRound]]  # the devices of every run
FIELDS = len(Device._fields) + 2  # of a device that are sent: what it keeps, its upload and its costs


def exchanged(
    asks: Sequence[Ask], shares: Sequence[Plans], ground: Ground, work: Callable[[], Sequence[Finished]]
) -> Iterator[Finished]:
    """Do this rank's share of a round and yield everybody's, run by run, in device order."""
    rank = join().rank
    finished, error = _attempted(work)
    rows = [_rows_of(run, plan, finished) for run, plan in enumerate([] if error else shares[rank])]
    widths = _agreed(rows, error, len(asks))
    labels = [_labels(asks, plans, ground) for plans in shares]
    shapes = [_shapes(plans, widths, own) for plans, own in zip(shares, labels, strict=True)]
    sent = [field for fields in rows for field in fields or ()] + labels[rank]
    mine = torch.cat([t.to(ground.targets.device).flatten() for t in sent]) if sent else ground.targets.new_zeros(0)
    received = all_values(mine, [sum(a * b for a, b in each) for each in shapes])
    pieces = [_unpacked(flat, each) for flat, each in zip(received, shapes, strict=True)]
    for other, given in enumerate(pieces):
        if other != rank:
            for here, new in zip(labels[other], given[FIELDS * len(asks) :], strict=True):
                here.copy_(new)
    for run in range(len(asks)):
        plans = [share[run] for share in shares]
        if any(plans):
            yield _together(run, plans, [given[run * FIELDS : (run + 1) * FIELDS] for given in pieces])


def _attempted(work: Callable[[], Sequence[Finished]]) -> tuple[Sequence[Finished], Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return [], error


def _rows_of(run: int, plan: Sequence[DeviceRound], finished: Sequence[Finished]) -> list[Tensor] | None:
    """The fields of one run's devices, [devices, width] each, in the plan's order; None where it has none here."""
    own = [each for each in finished if each.run == run]
    if not own:
        return None
    place = {task.device: i for i, task in enumerate(task for each in own for task in each.group)}
    order = [place[task.device] for task in plan]
    fields = [(*each.device, each.upload.delta, each.costs) for each in own]
    return [torch.cat(pieces)[order] for pieces in zip(*fields, strict=True)]


def _agreed(rows: Sequence[list[Tensor] | None], error: Exception | None, runs: int) -> list[list[int]]:
    """The width of every run's fields, as whoever has devices of it knows them; one rank's error is everybody's."""
    known = [width for fields in rows for width in ([t.shape[1] for t in fields] if fields else [0] * FIELDS)]
    told = all_numbers([0, *known] if error is None else [1] + [0] * (FIELDS * runs))
    if any(row[0] for row in told):
        reasons = texts("" if error is None else str(error) or type(error).__name__)
        if error:
            raise error
        failed = next(rank for rank, reason in enumerate(reasons) if reason)
        raise RunError(f"rank {failed}: {reasons[failed]}")
    widest = [max(column) for column in zip(*(row[1:] for row in told), strict=True)]
    return [widest[first : first + FIELDS] for first in range(0, len(widest), FIELDS)]


def _labels(asks: Sequence[Ask], plans: Plans, ground: Ground) -> list[Tensor]:
    """The pseudo-labels that some devices renew, where they lie on the ground."""
    found = []
    for ask, plan in zip(asks, plans, strict=True):
        for task in plan:
            if is_due(ask, task):
                rows = ask.setup.shelf.unlabelled_rows(task.device)
                found.append(ground.targets[ask.first_row + rows.start : ask.first_row + rows.stop])
    return found


def _shapes(plans: Plans, widths: Sequence[Sequence[int]], labels: Sequence[Tensor]) -> list[tuple[int, int]]:
    """What one rank's buffer is made of: the fields of every run, then pseudo-labels."""
    fields = [(len(plan), width) for plan, each in zip(plans, widths, strict=True) for width in each]
    return fields + [(t.shape[0], t.shape[1]) for t in labels]


def _unpacked(flat: Tensor, shapes: Sequence[tuple[int, int]]) -> list[Tensor]:
    pieces = flat.split([rows * columns for rows, columns in shapes])
    return [piece.view(shape) for piece, shape in zip(pieces, shapes, strict=True)]


def _together(run: int, plans: Plans, pieces: Sequence[Sequence[Tensor]]) -> Finished:
    """One run's devices from all ranks, in device order."""
    tasks = [task for plan in plans for task in plan]
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].device)
    fields = [torch.cat(parts)[order] for parts in zip(*pieces, strict=True)]
    *kept, delta, costs = fields
    group = [tasks[i] for i in order]
    steps = torch.tensor([task.steps for task in group], device=costs.device)
    device, upload = Device(*kept), Upload(delta, steps)
    return Finished(run, group, device, upload, costs, all_finite(device, upload, costs))
