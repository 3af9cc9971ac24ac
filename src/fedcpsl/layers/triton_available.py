"""Whether kernels of our own can be used: float32 and bfloat16 on a CUDA GPU, where Triton is installed."""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from fedcpsl.layers.precision import Arithmetic
from fedcpsl.leafwise import has_triton

KINDS = (torch.float32, torch.bfloat16)


def own_kernels(arithmetic: Arithmetic, *tensors: Tensor) -> Any:
    """The module `fedcpsl.layers.launch`, or None where PyTorch's own operations are to do it."""
    if arithmetic.kernels == "off" or not all(t.is_cuda and t.dtype in KINDS for t in tensors):
        return None
    if torch.is_grad_enabled() and any(t.requires_grad for t in tensors):
        return None  # someone wants autograd to see every operation
    return _launchers()


def own_products(arithmetic: Arithmetic, *tensors: Tensor) -> Any:
    """As `own_kernels`, for kernels that multiply: those of `ieee` are faster than PyTorch's matmul on a Hopper."""
    kernels = own_kernels(arithmetic, *tensors) if arithmetic.dot else None
    if kernels and arithmetic == Arithmetic() and not kernels.has_room(tensors[0]):
        return None
    return kernels


def _launchers() -> Any:
    return import_module("fedcpsl.layers.launch") if has_triton() else None
