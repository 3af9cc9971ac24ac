"""All samples where they are computed with, each device's rows in one piece."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.data.federation import Federation
from fedcpsl.data.roles import TEST, UNLABELLED, VALIDATION
from fedcpsl.data.scaling import Scaling

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
    say where. `truth` is the class of every training row, -1 where nobody knows.
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
    )


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
    """The samples of one role; `who` says which of so many devices each of the federation's is, -1: not tested."""
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
