"""What to compute on and how exactly, and numbers on their way there."""

from typing import Any

import torch
from torch import Tensor

from fedcpsl import config as settings
from fedcpsl.errors import InputError
from fedcpsl.simulation.ranks import world
from fedcpsl.torchrun import local_rank


def to_device(values: Any, where: torch.device) -> Tensor:
    """A list or array as a tensor on a device.

    To a GPU it goes from pinned memory: else the host would wait until the GPU has done all that it was given before.
    """
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else tensor.to(where)


def has_gpu() -> bool:
    """Whether there is a GPU, used or not."""
    return torch.cuda.is_available()


def choose_device(name: str) -> torch.device:
    """Where to compute; auto is cuda where there is one, else the cpu."""
    if name == settings.AUTO:
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        raise InputError(f"run.device = {name!r}: no such device; give cpu, cuda, cuda:1, ... or mps") from None
    present = {"cpu": True, "cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not present.get(device.type, False):
        raise InputError(f"run.device = {name!r}: this machine has none that PyTorch can use; give cpu")
    return _own_gpu(device) if device.type == "cuda" else device


def _own_gpu(device: torch.device) -> torch.device:
    """The GPU by its number. Every rank of a machine takes that of its own, from the first again if there are few."""
    if world()[1] == 1:
        return torch.device("cuda", torch.cuda.current_device()) if device.index is None else device
    if device.index is not None:
        raise InputError(f'run.device = "{device}": each rank takes a GPU of its own; give cuda')
    own = torch.device("cuda", local_rank() % torch.cuda.device_count())
    torch.cuda.set_device(own)
    return own


def choose_dtype(name: str, device: torch.device) -> torch.dtype:
    if name == "float64" and device.type == "mps":
        raise InputError('run.dtype = "float64": mps has no float64; give float32, or run.device = "cpu"')
    return torch.float64 if name == "float64" else torch.float32


def set_precision(name: str, device: torch.device) -> None:
    """Whether a GPU may round float32 factors to TF32; PyTorch by itself lets convolutions do so."""
    if name != "ieee" and device.type != "cuda":
        raise InputError(f'run.precision = "{name}": is a way in which an NVIDIA GPU multiplies; give ieee')
    torch.backends.cuda.matmul.allow_tf32 = name == "tf32"
    torch.backends.cudnn.allow_tf32 = name == "tf32"
