"""The environment of a run: versions and hardware in its manifest, and what `fedcpsl doctor` checks on this machine."""

import json
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import fedcpsl
from fedcpsl.data.download import PUBLISHED, cache_folder
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import OnDemand
from fedcpsl.data.sources import NAMED, data_folders, download_command, find_dataset
from fedcpsl.errors import InputError
from fedcpsl.runs.edge_files import edge_digests
from fedcpsl.settings import PUBLISHED_TESTS, Data
from fedcpsl.simulation import Setup
from fedcpsl.simulation.ranks import world
from fedcpsl.simulation.store import free_bytes


def make_manifest(setup: Setup, federation: Federation | OnDemand, group: Sequence[str]) -> dict[str, Any]:
    """Return everything that a reader needs to trust or repeat the run; `group` are the runs side by side."""
    return {
        "fedcpsl": fedcpsl.__version__,
        "git_commit": git_commit(),
        "started": now(),
        "command": ["fedcpsl", *sys.argv[1:]],
        "seed": setup.terms.seed,
        "split_sha256": federation.digest,
        **({} if setup.edge is None else {"edge_sha256": edge_digests(setup.edge.settings)}),
        "devices": federation.devices,
        "classes": federation.classes,
        "class_names": list(federation.class_names),
        "input_shape": list(federation.shape),
        "features": list(federation.features),
        "parameters": setup.terms.method.network.initial.numel(),
        "gradients_per_step": setup.terms.method.traits.gradients_per_step,
        "device_bytes": setup.device_bytes,
        "layout": {
            "executor": setup.machine.executor,
            "slots": setup.machine.slots,
            "processes": setup.machine.processes,
            "store": setup.machine.store,
            "ranks": world()[1],
            "threads": torch.get_num_threads(),
            "company": list(group),  # the key since version 0.1
        },
        **environment(setup.data.where),
    }


