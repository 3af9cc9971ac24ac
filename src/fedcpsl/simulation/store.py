"""Where device states live: on the accelerator, in host memory or on disk, what of them is there, and the way there."""

import mmap
import os
import sys
import tempfile
import weakref
from collections.abc import Sequence
from errno import ENOSPC
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.errors import RunError
from fedcpsl.settings import AUTO
from fedcpsl.trees import Tree, leaves, map_tensors

SHARE = 0.5  # of the accelerator's free memory that all states may take
HOST_SHARE = 0.25  # the same of the host's: what is on disk is kept in free memory as well, and can be given up
NO_RESERVE = 0x4000  # Linux: memory counts once it is used


def to_device(values: Any, where: torch.device) -> Tensor:
    """A list or array as a tensor on a device.

    To a GPU it goes from pinned memory: else the host would wait until the GPU has done all that it was given before.
    """
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else tensor.to(where)


class Map(NamedTuple):
    """The file behind a sparse tensor on disk."""

    memory: mmap.mmap  # what the tensor reads
    file: int  # its descriptor, closed with the memory

    def write(self, rows: Sequence[int], values: Tensor) -> None:
        """Write rows through the file: unlike writing to mapped memory, a full disk is then an error like others."""
        content = values.detach().cpu().contiguous()
        size = content[0].numel() * content.element_size()
        try:
            for row, value in zip(rows, content.view(len(rows), -1).numpy(), strict=True):
                if os.pwrite(self.file, value.data, row * size) < size:
                    raise OSError(ENOSPC, os.strerror(ENOSPC))
        except OSError as error:
            raise RunError(f"the states of devices cannot be stored: {error.strerror}; free some disk space") from error

    def release(self) -> None:
        """Release the memory of what was read; the system caches as much of the file as it sees fit."""
        if hasattr(self.memory, "madvise"):
            self.memory.madvise(mmap.MADV_DONTNEED)


class Sparse(NamedTuple):
    """What belongs to device states of which only some rows are there: those of devices that have been active."""

    there: NDArray[np.bool_]  # [devices]
    starts: dict[int, Tree]  # what the others keep, by the round in which they joined
    nu: Tensor  # [devices, most unlabelled samples, classes]: of samples made on demand; else empty
    maps: tuple[Map | None, ...]  # behind every field of the states, and behind nu; None: not on disk

    def start(self, joined: int) -> Tree:
        """What a device keeps that has not been active; one that joins later is as if it had been there."""
        return self.starts.get(joined, self.starts[0])

    def bytes_on_disk(self) -> int:
        """What the states take on disk now."""
        return sum(512 * os.fstat(each.file).st_blocks for each in self.maps if each is not None)

    def release(self) -> None:
        """Release the memory of what was read from disk."""
        for each in self.maps:
            if each is not None:
                each.release()


def free_bytes(device: torch.device) -> int:
    """Memory that is free now."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    info = Path("/proc/meminfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("MemAvailable"):
                return int(line.split()[1]) * 1024
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2 if hasattr(os, "sysconf") else 4 << 30


def choose_store(name: str, needed: int, device: torch.device, *, on_demand: bool) -> str:
    """auto: the fastest place that all states fit into, also once every device has been active."""
    if name != AUTO:
        return name
    if not on_demand and needed <= SHARE * free_bytes(device):
        return "accelerator"
    return "host" if needed <= HOST_SHARE * free_bytes(torch.device("cpu")) else "disk"


def sparse_states(
    one: Tree, devices: int, nu_shape: Sequence[int], store: str, folder: Path | None, like: Tensor
) -> tuple[Tree, Sparse]:
    """Room for the states of all devices, none of them there yet; `one` is what each starts with, nu is `like`."""
    maps: list[Map | None] = []

    def room(shape: Sequence[int], like: Tensor) -> Tensor:
        tensor, behind = _room(shape, like, store, folder)
        maps.append(behind)
        return tensor

    kept = map_tensors(lambda t: room((devices, *t.shape), t), one)
    nu = room((devices, *nu_shape), like)
    return kept, Sparse(np.zeros(devices, bool), {0: one}, nu, tuple(maps))


def shared_memory(size: int) -> mmap.mmap:
    """Memory that forked processes share and that counts once it is used."""
    if sys.platform != "linux":
        return mmap.mmap(-1, size)
    return mmap.mmap(-1, size, flags=mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | NO_RESERVE)


def shared_zeros(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Zeros in memory that forked processes share."""
    if not prod(shape):
        return torch.zeros(tuple(shape), dtype=dtype)
    return torch.frombuffer(shared_memory(prod(shape) * dtype.itemsize), dtype=dtype).view(tuple(shape))


def activate(devices: Tree, sparse: Sparse, which: Sequence[int], joins: NDArray[np.int64]) -> Sparse:
    """Store the initial states of devices that are active for the first time."""
    new = [device for device in which if not sparse.there[device]]
    if not new:
        return sparse
    for joined in {int(joins[device]) for device in new}:
        own = [device for device in new if joins[device] == joined]
        count = len(own)
        put(devices, sparse, own, map_tensors(lambda t, n=count: t.expand(n, *t.shape), sparse.start(joined)))
    there = sparse.there.copy()
    there[new] = True
    return sparse._replace(there=there)


def put(devices: Tree, sparse: Sparse | None, which: Sequence[int], values: Tree) -> None:
    """Store the states of some devices."""
    all_kept = leaves(devices)
    maps = sparse.maps if sparse else (None,) * len(all_kept)
    for kept, new, behind in zip(all_kept, leaves(values), maps, strict=False):
        put_rows(kept, behind, which, new)


def put_rows(kept: Tensor, behind: Map | None, which: Sequence[int], values: Tensor) -> None:
    """Store rows of one sparse tensor."""
    if not kept.numel() or not which:
        return
    if behind is not None:
        behind.write(which, values)
    else:
        kept[to_device(list(which), kept.device)] = values.to(kept.device)


def device_rows(devices: Tree, index: Tensor) -> Tree:
    """The states of some devices, where the index is."""
    return map_tensors(lambda t: t.index_select(0, index.to(t.device)).to(index.device), devices)


def _room(shape: Sequence[int], like: Tensor, store: str, folder: Path | None) -> tuple[Tensor, Map | None]:
    """Zeros that take no room until they are written."""
    size = prod(shape) * like.element_size()
    if not size:
        where = "cpu" if store != "accelerator" else like.device
        return torch.zeros(tuple(shape), dtype=like.dtype, device=where), None
    if store == "accelerator" and like.device.type != "cpu":
        return like.new_zeros(tuple(shape)), None
    if store != "disk":
        return shared_zeros(shape, like.dtype), None
    try:
        with tempfile.TemporaryFile(dir=folder) as file:  # it has no name, so that nothing is left behind
            file.truncate(size)
            memory, descriptor = mmap.mmap(file.fileno(), size), os.dup(file.fileno())
    except OSError as error:
        name = folder or tempfile.gettempdir()
        raise RunError(f"{name}: cannot hold device states: {error.strerror}; give another folder") from error
    weakref.finalize(memory, os.close, descriptor)
    return torch.frombuffer(memory, dtype=like.dtype).view(tuple(shape)), Map(memory, descriptor)
