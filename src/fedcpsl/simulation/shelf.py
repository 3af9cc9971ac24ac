"""All samples where they are computed with, normalised, each device's in one piece."""

from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.data.federation import Federation
from fedcpsl.data.roles import TEST, UNLABELLED, VALIDATION
from fedcpsl.data.scaling import Scaling

ROWS_AT_ONCE = 8192  # of inputs on their way to where they are used


class Held(NamedTuple):
    """Samples held back from training, device by device."""

    x: Tensor
    y: Tensor
    device: Tensor  # [samples]: who holds each
    start: NDArray[np.int64]  # [devices + 1]

    def rows(self, device: int) -> slice:
        return slice(int(self.start[device]), int(self.start[device + 1]))


class Shelf(NamedTuple):
    """All samples on the compute device, each device's in one piece.

    Training rows lie device by device, labelled before unlabelled; `start` [devices + 1] and `labelled` [devices]
    say where. `truth` is the class of every training row, -1 where nobody knows.
    """

    x: Tensor
    one_hot: Tensor  # [rows, classes]: labels; uniform where unlabelled
    truth: Tensor
    hidden: Tensor  # [rows]: whether the row is unlabelled
    device: Tensor  # [rows]: who holds it
    start: NDArray[np.int64]
    labelled: NDArray[np.int64]
    test: Held
    validation: Held

    def unlabelled_rows(self, device: int) -> slice:
        return slice(int(self.start[device] + self.labelled[device]), int(self.start[device + 1]))

    def all_rows(self, device: int) -> slice:
        return slice(int(self.start[device]), int(self.start[device + 1]))


def shelve(federation: Federation, device: torch.device, dtype: torch.dtype) -> Shelf:
    order, counts = federation.order, federation.counts
    train = order[federation.role[order] <= UNLABELLED]
    truth = torch.from_numpy(federation.y[train]).to(device)
    hidden = torch.from_numpy(federation.role[train] == UNLABELLED).to(device)
    one_hot = torch.nn.functional.one_hot(truth.clamp_min(0), federation.classes).to(dtype)
    one_hot[hidden] = 1 / federation.classes
    return Shelf(
        x=normalised(federation.x, train, federation.scaling, device, dtype),
        one_hot=one_hot,
        truth=truth,
        hidden=hidden,
        device=torch.from_numpy(federation.device[train]).to(device),
        start=np.concatenate([[0], counts[:, :TEST].sum(1).cumsum()]),
        labelled=federation.sizes.labelled,
        test=_hold(federation, TEST, device, dtype),
        validation=_hold(federation, VALIDATION, device, dtype),
    )


def _hold(federation: Federation, role: int, device: torch.device, dtype: torch.dtype) -> Held:
    rows = federation.order[federation.role[federation.order] == role]
    return Held(
        normalised(federation.x, rows, federation.scaling, device, dtype),
        torch.from_numpy(federation.y[rows]).to(device),
        torch.from_numpy(federation.device[rows]).to(device),
        np.concatenate([[0], federation.counts[:, role].cumsum()]),
    )


def normalised(
    x: NDArray[Any], rows: NDArray[np.int64], scaling: Scaling | None, device: torch.device, dtype: torch.dtype
) -> Tensor:
    """Some rows as a network is given them, (x - shift) / scale, on a device; never more than a piece twice."""
    given = torch.empty(len(rows), *x.shape[1:], device=device, dtype=dtype)
    for first in range(0, len(rows), ROWS_AT_ONCE):
        piece = slice(first, first + ROWS_AT_ONCE)
        given[piece] = torch.from_numpy(x[rows[piece]]).to(device)
        if scaling:
            shift, scale = (torch.from_numpy(np.asarray(t)).to(dtype).to(device) for t in scaling)
            given[piece].sub_(shift).div_(scale)
    return given
