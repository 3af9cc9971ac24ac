"""Triton kernels over all leaves of a model: one launch in place of one for each leaf.

A program works on a piece of one row, the leaf of one model of one slot. Up to eight leaves share a launch; their
addresses are plain numbers, and a program finds its own by the numbers of the pieces.
"""

from math import ceil

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST = 8  # leaves of a launch
BLOCK = 2048  # elements of a piece
NUMBERS = [f"{kind}{k}" for kind in ("a", "b", "n", "s") for k in range(MOST)]


@triton.jit(do_not_specialize=NUMBERS)
def _update(
    a0, a1, a2, a3, a4, a5, a6, a7,
    b0, b1, b2, b3, b4, b5, b6, b7,
    n0, n1, n2, n3, n4, n5, n6, n7,
    s0, s1, s2, s3, s4, s5, s6, s7,
    numbers, models,
    SCALES: tl.constexpr, ADDS: tl.constexpr, KIND: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """SCALES: a = number a (+ b for a slot's first model, where ADDS); else a = a - number b."""
    piece, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    a, b, n, first = a0, b0, n0, s0
    a, b = tl.where(piece >= s1, a1, a), tl.where(piece >= s1, b1, b)
    n, first = tl.where(piece >= s1, n1, n), tl.where(piece >= s1, s1, first)
    a, b = tl.where(piece >= s2, a2, a), tl.where(piece >= s2, b2, b)
    n, first = tl.where(piece >= s2, n2, n), tl.where(piece >= s2, s2, first)
    a, b = tl.where(piece >= s3, a3, a), tl.where(piece >= s3, b3, b)
    n, first = tl.where(piece >= s3, n3, n), tl.where(piece >= s3, s3, first)
    a, b = tl.where(piece >= s4, a4, a), tl.where(piece >= s4, b4, b)
    n, first = tl.where(piece >= s4, n4, n), tl.where(piece >= s4, s4, first)
    a, b = tl.where(piece >= s5, a5, a), tl.where(piece >= s5, b5, b)
    n, first = tl.where(piece >= s5, n5, n), tl.where(piece >= s5, s5, first)
    a, b = tl.where(piece >= s6, a6, a), tl.where(piece >= s6, b6, b)
    n, first = tl.where(piece >= s6, n6, n), tl.where(piece >= s6, s6, first)
    a, b = tl.where(piece >= s7, a7, a), tl.where(piece >= s7, b7, b)
    n, first = tl.where(piece >= s7, n7, n), tl.where(piece >= s7, s7, first)
    e = (piece - first) * BLOCK + tl.arange(0, BLOCK)
    own = a.to(tl.pointer_type(KIND)) + row * n + e
    other = b.to(tl.pointer_type(KIND))
    value = tl.load(own, mask=e < n)
    if SCALES:
        value = value * tl.load(numbers + row // models)
        if ADDS:
            first_model = row % models == 0
            value += tl.load(other + (row // models) * n + e, mask=(e < n) & first_model, other=0.0)
    else:
        value -= tl.load(numbers + row) * tl.load(other + row * n + e, mask=e < n)
    tl.store(own, value, mask=e < n)


def scale_and_add(leaves: tuple[Tensor, ...], numbers: Tensor, others: tuple[Tensor, ...]) -> None:
    """As `fedcpsl.engine.leafwise.scale_and_add`."""
    _launch(leaves, numbers.contiguous(), others, numbers.numel(), scales=True)


def subtract_scaled(leaves: tuple[Tensor, ...], numbers: Tensor, others: tuple[Tensor, ...]) -> None:
    """As `fedcpsl.engine.leafwise.subtract_scaled`."""
    _launch(leaves, numbers.contiguous(), others, numbers.numel(), scales=False)


def _launch(
    leaves: tuple[Tensor, ...], numbers: Tensor, others: tuple[Tensor, ...], slots: int, *, scales: bool
) -> None:
    kind = tl.float64 if leaves[0].dtype == torch.float64 else tl.float32
    models = leaves[0].shape[numbers.dim()] if scales else 1
    rows = slots * models
    for first in range(0, len(leaves), MOST):
        some = leaves[first : first + MOST]
        beside = others[first : first + MOST] or some
        sizes = [leaf.numel() // rows for leaf in some]
        starts = [0]
        for size in sizes:
            starts.append(starts[-1] + ceil(size / BLOCK))
        missing = MOST - len(some)
        _update[(starts[-1], rows)](
            *(leaf.data_ptr() for leaf in some), *[0] * missing,
            *(leaf.data_ptr() for leaf in beside), *[0] * missing,
            *sizes, *[0] * missing,
            *starts[:-1], *[1 << 30] * missing,
            numbers, models,
            SCALES=scales, ADDS=bool(others), KIND=kind, BLOCK=BLOCK, num_warps=4,
        )  # fmt: skip
