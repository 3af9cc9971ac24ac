"""Input normalisation: computed from training data, kept with the model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROWS_AT_ONCE = 1 << 16


class Scaling(NamedTuple):
    """A network is given (x - shift) / scale. Both have a shape that goes with one input."""

    shift: NDArray[np.float64]
    scale: NDArray[np.float64]


def fixed_scaling(shift: float, scale: float) -> Scaling:
    """The same numbers for every feature, as published with a data set."""
    return Scaling(np.asarray(shift, np.float64), np.asarray(scale, np.float64))


def fit_scaling(x: NDArray[Any], rows: NDArray[np.int64]) -> Scaling:
    """Mean and standard deviation over some rows: by channel for images and windows, by feature otherwise.

    What never varies is shifted and not scaled.
    """
    rest = tuple(range(2, x.ndim)) if x.ndim > 2 else ()
    axes = (0, *rest)
    count = len(rows) * int(np.prod([x.shape[a] for a in rest]))
    mean = sum(part.sum(axes) for part in _parts(x, rows)) / count
    spread = mean.reshape(-1, *(1,) * len(rest))
    std = np.sqrt(sum(np.square(part - spread).sum(axes) for part in _parts(x, rows)) / count)
    std[std <= 1e-12 * np.maximum(np.abs(mean), 1)] = 1
    return Scaling(spread, std.reshape(spread.shape))


def _parts(x: NDArray[Any], rows: NDArray[np.int64]) -> Iterator[NDArray[np.float64]]:
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield x[rows[first : first + ROWS_AT_ONCE]].astype(np.float64)