def environment(device: torch.device) -> dict[str, Any]:
    """Return the versions and hardware that a result's last bits depend on."""
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
    """Return the processor's name."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text(errors="replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


@cache
def git_commit() -> str | None:
    """Return the commit of the fedcpsl checkout in use, or None; with `-dirty` if files differ from it."""
    here = Path(fedcpsl.__file__).resolve().parent
    try:
        described = subprocess.run(
            ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"],
            capture_output=True,
            text=True,
            timeout=10,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    tracked = described.returncode == 0 and "site-packages" not in here.parts
    return described.stdout.strip() if tracked else None


EXTRAS = {
    "tables": "CSV and Parquet files, pandas and polars frames",
    "federation": "federations on real devices: keys, serve, join",
    "flower": "the plain Flower app",
    "onnx": "models as ONNX files",
    "privacy": "the epsilon of noised updates",
}
NOT_FOR_USERS = ("dev", "docs")
PROGRAMS = {
    "git": "the commit in a run's manifest, where fedcpsl is run from a clone",
    "torchrun": "several GPUs or machines",
    "flower-superlink": "the plain Flower app",
    "nginx": "a proxy before a federation's server",
}
COMPILER = "kernels for the GPU"
PROGRAMS_OF_EXTRAS = {"flower-superlink": "flower"}


class Part(NamedTuple):
    """Something that may be installed: its purpose, its path or version, or the command that installs it."""

    name: str
    purpose: str
    found: str | None
    fix: str | None


def inspect_machine() -> dict[str, Any]:
    """Return processor, memory, accelerators, disk and versions."""
    cores = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else None
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") if hasattr(os, "sysconf") else None
    return {
        "fedcpsl": fedcpsl.__version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "platform": platform.platform(),
        "processor": cpu_name(),
        "cores": os.cpu_count(),
        "usable_cores": len(cores),
        "load": load,
        "memory_bytes": pages,
        "free_memory_bytes": free_bytes(torch.device("cpu")),
        "accelerators": accelerators(),
        "disk": {str(folder): _free_disk(folder) for folder in _folders()},
    }


def accelerators() -> list[dict[str, Any]]:
    """Return the devices that PyTorch can use besides the processor."""
    found: list[dict[str, Any]] = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        found.append({"device": f"cuda:{number}", "name": name, "memory_bytes": total, "free_bytes": free})
    return found


def idle_gpu() -> Part | None:
    """Return a GPU that PyTorch cannot use, with the fix; None if there is none."""
    tool = shutil.which("nvidia-smi")
    if not tool or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        fix = f"{_pip()} install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        return Part("GPU", "this PyTorch is for processors only", None, fix)
    return Part("GPU", f"PyTorch is built for CUDA {torch.version.cuda}, and the driver does not respond", None, tool)


def inspect_extras() -> list[Part]:
    """Return the optional dependencies, as the installed package declares them."""
    found = []
    for extra, needs in _declared().items():
        missing = [need for need in needs if not _satisfied(need)]
        versions = None if missing else ", ".join(f"{name} {metadata.version(name)}" for name in map(_name, needs))
        found.append(Part(extra, EXTRAS.get(extra, ""), versions, _install(extra) if missing else None))
    return found


def inspect_programs() -> list[Part]:
    """Return external programs that some commands start or files mention."""
    wanted = PROGRAMS | ({"cc": COMPILER} if torch.cuda.is_available() else {})
    own_folder = str(Path(sys.executable).parent)
    found = []
    for name, purpose in wanted.items():
        path = shutil.which(name, path=own_folder) or shutil.which(name)
        found.append(Part(name, purpose, path, None if path else _install_program(name)))
    return found


def inspect_datasets(wanted: Data | None = None) -> list[Part]:
    """Return the data sets by name: where each is, or how to get it; the wanted one with the tests that it needs."""
    wanted = wanted or Data()
    folders = data_folders(wanted.dir)
    parts = []
    for name in NAMED:
        if name == "digits":
            parts.append(Part(name, "1,797 images of 8 x 8", "ships with scikit-learn", None))
            continue
        data = wanted if name == wanted.dataset else Data(dataset=name)
        fix, tests = download_command(data), data.test == PUBLISHED_TESTS
        size = sum(file.size for kind, file in PUBLISHED.get(name, {}).items() if tests or not kind.startswith("test"))
        purpose = (
            f"downloaded when first used, {size / 1e6:.0f} MB"
            if size
            else "not downloaded: copy it into your data folder"
        )
        if name == "har":
            fix = "mkdir -p data/har && cp har_windows.npz data/har/ && export FEDCPSL_DATA=$PWD/data"
        try:
            where = find_dataset(name, folders, tests=tests)
        except InputError as error:
            where, purpose = None, str(error)
        parts.append(Part(name, purpose, str(where) if where else None, None if where else fix))
    return [*parts, Part("synthetic", "made on demand", "needs no file", None)]


def able(machine: Mapping[str, Any], extras: list[Part]) -> dict[str, str]:
    """Return what can be done on this machine, as text."""
    installed = {part.name: part.found is not None for part in extras}
    gpus = [a["device"] for a in machine["accelerators"]]
    cores = machine["usable_cores"]
    processor = f"the processor ({cores} core{'s' * (cores > 1)})"
    return {
        "simulations": f"yes, on {' and '.join([*gpus, processor])}",
        "your own arrays and images": "yes",
        "your own tables": _yes(installed.get("tables", False), "tables"),
        "federations on real devices": _yes(installed.get("federation", False), "federation"),
        "noised updates with an epsilon": _yes(installed.get("privacy", False), "privacy"),
    }


def _yes(ready: bool, extra: str) -> str:
    return "yes" if ready else f"no, needs the extra {extra}"


def _declared() -> dict[str, list[str]]:
    """Return requirements by extra."""
    found: dict[str, list[str]] = {}
    with suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("fedcpsl") or []:
            extra = re.search(r"extra\s*==\s*['\"]([\w-]+)['\"]", line)
            if extra and extra[1] not in NOT_FOR_USERS:
                found.setdefault(extra[1], []).append(line.partition(";")[0].strip())
    return found


def _name(requirement: str) -> str:
    return re.split(r"[^\w.-]", requirement, maxsplit=1)[0]


def _satisfied(requirement: str) -> bool:
    from packaging.requirements import Requirement

    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _install(extra: str) -> str:
    """Return the command that installs an extra, in the way fedcpsl was installed."""
    with suppress(metadata.PackageNotFoundError, ValueError, TypeError):
        text = metadata.distribution("fedcpsl").read_text("direct_url.json")
        origin = json.loads(text or "{}")
        if origin.get("dir_info", {}).get("editable"):
            folder = origin["url"].removeprefix("file://")
            return f"{_pip()} install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"{_pip()} install 'fedcpsl[{extra}]'"


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip"


def _install_program(program: str) -> str:
    if program in PROGRAMS_OF_EXTRAS:
        return _install(PROGRAMS_OF_EXTRAS[program])
    if program == "torchrun":
        return f"{_pip()} install --force-reinstall torch"
    package = {"cc": "gcc"}.get(program, program)
    managers = {"apt-get": "sudo apt-get install", "dnf": "sudo dnf install", "brew": "brew install"}
    known = next((command for name, command in managers.items() if shutil.which(name)), "install")
    return f"{known} {package}"


def _folders() -> Iterator[Path]:
    """Yield the folders that are written to: the current one, and the cache of data sets."""
    yield Path.cwd()
    with suppress(InputError):
        yield cache_folder()


def _free_disk(folder: Path) -> int | None:
    existing = next((path for path in (folder, *folder.parents) if path.exists()), None)
    with suppress(OSError):
        return shutil.disk_usage(existing or folder).free
    return None
