"""The split: which device holds each sample, and its role there (labelled, unlabelled, test, validation, server).

Every partition function returns each sample's device.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError
from fedcpsl.schedule import stream

LABELLED, UNLABELLED, TEST, VALIDATION, SERVER = range(5)
ROLES = ("labelled", "unlabelled", "test", "validation", "server")  # the server's: labelled, and no device has them
Owners = NDArray[np.int64]


def iid(samples: int, devices: int, seed: int) -> Owners:
    """Assign samples to devices at random, in equal shares."""
    _check_enough(samples, devices)
    owner = np.empty(samples, np.int64)
    owner[stream(seed, "split", 0).permutation(samples)] = np.arange(samples) % devices
    return owner


def by_quantity(samples: int, devices: int, concentration: float, seed: int) -> Owners:
    """Assign shares of unequal size, drawn from a symmetric Dirichlet distribution; every device gets a sample."""
    _check_enough(samples, devices)
    rng = stream(seed, "split", 0)
    sizes = 1 + _apportion(rng.dirichlet(np.full(devices, concentration)), samples - devices)
    owner = np.empty(samples, np.int64)
    owner[rng.permutation(samples)] = np.repeat(np.arange(devices), sizes)
    return owner


def by_dirichlet(y: NDArray[np.int64], devices: int, concentration: float, seed: int) -> Owners:
    """Split each class in proportions from a symmetric Dirichlet distribution; a small concentration is more skewed.

    A device that drew nothing gets one sample of the device that has most.
    """
    _check_enough(len(y), devices)
    _check_all_labelled(y, "dirichlet")
    rng = stream(seed, "split", 0)
    owner = np.empty(len(y), np.int64)
    for c in np.unique(y):
        own = rng.permutation(np.flatnonzero(y == c))
        sizes = _apportion(rng.dirichlet(np.full(devices, concentration)), len(own))
        owner[own] = np.repeat(np.arange(devices), sizes)
    counts = np.bincount(owner, minlength=devices)
    for empty in np.flatnonzero(counts == 0):
        largest = int(counts.argmax())
        owner[np.flatnonzero(owner == largest)[0]] = empty
        counts[largest] -= 1
    return owner


def by_shards(y: NDArray[np.int64], devices: int, per_device: int, seed: int) -> Owners:
    """Sort samples by class, cut them into equal shards and assign some to each device: it may get one class twice."""
    _check_enough(len(y), devices * per_device)
    _check_all_labelled(y, "shards")
    rng = stream(seed, "split", 0)
    shuffled = rng.permutation(len(y))
    ordered = shuffled[np.argsort(y[shuffled], kind="stable")]
    dealt = rng.permutation(devices * per_device) // per_device
    owner = np.empty(len(y), np.int64)
    for device, shard in zip(dealt, np.array_split(ordered, devices * per_device), strict=True):
        owner[shard] = device
    return owner


def by_classes(y: NDArray[np.int64], devices: int, per_device: int, seed: int) -> Owners:
    """Cut each class into equal pieces and give every device pieces of distinct classes: the paper's partition.

    A sample's device is -1 if its class has no piece (fewer pieces than classes).
    """
    _check_all_labelled(y, "classes")
    _check_enough(len(y), devices)
    present = np.unique(y)
    classes = len(present)
    if per_device > classes:
        raise InputError(f"data.classes_per_device = {per_device}: the data has only {classes} classes")
    rng = stream(seed, "split", 0)
    held = _draw_classes(devices, per_device, classes, rng)
    owner = np.full(len(y), -1, np.int64)
    for c in range(classes):
        holders = np.flatnonzero(held[:, c])
        samples = rng.permutation(np.flatnonzero(y == present[c]))
        if len(samples) < len(holders):
            raise InputError(
                f"data.devices = {devices}: class {present[c]} has {len(samples)} samples for {len(holders)} devices; "
                "use fewer devices"
            )
        if len(holders):
            for device, piece in zip(holders, np.array_split(samples, len(holders)), strict=True):
                owner[piece] = device
    return owner


def like_training(
    y: NDArray[np.int64], owner: NDArray[np.int64], tests: NDArray[np.int64], devices: int, seed: int
) -> Owners:
    """Divide the test samples of each class among devices as its training samples are; -1 where nobody holds it.

    `y` and `owner` are the classes and devices of training samples, `tests` the classes of test samples.
    """
    rng = stream(seed, "split", devices + 1)  # after those of the devices' roles
    found = np.full(len(tests), -1, np.int64)
    for c in np.unique(tests):
        held = np.bincount(owner[(y == c) & (owner >= 0)], minlength=devices)
        if held.any():
            own = rng.permutation(np.flatnonzero(tests == c))
            found[own] = np.repeat(np.arange(devices), _apportion(held / held.sum(), len(own)))
    return found


def _draw_classes(devices: int, per_device: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Draw which device holds which class, [devices, classes]: distinct within a device, classes equally often."""
    pieces = np.full(classes, devices * per_device // classes)
    pieces[rng.permutation(classes)[: devices * per_device % classes]] += 1
    held = np.zeros((devices, classes), bool)
    for left, device in enumerate(rng.permutation(devices)[::-1]):
        remaining = devices - left
        forced = np.flatnonzero(pieces == remaining)
        free = np.flatnonzero((pieces > 0) & (pieces < remaining))
        open_places = per_device - len(forced)
        likely = pieces[free] / max(pieces[free].sum(), 1)
        drawn = rng.choice(free, open_places, replace=False, p=likely) if open_places else free[:0]
        chosen = np.concatenate([forced, drawn])
        held[device, chosen] = True
        pieces[chosen] -= 1
    return held


def _apportion(shares: NDArray[np.float64], total: int) -> NDArray[np.int64]:
    """Return whole numbers in proportion to `shares` that add up to `total` (largest remainders)."""
    exact = shares * total
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    return whole


def _check_enough(samples: int, devices: int) -> None:
    if samples < devices:
        raise InputError(f"data.devices: {samples} samples cannot be shared among {devices}; use fewer devices")


def _check_all_labelled(y: NDArray[np.int64], partition: str) -> None:
    if (y < 0).any():
        raise InputError(
            f'data.partition = "{partition}": uses the classes, and some samples have none; give "iid" or "quantity"'
        )


class Shares(NamedTuple):
    """Which shares of a device's samples with known class get which role; the rest are unlabelled."""

    labelled: float | Sequence[float] = 1.0  # of the training labels; or one share per device
    by: str = "device"  # the share is of each device's labels, or of all labels together ("overall")
    stratified: bool = False
    labelled_devices: int | None = None  # number of devices, drawn by the seed, that have any labels; None: all
    test: float = 0.2
    validation: float = 0.0  # of the known samples without the test set
    server: float = 0.0  # of the known samples without both: the server holds them, with their labels
    foreign_test: float = 0.0  # of the test set: another device is tested on them


def draw_roles(
    y: NDArray[np.int64], device: NDArray[np.int64], test: NDArray[np.bool_] | None, shares: Shares, seed: int
) -> NDArray[np.int8]:
    """Draw each device's test and validation samples, those that the server gets, then which others keep labels."""
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
        given_away, known = np.split(known, [round(shares.server * len(known))])
        role[tested], role[validated], role[given_away] = TEST, VALIDATION, SERVER
        trained.append(known)
    for visible in _visible_samples(trained, y, shares, seed):
        role[visible] = LABELLED
    return role


def exchange_tests(device: NDArray[np.int64], role: NDArray[np.int8], share: float, seed: int) -> NDArray[np.int64]:
    """The device of every sample once each has given a share of its test set to another, drawn by the seed.

    The exchanged samples lie in a ring, device by device, and all move on by the largest device's number of them:
    every device has as many as before, and none its own (unless one device has more than half of all).
    """
    rng, devices = stream(seed, "foreign"), int(device.max()) + 1
    own = [samples[role[samples] == TEST] for samples in _by_device(device, devices)]
    given = [rng.permutation(samples)[: round(share * len(samples))] for samples in own]
    ring = np.concatenate([given[i] for i in rng.permutation(devices)])
    exchanged = device.copy()
    exchanged[ring] = np.roll(device[ring], max(map(len, given)))
    return exchanged


def _visible_samples(
    trained: list[NDArray[np.int64]], y: NDArray[np.int64], shares: Shares, seed: int
) -> list[NDArray[np.int64]]:
    """Return the samples whose labels devices may see."""
    devices = len(trained)
    with_labels = set(range(devices))
    if shares.labelled_devices is not None:
        with_labels = set(stream(seed, "labels", 0).permutation(devices)[: shares.labelled_devices].tolist())
    fractions = [shares.labelled] * devices if isinstance(shares.labelled, float | int) else list(shares.labelled)
    pools = [known if i in with_labels else known[:0] for i, known in enumerate(trained)]
    if shares.by == "overall":
        pools = [stream(seed, "labels", 1).permutation(np.concatenate(pools))]
        fractions = fractions[:1]
    return [
        (_stratified_order(pool, y) if shares.stratified else pool)[: _label_count(fraction, len(pool))]
        for pool, fraction in zip(pools, fractions, strict=True)
    ]


def _stratified_order(pool: NDArray[np.int64], y: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the pool in an order such that every prefix has the classes in about their proportions."""
    position = np.empty(len(pool))
    for c in np.unique(y[pool]):
        own = np.flatnonzero(y[pool] == c)
        position[own] = (np.arange(len(own)) + 0.5) / len(own)
    return pool[np.argsort(position, kind="stable")]


def _by_device(device: NDArray[np.int64], devices: int) -> list[NDArray[np.int64]]:
    """Return the samples of each device, in their original order."""
    order = np.argsort(device, kind="stable")
    return np.split(order, np.bincount(device, minlength=devices).cumsum()[:-1])


def _label_count(fraction: float, count: int) -> int:
    return min(count, max(1, round(fraction * count))) if fraction > 0 else 0
