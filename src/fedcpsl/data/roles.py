"""What each sample is for: a label that the device sees, one that it does not, a test, or validation."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.schedule import stream

LABELLED, UNLABELLED, TEST, VALIDATION = 0, 1, 2, 3
ROLES = ("labelled", "unlabelled", "test", "validation")


class Shares(NamedTuple):
    """How a device's samples with known class are shared out; the rest are unlabelled."""

    labelled: float | Sequence[float] = 1.0  # of the training labels; or one share per device
    by: str = "device"  # each device keeps that share of its labels, or all together keep it of all ("overall")
    stratified: bool = False
    labelled_devices: int | None = None  # how many devices, drawn by the seed, have labels at all; None: all
    test: float = 0.2
    validation: float = 0.0  # of what is left of the known samples after the test set


def draw_roles(
    y: NDArray[np.int64], device: NDArray[np.int64], test: NDArray[np.bool_] | None, shares: Shares, seed: int
) -> NDArray[np.int8]:
    """Each device's test and validation samples, then which of its remaining samples keep their labels."""
    role = np.full(len(y), UNLABELLED, np.int8)
    devices = int(device.max()) + 1
    trained: list[NDArray[np.int64]] = []  # each device's training samples of known class, in random order
    for i, own in enumerate(_by_device(device, devices)):
        order = stream(seed, "split", i + 1).permutation(own)
        known = order[y[order] >= 0]
        if test is None:
            tested, known = np.split(known, [round(shares.test * len(known))])
        else:
            tested, known = own[test[own]], known[~test[known]]
        validated, known = np.split(known, [round(shares.validation * len(known))])
        role[tested], role[validated] = TEST, VALIDATION
        trained.append(known)
    for visible in _visible(trained, y, shares, seed):
        role[visible] = LABELLED
    return role


def _visible(
    trained: list[NDArray[np.int64]], y: NDArray[np.int64], shares: Shares, seed: int
) -> list[NDArray[np.int64]]:
    """The samples whose labels devices may see."""
    devices = len(trained)
    having = set(range(devices))
    if shares.labelled_devices is not None:
        having = set(stream(seed, "labels", 0).permutation(devices)[: shares.labelled_devices].tolist())
    fractions = [shares.labelled] * devices if isinstance(shares.labelled, float | int) else list(shares.labelled)
    pools = [known if i in having else known[:0] for i, known in enumerate(trained)]
    if shares.by == "overall":
        pools = [stream(seed, "labels", 1).permutation(np.concatenate(pools))]
        fractions = fractions[:1]
    return [
        (_class_by_class(pool, y) if shares.stratified else pool)[: _kept(fraction, len(pool))]
        for pool, fraction in zip(pools, fractions, strict=True)
    ]


def _class_by_class(pool: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.int64]:
    """The pool in an order of which every beginning has the classes in about their shares."""
    place = np.empty(len(pool))
    for c in np.unique(y[pool]):
        own = np.flatnonzero(y[pool] == c)
        place[own] = (np.arange(len(own)) + 0.5) / len(own)
    return pool[np.argsort(place, kind="stable")]


def _by_device(device: NDArray[np.int64], devices: int) -> list[NDArray[np.int64]]:
    """The samples of each device, in their own order."""
    order = np.argsort(device, kind="stable")
    return np.split(order, np.bincount(device, minlength=devices).cumsum()[:-1])


def _kept(fraction: float, count: int) -> int:
    return min(count, max(1, round(fraction * count))) if fraction > 0 else 0
