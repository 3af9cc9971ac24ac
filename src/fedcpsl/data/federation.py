"""Devices and their samples: labelled, unlabelled, test and validation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.scaling import CHUNK_ROWS, Scaling, fit_scaling
from fedcpsl.data.split import LABELLED, ROLES, SERVER, TEST, UNLABELLED, Shares, draw_roles, exchange_tests
from fedcpsl.errors import InputError, printable
from fedcpsl.schedule import Sizes


class Source(NamedTuple):
    """Samples as they were read, before each has a role."""

    x: NDArray[Any]  # [samples, ...]
    y: NDArray[np.int64]  # -1 where unknown
    class_names: tuple[str, ...]
    device: NDArray[np.int64] | None = (
        None  # 0 ... devices-1, -1 if no device holds it; None before devices are assigned
    )
    names: tuple[str, ...] = ()  # of the devices
    test: NDArray[np.bool_] | None = None
    scaling: Scaling | None = None  # published with the data; None: to be computed from the training samples
    features: tuple[str, ...] = ()  # names of a table's columns; empty if inputs have no names
    axes: tuple[tuple[int, int, int], ...] = ()  # channels of windows that are a sensor's x, y and z
    recording: NDArray[np.int64] | None = None  # that each sample is of; a device's samples are in the order of time


@dataclass(frozen=True)
class Federation:
    """Samples, the device that holds each, and the role each has there.

    `y` is the true class if it is known, also of unlabelled samples (then it is used to score pseudo-labels only), and
    -1 if it is not. A network receives x normalised by `scaling`; None leaves x as it is.
    """

    x: NDArray[Any]  # [samples, ...]
    y: NDArray[np.int64]
    device: NDArray[np.int64]  # 0 ... devices-1
    role: NDArray[np.int8]  # LABELLED, UNLABELLED, TEST, VALIDATION, or SERVER: what it gave to the server
    classes: int
    names: tuple[str, ...]  # of the devices
    scaling: Scaling | None = None
    class_names: tuple[str, ...] = ()
    features: tuple[str, ...] = ()  # names of a table's columns
    axes: tuple[tuple[int, int, int], ...] = ()  # channels of windows that are a sensor's x, y and z
    recording: NDArray[np.int64] | None = None  # that each sample is of; a device's samples are in the order of time

    @staticmethod
    def from_arrays(
        x: Any,
        y: Any,
        device: Any,
        test: Any = None,
        *,
        labelled: float | Sequence[float] = 1.0,
        test_fraction: float = 0.2,
        validation_fraction: float = 0.0,
        stratified: bool = False,
        normalise: bool = True,
        seed: int = 0,
        recording: Any = None,
        server: float = 0.0,
    ) -> "Federation":
        """Make a federation from arrays: `y` is -1 where unlabelled, `device` is the device that holds a sample.

        `test` marks each device's test samples; without it, `test_fraction` of a device's samples with known class
        are set aside. `labelled` < 1 hides some of the labels, as experiments do. `recording` says which recording a
        sample is of, where samples are windows in the order of time. `server` is the share of a device's samples with
        known class that the server holds in its place, for algorithms that learn there.
        """
        shares = Shares(_share(labelled), "device", stratified, None, test_fraction, validation_fraction, server)
        source = array_source(x, y, device, test, recording)
        return federate(source, shares, normalise=normalise, seed=seed)

    @staticmethod
    def from_frame(
        frame: Any,
        *,
        label: str,
        device: str,
        test: str = "",
        labelled: float | Sequence[float] = 1.0,
        test_fraction: float = 0.2,
        validation_fraction: float = 0.0,
        stratified: bool = False,
        normalise: bool = True,
        seed: int = 0,
    ) -> "Federation":
        """Make a federation from a pandas, polars or Arrow table: a row per sample, an empty label where unlabelled.

        `label`, `device` and `test` name columns; all others are features.
        """
        from fedcpsl.data.tables import Columns, frame_source

        shares = Shares(_share(labelled), "device", stratified, None, test_fraction, validation_fraction)
        source = frame_source(frame, Columns(label, device, test))
        return federate(source, shares, normalise=normalise, seed=seed)

    @property
    def devices(self) -> int:
        return len(self.names)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return self.x.shape[1:]

    @cached_property
    def order(self) -> NDArray[np.int64]:
        """Samples sorted by device, then role: each device's samples of one role are contiguous."""
        return np.lexsort((np.arange(len(self.y)), self.role, self.device))

    @property
    def counts(self) -> NDArray[np.int64]:
        """Samples that devices hold, by role, [devices, 4]: labelled, unlabelled, test, validation."""
        return self.role_counts[:, :SERVER]

    @cached_property
    def role_counts(self) -> NDArray[np.int64]:
        """The same with what each gave to the server, [devices, 5]."""
        roles = len(ROLES)
        return np.bincount(self.device * roles + self.role, minlength=roles * self.devices).reshape(-1, roles)

    @property
    def sizes(self) -> Sizes:
        return Sizes(self.counts[:, LABELLED], self.counts[:, UNLABELLED])

    @cached_property
    def recordings(self) -> tuple[NDArray[np.int64], ...] | None:
        """How many of each device's unlabelled samples its recordings have, one after another; None if not known."""
        if self.recording is None:
            return None
        found = []
        rows = self.order[self.role[self.order] == UNLABELLED]
        for own in np.split(self.recording[rows], self.sizes.unlabelled.cumsum()[:-1]):
            changes = np.flatnonzero(np.diff(own)) + 1
            found.append(np.diff(np.concatenate([[0], changes, [len(own)]])))
        return tuple(found)

    @property
    def server_samples(self) -> NDArray[np.int64]:
        """Which samples the server holds."""
        return self.order[self.role[self.order] == SERVER]

    def class_counts(self, role: int) -> NDArray[np.int64]:
        """Samples of one role with known class, by device and class: [devices, classes]."""
        chosen = (self.role == role) & (self.y >= 0)
        cell = self.device[chosen] * self.classes + self.y[chosen]
        return np.bincount(cell, minlength=self.devices * self.classes).reshape(self.devices, -1)

    @cached_property
    def digest(self) -> str:
        """A hash of the samples and the split: equal for equal data on equal devices."""
        return digest_of(self.x, self.y, self.device, self.role)

    def check(self, *, labels_needed: bool = True) -> None:
        """Raise InputError if nothing can be learned from these samples."""
        if labels_needed and not (self.counts[:, LABELLED]).any():
            raise InputError("no device has a labelled training sample: give some y >= 0, or a smaller test share")
        empty = [name for name, c in zip(self.names, self.counts, strict=True) if c[:TEST].sum() == 0]
        if empty:
            raise InputError(f"device {empty[0]!r} has no training samples: give it some or leave it out")


