"""The precision of products, and whether kernels of our own can be used: on a CUDA GPU, where Triton is installed."""

from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.engine.leafwise import has_triton

PRECISIONS = ("ieee", "tf32", "bf16")
PROGRAMS = 792  # that a GPU runs well side by side: 6 for each of an H200's multiprocessors
TILE = 64  # results a side that one of them computes
LEAST_ROWS = 256  # that are worth sharing out


class Arithmetic(NamedTuple):
    """How products are computed.

    `ieee` and `tf32` are the same to PyTorch's matmuls, which a global setting tells apart; kernels of our own need
    to know. For `ieee` they cut each factor into two TF32 numbers and add up three of their four products, which leaves
    an error like that of a float32 product. `bf16` rounds the factors of every matmul to bfloat16 and adds up in
    float32; what goes from one convolution to the next may be kept rounded.
    """

    precision: str = "ieee"
    kernels: str = "auto"  # on a GPU: "auto"; "off"; or, for ieee, kernels with "ieee" or "tf32x3" products on any GPU

    @property
    def dot(self) -> str | None:
        """The products of kernels of our own; None where PyTorch's matmul is used."""
        if self.kernels == "off":
            return None
        if self.precision == "ieee":
            return "tf32x3" if self.kernels == "auto" else self.kernels
        return self.precision


def factor(t: Tensor, arithmetic: Arithmetic) -> Tensor:
    """A tensor as it may go into `product`."""
    if arithmetic.precision != "bf16":
        return t
    rounded = t.to(torch.bfloat16)
    return rounded if t.is_cuda and t.dtype == torch.float32 else rounded.to(t.dtype)


def product(a: Tensor, b: Tensor) -> Tensor:
    """a b, added up in float32 where the factors are bfloat16."""
    if a.dtype == torch.bfloat16:
        return torch.bmm(a, b, torch.float32)
    return torch.bmm(a, b)


def add_outer(total: Tensor, left: Tensor, right: Tensor) -> None:
    """total [batch, m, n] += left [batch, rows, m] transposed times right [batch, rows, n].

    A GPU's library gives each small result to few processors, however many rows it sums over: many rows are shared
    out, and the parts added up in order.
    """
    parts = _parts(total, left.shape[1]) if left.is_cuda else 1
    if parts == 1:
        add_product(total, left.mT, right)
        return
    left, right = (t.reshape(len(total) * parts, -1, t.shape[2]) for t in (left, right))
    total.add_(product(left.mT, right).view(len(total), parts, *total.shape[1:]).sum(1))


def _parts(total: Tensor, rows: int) -> int:
    """Into how many parts rows are shared out: as many as there is room for beside the results themselves."""
    batch, m, n = total.shape
    most = min(PROGRAMS // (batch * -(-m // TILE) * -(-n // TILE)), rows // LEAST_ROWS)
    return next((parts for parts in range(most, 1, -1) if rows % parts == 0), 1)


def add_product(total: Tensor, a: Tensor, b: Tensor) -> None:
    """total += a b."""
    if a.dtype == torch.bfloat16:
        torch.baddbmm(total, a, b, torch.float32, out=total)
    else:
        total.baddbmm_(a, b)


KINDS = (torch.float32, torch.bfloat16)


def own_kernels(arithmetic: Arithmetic, *tensors: Tensor) -> Any:
    """The module `fedcpsl.engine.launch`, or None where PyTorch's own operations are to do it."""
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
    return import_module("fedcpsl.engine.launch") if has_triton() else None
