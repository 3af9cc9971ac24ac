"""Samples where they are computed with, each device's rows in one piece: all, or those of a round's devices."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Visit, visit_of
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.split import LABELLED, TEST, UNLABELLED, VALIDATION
from fedcpsl.device_round import all_labelled
from fedcpsl.problem import Samples
from fedcpsl.settings import AUTO
from fedcpsl.simulation.store import Map, put_rows, shared_memory, shared_zeros
from fedcpsl.views import Axes, normalised_axes

ROWS_AT_ONCE = 8192  # of inputs on their way to where they are used
MANY_BYTES = 1 << 29  # of inputs as numbers; from here on bytes stay bytes in a CPU's memory too


class Inputs(NamedTuple):
    """Inputs in the order of their source: ready for a network, or bytes that are normalised when they are taken."""

    raw: Tensor  # [samples, ...]
    made_of: NDArray[Any]
    scaling: Scaling | None
    shift: Tensor | None = None  # given where raw is bytes
    scale: Tensor | None = None

    def take(self, rows: Tensor) -> Tensor:
        """Some of them as a network is given them, [*rows, ...]."""
        taken = self.raw.index_select(0, rows.flatten()).unflatten(0, rows.shape)
        return taken if self.shift is None else normalise(taken, self.shift, self.scale)


def normalise(x: Tensor, shift: Tensor, scale: Tensor | None) -> Tensor:
    """(x - shift) / scale."""
    x = x - shift
    return x if scale is None else x.div_(scale)


class Held(NamedTuple):
    """Samples held back from training, device by device."""

    x: Tensor
    y: Tensor
    device: Tensor  # [samples]: who holds each
    start: NDArray[np.int64]  # [devices + 1]
    bounds: Tensor  # the same on the compute device

    def rows(self, device: int) -> slice:
        return slice(int(self.start[device]), int(self.start[device + 1]))


class DeviceData(NamedTuple):
    """All samples on the compute device.

    Training rows lie device by device, labelled before unlabelled; `start`, `labelled` and `unlabelled` [devices]
    say where. `truth` is the class of every training row, -1 where unknown.
    """

    inputs: Inputs
    source: Tensor  # [rows]: where a training row's input is among the inputs
    one_hot: Tensor  # [rows, classes]: labels; uniform where unlabelled
    truth: Tensor
    hidden: Tensor  # [rows]: whether the row is unlabelled
    device: Tensor  # [rows]: who holds it
    start: NDArray[np.int64]  # [devices] or more
    labelled: NDArray[np.int64]
    unlabelled: NDArray[np.int64]
    test: Held
    validation: Held
    made_of: Federation | None = None  # None: what it holds changes from round to round
    supply: OnDemand | None = None  # makes the samples of active devices; None: all are there
    axes: tuple[Axes, ...] = ()  # of windows, for views
    label_table: Tensor | None = None  # [devices, classes]: label counts, where they stay
    recordings: Sequence[NDArray[np.int64]] | None = None  # lengths of each device's, of its unlabelled samples
    server_source: Tensor | None = None  # where the inputs that the server holds are among the inputs, and their
    server_truth: Tensor | None = None  # classes; None: it holds none

    @property
    def where(self) -> torch.device:
        """What is computed on."""
        return self.one_hot.device

    @property
    def dtype(self) -> torch.dtype:
        return self.one_hot.dtype

    def x(self, rows: slice) -> Tensor:
        """The inputs of some training rows as a network is given them."""
        return self.inputs.take(self.source[rows])

    def label_counts(self, device: int) -> Tensor:
        """How many of a device's labelled samples each class has, [classes]; 0 while its samples are not loaded."""
        if self.label_table is not None:
            return self.label_table[device]
        first = int(self.start[device])
        known = self.truth[first : first + int(self.labelled[device])]
        return torch.nn.functional.one_hot(known, self.one_hot.shape[1]).sum(0).to(self.dtype)

    def labels_of(self, device: int) -> Tensor:
        """The same, also of a device whose samples are made on demand and are not loaded."""
        if self.supply is None:
            return self.label_counts(device)
        return torch.from_numpy(self.supply.label_counts(device)).to(self.where, self.dtype)

    def visit(self, device: int) -> Visit:
        """What a device holds, for an algorithm that looks at all of it."""
        seen = slice(int(self.start[device]), self.unlabelled_rows(device).start)
        return visit_of(
            self.label_counts(device), self.x(self.unlabelled_rows(device)), self.x(seen), self.one_hot[seen]
        )

    def labelled_samples(self, device: int) -> Samples:
        """All labelled samples of a device, also of one whose samples are made on demand."""
        first, count = int(self.start[device]), int(self.labelled[device])
        if self.supply is None:
            return all_labelled(self.x(slice(first, first + count)), self.one_hot[first : first + count])
        made = self.supply.samples(device)
        x, y = (torch.from_numpy(np.asarray(t[:count])).to(self.where) for t in (made.x, made.y))
        return all_labelled(x.to(self.dtype), torch.nn.functional.one_hot(y, self.one_hot.shape[1]).to(self.dtype))

    def server_samples(self, order: NDArray[np.int64]) -> Samples:
        """The samples that the server holds, in an order that was drawn."""
        assert self.server_source is not None
        assert self.server_truth is not None
        rows = torch.from_numpy(order).to(self.where)
        target = torch.nn.functional.one_hot(self.server_truth[rows], self.one_hot.shape[1]).to(self.dtype)
        return all_labelled(self.inputs.take(self.server_source[rows]), target)

    def unlabelled_rows(self, device: int) -> slice:
        first = int(self.start[device] + self.labelled[device])
        return slice(first, first + int(self.unlabelled[device]))

    def all_rows(self, device: int) -> slice:
        return slice(int(self.start[device]), self.unlabelled_rows(device).stop)


