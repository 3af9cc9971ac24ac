"""Samples made by a function, device by device: for more devices than fit in memory."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.data.federation import Federation, digest_of
from fedcpsl.data.scaling import Scaling
from fedcpsl.data.split import LABELLED, TEST, UNLABELLED
from fedcpsl.errors import InputError
from fedcpsl.schedule import Sizes

DIGEST_DEVICES = 8  # devices whose samples are in the digest
Make = Callable[[int], tuple[Any, Any]]


class DeviceSamples(NamedTuple):
    """One device's samples, checked: labelled ones first, then unlabelled ones, then tests."""

    x: NDArray[Any]
    y: NDArray[np.int64]


@dataclass(frozen=True)
class OnDemand:
    """Devices whose samples are made when they are needed, and not kept; their numbers are known before."""

    make: Make
    sizes: Sizes
    tests: NDArray[np.int64]
    classes: int
    names: tuple[str, ...]
    class_names: tuple[str, ...] = ()
    scaling: Scaling | None = None  # the function normalises its inputs itself
    features: tuple[str, ...] = ()  # its inputs have no names

    @property
    def devices(self) -> int:
        return len(self.names)

    @cached_property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input, from the first device's."""
        x = np.asarray(_pair(self.make(0), self.names[0])[0])
        if x.ndim < 2 or 0 in x.shape:
            raise InputError(
                f"the samples of device {self.names[0]!r}: x has shape {list(x.shape)}: give one row per sample, "
                "[samples, features...]"
            )
        return x.shape[1:]

    @cached_property
    def digest(self) -> str:
        """A hash of the sizes and of a few devices' samples: equal for equal functions, with high probability."""
        some = np.unique(np.linspace(0, self.devices - 1, DIGEST_DEVICES).round().astype(np.int64))
        samples = [array for device in some.tolist() for array in self.samples(device)]
        return digest_of(*self.sizes, self.tests, *samples)

    def label_counts(self, device: int) -> NDArray[np.int64]:
        """Return how many labelled samples of each class a device has; made once."""
        if device not in self._label_counts:
            labels = self.samples(device).y[: int(self.sizes.labelled[device])]
            self._label_counts[device] = np.bincount(labels, minlength=self.classes)
        return self._label_counts[device]

    @cached_property
    def _label_counts(self) -> dict[int, NDArray[np.int64]]:
        return {}

    def samples(self, device: int) -> DeviceSamples:
        """Make one device's samples and check them."""
        name, shape = self.names[device], self.shape
        n, m, tests = int(self.sizes.labelled[device]), int(self.sizes.unlabelled[device]), int(self.tests[device])
        x, y = (np.asarray(array) for array in _pair(self.make(device), name))
        problem = _problem(x, y, n, m, tests, shape, self.classes)
        if problem:
            raise InputError(f"the samples of device {name!r}: {problem}")
        return DeviceSamples(x, y.astype(np.int64))

    def federation_of(self, devices: Iterable[int]) -> Federation:
        """Return a federation of some of the devices, with their samples in memory."""
        chosen = list(devices)
        samples = [self.samples(device) for device in chosen]
        roles = [
            np.repeat(np.array([LABELLED, UNLABELLED, TEST], np.int8), counts)
            for counts in zip(*(each[chosen].tolist() for each in (*self.sizes, self.tests)), strict=True)
        ]
        return Federation(
            np.concatenate([x for x, _ in samples]),
            np.concatenate([y for _, y in samples]),
            np.repeat(np.arange(len(chosen)), [len(y) for _, y in samples]),
            np.concatenate(roles),
            self.classes,
            tuple(self.names[device] for device in chosen),
            self.scaling,
            self.class_names,
        )


def from_function(
    make: Make,
    *,
    devices: int,
    classes: int,
    labelled: int | Sequence[int],
    unlabelled: int | Sequence[int],
    tests: int | Sequence[int] = 0,
    names: Sequence[str] | None = None,
) -> OnDemand:
    """Make a federation whose samples are made when a device is active: `make(device)` returns `(x, y)`.

    `labelled`, `unlabelled` and `tests` are the numbers of samples of each device, one for all or one per device;
    `x` [samples, ...] and `y` hold the labelled ones first, then the unlabelled ones, then the tests. `y` is the class,
    0 ... `classes` - 1; that of an unlabelled sample may be -1, else it is used to score pseudo-labels.
    `make` must return the same samples whenever it is called for the same device.
    """
    if devices < 1 or classes < 2:
        raise InputError(f"devices = {devices}, classes = {classes}: give at least 1 device and 2 classes")
    counts = []
    for what, given in (("labelled", labelled), ("unlabelled", unlabelled), ("tests", tests)):
        count = np.asarray(given)
        if count.dtype.kind not in "iu" or count.shape not in ((), (devices,)) or count.min(initial=0) < 0:
            raise InputError(f"{what}: give a whole number of at least 0, or one for each of the {devices} devices")
        counts.append(np.broadcast_to(count, devices).astype(np.int64))
    if names is not None and len(names) != devices:
        raise InputError(f"names has {len(names)} names for {devices} devices; give one each")
    empty = np.flatnonzero(counts[0] + counts[1] == 0)
    called = tuple(map(str, range(devices) if names is None else names))
    if len(empty):
        raise InputError(f"device {called[empty[0]]!r} has no training samples: give it some or leave it out")
    if not counts[0].any():
        raise InputError("no device has a labelled training sample: give some device labelled > 0")
    classes_by_name = tuple(map(str, range(classes)))
    federation = OnDemand(make, Sizes(counts[0], counts[1]), counts[2], classes, called, classes_by_name)
    federation.samples(0)
    return federation


def _pair(made: Any, name: str) -> tuple[Any, Any]:
    if not isinstance(made, tuple | list) or len(made) != 2:
        raise InputError(f"the samples of device {name!r}: the function returned {type(made).__name__}; return (x, y)")
    return made[0], made[1]


def _problem(
    x: NDArray[Any], y: NDArray[Any], n: int, m: int, tests: int, shape: tuple[int, ...], classes: int
) -> str | None:
    """Return what is wrong with one device's samples, or None."""
    count = n + m + tests
    if x.shape != (count, *shape) or y.shape != (count,):
        return (
            f"x has shape {list(x.shape)} and y {list(y.shape)}; give {[count, *shape]} and {[count]}, {n} labelled, "
            f"{m} unlabelled and {tests} test samples in this order"
        )
    if x.dtype.kind not in "fiub" or not np.isfinite(x).all():
        return f"x has a NaN or infinite value, or its dtype ({x.dtype}) is not of numbers; give finite numbers"
    if y.dtype.kind not in "iu" or y.min(initial=0) < -1 or y.max(initial=0) >= classes:
        return f"y has dtype {y.dtype} and values beyond 0 ... {classes - 1}; give whole class numbers, -1 for unknown"
    if (y[:n] < 0).any() or (y[n + m :] < 0).any():
        return "y is -1 for a labelled or a test sample; give its class, only unlabelled samples have none"
    return None
