"""The data set "synthetic": as many devices as you like, each one's samples made from the seed and its number."""

from dataclasses import fields
from functools import partial

import numpy as np
from numpy.typing import NDArray

from fedcpsl import config
from fedcpsl.data.ondemand import OnDemand, from_function
from fedcpsl.errors import InputError
from fedcpsl.schedule import stream

FEATURES, CLASSES, SAMPLES = 64, 10, 30  # samples of each device, tests included
SPREAD, SHIFT, LOPSIDED = 0.4, 0.5, 0.5  # of the classes' means, of a device's shift, and how even its classes are
USED = {"dataset", "dir", "devices", "partition", "labelled", "test", "normalise"}


def synthetic(data: config.Data, seed: int) -> OnDemand:
    """Gaussian classes, shifted and lopsided on each device; `data` says how many are labelled and tests."""
    for setting in fields(data):
        if setting.name not in USED and getattr(data, setting.name) != getattr(config.Data(), setting.name):
            raise InputError(f"data.{setting.name}: means nothing for the data set synthetic; leave it out")
    share = np.asarray(data.labelled, float)
    if share.shape not in ((), (data.devices,)):
        raise InputError(f"data.labelled has {len(share)} values for {data.devices} devices; give one each, or one")
    tests = round(data.test * SAMPLES)
    labelled = np.where(share > 0, np.maximum(1, (share * (SAMPLES - tests)).round()), 0).astype(np.int64)
    means = stream(seed, "split").normal(scale=SPREAD, size=(CLASSES, FEATURES))
    return from_function(
        partial(_make, seed, means),
        devices=data.devices,
        classes=CLASSES,
        labelled=labelled.tolist(),
        unlabelled=(SAMPLES - tests - labelled).tolist(),
        tests=tests,
    )


def _make(seed: int, means: NDArray[np.float64], device: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    draw = stream(seed, "split", device + 1)
    y = draw.choice(CLASSES, SAMPLES, p=draw.dirichlet(np.full(CLASSES, LOPSIDED)))
    x = means[y] + draw.normal(scale=SHIFT, size=FEATURES) + draw.standard_normal((SAMPLES, FEATURES))
    return x.astype(np.float32), y
