"""The benchmarks that need no GPU and no peers, with next to no work: that they still run and print their line."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from .test_docs import write_idx

ROOT = Path(__file__).parents[1]
SMALL = {
    "uplink.py": ([], "scaffold as published"),
    "mnist_cpu.py": (["--rounds", "1", "--sequential-rounds", "1"], "times as fast as sequential"),
    "cifar_cpu.py": (["--turns", "1", "--steps", "1"], "times as fast; matmul"),
    "many_devices.py": (
        ["--devices", "100,200", "--stores", "disk", "--rounds", "20", "--steps", "1", "--repeats", "1"],
        "200 devices",
    ),
    "successor_cpu.py": (["--turns", "1", "--steps", "1"], "mnist: a step of fedcpsl2 takes"),
    "disagreeing_devices.py": (["--settings", "one of ten", "--seeds", "1", "--rounds", "1"], "one of ten"),
    "new_data.py": (["--data", "wine, unequal sizes", "--seeds", "1", "--rounds", "1"], "fedcpsl2 is ahead by"),
    "unseen_devices.py": (["--seeds", "1", "--rounds", "1"], "own rounds"),
    "related_gpu.py": (["--runs", "1", "--rounds", "2", "--device", "cpu"], "ratio to fedavg"),
    "before_after.py": (["HEAD", "--turns", "1", "--", "--version"], "whole command: now / before"),
    "large_table.py": (["--rows", "2000", "--features", "3"], "2,000 rows of 3 features"),
}


@pytest.mark.parametrize("script", SMALL)
def test_a_benchmark_runs(script, tmp_path):
    rng = np.random.default_rng(0)
    write_idx(tmp_path / "mnist" / "train-images-idx3-ubyte", rng.integers(0, 256, (400, 28, 28)))
    write_idx(tmp_path / "mnist" / "train-labels-idx1-ubyte", np.arange(400) % 10)
    arguments, said = SMALL[script]
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / script, *arguments],
        cwd=ROOT,
        env=os.environ | {"FEDCPSL_DATA": str(tmp_path), "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stdout
