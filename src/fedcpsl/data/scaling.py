"""Input normalisation: computed from training data, saved with the model."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

CHUNK_ROWS = 1 << 16
CHUNK_BYTES = 3 << 20  # NumPy counts eight times as much, and caches are small


class Scaling(NamedTuple):
    """A network receives (x - shift) / scale. Both have a shape that broadcasts with one input."""

    shift: NDArray[np.float64]
    scale: NDArray[np.float64]


def fixed_scaling(shift: float, scale: float) -> Scaling:
    """Return the same scaling for every feature, as published with a data set."""
    return Scaling(np.asarray(shift, np.float64), np.asarray(scale, np.float64))


def fit_scaling(x: NDArray[Any], rows: NDArray[np.int64]) -> Scaling:
    """Compute mean and standard deviation over some rows: by channel for images and windows, by feature otherwise.

    A constant feature is shifted and not scaled.
    """
    if x.dtype == np.uint8:
        return _fit_bytes(x, rows)
    rest = tuple(range(2, x.ndim)) if x.ndim > 2 else ()
    axes = (0, *rest)
    count = len(rows) * int(np.prod([x.shape[a] for a in rest]))
    mean = sum(part.sum(axes) for part in _parts(x, rows)) / count
    spread = mean.reshape(-1, *(1,) * len(rest))
    std = np.sqrt(sum(np.square(part - spread).sum(axes) for part in _parts(x, rows)) / count)
    return Scaling(spread, _or_one(std, mean).reshape(spread.shape))


def _fit_bytes(x: NDArray[np.uint8], rows: NDArray[np.int64]) -> Scaling:
    """Compute the scaling of bytes from a histogram of their 256 values, which is much faster."""
    kinds = x.shape[1]
    counts = np.zeros((kinds, 256), np.int64)
    chunk = max(1, CHUNK_BYTES // max(1, int(np.prod(x.shape[1:]))))
    for first in range(0, len(rows), chunk):
        part = x[rows[first : first + chunk]].reshape(-1, kinds, int(np.prod(x.shape[2:])))
        for kind in range(kinds):
            counts[kind] += np.bincount(part[:, kind].reshape(-1), minlength=256)
    values, total = np.arange(256.0), counts.sum(1)
    mean = counts @ values / total
    std = np.sqrt((counts * np.square(values - mean[:, None])).sum(1) / total)
    shape = (kinds, *(1,) * (x.ndim - 2))
    return Scaling(mean.reshape(shape), _or_one(std, mean).reshape(shape))


def _or_one(std: NDArray[np.float64], mean: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the deviations to divide by; 1 where a feature is constant."""
    return np.where(std <= 1e-12 * np.maximum(np.abs(mean), 1), 1, std)


def _parts(x: NDArray[Any], rows: NDArray[np.int64]) -> Iterator[NDArray[np.float64]]:
    for first in range(0, len(rows), CHUNK_ROWS):
        yield x[rows[first : first + CHUNK_ROWS]].astype(np.float64)