def federate(source: Source, shares: Shares, *, normalise: bool, seed: int, labels_needed: bool = True) -> Federation:
    """Draw the roles of each device's samples, and compute how inputs are normalised."""
    if source.device is None:
        raise InputError("the samples have no devices: name each sample's device")
    _check_shares(shares)
    if not isinstance(shares.labelled, float | int) and len(shares.labelled) != len(source.names):
        raise InputError(
            f"data.labelled has {len(shares.labelled)} values for {len(source.names)} devices; give one each, or one"
        )
    if shares.labelled_devices is not None and shares.labelled_devices > len(source.names):
        raise InputError(
            f"data.labelled_devices = {shares.labelled_devices}: there are only {len(source.names)} devices"
        )
    held = source.device >= 0
    x, y, device, test = source.x, source.y, source.device, source.test
    if not held.all():  # classes that no device holds; else avoid a large copy
        x, y, device, test = x[held], y[held], device[held], None if test is None else test[held]
    source = source._replace(x=x, recording=None if source.recording is None else source.recording[held])
    role = draw_roles(y, device, test, shares, seed)
    if shares.foreign_test:
        device = exchange_tests(device, role, shares.foreign_test, seed)
    return with_roles(source, y, device, role, normalise=normalise, labels_needed=labels_needed)