def place_samples(
    federation: Federation,
    device: torch.device,
    dtype: torch.dtype,
    beside: DeviceData | None,
    tested: NDArray[np.int64],
) -> DeviceData:
    """A federation's samples on a device; what `beside` holds already is shared with it."""
    all_tested = len(tested) == federation.devices
    if beside and beside.made_of is federation and (beside.where, beside.dtype) == (device, dtype) and all_tested:
        return beside
    order, counts = federation.order, federation.counts
    train = order[federation.role[order] <= UNLABELLED]
    truth = torch.from_numpy(federation.y[train]).to(device)
    hidden = torch.from_numpy(federation.role[train] == UNLABELLED).to(device)
    one_hot = torch.nn.functional.one_hot(truth.clamp_min(0), federation.classes).to(dtype)
    one_hot[hidden] = 1 / federation.classes
    inputs = _inputs(federation, device, dtype, beside.inputs if beside else None)
    who = np.full(federation.devices, -1)
    who[tested] = tested
    at_server = federation.server_samples
    return DeviceData(
        inputs=inputs,
        source=torch.from_numpy(train).to(device),
        one_hot=one_hot,
        truth=truth,
        hidden=hidden,
        device=torch.from_numpy(federation.device[train]).to(device),
        start=np.concatenate([[0], counts[:, :TEST].sum(1).cumsum()]),
        labelled=federation.sizes.labelled,
        unlabelled=federation.sizes.unlabelled,
        test=hold(federation, inputs, TEST, who, federation.devices),
        validation=hold(federation, inputs, VALIDATION, who, federation.devices),
        made_of=federation if all_tested else None,
        axes=axes_of(federation),
        label_table=torch.from_numpy(federation.class_counts(LABELLED)).to(device).to(dtype),
        recordings=federation.recordings,
        server_source=torch.from_numpy(at_server).to(device) if len(at_server) else None,
        server_truth=torch.from_numpy(federation.y[at_server]).to(device) if len(at_server) else None,
    )


