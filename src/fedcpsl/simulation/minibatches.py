"""What local steps read: the minibatches of a round, from drawn row numbers, and pseudo-labels renewed before them."""

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Method, Visit, alike, optional
from fedcpsl.device_round import is_relabelled, relabelled
from fedcpsl.problem import Samples
from fedcpsl.schedule import DeviceRound, Draw, draw_shape
from fedcpsl.simulation.device_data import normalise
from fedcpsl.simulation.round_request import RoundRequest, Slot, TrainingData, hyper_of, states_of
from fedcpsl.simulation.store import to_device
from fedcpsl.trees import map_tensors
from fedcpsl.views import Views, viewed, views_for

ROWS_AT_ONCE = 4096
VIEWED_AT_ONCE = 1 << 19  # numbers of inputs: few calls, and a CPU still finds them in its cache


class BatchPlan(NamedTuple):
    """The minibatches of one group of slots for one round."""

    rows: Tensor  # [steps, slots, batch]: where samples are in the training data
    inputs: Tensor  # the same of their inputs
    labelled: Tensor  # [slots, batch]: the weights of Samples
    unlabelled: Tensor
    keys: Tensor | None
    shift: Tensor | None  # [slots, 1, ...]: of inputs that are bytes
    scale: Tensor | None
    partner: Tensor | None = None  # [rows, classes]: log h(theta; x) of the group's samples, theta fixed
    partner_rows: Tensor | None = None  # [steps, slots, batch]: where a sample's row is there
    view_keys: Tensor | None = None  # [steps, slots, batch + unlabelled]
    views: Views | None = None
    extra: "Mapping[str, BatchPlan]" = MappingProxyType({})  # further minibatches of each step, by name
    which: Tensor | None = None  # [steps, slots, batch]: where samples are among the device's
    unlabelled_count: Tensor | None = None  # [slots]: how many unlabelled samples each device has

    def of_slots(self, slots: int | slice) -> "BatchPlan":
        """The minibatches of some of the slots."""

        def by_step(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[:, slots]

        def by_slot(t: Tensor | None) -> Tensor | None:
            return None if t is None else t[slots]

        return BatchPlan(
            self.rows[:, slots],
            self.inputs[:, slots],
            self.labelled[slots],
            self.unlabelled[slots],
            by_step(self.keys),
            by_slot(self.shift),
            by_slot(self.scale),
            self.partner,
            by_step(self.partner_rows),
            by_step(self.view_keys),
            self.views,
            {name: plan.of_slots(slots) for name, plan in self.extra.items()},
            by_step(self.which),
            by_slot(self.unlabelled_count),
        )


def batch_plan(slots: Sequence[Slot], data: TrainingData) -> BatchPlan:
    """What the schedules of some slots draw, row by row."""
    setup = slots[0].request.setup
    widths, where, dtype = setup.terms.batch_widths, setup.data.where, setup.data.dtype
    longest = max(slot.task.steps for slot in slots)
    rows = np.zeros((longest, len(slots), sum(widths)), np.int64)
    weights = np.zeros((2, len(slots), sum(widths)))
    method = setup.terms.method_of(slots[0].task)
    keys = np.zeros(rows.shape, np.int64) if method.network.has_dropout else None
    views = views_for(method.traits.views, tuple(setup.data.inputs.raw.shape[1:]), setup.data.axes)
    view_keys = None if views is None else np.zeros((longest, len(slots), sum(widths) + widths[1]), np.int64)
    which = np.zeros(rows.shape, np.int64) if method.traits.per_sample or method.traits.positions else None
    for i, slot in enumerate(slots):
        task, device_data = slot.task, slot.request.setup.data
        start = slot.request.first_row + device_data.start[task.device]
        rows[:, i] = start
        for kind, (drawn, offset) in enumerate(
            [(task.labelled, start), (task.unlabelled, start + device_data.labelled[task.device])]
        ):
            if drawn.shape[1] and widths[kind]:
                columns = slice(kind * widths[0], kind * widths[0] + drawn.shape[1])
                np.add(drawn, offset, out=rows[: task.steps, i, columns])
                weights[kind, i, columns] = 1 / drawn.shape[1]
                if which is not None:
                    which[: task.steps, i, columns] = drawn
        if keys is not None and task.keys is not None:
            keys[: task.steps, i] = task.keys
        if view_keys is not None and task.views is not None:
            view_keys[: task.steps, i] = task.views

    drawn_rows, labelled = to_device(rows, where), to_device(weights, where).to(dtype)
    shift, scale = scaling_of(slots)
    batches = BatchPlan(
        drawn_rows,
        data.source.index_select(0, drawn_rows.flatten()).view(drawn_rows.shape),
        labelled[0],
        labelled[1],
        None if keys is None else to_device(keys, where),
        shift,
        scale,
        view_keys=None if view_keys is None else to_device(view_keys, where),
        views=views,
        which=None if which is None else to_device(which, where),
        unlabelled_count=_unlabelled_count(slots) if method.traits.per_sample else None,
        extra={draw.name: _extra_plan(draw, slots, data) for draw in method.traits.draws if not draw.per_visit},
    )
    if not slots[0].task.personal or optional(setup.terms.algorithm, "partner") is None:
        return batches
    partner, first = _partners(slots)
    starts = np.array([slot.request.first_row + slot.request.setup.data.start[slot.task.device] for slot in slots])
    return batches._replace(partner=partner, partner_rows=to_device(rows - (starts - first)[:, None], where))


def _unlabelled_count(slots: Sequence[Slot]) -> Tensor:
    """How many unlabelled samples each slot's device has."""
    counts = [int(slot.request.setup.terms.sizes.unlabelled[slot.task.device]) for slot in slots]
    data = slots[0].request.setup.data
    return to_device(counts, data.where).to(data.dtype)


def _extra_plan(draw: Draw, slots: Sequence[Slot], data: TrainingData) -> BatchPlan:
    """What an extra draw gives some slots; that of a visit as of one step."""
    setup = slots[0].request.setup
    where, width = setup.data.where, draw_shape(draw, 1, setup.terms.work)[-1]
    longest = 1 if draw.per_visit else max(slot.task.steps for slot in slots)
    rows, weights = np.zeros((longest, len(slots), width), np.int64), np.zeros((len(slots), width))
    keys = np.zeros(rows.shape, np.int64) if setup.terms.method.network.has_dropout and not draw.per_visit else None
    for i, slot in enumerate(slots):
        task, device_data = slot.task, slot.request.setup.data
        start = slot.request.first_row + device_data.start[task.device]
        rows[:, i] = start
        drawn, count = task.extra[draw.name], 1 if draw.per_visit else task.steps
        columns = drawn.rows.shape[-1]
        if columns:
            offset = start + (0 if draw.of == "labelled" else device_data.labelled[task.device])
            rows[:count, i, :columns] = drawn.rows + offset
            weights[i, :columns] = 1 / columns
        if keys is not None and drawn.keys is not None:
            keys[:count, i] = drawn.keys
    on_device, weight = to_device(rows, where), to_device(weights, where).to(setup.data.dtype)
    nothing = torch.zeros_like(weight)
    return BatchPlan(
        on_device,
        data.source.index_select(0, on_device.flatten()).view(on_device.shape),
        *((weight, nothing) if draw.of == "labelled" else (nothing, weight)),
        None if keys is None else to_device(keys, where),
        *scaling_of(slots),
    )


def drawn_for_visit(
    slots: Sequence[Slot], method: Method, data: TrainingData, which: int | slice = slice(None)
) -> dict[str, Samples | Tensor]:
    """What the draws of a visit gave some slots, or one of them."""
    return {draw.name: drawn_once(draw, slots, data, which) for draw in method.traits.draws if draw.for_device}


def drawn_once(
    draw: Draw, slots: Sequence[Slot], data: TrainingData, which: int | slice = slice(None)
) -> Samples | Tensor:
    """What one draw of a visit gave some slots, or one of them: samples, or the number of a step."""
    if draw.of == "step":
        return to_device([int(slot.task.extra[draw.name].rows) for slot in slots], data.targets.device)[which]
    return next(minibatches(data, _extra_plan(draw, slots, data).of_slots(which), range(1)))


def scaling_of(slots: Sequence[Slot]) -> tuple[Tensor | None, Tensor | None]:
    """Shift and scale of every slot's inputs, [slots, 1, ...], where they are bytes."""
    inputs = [slot.request.setup.data.inputs for slot in slots]
    shifts, scales = (
        [t for t in given if t is not None] for given in zip(*(each[-2:] for each in inputs), strict=True)
    )
    if not shifts:
        return None, None
    rank = inputs[0].raw.dim()

    def by_slot(given: list[Tensor]) -> Tensor:
        return torch.stack([t.reshape((1,) * (rank - t.dim()) + t.shape) for t in given])

    return by_slot(shifts), by_slot(scales)


def _partners(slots: Sequence[Slot]) -> tuple[Tensor, NDArray[np.int64]]:
    """log h(theta; x) of all samples of the slots' devices, in evaluation mode, and where each device's begin."""
    pieces, first, begun = [], [], 0
    with torch.no_grad():
        for slot in slots:
            setup = slot.request.setup
            theta = optional(setup.terms.algorithm, "partner")(slot.request.broadcast_to(slot.task.device))
            first.append(begun)
            for some in setup.data.x(setup.data.all_rows(slot.task.device)).split(ROWS_AT_ONCE):
                pieces.append(setup.terms.method.network.log_probabilities(theta, some))
                begun += len(some)
    return torch.cat(pieces), np.array(first, np.int64)


def minibatches(data: TrainingData, batches: BatchPlan, steps: range) -> Iterator[Samples]:
    """The samples of some steps, gathered one step at a time."""
    shape = batches.rows.shape[1:]
    drawn = batches.rows[steps.start : steps.stop].reshape(len(steps), -1).unbind()
    extra = {name: minibatches(data, plan, steps) for name, plan in batches.extra.items()}
    for t, rows, (x, strong) in zip(steps, drawn, _inputs(data, batches, steps), strict=True):
        partner = (
            None
            if batches.partner is None or batches.partner_rows is None
            else batches.partner[batches.partner_rows[t]]
        )
        yield Samples(
            x=x,
            target=data.targets.index_select(0, rows).view(*shape, -1),
            labelled=batches.labelled,
            unlabelled=batches.unlabelled,
            keys=None if batches.keys is None else batches.keys[t],
            partner=partner,
            strong=strong,
            extra={name: next(others) for name, others in extra.items()},
            which=None if batches.which is None else batches.which[t],
            unlabelled_count=batches.unlabelled_count,
        )


def _inputs(data: TrainingData, batches: BatchPlan, steps: range) -> Iterator[tuple[Tensor, Tensor | None]]:
    """The inputs of each step, and strong views where there are any: views are made for some steps at a time."""
    shape, scaling = batches.inputs.shape[1:], (batches.shift, batches.scale)
    if batches.views is None or batches.view_keys is None:
        for sources in batches.inputs[steps.start : steps.stop].reshape(len(steps), -1).unbind():
            yield taken(data.raw, sources, shape, *scaling), None
        return
    at_once = max(1, VIEWED_AT_ONCE // (shape.numel() * data.raw[0].numel()))
    for begin in range(steps.start, steps.stop, at_once):
        some = slice(begin, min(begin + at_once, steps.stop))
        sources = batches.inputs[some]
        x = taken(data.raw, sources.flatten(), sources.shape, *scaling)
        weak, strong = viewed(batches.views, x, batches.view_keys[some])
        yield from zip(weak.unbind(), strong.unbind(), strict=True)


def taken(raw: Tensor, sources: Tensor, shape: Sequence[int], shift: Tensor | None, scale: Tensor | None) -> Tensor:
    """Inputs [*shape, ...] as a network is given them; shape is that of a batch, before it the slots if any."""
    x = raw.index_select(0, sources).view(*shape, *raw.shape[1:])
    return x if shift is None else normalise(x, shift, scale)


ROWS_OF_VISITS = 1 << 14  # of all devices, at a time


def visits(slots: Sequence[Slot], data: TrainingData) -> Visit:
    """What the devices of some slots hold, side by side; rows that fill gaps do not count."""
    setup = slots[0].request.setup
    where, dtype, widest = setup.data.where, setup.data.dtype, max(1, ROWS_OF_VISITS // len(slots))
    counts = np.array([_rows(slot).stop - _rows(slot).start for slot in slots])
    first = np.array([slot.request.first_row + _rows(slot).start for slot in slots])
    shift, scale = scaling_of(slots)

    def pieces() -> Iterator[tuple[Tensor, Tensor]]:
        for begin in range(0, int(counts.max()), widest):
            column = np.arange(begin, min(begin + widest, int(counts.max())))
            there = column < counts[:, None]
            rows = to_device(np.where(there, first[:, None] + column, first[:, None] - (counts == 0)[:, None]), where)
            sources = data.source.index_select(0, rows.flatten())
            yield taken(data.raw, sources, rows.shape, shift, scale), to_device(there, where).to(dtype)

    def labelled(positions: Tensor) -> tuple[Tensor, Tensor]:
        own = np.array([slot.request.setup.data.labelled[slot.task.device] for slot in slots])
        most, before = to_device(
            np.stack([np.maximum(own - 1, 0), np.minimum(first - own, len(data.source) - 1)]), where
        )
        rows = before[:, None] + torch.minimum(positions, most[:, None])
        sources = data.source.index_select(0, rows.flatten())
        one_hot = data.targets.index_select(0, rows.flatten()).view(*rows.shape, -1)
        return taken(data.raw, sources, rows.shape, shift, scale), one_hot

    labels = torch.stack([slot.request.setup.data.label_counts(slot.task.device) for slot in slots])
    return Visit(labels, to_device(counts, where).to(dtype), pieces, labelled)


ROWS_TOGETHER = 1 << 17  # of many devices side by side on an accelerator


def renew_labels(requests: Sequence[RoundRequest], data: TrainingData) -> None:
    """Renew the rows of all devices that are due, in place."""
    due: dict[Any, list[Slot]] = {}
    for run, request in enumerate(requests):
        method = request.setup.terms.method
        for task in request.plan:
            if is_due(request, task):
                together = request.setup.machine.vectorised and data.targets.is_cuda
                key = (
                    id(method.network.module),
                    request.setup.terms.algorithm,
                    alike(request.setup.terms.algorithm, method),
                )
                due.setdefault(key if together else (run, task.device), []).append(Slot(run, request, task))
    for slots in due.values():
        slots[0].request.setup.terms.method.network.set_precision()
        if len(slots) == 1:
            _renew_one(slots[0], data)
        else:
            _renew_together(slots, data)


def is_due(request: RoundRequest, task: DeviceRound) -> bool:
    """Whether a device renews its pseudo-labels in a round."""
    labels = is_relabelled(request.setup.terms.algorithm, request.setup.terms.method, warming=task.warming)
    return bool(labels and task.relabels and request.setup.terms.sizes.unlabelled[task.device] > 0)


def _renew_one(slot: Slot, data: TrainingData) -> None:
    setup, device, first = slot.request.setup, slot.task.device, slot.request.first_row
    rows = _rows(slot)
    kept = map_tensors(lambda t: t[device].to(data.targets.device), slot.request.devices)
    hyper, sent = map_tensors(lambda t: t[0], hyper_of([slot])), slot.request.broadcast_to(device)
    nu = data.targets[first + rows.start : first + rows.stop]

    def inputs(begin: int, end: int) -> Tensor:
        return setup.data.x(slice(rows.start + begin, rows.start + end))

    nu.copy_(relabelled(setup.terms.algorithm, setup.terms.method, hyper, sent, kept, inputs, nu))


def _renew_together(slots: Sequence[Slot], data: TrainingData) -> None:
    """As many rows of every device at a time as fit; those that have fewer drop out."""
    counts = {id(slot): _rows(slot).stop - _rows(slot).start for slot in slots}
    most_first = sorted(slots, key=lambda slot: -counts[id(slot)])
    step, begun = max(1, ROWS_TOGETHER // len(slots)), 0
    while most_first:
        left = np.array([counts[id(slot)] - begun for slot in most_first])
        first = np.array([slot.request.first_row + _rows(slot).start + begun for slot in most_first])
        _renew_block(most_first, data, first, np.minimum(left, step))
        begun += step
        most_first = [slot for slot in most_first if counts[id(slot)] > begun]


def _renew_block(
    slots: Sequence[Slot], data: TrainingData, first: NDArray[np.int64], counts: NDArray[np.int64]
) -> None:
    """Some rows of every slot, `counts` from `first` on: its own last one again where it has fewer than the others."""
    setup, width = slots[0].request.setup, int(counts.max())
    device, broadcast = states_of(slots)
    all_of_each = to_device([_rows(slot).stop - _rows(slot).start for slot in slots], data.targets.device)
    begin, own, before = to_device(np.stack([first, counts, counts.cumsum() - counts]), data.targets.device)
    along = torch.arange(width, device=begin.device)
    flat = (begin[:, None] + torch.minimum(along, own[:, None] - 1)).flatten()
    shape = (len(slots), width)
    x = taken(data.raw, data.source.index_select(0, flat), shape, *scaling_of(slots))
    nu = data.targets.index_select(0, flat).view(*shape, -1)
    relabel = optional(setup.terms.algorithm, "relabel")
    renewed = relabel(setup.terms.method, hyper_of(slots), broadcast, device, x, nu, all_of_each)
    total = int(counts.sum())  # known here, so that the host need not wait to be told
    slot = torch.repeat_interleave(torch.arange(len(slots), device=begin.device), own, output_size=total)
    real = slot * width + torch.arange(total, device=begin.device) - before[slot]
    data.targets.index_copy_(0, flat.index_select(0, real), renewed.flatten(0, 1).index_select(0, real))


def _rows(slot: Slot) -> slice:
    return slot.request.setup.data.unlabelled_rows(slot.task.device)
