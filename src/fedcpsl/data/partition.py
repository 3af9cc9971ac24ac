"""Which device gets which samples."""

import numpy as np
from numpy.typing import NDArray

from fedcpsl.errors import InputError
from fedcpsl.schedule import stream


def by_classes(y: NDArray[np.int64], devices: int, per_device: int, seed: int) -> NDArray[np.int64]:
    """The paper's partition: each class cut into equal pieces, every device given pieces of distinct classes.

    Returns each sample's device, and -1 where a class has no piece (fewer pieces than classes).
    """
    classes = int(y.max()) + 1
    if per_device > classes:
        raise InputError(f"data.classes_per_device = {per_device}: the data has only {classes} classes")
    rng = stream(seed, "split", 0)
    held = _deal(devices, per_device, classes, rng)
    owner = np.full(len(y), -1, np.int64)
    for c in range(classes):
        holders = np.flatnonzero(held[:, c])
        samples = rng.permutation(np.flatnonzero(y == c))
        if len(samples) < len(holders):
            raise InputError(
                f"data.devices = {devices}: class {c} has {len(samples)} samples for {len(holders)} devices; "
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