def axes_of(federation: Federation) -> tuple[Axes, ...]:
    """The axes of a federation's windows, with how their channels are normalised."""
    if not federation.axes:
        return ()
    shift, scale = federation.scaling or Scaling(np.zeros(()), np.ones(()))
    channels = federation.shape[0]
    each = [np.broadcast_to(np.reshape(t, (-1,)), channels).tolist() for t in (shift, scale)]
    return normalised_axes(federation.axes, *each)


def _inputs(federation: Federation, device: torch.device, dtype: torch.dtype, beside: Inputs | None) -> Inputs:
    """All inputs on a device: bytes on an accelerator, or where they are many; normalised numbers otherwise."""
    x, scaling = federation.x, federation.scaling
    same = beside if beside and beside.made_of is x and beside.raw.device == device else None
    if x.dtype == np.uint8 and (device.type != "cpu" or x.size * dtype.itemsize > MANY_BYTES):
        raw = same.raw if same and same.raw.dtype == torch.uint8 else _tensor(x).to(device)
        shift, scale = scaling or Scaling(np.zeros(()), np.ones(()))
        on_device = (torch.from_numpy(np.asarray(t)).to(dtype).to(device) for t in (shift, scale))
        return Inputs(raw, x, scaling, *on_device)
    if same and same.scaling is scaling and same.raw.dtype == dtype:
        return same
    return Inputs(_normalised(x, scaling, device, dtype), x, scaling)


def hold(federation: Federation, inputs: Inputs, role: int, who: NDArray[np.int64], devices: int) -> Held:
    """The samples of one role; `who` maps the federation's devices to 0 ... devices - 1, -1: not tested."""
    rows = federation.order[federation.role[federation.order] == role]
    rows = rows[who[federation.device[rows]] >= 0]
    device, owner = inputs.raw.device, who[federation.device[rows]]
    start = np.concatenate([[0], np.bincount(owner, minlength=devices).cumsum()])
    return Held(
        inputs.take(torch.from_numpy(rows).to(device)),
        torch.from_numpy(federation.y[rows]).to(device),
        torch.from_numpy(owner).to(device),
        start,
        torch.from_numpy(start).to(device),
    )


def _tensor(x: NDArray[Any]) -> Tensor:
    return torch.from_numpy(x if x.flags.writeable else x.copy())


def _normalised(x: NDArray[Any], scaling: Scaling | None, device: torch.device, dtype: torch.dtype) -> Tensor:
    """Inputs as a network is given them, on a device; never more than a piece twice."""
    given = torch.empty(x.shape, device=device, dtype=dtype)
    for first in range(0, len(x), ROWS_AT_ONCE):
        piece = slice(first, first + ROWS_AT_ONCE)
        given[piece] = _tensor(x[piece]).to(device)
        if scaling:
            shift, scale = (torch.from_numpy(np.asarray(t)).to(dtype).to(device) for t in scaling)
            given[piece].sub_(shift).div_(scale)
    return given


TESTED = 100  # devices, where samples are made on demand


def device_data_of(
    federation: Federation | OnDemand,
    device: torch.device,
    dtype: torch.dtype,
    beside: DeviceData | None,
    active: int,
    evaluate_devices: int | str,
) -> DeviceData:
    """All samples of a federation in memory; or buffers for those of `active` devices, and some devices' tests."""
    count = choose_tested_count(evaluate_devices, federation) or federation.devices
    tested = np.linspace(0, federation.devices - 1, count).round().astype(np.int64)  # evenly spread
    if isinstance(federation, Federation):
        return place_samples(federation, device, dtype, beside, tested)
    return _empty_buffers(federation, device, dtype, active, tested)


def choose_tested_count(given: int | str, federation: Federation | OnDemand) -> int:
    """How many devices are tested; 0: all."""
    count = (TESTED if isinstance(federation, OnDemand) else 0) if given == AUTO else int(given)
    return count if count < federation.devices else 0


