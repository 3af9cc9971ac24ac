"""Linear layers of few rows as Triton kernels: reading the weights is what they cost, and rounding them is free.

PyTorch's batched matmul has few programs for few rows of many inputs, and rounding to bfloat16 before it would read and
write the weights once more.
"""

from math import ceil

from torch import Tensor

from fedcpsl.engine import kernels

PROGRAMS = 1056  # that inputs are shared among: 8 for each of an H200's multiprocessors
MOST_ROWS = {"bf16": 64}  # and 32 in other precisions, in which PyTorch's matmul needs no rounded copies
LEAST_WEIGHTS = 1 << 18  # of one model; smaller ones are not worth compiling for


def suits(rows: Tensor, weight: Tensor, dot: str) -> bool:
    """Whether these kernels are likely to be faster than PyTorch's matmul."""
    return rows.shape[1] <= MOST_ROWS.get(dot, 32) and weight[0].numel() >= LEAST_WEIGHTS


def outputs(rows: Tensor, weight: Tensor, bias: Tensor | None, dot: str) -> Tensor:
    """rows [batch, rows, in] times weight [batch, out, in] transposed, plus bias [batch, 1, out]."""
    batch, out, inputs = weight.shape
    block_m, block_n = (128 if out > 64 else 64), _few(rows.shape[1])
    wanted = max(1, PROGRAMS // (batch * ceil(out / block_m)))
    each = 64 * ceil(inputs / (64 * wanted))
    parts = weight.new_empty(ceil(inputs / each), batch, rows.shape[1], out)
    _multiply(weight, rows.mT, parts[0].mT, (block_m, block_n, 64), dot, each=each)
    y = parts.sum(0) if len(parts) > 1 else parts[0]
    return y if bias is None else y.add_(bias)


def x_gradient(gradients: Tensor, weight: Tensor, dot: str) -> Tensor:
    """gradients [batch, rows, out] times weight [batch, out, in]."""
    back = gradients.new_empty(*gradients.shape[:2], weight.shape[2])
    _multiply(gradients, weight, back, (_few(gradients.shape[1]), 128, 64), dot)
    return back


def add_weight_gradient(total: Tensor, gradients: Tensor, rows: Tensor, dot: str) -> None:
    """total [batch, out, in] += gradients [batch, rows, out] transposed times rows [batch, rows, in]."""
    _multiply(gradients.mT, rows, total, (64, 128, _few(rows.shape[1])), dot, add=True)


def _few(rows: int) -> int:
    return next(size for size in (16, 32, 64) if rows <= size)


def _multiply(
    a: Tensor, b: Tensor, c: Tensor, blocks: tuple[int, int, int], dot: str, *, add: bool = False, each: int = 0
) -> None:
    (batch, m, k), n = a.shape, b.shape[2]
    block_m, block_n, block_k = blocks
    each = each or block_k * ceil(k / block_k)
    grid = (ceil(m / block_m) * ceil(n / block_n), ceil(k / each), batch)
    stages = 1 if k <= block_k else 3
    kernels.multiply[grid](
        a, b, c, m, n, k, each, *a.stride(), *b.stride(), *c.stride(),
        ADD=add, DOT=dot, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=stages,
    )  # fmt: skip
