"""Which device gets which samples: every function returns each sample's device."""

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError
from fedcpsl.schedule import stream

Owners = NDArray[np.int64]


def iid(samples: int, devices: int, seed: int) -> Owners:
    """Equal shares at random."""
    _enough(samples, devices)
    owner = np.empty(samples, np.int64)
    owner[stream(seed, "split", 0).permutation(samples)] = np.arange(samples) % devices
    return owner


def by_quantity(samples: int, devices: int, concentration: float, seed: int) -> Owners:
    """Shares of unequal size, drawn from a symmetric Dirichlet distribution; every device gets a sample."""
    _enough(samples, devices)
    rng = stream(seed, "split", 0)
    sizes = 1 + _apportion(rng.dirichlet(np.full(devices, concentration)), samples - devices)
    owner = np.empty(samples, np.int64)
    owner[rng.permutation(samples)] = np.repeat(np.arange(devices), sizes)
    return owner


def by_dirichlet(y: NDArray[np.int64], devices: int, concentration: float, seed: int) -> Owners:
    """Each class shared out in proportions from a symmetric Dirichlet distribution; a small one means lopsided.

    A device that drew nothing is given one sample of the device that has most.
    """
    _enough(len(y), devices)
    _need_all_labels(y, "dirichlet")
    rng = stream(seed, "split", 0)
    owner = np.empty(len(y), np.int64)
    for c in np.unique(y):
        own = rng.permutation(np.flatnonzero(y == c))
        sizes = _apportion(rng.dirichlet(np.full(devices, concentration)), len(own))
        owner[own] = np.repeat(np.arange(devices), sizes)
    counts = np.bincount(owner, minlength=devices)
    for poor in np.flatnonzero(counts == 0):
        rich = int(counts.argmax())
        owner[np.flatnonzero(owner == rich)[0]] = poor
        counts[rich] -= 1
    return owner


def by_shards(y: NDArray[np.int64], devices: int, per_device: int, seed: int) -> Owners:
    """Samples sorted by class and cut into equal shards, each device dealt some: it may get one class twice."""
    _enough(len(y), devices * per_device)
    _need_all_labels(y, "shards")
    rng = stream(seed, "split", 0)
    shuffled = rng.permutation(len(y))
    ordered = shuffled[np.argsort(y[shuffled], kind="stable")]
    dealt = rng.permutation(devices * per_device) // per_device
    owner = np.empty(len(y), np.int64)
    for device, shard in zip(dealt, np.array_split(ordered, devices * per_device), strict=True):
        owner[shard] = device
    return owner


def by_classes(y: NDArray[np.int64], devices: int, per_device: int, seed: int) -> Owners:
    """The paper's partition: each class cut into equal pieces, every device given pieces of distinct classes.

    A sample's device is -1 where its class has no piece (fewer pieces than classes).
    """
    _need_all_labels(y, "classes")
    _enough(len(y), devices)
    present = np.unique(y)
    classes = len(present)
    if per_device > classes:
        raise InputError(f"data.classes_per_device = {per_device}: the data has only {classes} classes")
    rng = stream(seed, "split", 0)
    held = _deal(devices, per_device, classes, rng)
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


def _deal(devices: int, per_device: int, classes: int, rng: np.random.Generator) -> NDArray[np.bool_]:
    """Who holds which class, [devices, classes]: distinct within a device, classes equally often."""
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
    """Whole numbers in proportion to `shares` that add up to `total` (largest remainders)."""
    exact = shares * total
    whole = np.floor(exact).astype(np.int64)
    whole[np.argsort(whole - exact, kind="stable")[: total - whole.sum()]] += 1
    return whole


def _enough(samples: int, devices: int) -> None:
    if samples < devices:
        raise InputError(f"data.devices: {samples} samples cannot be shared among {devices}; use fewer devices")


def _need_all_labels(y: NDArray[np.int64], partition: str) -> None:
    if (y < 0).any():
        raise InputError(
            f'data.partition = "{partition}": goes by class, and some samples have none; give "iid" or "quantity"'
        )
