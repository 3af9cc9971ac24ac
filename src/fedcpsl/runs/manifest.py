"""What a run was made with: versions, hardware, seed, split, executor."""

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

import fedcpsl
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.simulation import Setup
from fedcpsl.simulation.ranks import world


def make_manifest(setup: Setup, federation: Federation | OnDemand, company: Sequence[str]) -> dict[str, Any]:
    """Everything that a reader needs to trust or repeat the run; `company` are the runs that go together."""
    return {
        "fedcpsl": fedcpsl.__version__,
        "git_commit": git_commit(),
        "started": now(),
        "command": ["fedcpsl", *sys.argv[1:]],
        "seed": setup.seed,
        "split_sha256": federation.digest,
        "devices": federation.devices,
        "classes": federation.classes,
        "class_names": list(federation.class_names),
        "input_shape": list(federation.shape),
        "features": list(federation.features),
        "parameters": setup.method.network.initial.numel(),
        "gradients_per_step": setup.method.traits.gradients_per_step,
        "layout": {
            "executor": setup.executor,
            "slots": setup.slots,
            "processes": setup.processes,
            "store": setup.store,
            "ranks": world()[1],
            "threads": torch.get_num_threads(),
            "company": list(company),
        },
        **environment(setup.device_data.where),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """The versions and hardware that decide a result's last bits."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "platform": platform.platform(),
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "device": str(device),
        "device_name": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
    }


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def git_commit() -> str | None:
    """The commit of the fedcpsl checkout in use, if it is one; `-dirty` where files differ from it."""
    here = Path(fedcpsl.__file__).resolve().parent
    try:
        asked = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    tracked = asked.returncode == 0 and "site-packages" not in here.parts
    return asked.stdout.strip() if tracked else None
