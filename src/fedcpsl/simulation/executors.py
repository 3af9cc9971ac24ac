"""Who calls the algorithm's functions: a loop over devices, or all of them side by side. Same answer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Broadcast, Device, Hyper, Local, Upload, map_tensors
from fedcpsl.problem import Samples
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation.setup import Setup

ROWS_AT_ONCE = 4096


class Finished(NamedTuple):
    """What one group of devices leaves behind; every field has a leading dimension, the devices of `group`."""

    group: list[DeviceRound]
    device: Device
    upload: Upload
    costs: Tensor  # [devices, 1 or 2]: mean f_i and F_i over the steps


class Feed(NamedTuple):
    """The minibatches of one group for one round, as row numbers into the shelf, slots last to first finished."""

    rows: Tensor  # [steps, slots, batch]
    labelled: Tensor  # [slots, batch]: the weights of Samples
    unlabelled: Tensor
    keys: Tensor | None


LocalRounds = Callable[[Setup, Sequence[DeviceRound], Device, Tensor, Broadcast], Iterator[Finished]]


def local_rounds(
    setup: Setup, plan: Sequence[DeviceRound], devices: Device, targets: Tensor, broadcast: Broadcast
) -> Iterator[Finished]:
    """New pseudo-labels for every planned device, then its local steps, group by group, in device order."""
    if setup.method.parts.unlabelled:
        for task in plan:
            _relabel(setup, task.device, devices, targets, broadcast)
    size = setup.slots or 1
    for first in range(0, len(plan), size):
        group = plan[first : first + size]
        yield (_side_by_side if setup.slots else _one)(setup, group, devices, targets, broadcast)


def _relabel(setup: Setup, device: int, devices: Device, targets: Tensor, broadcast: Broadcast) -> None:
    """Renew a device's rows of `targets`, in place."""
    rows = setup.shelf.unlabelled_rows(device)
    kept, hyper = (map_tensors(lambda t: t[device], state) for state in (devices, setup.hyper))
    for first in range(rows.start, rows.stop, ROWS_AT_ONCE):
        some = slice(first, min(first + ROWS_AT_ONCE, rows.stop))
        targets[some] = setup.algorithm.relabel(
            setup.method, hyper, broadcast, kept, setup.shelf.x[some], targets[some], rows.stop - rows.start
        )


def _one(
    setup: Setup, group: Sequence[DeviceRound], devices: Device, targets: Tensor, broadcast: Broadcast
) -> Finished:
    (task,) = group
    algorithm, method = setup.algorithm, setup.method
    hyper: Hyper = map_tensors(lambda t: t[task.device], setup.hyper)
    device: Device = map_tensors(lambda t: t[task.device].clone(), devices)
    feed = _of_slots(_feed(setup, group), 0)
    local = algorithm.begin(method, hyper, broadcast, device)
    for t in range(task.steps):
        local = algorithm.step(method, hyper, local, _samples(setup, targets, feed, t))
    steps = torch.tensor(task.steps, device=targets.device)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps)
    add_slot = lambda t: t[None]  # noqa: E731
    return Finished(
        list(group),
        map_tensors(add_slot, device),
        map_tensors(add_slot, upload),
        local.costs[None] / task.steps,
    )


def _side_by_side(
    setup: Setup, group: Sequence[DeviceRound], devices: Device, targets: Tensor, broadcast: Broadcast
) -> Finished:
    """All slots at once, longest first: those that are done drop off the end, so no step is wasted."""
    algorithm, method = setup.algorithm, setup.method
    longest_first = sorted(group, key=lambda task: -task.steps)
    index = torch.tensor([task.device for task in longest_first], device=targets.device)
    hyper: Hyper = map_tensors(lambda t: t[index], setup.hyper)
    device: Device = map_tensors(lambda t: t[index], devices)
    feed = _feed(setup, longest_first)
    local = algorithm.begin(method, hyper, broadcast, device)
    done: list[Local] = []
    for steps, slots in _stretches([task.steps for task in longest_first]):
        done.insert(0, map_tensors(lambda t, n=slots: t[n:], local))
        local = map_tensors(lambda t, n=slots: t[:n], local)
        running: Hyper = map_tensors(lambda t, n=slots: t[:n], hyper)
        fed = _of_slots(feed, slice(0, slots))
        for t in steps:
            local = algorithm.step(method, running, local, _samples(setup, targets, fed, t))
    local = map_tensors(lambda *pieces: torch.cat(pieces), local, *done)
    steps_done = torch.tensor([task.steps for task in longest_first], device=targets.device)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps_done)
    back = torch.tensor(np.argsort([task.device for task in longest_first]), device=targets.device)
    return Finished(
        list(group),
        map_tensors(lambda t: t[back], device),
        map_tensors(lambda t: t[back], upload),
        (local.costs / steps_done[:, None])[back],
    )


def _stretches(steps: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Step counts, largest first, as stretches of steps during which the same slots run."""
    begun = 0
    for slots in range(len(steps), 0, -1):
        if steps[slots - 1] > begun:
            yield range(begun, steps[slots - 1]), slots
            begun = steps[slots - 1]


def _feed(setup: Setup, group: Sequence[DeviceRound]) -> Feed:
    shelf, work = setup.shelf, setup.work
    widths = (work.batch_labelled, work.batch_unlabelled if setup.method.parts.unlabelled else 0)
    longest = max(task.steps for task in group)
    rows = np.zeros((longest, len(group), sum(widths)), np.int64)
    weights = np.zeros((2, len(group), sum(widths)))
    keys = np.zeros(rows.shape, np.int64) if setup.method.network.has_dropout else None
    for slot, task in enumerate(group):
        start = shelf.start[task.device]
        for kind, (drawn, offset) in enumerate(
            [(task.labelled, start), (task.unlabelled, start + shelf.labelled[task.device])]
        ):
            if drawn.shape[1] and widths[kind]:
                columns = slice(kind * widths[0], kind * widths[0] + drawn.shape[1])
                rows[: task.steps, slot, columns] = drawn + offset
                weights[kind, slot, columns] = 1 / drawn.shape[1]
        if keys is not None and task.keys is not None:
            keys[: task.steps, slot] = task.keys

    def on_device(array: NDArray[Any]) -> Tensor:
        return torch.from_numpy(array).to(shelf.x.device)

    weights = weights.astype(np.float64 if shelf.x.dtype == torch.float64 else np.float32)
    return Feed(
        on_device(rows),
        on_device(weights[0]),
        on_device(weights[1]),
        None if keys is None else on_device(keys),
    )


def _of_slots(feed: Feed, slots: int | slice) -> Feed:
    return Feed(
        feed.rows[:, slots],
        feed.labelled[slots],
        feed.unlabelled[slots],
        None if feed.keys is None else feed.keys[:, slots],
    )


def _samples(setup: Setup, targets: Tensor, feed: Feed, t: int) -> Samples:
    rows = feed.rows[t]
    flat = rows.flatten()
    return Samples(
        x=setup.shelf.x.index_select(0, flat).view(*rows.shape, *setup.shelf.x.shape[1:]),
        target=targets.index_select(0, flat).view(*rows.shape, -1),
        labelled=feed.labelled,
        unlabelled=feed.unlabelled,
        keys=None if feed.keys is None else feed.keys[t],
    )
