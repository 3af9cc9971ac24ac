"""One thread (a suite of tiny models runs many times faster so) and small federations to test with."""

import os
import signal
import sys

import numpy as np
import pytest
import torch
from hypothesis import settings
from torch import nn

from fedcpsl.data.federation import Federation
from fedcpsl.data.split import LABELLED, SERVER, TEST, UNLABELLED, VALIDATION

torch.set_num_threads(1)
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # with nohup or in the background; processes would inherit it
    signal.signal(signal.SIGINT, signal.default_int_handler)
if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
if "CI" not in os.environ:  # there Hypothesis has a profile of its own, without a deadline too
    settings.register_profile("unhurried", deadline=None)
    settings.load_profile("unhurried")
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
needs_fork = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="processes are forked on Linux, and not beside a GPU"
)


def small_federation(
    sizes=((3, 5), (1, 7), (4, 2), (0, 6), (5, 0)), features=6, classes=3, tests=4, seed=0, at_server=0, validation=0
):
    """Devices with (labelled, unlabelled) samples as given: unequal, some without labels or without the rest."""
    rng = np.random.default_rng(seed)
    device, role = [], []
    for i, (n, m) in enumerate(sizes):
        device += [i] * (n + m + tests + validation)
        role += [LABELLED] * n + [UNLABELLED] * m + [TEST] * tests + [VALIDATION] * validation
    device += [0] * at_server
    role += [SERVER] * at_server
    count = len(device)
    y = rng.integers(0, classes, count)
    x = rng.normal(size=(count, features)) + np.eye(classes, features)[y]
    names = tuple(f"phone-{i}" for i in range(len(sizes)))
    given = x, y, np.array(device), np.array(role, np.int8), classes, names
    return Federation(*given, recording=np.arange(count) // 9)


def small_model(features=6, classes=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, classes))


@pytest.fixture
def federation():
    return small_federation()


@pytest.fixture
def model():
    return small_model()


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache for downloads, and no mirror."""
    monkeypatch.setenv("FEDCPSL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("no_proxy", "*")
    monkeypatch.delenv("FEDCPSL_MIRROR", raising=False)
    return tmp_path / "cache"
