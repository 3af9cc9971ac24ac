"""A server and some devices as real processes on this machine, with TLS and keys, on the digits."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from fedcpsl.deployment.endpoints import free_port, read_status
from fedcpsl.errors import InputError, RunError
from fedcpsl.settings import DEFAULT_ALGORITHM
from fedcpsl.storage import make_folder, write_whole

JOB = """# What the devices of this federation do together.
[federation]
shape = [64]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
shift = 4.88
scale = 6.02
min_devices = {devices}
deadline = 60

[model]
name = "mlp"
hidden = [64]

[algorithm]
name = "{algorithm}"
eta = 0.05

[work]
rounds = {rounds}
active = {active}
"""
LABELLED_SHARE = 0.1
DEMO_TIMEOUT_S = 900.0


def demo_job(devices: int, rounds: int) -> str:
    """Return the job of the default algorithm; a server has no samples to search a step size with."""
    return JOB.format(algorithm=DEFAULT_ALGORITHM, devices=devices, rounds=rounds, active=max(1, devices - 2))


def prepare_demo(folder: Path, devices: int, rounds: int) -> list[str]:
    """Write the job, the keys, and for every device a file with two kinds of digits, few of them labelled."""
    if folder.exists():
        raise InputError(f"{folder}: exists already; give another --folder, or remove it")
    from sklearn.datasets import load_digits

    from fedcpsl.deployment.keys import make_authority, make_device_key, make_operator_key, make_server_certificate

    make_folder(folder)
    names = [f"phone-{i}" for i in range(devices)]
    write_whole(folder / "job.toml", demo_job(devices, rounds))
    keys = folder / "keys"
    make_folder(keys)
    make_authority(keys)
    make_server_certificate(keys, ["127.0.0.1"])
    make_operator_key(keys)
    x, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    for i, name in enumerate(names):
        make_device_key(keys, name)
        mine = np.flatnonzero(np.isin(y, [2 * i % 10, (2 * i + 1) % 10]))
        test = rng.random(len(mine)) < 0.2
        hidden = (rng.random(len(mine)) > LABELLED_SHARE) & ~test
        np.savez(folder / f"{name}.npz", x=x[mine], y=np.where(hidden, -1, y[mine]), test=test)
    return names


def run_demo(folder: Path, names: list[str], show: Callable[[Mapping[str, Any]], None]) -> dict[str, Any]:
    """Start the server and all devices, and return the last status; `show` gets every new one."""
    port = str(free_port())
    with ExitStack() as running:
        server = running.enter_context(
            _process(folder, "serve", "serve", "job.toml", "--keys", "keys", "--folder", "server", "--port", port)
        )
        for name in names:
            joined = ["join", f"127.0.0.1:{port}", "--data", f"{name}.npz", "--name", name, "--keys", "keys"]
            running.enter_context(_process(folder, name, *joined, "--share-accuracy"))
        end, seen = time.monotonic() + DEMO_TIMEOUT_S, 0.0
        while time.monotonic() < end and server.poll() is None:
            if (folder / "server" / "status.json").exists():
                status = read_status(folder / "server")
                if status["updated"] > seen:
                    seen = status["updated"]
                    show(status)
            time.sleep(0.3)
        if server.poll() != 0:
            last_line = (folder / "serve.log").read_text(encoding="utf-8", errors="replace").strip().splitlines()[-1:]
            raise RunError(f"the server failed: {''.join(last_line)}; see {folder / 'serve.log'}")
    return read_status(folder / "server")


@contextmanager
def _process(folder: Path, called: str, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    with (folder / f"{called}.log").open("ab") as log:
        command = [sys.executable, "-m", "fedcpsl", *words]
        process = subprocess.Popen(command, cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
    try:
        yield process
    finally:
        process.terminate()
        process.wait()
