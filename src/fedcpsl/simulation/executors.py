"""Who calls the algorithm's functions: a loop over devices, or all of them side by side. Same answer."""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Broadcast, Device, Hyper, Local, Method, Upload, map_tensors
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
    partner: Tensor | None = None  # [rows, classes]: log h(theta; x) of the group's samples, theta fixed
    partner_rows: Tensor | None = None  # [steps, slots, batch]: where a sample's row is there


LocalSteps = Callable[[Setup, Method, Hyper, Local, Feed, Tensor, Sequence[int]], Local]
LocalRounds = Callable[[Setup, Sequence[DeviceRound], Device, Tensor, Broadcast], Iterator[Finished]]


def local_rounds(
    setup: Setup,
    plan: Sequence[DeviceRound],
    devices: Device,
    targets: Tensor,
    broadcast: Broadcast,
    take_steps: LocalSteps | None = None,
) -> Iterator[Finished]:
    """New pseudo-labels for the planned devices, then their local steps, group by group, in device order."""
    if setup.method.parts.unlabelled:
        for task in plan:
            if task.relabels and not task.warming:
                _relabel(setup, task.device, devices, targets, broadcast)
    size = setup.slots or 1
    for first in range(0, len(plan), size):
        group = plan[first : first + size]
        if setup.slots:
            yield _side_by_side(setup, group, devices, targets, broadcast, take_steps or steps_one_by_one)
        else:
            yield _one(setup, group, devices, targets, broadcast)


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
    algorithm, method = setup.algorithm, setup.method_of(task)
    hyper: Hyper = map_tensors(lambda t: t[0], hyper_of(setup, group))
    device: Device = map_tensors(lambda t: t[task.device].clone(), devices)
    feed = _of_slots(_feed(setup, group, broadcast), 0)
    local = algorithm.begin(method, hyper, broadcast, device)
    for samples in _minibatches(setup, targets, feed, range(task.steps)):
        local = algorithm.step(method, hyper, local, samples)
    steps = torch.tensor(task.steps, device=targets.device)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps)
    device, upload = (map_tensors(lambda t: t[None], state) for state in (device, upload))
    return Finished(list(group), device, upload, local.costs[None] / task.steps)


def _side_by_side(
    setup: Setup,
    group: Sequence[DeviceRound],
    devices: Device,
    targets: Tensor,
    broadcast: Broadcast,
    take_steps: LocalSteps,
) -> Finished:
    """All slots at once, those with most steps first."""
    algorithm, method = setup.algorithm, setup.method_of(group[0])
    longest_first = sorted(group, key=lambda task: -task.steps)
    index = torch.tensor([task.device for task in longest_first], device=targets.device)
    hyper = hyper_of(setup, longest_first)
    device: Device = map_tensors(lambda t: t[index], devices)
    feed = _feed(setup, longest_first, broadcast)
    local = algorithm.begin(method, hyper, broadcast, device)
    local = take_steps(setup, method, hyper, local, feed, targets, [task.steps for task in longest_first])
    steps_done = torch.tensor([task.steps for task in longest_first], device=targets.device)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps_done)
    back = torch.tensor(np.argsort([task.device for task in longest_first]), device=targets.device)
    return Finished(
        list(group),
        map_tensors(lambda t: t[back], device),
        map_tensors(lambda t: t[back], upload),
        (local.costs / steps_done[:, None])[back],
    )


def steps_one_by_one(
    setup: Setup, method: Method, hyper: Hyper, local: Local, feed: Feed, targets: Tensor, counts: Sequence[int]
) -> Local:
    """The local steps of all slots, `counts` largest first: those that are done drop off the end, so none is wasted."""
    done: list[Local] = []
    for steps, slots in stretches(counts):
        done.insert(0, map_tensors(lambda t, n=slots: t[n:], local))
        local = map_tensors(lambda t, n=slots: t[:n], local)
        running: Hyper = map_tensors(lambda t, n=slots: t[:n], hyper)
        fed = _of_slots(feed, slice(0, slots))
        for samples in _minibatches(setup, targets, fed, steps):
            local = setup.algorithm.step(method, running, local, samples)
    together: Local = map_tensors(lambda *pieces: torch.cat(pieces), local, *done)
    return together


def stretches(steps: Sequence[int]) -> Iterator[tuple[range, int]]:
    """Step counts, largest first, as stretches of steps during which the same slots run."""
    begun = 0
    for slots in range(len(steps), 0, -1):
        if steps[slots - 1] > begun:
            yield range(begun, steps[slots - 1]), slots
            begun = steps[slots - 1]


def hyper_of(setup: Setup, group: Sequence[DeviceRound]) -> Hyper:
    """The numbers of some devices, one of each per slot; a device that warms up has no unlabelled terms."""
    index = torch.tensor([task.device for task in group], device=setup.hyper.eta.device)
    hyper: Hyper = map_tensors(lambda t: t[index], setup.hyper)
    if any(task.warming for task in group):
        used = torch.tensor([not task.warming for task in group]).to(hyper.eta)
        hyper = hyper._replace(alpha_p=hyper.alpha_p * used, alpha_r=hyper.alpha_r * used)
    return hyper


def _feed(setup: Setup, group: Sequence[DeviceRound], broadcast: Broadcast) -> Feed:
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
    partner = _partner(setup, group, broadcast) if group[0].personal else None
    within = rows - (shelf.start[[task.device for task in group]] - _first_rows(setup, group))[:, None]
    return Feed(
        on_device(rows),
        on_device(weights[0]),
        on_device(weights[1]),
        None if keys is None else on_device(keys),
        partner,
        None if partner is None else on_device(within.clip(min=0)),
    )


def _first_rows(setup: Setup, group: Sequence[DeviceRound]) -> NDArray[np.int64]:
    """Where each device's samples begin if those of the group are put one after another."""
    counts = [setup.shelf.start[task.device + 1] - setup.shelf.start[task.device] for task in group]
    return np.concatenate([[0], np.cumsum(counts)[:-1]]).astype(np.int64)


def _partner(setup: Setup, group: Sequence[DeviceRound], broadcast: Broadcast) -> Tensor:
    """log h(theta; x) of all samples of the group's devices, in evaluation mode."""
    predict = setup.method.network.log_probabilities
    with torch.no_grad():
        return torch.cat(
            [
                predict(broadcast.theta, some)
                for task in group
                for some in setup.shelf.x[setup.shelf.all_rows(task.device)].split(ROWS_AT_ONCE)
            ]
        )


def _of_slots(feed: Feed, slots: int | slice) -> Feed:
    return Feed(
        feed.rows[:, slots],
        feed.labelled[slots],
        feed.unlabelled[slots],
        None if feed.keys is None else feed.keys[:, slots],
        feed.partner,
        None if feed.partner_rows is None else feed.partner_rows[:, slots],
    )


def _minibatches(setup: Setup, targets: Tensor, feed: Feed, steps: range) -> Iterator[Samples]:
    """The samples of some steps, gathered one step at a time."""
    x, shape = setup.shelf.x, feed.rows.shape[1:]
    all_rows = feed.rows[steps.start : steps.stop].reshape(len(steps), -1).unbind()
    for t, rows in zip(steps, all_rows, strict=True):
        yield Samples(
            x=x.index_select(0, rows).view(*shape, *x.shape[1:]),
            target=targets.index_select(0, rows).view(*shape, -1),
            labelled=feed.labelled,
            unlabelled=feed.unlabelled,
            keys=None if feed.keys is None else feed.keys[t],
            partner=None if feed.partner is None or feed.partner_rows is None else feed.partner[feed.partner_rows[t]],
        )
