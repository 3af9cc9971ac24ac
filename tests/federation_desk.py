"""A federation of real processes on this machine, and the simulator's answer to the same job."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from sklearn.datasets import load_digits

from fedcpsl.data.federation import Federation
from fedcpsl.data.split import LABELLED, TEST, UNLABELLED
from fedcpsl.deployment.endpoints import free_port
from fedcpsl.deployment.job import job_terms, read_job
from fedcpsl.federation.device import load_device_state
from fedcpsl.federation.server_store import load_server_state
from fedcpsl.models import make_model
from fedcpsl.schedule import stream
from fedcpsl.simulation import prepare, simulate

ROOT = Path(__file__).parents[1]

JOB = """
[federation]
shape = [64]
classes = ["0", "1", "2", "3", "4", "5", "6", "7", "8", "9"]
min_devices = {devices}
deadline = {deadline}

[model]
name = "mlp"
hidden = [16]

[algorithm]
name = "fedcpsl"
eta = 0.05

[work]
rounds = {rounds}
active = {active}
unit = "steps"
amount = 5
"""


class Desk:
    """A folder with a job, keys and the data of some devices, and the processes started there."""

    def __init__(
        self,
        folder: Path,
        devices: int,
        rounds: int,
        active: int,
        deadline: float = 60,
        min_devices: int = 0,
        names: Sequence[str] = (),
        host: str = "127.0.0.1",
        settings: str = "",
    ) -> None:
        self.folder, self.names = folder, list(names) or [f"dev{i}" for i in range(devices)]
        self.address = f"127.0.0.1:{free_port()}"
        self.processes: dict[str, subprocess.Popen[str]] = {}
        text = JOB.format(devices=min_devices or devices, rounds=rounds, active=active, deadline=deadline)
        (folder / "job.toml").write_text(text.replace("[model]", f"{settings}\n[model]", 1))
        for i, name in enumerate(self.names):
            np.savez(folder / f"{name}.npz", **samples_of(i, devices))
        made = subprocess.run(
            [*self.fedcpsl, "keys", "keys", "--server", host, "--devices", *self.names],
            cwd=folder,
            capture_output=True,
            text=True,
        )
        assert made.returncode == 0, made.stderr

    @property
    def fedcpsl(self) -> list[str]:
        return [sys.executable, "-m", "fedcpsl"]

    def serve(self, *words: str) -> None:
        port = self.address.rpartition(":")[2]
        self._start("server", "serve", "job.toml", "--keys", "keys", "--folder", "server", "--port", port, *words)

    def join(self, name: str, *, data: str = "", odd: str = "", address: str = "", share: bool = True) -> None:
        """Start a device; an odd one is a process of tests.odd_device."""
        data = data or f"{name}.npz"
        words = ["join", address or self.address, "--data", data, "--name", name, "--keys", "keys"]
        self._start(name, *words, *(["--share-accuracy"] if share else []), odd=odd)

    def _start(self, called: str, *words: str, odd: str = "") -> None:
        program = [sys.executable, "-m", "tests.odd_device", odd] if odd else self.fedcpsl
        with (self.folder / f"{called}.log").open("a") as log:
            self.processes[called] = subprocess.Popen(
                [*program, *words],
                cwd=self.folder,
                stdout=log,
                stderr=log,
                text=True,
                env=os.environ
                | {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])},
            )

    def status(self) -> dict | None:
        path = self.folder / "server" / "status.json"
        return json.loads(path.read_text()) if path.exists() else None

    def wait(self, until, seconds: float) -> dict:
        """The status once it is as wanted."""
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            status = self.status()
            if status and until(status):
                return status
            time.sleep(0.3)
        raise AssertionError(f"not in {seconds} s: {self.status()}\n{self.logs()}")

    def wait_for_word(self, who: str, word: str, seconds: float) -> None:
        """Wait until a process has said something."""
        end = time.monotonic() + seconds
        while word not in (self.folder / f"{who}.log").read_text():
            assert time.monotonic() < end, self.logs()
            time.sleep(0.2)

    def logs(self) -> str:
        files = sorted(self.folder.glob("*.log"))
        return "\n".join(f"--- {file.name}\n{file.read_text()[-3000:]}" for file in files)

    def close(self) -> None:
        for process in self.processes.values():
            process.send_signal(signal.SIGTERM)
        for process in self.processes.values():
            process.wait(120)

    # what is on disk

    def server_state(self):
        terms = job_terms(self.job)
        return load_server_state(self.folder / "server" / "server", terms)

    @property
    def job(self):
        return read_job((self.folder / "job.toml").read_text(), "job.toml")

    def device_state(self, name: str):
        (folder,) = (self.folder / "devices" / name).iterdir()
        return load_device_state(folder, job_terms(self.job))

    def invariant_gap(self) -> float:
        """|c - sum_i w_i c_i|, after every device knows what was counted."""
        state = self.server_state()
        total = sum(m.samples / state.samples * self.device_state(m.name).committed.c for m in state.roster)
        return float((state.server.c - total).abs().max())


def samples_of(i: int, devices: int) -> dict:
    x, y = load_digits(return_X_y=True)
    mine = np.flatnonzero(np.arange(len(y)) % devices == i)[:120]
    rng = np.random.default_rng(i)
    test = rng.random(len(mine)) < 0.2
    hidden = (rng.random(len(mine)) < 0.7) & ~test
    return {"x": (x[mine] / 16).astype(np.float32), "y": np.where(hidden, -1, y[mine]), "test": test}


def simulated(desk: Desk):
    """The simulator's last state, its devices in the order in which the real ones joined."""
    job, roster = desk.job, [member.name for member in desk.server_state().roster]
    parts = [np.load(desk.folder / f"{name}.npz") for name in roster]
    x, y, test = (np.concatenate([p[key] for p in parts]) for key in ("x", "y", "test"))
    device = np.concatenate([np.full(len(p["y"]), i) for i, p in enumerate(parts)])
    role = np.where(test, TEST, np.where(y < 0, UNLABELLED, LABELLED)).astype(np.int8)
    federation = Federation(x, y, device, role, 10, tuple(roster))
    config = job.config
    torch.manual_seed(int(stream(config.run.seed, "init").integers(2**63)))
    model = make_model("mlp", config.model.hidden, job.shape, 10)
    run = replace(config.run, executor="sequential", processes=1, device="cpu")
    *_, last = simulate(prepare(federation, model, config.algorithm, config.work, run))
    return last


def furthest(desk: Desk) -> float:
    """The largest difference between the federation's theta, c, c_i and theta_lc and the simulator's."""
    state, reference = desk.server_state(), simulated(desk)
    pairs = [(state.server.theta, reference.server.theta), (state.server.c, reference.server.c)]
    for i, member in enumerate(state.roster):
        kept, own = desk.device_state(member.name).committed, reference.device(i)
        pairs += [(kept.theta_lc, own.theta_lc), (kept.c, own.c)]
    return max(float((a - b).abs().max()) for a, b in pairs)
