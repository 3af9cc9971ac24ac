"""Devices and their samples: labelled, unlabelled and test."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError
from fedcpsl.schedule import Sizes, stream

LABELLED, UNLABELLED, TEST = 0, 1, 2


@dataclass(frozen=True)
class Federation:
    """Samples, the device that holds each, and the role each plays there.

    `y` is the true class where it is known, also of unlabelled samples (then it serves to score pseudo-labels and
    nothing else), and -1 where it is not.
    """

    x: NDArray[Any]  # [samples, ...]
    y: NDArray[np.int64]
    device: NDArray[np.int64]  # 0 ... devices-1
    role: NDArray[np.int8]  # LABELLED, UNLABELLED or TEST
    classes: int
    names: tuple[str, ...]  # of the devices

    @staticmethod
    def from_arrays(
        x: Any,
        y: Any,
        device: Any,
        test: Any = None,
        *,
        labelled: float = 1.0,
        test_fraction: float = 0.2,
        seed: int = 0,
    ) -> "Federation":
        """A federation from arrays: `y` is -1 where unlabelled, `device` says who holds a sample.

        `test` marks each device's test samples; without it, `test_fraction` of a device's samples with known class
        are set aside. `labelled` < 1 hides some of the labels, as experiments do.
        """
        x, y, device = np.asarray(x), np.asarray(y), np.asarray(device)
        test = None if test is None else np.asarray(test)
        _check_arrays(x, y, device, test)
        names, owner = np.unique(device, return_inverse=True)
        y = y.astype(np.int64)
        role = draw_roles(y, owner, None if test is None else test.astype(bool), labelled, test_fraction, seed)
        federation = Federation(
            x, y, owner.astype(np.int64), role, int(y.max()) + 1, tuple(str(name) for name in names)
        )
        federation.check()
        return federation

    @property
    def devices(self) -> int:
        return len(self.names)

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Samples sorted by device, then role: each device's labelled, unlabelled and test samples in one piece."""
        return np.lexsort((np.arange(len(self.y)), self.role, self.device))

    @cached_property
    def counts(self) -> NDArray[np.int64]:
        """Samples by device and role, [devices, 3]."""
        return np.bincount(self.device * 3 + self.role, minlength=3 * self.devices).reshape(-1, 3)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.counts[:, LABELLED], self.counts[:, UNLABELLED])

    def class_counts(self, role: int) -> NDArray[np.int64]:
        """Samples of one role with known class, by device and class: [devices, classes]."""
        chosen = (self.role == role) & (self.y >= 0)
        cell = self.device[chosen] * self.classes + self.y[chosen]
        return np.bincount(cell, minlength=self.devices * self.classes).reshape(self.devices, -1)

    @cached_property
    def digest(self) -> str:
        """A hash of the samples and the split: equal for equal data in equal hands."""
        h = sha256()
        for array in (self.x, self.y, self.device, self.role):
            array = np.ascontiguousarray(array)
            h.update(f"{array.dtype.str}{array.shape}".encode())
            h.update(array.view(np.uint8).reshape(-1).data if array.size else b"")
        return h.hexdigest()

    def check(self) -> None:
        """Refuse what nothing can be learnt from."""
        if not (self.counts[:, LABELLED]).any():
            raise InputError("no device has a labelled training sample: give some y >= 0, or a smaller test share")
        empty = [name for name, c in zip(self.names, self.counts, strict=True) if c[:2].sum() == 0]
        if empty:
            raise InputError(f"device {empty[0]!r} has no training samples: give it some or leave it out")


def draw_roles(
    y: NDArray[np.int64],
    device: NDArray[np.int64],
    test: NDArray[np.bool_] | None,
    labelled: float,
    test_fraction: float,
    seed: int,
) -> NDArray[np.int8]:
    """Each device's test set, then which of its remaining samples keep their labels."""
    role = np.full(len(y), UNLABELLED, np.int8)
    for i in range(int(device.max()) + 1):
        own = np.flatnonzero(device == i)
        order = stream(seed, "split", i + 1).permutation(own)
        known = order[y[order] >= 0]
        if test is None:
            tested, known = np.split(known, [round(test_fraction * len(known))])
        else:
            tested, known = own[test[own]], known[~test[known]]
        role[tested] = TEST
        role[known[: _kept(labelled, len(known))]] = LABELLED
    return role


def _kept(fraction: float, count: int) -> int:
    return min(count, max(1, round(fraction * count))) if fraction > 0 else 0


def _check_arrays(x: NDArray[Any], y: NDArray[Any], device: NDArray[Any], test: NDArray[Any] | None) -> None:
    named: Sequence[tuple[str, NDArray[Any] | None]] = [
        ("x", x),
        ("y", y),
        ("device", device),
        ("test", test),
    ]
    for name, array in named:
        if array is not None and array.dtype == object:
            raise InputError(f"{name} is an array of Python objects: give it as numbers (device: numbers or text)")
    if x.ndim < 2:
        raise InputError(f"x has shape {list(x.shape)}: give one row per sample, [samples, features...]")
    for name, array in named[1:]:
        if array is not None and array.shape != (len(x),):
            raise InputError(f"{name} has shape {list(array.shape)} where x has {len(x)} samples: give one per sample")
    if len(x) == 0:
        raise InputError("the data is empty: x has no samples")
    if x.dtype.kind not in "fiub":
        raise InputError(f"x has dtype {x.dtype}: give numbers")
    if x.dtype.kind == "f" and not np.isfinite(x).all():
        where = np.argwhere(~np.isfinite(x))[0]
        raise InputError(f"x has a NaN or infinite value at {where.tolist()}: remove or fill it")
    if y.dtype.kind not in "iub" and not (y.dtype.kind == "f" and np.array_equal(y, np.floor(y))):
        raise InputError(f"y has dtype {y.dtype}: give class numbers 0, 1, ..., and -1 where unlabelled")
    if y.min() < -1:
        raise InputError(f"y has the label {y.min()}: classes are 0, 1, ..., and -1 means unlabelled")
    if y.max() < 0:
        raise InputError("no sample has a label: every y is -1; give some labels, 0, 1, ...")
    if test is not None and not np.isin(test, (0, 1)).all():
        raise InputError("test must be 0 or 1 (or a boolean) for each sample")
    if test is not None and (y[test.astype(bool)] < 0).any():
        where = int(np.flatnonzero(test.astype(bool) & (y < 0))[0])
        raise InputError(f"test marks sample {where}, whose class is unknown (y = -1): test samples need a label")