def _empty_buffers(
    supply: OnDemand, device: torch.device, dtype: torch.dtype, active: int, tested: NDArray[np.int64]
) -> DeviceData:
    """Buffers that hold the samples of any `active` devices; forked processes share what a round writes into."""
    sizes = supply.sizes
    rows = max(2, int(np.sort(sizes.labelled + sizes.unlabelled)[-active:].sum()))

    def room(*shape: int, of: torch.dtype = dtype) -> Tensor:
        zeros = shared_zeros(shape, of)
        return zeros if device.type == "cpu" else zeros.to(device)

    start = np.frombuffer(shared_memory(8 * supply.devices), np.int64)
    held = supply.federation_of(tested.tolist())
    tests = Inputs(torch.from_numpy(np.asarray(held.x)).to(dtype).to(device), held.x, None)
    return DeviceData(
        inputs=Inputs(room(rows, *supply.shape), np.empty(0), None),
        source=torch.arange(rows, device=device),
        one_hot=room(rows, supply.classes),
        truth=room(rows, of=torch.int64),
        hidden=room(rows, of=torch.bool),
        device=room(rows, of=torch.int64),
        start=start,
        labelled=sizes.labelled,
        unlabelled=sizes.unlabelled,
        test=hold(held, tests, TEST, tested, supply.devices),
        validation=hold(held, tests, VALIDATION, tested, supply.devices),
        supply=supply,
    )


def load_samples(
    device_data: DeviceData,
    supply: OnDemand,
    targets: Tensor,
    nu: Tensor,
    there: NDArray[np.bool_],
    which: Sequence[int],
) -> None:
    """Make the samples of some devices and put them in their place, with the pseudo-labels that they had."""
    if not which:
        return
    samples = [supply.samples(device) for device in which]
    n, m = device_data.labelled[list(which)], device_data.unlabelled[list(which)]
    x = np.concatenate([each.x[:k] for each, k in zip(samples, n + m, strict=True)])
    y = np.concatenate([each.y[:k] for each, k in zip(samples, n + m, strict=True)])
    begin = np.concatenate([[0], (n + m).cumsum()])
    device_data.start[list(which)] = begin[:-1]
    hidden = np.arange(len(y)) - np.repeat(begin[:-1], n + m) >= np.repeat(n, n + m)
    target = np.where(hidden[:, None], 1 / supply.classes, np.eye(supply.classes)[np.maximum(y, 0)])
    filled = slice(0, len(y))
    device_data.hidden[len(y) :] = False
    for buffer, values in (
        (device_data.inputs.raw, x),
        (device_data.truth, y),
        (device_data.hidden, hidden),
        (device_data.device, np.repeat(np.asarray(which), n + m)),
        (targets, target),
    ):
        buffer[filled].copy_(torch.from_numpy(values).to(buffer.dtype))
    known = [device for device in which if there[device]]
    if nu.numel() and known:
        place, real = _places(device_data, known, nu.shape[1], targets.device)
        had = nu[torch.tensor(known, device=nu.device)].to(targets.device)
        targets.index_copy_(0, place, had.flatten(0, 1).index_select(0, real))


def keep_labels(device_data: DeviceData, targets: Tensor, nu: Tensor, behind: Map | None, which: Sequence[int]) -> None:
    """Keep the pseudo-labels of devices whose samples are there until they are active again."""
    if not nu.numel() or not which:
        return
    place, real = _places(device_data, which, nu.shape[1], targets.device)
    kept = targets.new_zeros(len(which), *nu.shape[1:])
    kept.flatten(0, 1).index_copy_(0, real, targets.index_select(0, place))
    put_rows(nu, behind, which, kept)


def _places(device_data: DeviceData, which: Sequence[int], most: int, where: torch.device) -> tuple[Tensor, Tensor]:
    """Where the unlabelled samples of some devices are, and among rows of `most` for each device."""
    chosen = list(which)
    column = np.arange(most)
    real = column < device_data.unlabelled[chosen][:, None]
    place = (device_data.start[chosen] + device_data.labelled[chosen])[:, None] + column
    return torch.from_numpy(place[real]).to(where), torch.from_numpy(np.flatnonzero(real)).to(where)
