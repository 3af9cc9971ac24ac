"""A round on several ranks: each runs its share of the devices, then all know what every device left behind.

Every rank holds the state of all devices. After its share, it sends what those devices keep, their uploads, their costs
and their new pseudo-labels to all others, as one buffer of bytes. Every rank then sums the uploads in device order, so
that all ranks, and every repetition with as many of them, come to the same bits.
"""

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from fedcpsl.errors import RunError
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.executors import Finished, all_finite, example_of
from fedcpsl.simulation.minibatches import is_due
from fedcpsl.simulation.ranks import all_numbers, all_values, join, texts
from fedcpsl.simulation.round_request import RoundRequest, TrainingData
from fedcpsl.trees import Tree, leaves, rebuilt

Plans = Sequence[Sequence[DeviceRound]]  # the devices of every run


def exchanged(
    requests: Sequence[RoundRequest],
    shares: Sequence[Plans],
    data: TrainingData,
    work: Callable[[], Sequence[Finished]],
) -> Iterator[Finished]:
    """Do this rank's share of a round and yield everybody's, run by run, in device order."""
    rank = join().rank
    finished, error = _attempted(work)
    _agree(error)
    examples = [_example(request, [plans[run] for plans in shares]) for run, request in enumerate(requests)]
    labels = [_labels(requests, plans, data) for plans in shares]
    rooms = [_rooms(plans, examples, own) for plans, own in zip(shares, labels, strict=True)]
    sent = [t for run, plan in enumerate(shares[rank]) if plan for t in _rows_of(run, plan, finished)] + labels[rank]
    where = data.targets.device
    mine = (
        torch.cat([_as_bytes(t.to(where)) for t in sent]) if sent else torch.zeros(0, dtype=torch.uint8, device=where)
    )
    received = all_values(mine, [sum(map(_byte_count, each)) for each in rooms])
    pieces = [_unpacked(flat, each) for flat, each in zip(received, rooms, strict=True)]
    for other, given in enumerate(pieces):
        if other != rank:
            for here, new in zip(labels[other], given[len(given) - len(labels[other]) :], strict=True):
                here.copy_(new)
    taken = [iter(given) for given in pieces]
    for run, example in enumerate(examples):
        plans = [share[run] for share in shares]
        if example is not None:
            count = len(leaves(example))
            fields = [[next(given) for _ in range(count)] for given, plan in zip(taken, plans, strict=True) if plan]
            yield _together(run, plans, fields, example)


def _attempted(work: Callable[[], Sequence[Finished]]) -> tuple[Sequence[Finished], Exception | None]:
    try:
        return work(), None
    except Exception as error:
        return [], error


def _agree(error: Exception | None) -> None:
    """One rank's error is everybody's."""
    if not any(row[0] for row in all_numbers([int(error is not None)])):
        return
    reasons = texts("" if error is None else str(error) or type(error).__name__)
    if error:
        raise error
    failed = next(rank for rank, reason in enumerate(reasons) if reason)
    raise RunError(f"rank {failed}: {reasons[failed]}")


def _example(request: RoundRequest, plans: Plans) -> Tree | None:
    """What one device of a run leaves behind in this round, by its shapes; None where no device is active."""
    active = [task for plan in plans for task in plan]
    return example_of(request, request.setup.terms.method_of(active[0])) if active else None


def _rows_of(run: int, plan: Sequence[DeviceRound], finished: Sequence[Finished]) -> list[Tensor]:
    """The fields of one run's devices, [devices, ...] each, in the plan's order."""
    own = [each for each in finished if each.run == run]
    place = {task.device: i for i, task in enumerate(task for each in own for task in each.group)}
    order = [place[task.device] for task in plan]
    fields = [leaves((each.device, each.upload, each.costs)) for each in own]
    return [torch.cat(pieces)[order] for pieces in zip(*fields, strict=True)]


def _labels(requests: Sequence[RoundRequest], plans: Plans, data: TrainingData) -> list[Tensor]:
    """The pseudo-labels that some devices renew, as views of the training data."""
    found = []
    for request, plan in zip(requests, plans, strict=True):
        for task in plan:
            if is_due(request, task):
                rows = request.setup.data.unlabelled_rows(task.device)
                found.append(data.targets[request.first_row + rows.start : request.first_row + rows.stop])
    return found


def _rooms(plans: Plans, examples: Sequence[Tree | None], labels: Sequence[Tensor]) -> list[Tensor]:
    """The contents of one rank's buffer, as tensors without memory: the fields of every run, then pseudo-labels."""
    fields = [
        torch.empty(len(plan), *leaf.shape, dtype=leaf.dtype, device="meta")
        for plan, example in zip(plans, examples, strict=True)
        if plan
        for leaf in leaves(example)
    ]
    return fields + [torch.empty(t.shape, dtype=t.dtype, device="meta") for t in labels]


def _byte_count(t: Tensor) -> int:
    return t.numel() * t.element_size()


def _as_bytes(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def _unpacked(flat: Tensor, rooms: Sequence[Tensor]) -> list[Tensor]:
    pieces = flat.split([_byte_count(room) for room in rooms])
    # a copy of its own for each: a piece need not begin where its numbers may
    return [piece.clone().view(room.dtype).view(room.shape) for piece, room in zip(pieces, rooms, strict=True)]


def _together(run: int, plans: Plans, pieces: Sequence[Sequence[Tensor]], example: Tree) -> Finished:
    """One run's devices from all ranks, in device order."""
    tasks = [task for plan in plans for task in plan]
    order = sorted(range(len(tasks)), key=lambda i: tasks[i].device)
    device, upload, costs = rebuilt(example, [torch.cat(parts)[order] for parts in zip(*pieces, strict=True)])
    return Finished(run, [tasks[i] for i in order], device, upload, costs, all_finite(device, upload, costs))
