"""What this machine has for our work, what is missing, and the command that mends it."""

import json
import os
import platform
import re
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import torch

import fedcpsl
from fedcpsl.data.datasets import NAMED, whereabouts
from fedcpsl.data.download import PUBLISHED, cache_folder
from fedcpsl.data.sources import data_folders
from fedcpsl.errors import InputError
from fedcpsl.runs.manifest import cpu_name
from fedcpsl.simulation.store import free_bytes

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
OF_EXTRAS = {"flower-superlink": "flower"}


class Part(NamedTuple):
    """Something that may be installed: what it is for, where or in which version it is there, else what mends it."""

    name: str
    purpose: str
    found: str | None
    mend: str | None


def inspect_machine() -> dict[str, Any]:
    """Processor, memory, accelerators, disk and versions."""
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
    """What PyTorch can compute on beside the processor."""
    found: list[dict[str, Any]] = []
    for number in range(torch.cuda.device_count()):
        free, total = torch.cuda.mem_get_info(number)
        name = torch.cuda.get_device_name(number)
        found.append({"device": f"cuda:{number}", "name": name, "memory_bytes": total, "free_bytes": free})
    if torch.backends.mps.is_available():
        found.append({"device": "mps", "name": platform.machine(), "memory_bytes": None, "free_bytes": None})
    return found


def idle_gpu() -> Part | None:
    """A GPU that is there and that PyTorch does not use."""
    seen = shutil.which("nvidia-smi")
    if not seen or torch.cuda.is_available():
        return None
    if torch.version.cuda is None:
        mend = f"{_pip()} install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu126"
        return Part("GPU", "this PyTorch is for processors alone", None, mend)
    return Part("GPU", f"PyTorch is made for CUDA {torch.version.cuda}, and the driver does not answer", None, seen)


def inspect_extras() -> list[Part]:
    """The optional dependencies, as the installed package declares them."""
    found = []
    for extra, needs in _declared().items():
        missing = [need for need in needs if not _satisfied(need)]
        versions = None if missing else ", ".join(f"{name} {metadata.version(name)}" for name in map(_name, needs))
        found.append(Part(extra, EXTRAS.get(extra, ""), versions, _install(extra) if missing else None))
    return found


def inspect_programs() -> list[Part]:
    """Outside programs that some commands start or files mention."""
    wanted = PROGRAMS | ({"cc": COMPILER} if torch.cuda.is_available() else {})
    beside = str(Path(sys.executable).parent)
    found = []
    for name, purpose in wanted.items():
        path = shutil.which(name, path=beside) or shutil.which(name)
        found.append(Part(name, purpose, path, None if path else _way_to(name)))
    return found


def inspect_datasets(data_dir: str = "") -> list[Part]:
    """The data sets by name: where each lies, or how it comes here."""
    folders = data_folders(data_dir)
    parts = []
    for name in NAMED:
        if name == "digits":
            parts.append(Part(name, "1,797 images of 8 x 8", "ships with scikit-learn", None))
            continue
        mend = f"fedcpsl data --dataset {name}"
        size = sum(file.size for file in PUBLISHED.get(name, {}).values())
        purpose = f"downloaded when first used, {size / 1e6:.0f} MB" if size else "to be put there by hand"
        if name == "har":
            mend = "mkdir -p data/har && cp har_windows.npz data/har/ && export FEDCPSL_DATA=$PWD/data"
        try:
            where = whereabouts(name, folders)
        except InputError as error:
            where, purpose = None, str(error)
        parts.append(Part(name, purpose, str(where) if where else None, None if where else mend))
    return [*parts, Part("synthetic", "made on demand", "needs no file", None)]


def able(machine: Mapping[str, Any], extras: list[Part]) -> dict[str, str]:
    """What can be done here, in words."""
    there = {part.name: part.found is not None for part in extras}
    gpus = [a["device"] for a in machine["accelerators"]]
    cores = machine["usable_cores"]
    processor = f"the processor ({cores} core{'s' * (cores > 1)})"
    return {
        "simulations": f"yes, on {' and '.join([*gpus, processor])}",
        "your own arrays and images": "yes",
        "your own tables": _yes(there.get("tables", False), "tables"),
        "federations on real devices": _yes(there.get("federation", False), "federation"),
        "noised updates with an epsilon": _yes(there.get("privacy", False), "privacy"),
    }


def _yes(ready: bool, extra: str) -> str:
    return "yes" if ready else f"no, needs the extra {extra}"


def _declared() -> dict[str, list[str]]:
    """Requirements by extra."""
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
    from packaging.requirements import Requirement  # matplotlib brings it

    wanted = Requirement(requirement)
    try:
        return wanted.specifier.contains(metadata.version(wanted.name), prereleases=True)
    except metadata.PackageNotFoundError:
        return False


def _install(extra: str) -> str:
    """How fedcpsl was installed, with an extra."""
    with suppress(metadata.PackageNotFoundError, ValueError, TypeError):
        text = metadata.distribution("fedcpsl").read_text("direct_url.json")
        origin = json.loads(text or "{}")
        if origin.get("dir_info", {}).get("editable"):
            folder = origin["url"].removeprefix("file://")
            return f"{_pip()} install -e {shlex.quote(f'{folder}[{extra}]')}"
    return f"{_pip()} install 'fedcpsl[{extra}]'"


def _pip() -> str:
    return f"{shlex.quote(sys.executable)} -m pip"


def _way_to(program: str) -> str:
    if program in OF_EXTRAS:
        return _install(OF_EXTRAS[program])
    if program == "torchrun":
        return f"{_pip()} install --force-reinstall torch"
    package = {"cc": "gcc"}.get(program, program)
    managers = {"apt-get": "sudo apt-get install", "dnf": "sudo dnf install", "brew": "brew install"}
    known = next((command for name, command in managers.items() if shutil.which(name)), "install")
    return f"{known} {package}"


def _folders() -> Iterator[Path]:
    """Where files go: here, and into the cache of data sets."""
    yield Path.cwd()
    with suppress(InputError):
        yield cache_folder()


def _free_disk(folder: Path) -> int | None:
    there = next((path for path in (folder, *folder.parents) if path.exists()), None)
    with suppress(OSError):
        return shutil.disk_usage(there or folder).free
    return None
