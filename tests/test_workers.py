"""Processes that share a round's devices: they end with the main one, and a dead one is reported."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from fedcpsl import config
from fedcpsl.errors import RunError
from fedcpsl.schedule import DeviceRound
from fedcpsl.simulation import prepare, simulate
from fedcpsl.simulation.round_request import RoundRequest
from fedcpsl.simulation.workers import share_out

from .command import spawn
from .conftest import small_federation, small_model
from .test_runs import RUN, wait_for_rounds

pytestmark = pytest.mark.skipif(
    sys.platform != "linux" or torch.cuda.is_available(), reason="processes are forked on Linux, and not beside a GPU"
)


def children(pid):
    """The live child processes of a process."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def is_alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_work_is_shared_evenly_and_in_device_order():
    empty = np.empty((0, 0), np.int64)
    plans = [[DeviceRound(i, steps, empty, empty) for i, steps in enumerate(counts)] for counts in ([5, 1, 4], [3, 3])]
    shares = share_out([RoundRequest(None, plan, None, None) for plan in plans], 2)
    assert sorted(sum(task.steps for plan in share for task in plan) for share in shares) == [8, 8]
    assert all([t.device for t in plan] == sorted(t.device for t in plan) for share in shares for plan in share)


def two_processes():
    return prepare(
        small_federation(),
        small_model(),
        config.Algorithm(),
        config.Work(active=4),
        config.Run(processes=2, device="cpu"),
    )


def test_a_worker_that_dies_is_reported():
    rounds = simulate(two_processes())
    next(rounds), next(rounds)
    os.kill(children(os.getpid())[0], signal.SIGKILL)
    with pytest.raises(RunError, match="a worker process died"):
        for _ in rounds:
            pass


def test_workers_end_when_the_caller_stops_looking():
    before = children(os.getpid())
    rounds = simulate(two_processes())
    next(rounds), next(rounds)
    assert len(children(os.getpid())) == len(before) + 2
    rounds.close()
    assert children(os.getpid()) == before


def test_no_worker_outlives_a_killed_run(tmp_path):
    process = spawn(*RUN, "--set", "run.processes=2", "--rounds", "5000", "--out", "a", cwd=tmp_path)
    wait_for_rounds(tmp_path / "a", 2, process)
    workers = children(process.pid)
    assert len(workers) == 2
    process.kill()
    process.communicate()
    deadline = time.monotonic() + 20
    while any(is_alive(pid) for pid in workers):
        assert time.monotonic() < deadline
        time.sleep(0.05)