def _share(labelled: Any) -> float | list[float]:
    """Return a share, or one per device, as Python numbers."""
    return np.asarray(labelled, float).tolist()


def _check_shares(shares: Shares) -> None:
    each = [shares.labelled] if isinstance(shares.labelled, float | int) else list(shares.labelled)
    if not each or not all(0 <= share <= 1 for share in each) or not any(each):
        raise InputError(f"labelled = {shares.labelled}: give a number from 0 to 1, 0 excluded, or one per device")
    for name, share in (("test", shares.test), ("validation", shares.validation), ("server", shares.server)):
        if not 0 <= share < 1:
            raise InputError(f"the {name} share is {share}: give a number from 0 to 1, 1 excluded")


def with_roles(
    source: Source,
    y: NDArray[np.int64],
    device: NDArray[np.int64],
    role: NDArray[np.int8],
    *,
    normalise: bool,
    labels_needed: bool = True,
) -> Federation:
    """Make a federation whose split is given; `source` has the inputs and the names."""
    scaling = source.scaling
    if normalise and scaling is None:
        training = np.flatnonzero(role <= UNLABELLED)
        scaling = fit_scaling(source.x, training) if len(training) else None
    federation = Federation(
        source.x,
        y,
        device,
        role,
        len(source.class_names),
        tuple(map(printable, source.names)),
        scaling if normalise else None,
        tuple(map(printable, source.class_names)),
        tuple(map(printable, source.features)),
        source.axes,
        source.recording,
    )
    federation.check(labels_needed=labels_needed)
    return federation


def parse_axes(text: str, channels: int) -> tuple[tuple[int, int, int], ...]:
    """Channels that form axes, as in "0 1 2, 3 4 5"; InputError where they are not triples of different channels."""
    try:
        found = [tuple(map(int, group.split())) for group in text.split(",")] if text.strip() else []
    except ValueError:
        raise InputError(f'data.axes = "{text}": give channels in threes, such as "0 1 2, 3 4 5"') from None
    named = [channel for group in found for channel in group]
    if any(len(group) != 3 for group in found) or len(set(named)) < len(named):
        raise InputError(f'data.axes = "{text}": give different channels in threes, such as "0 1 2, 3 4 5"')
    if any(not 0 <= channel < channels for channel in named):
        raise InputError(f'data.axes = "{text}": inputs have the channels 0 to {channels - 1}')
    return tuple((a, b, c) for a, b, c in found)


def array_source(
    x: Any, y: Any, device: Any, test: Any = None, recording: Any = None, *, labels_needed: bool = True
) -> Source:
    """Check arrays of samples; `device` may be None if a partition will assign them."""
    x, y = np.asarray(x), np.asarray(y)
    test = None if test is None else np.asarray(test)
    given = np.zeros(len(y) if y.ndim else 0, int) if device is None else np.asarray(device)
    recording = None if recording is None else np.asarray(recording)
    _check_arrays(x, y, given, test, recording)
    if labels_needed and y.max() < 0:
        raise InputError("no sample has a label: every y is -1; give some labels, 0, 1, ...")
    if not x.dtype.isnative or x.dtype.itemsize > 8:
        x = x.astype(np.float64 if x.dtype.itemsize > 8 else x.dtype.newbyteorder("="))
    y = y.astype(np.int64)
    source = Source(
        x,
        y,
        tuple(str(c) for c in range(int(y.max()) + 1)),
        test=None if test is None else test.astype(bool),
        recording=None if recording is None else np.unique(recording, return_inverse=True)[1],
    )
    if device is None:
        return source
    found, owner = np.unique(given, return_inverse=True)
    names, position = natural_order([str(name) for name in found])
    return source._replace(device=position[owner], names=tuple(names))


