"""Running the fedcpsl command as a user does."""

import os
import subprocess
import sys

PATIENCE_S = 240  # for what may take long on a machine that is busy, and must come
QUICK = [
    *("--rounds", "3", "--devices", "4", "--active", "2", "--set", "model.hidden=[8]"),
    *("--set", "algorithm.name=fedcpsl"),  # a flag --algorithm overrides it
]


def environment():
    return os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100", "PYTHONWARNINGS": "error"}


def fedcpsl(*arguments, cwd, **options):
    return subprocess.run(
        [sys.executable, "-m", "fedcpsl", *map(str, arguments)],
        cwd=cwd,
        env=options.pop("env", environment()),
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
        **options,
    )


def spawn(*arguments, cwd):
    return subprocess.Popen(
        [sys.executable, "-m", "fedcpsl", *map(str, arguments)],
        cwd=cwd,
        env=environment(),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
