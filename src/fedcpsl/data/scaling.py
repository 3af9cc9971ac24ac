"""Input normalisation: computed from training data, kept with the model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

ROWS_AT_ONCE = 1 << 16
BYTES_AT_ONCE = 3 << 20  # NumPy counts eight times as much, and caches are small


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
    if x.dtype == np.uint8:
        return _of_bytes(x, rows)
    rest = tuple(range(2, x.ndim)) if x.ndim > 2 else ()
    axes = (0, *rest)
    count = len(rows) * int(np.prod([x.shape[a] for a in rest]))
    mean = sum(part.sum(axes) for part in _parts(x, rows)) / count
    spread = mean.reshape(-1, *(1,) * len(rest))
    std = np.sqrt(sum(np.square(part - spread).sum(axes) for part in _parts(x, rows)) / count)
    return Scaling(spread, _or_one(std, mean).reshape(spread.shape))


def _of_bytes(x: NDArray[np.uint8], rows: NDArray[np.int64]) -> Scaling:
    """The same of bytes, from how often each of the 256 values occurs: a fraction of the time."""
    kinds = x.shape[1]
    counts = np.zeros((kinds, 256), np.int64)
    at_once = max(1, BYTES_AT_ONCE // max(1, int(np.prod(x.shape[1:]))))
    for first in range(0, len(rows), at_once):
        part = x[rows[first : first + at_once]].reshape(-1, kinds, int(np.prod(x.shape[2:])))
        for kind in range(kinds):
            counts[kind] += np.bincount(part[:, kind].reshape(-1), minlength=256)
    values, total = np.arange(256.0), counts.sum(1)
    mean = counts @ values / total
    std = np.sqrt((counts * np.square(values - mean[:, None])).sum(1) / total)
    shape = (kinds, *(1,) * (x.ndim - 2))
    return Scaling(mean.reshape(shape), _or_one(std, mean).reshape(shape))


def _or_one(std: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Deviations to divide by; 1 in place of none."""
    return np.where(std <= 1e-12 * np.maximum(np.abs(mean), 1), 1, std)


def _parts(x: NDArray[Any], rows: NDArray[np.int64]) -> Iterator[NDArray[np.float64]]:
    for first in range(0, len(rows), ROWS_AT_ONCE):
        yield x[rows[first : first + ROWS_AT_ONCE]].astype(np.float64)