def natural_order(texts: list[str]) -> tuple[list[str], NDArray[np.int64]]:
    """Return texts in natural order (p2 before p10), and each one's position in it."""
    order = sorted(range(len(texts)), key=lambda i: natural_key(texts[i]))
    position = np.empty(len(texts), np.int64)
    position[order] = np.arange(len(texts))
    return [texts[i] for i in order], position


def natural_key(text: str) -> tuple[Any, ...]:
    """Return a sort key: numbers in a text by their value, negative ones first; equal ones by the text itself."""
    negative = re.fullmatch(r"-(\d+)", text)
    if negative:
        return (0, -int(negative.group(1))), (2, text)
    pieces = re.split(r"(\d+)", text)
    return *((1, piece) if k % 2 == 0 else (0, int(piece)) for k, piece in enumerate(pieces) if piece), (2, text)


def digest_of(*arrays: NDArray[Any]) -> str:
    """Return a hash of arrays: their types, shapes and bytes."""
    h = sha256()
    for array in arrays:
        array = np.ascontiguousarray(array)
        h.update(f"{array.dtype.str}{array.shape}".encode())
        h.update(array.view(np.uint8).reshape(-1).data if array.size else b"")
    return h.hexdigest()


def _check_finite(x: NDArray[Any]) -> None:
    if x.dtype.kind != "f":
        return
    for first in range(0, len(x), CHUNK_ROWS):
        piece = x[first : first + CHUNK_ROWS]
        wrong = ~(np.abs(piece) <= np.finfo(np.float32).max)  # also true of NaN
        if wrong.any():
            row, *rest = np.argwhere(wrong)[0].tolist()
            what = "a value too large for float32" if np.isfinite(piece[wrong][0]) else "a NaN or infinite value"
            raise InputError(f"x has {what} at {[first + row, *rest]}: remove or fill it")


def _check_arrays(
    x: NDArray[Any],
    y: NDArray[Any],
    device: NDArray[Any],
    test: NDArray[Any] | None,
    recording: NDArray[Any] | None = None,
) -> None:
    named: Sequence[tuple[str, NDArray[Any] | None]] = [
        ("x", x),
        ("y", y),
        ("device", device),
        ("test", test),
        ("recording", recording),
    ]
    for name, array in named:
        if array is not None and array.dtype == object:
            raise InputError(f"{name} is an array of Python objects: give it as numbers (device: numbers or text)")
    if x.ndim < 2 or 0 in x.shape[1:]:
        raise InputError(f"x has shape {list(x.shape)}: give one row per sample, [samples, features...]")
    for name, array in named[1:]:
        if array is not None and array.shape != (len(x),):
            raise InputError(f"{name} has shape {list(array.shape)} where x has {len(x)} samples: give one per sample")
    if len(x) == 0:
        raise InputError("the data is empty: x has no samples")
    if x.dtype.kind not in "fiub":
        raise InputError(f"x has dtype {x.dtype}: give numbers")
    _check_finite(x)
    whole = y.dtype.kind == "f" and bool(np.isfinite(y).all()) and np.array_equal(y, np.floor(y))
    if y.dtype.kind not in "iub" and not whole:
        raise InputError(f"y has dtype {y.dtype}: give class numbers 0, 1, ..., and -1 where unlabelled")
    if y.min() < -1:
        raise InputError(f"y has the label {y.min()}: classes are 0, 1, ..., and -1 means unlabelled")
    if y.max() >= 1000 and len(np.unique(y)) < y.max() / 2:
        raise InputError(f"y has the class {y.max()} and few others: number the classes 0, 1, 2, ... without gaps")
    if test is not None and not np.isin(test, (0, 1)).all():
        raise InputError("test must be 0 or 1 (or a boolean) for each sample")
    if test is not None and (y[test.astype(bool)] < 0).any():
        where = int(np.flatnonzero(test.astype(bool) & (y < 0))[0])
        raise InputError(f"test marks sample {where}, whose class is unknown (y = -1): test samples need a label")
