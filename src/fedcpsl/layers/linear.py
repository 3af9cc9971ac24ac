"""Linear layers as batched matmuls."""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.layers.layer_kinds import Named, Pull
from fedcpsl.layers.precision import Arithmetic, add_outer, factor, product
from fedcpsl.layers.triton_available import own_products

MANY_ROWS = 1024  # from here on a GPU sums rows faster than it multiplies them by ones


class Matrices(NamedTuple):
    """The views that a linear layer's matmuls want: a matrix per model, and a slot's models as one."""

    each: Tensor  # [slots * models, out, in]
    each_transposed: Tensor
    together_transposed: Tensor  # [slots, in, models * out]
    bias: Tensor | None  # [slots * models, 1, out]
    shape: tuple[int, int, int]  # slots, models, out


class Totals(NamedTuple):
    """Where a linear layer's gradient is added, in the same two views."""

    each: Tensor  # [slots * models, out, in]
    together: Tensor  # [slots, models * out, in]
    bias: Tensor | None  # [slots * models, 1, out]


def matrices_of(own: Named) -> Matrices:
    weight, bias = own["weight"], own.get("bias")
    slots, models, out, _ = weight.shape
    each = weight.flatten(0, 1)
    return Matrices(
        each,
        each.mT,
        weight.flatten(1, 2).mT,
        None if bias is None else bias.reshape(-1, 1, out),
        (slots, models, out),
    )


def totals_of(into: Named) -> Totals:
    weight, bias = into["weight"], into.get("bias")
    slots, models, out, inputs = weight.shape
    return Totals(
        weight.view(-1, out, inputs),
        weight.view(slots, models * out, inputs),
        None if bias is None else bias.view(-1, 1, out),
    )


def _as_factors(matrices: Matrices, arithmetic: Arithmetic) -> Matrices:
    if arithmetic.precision != "bf16":
        return matrices
    slots, models, out = matrices.shape
    each = factor(matrices.each, arithmetic)
    return matrices._replace(
        each=each, each_transposed=each.mT, together_transposed=each.view(slots, models * out, -1).mT
    )


def linear(x: Tensor, matrices: Matrices, totals: Totals | None, arithmetic: Arithmetic) -> tuple[Tensor, Pull]:
    """x W^T + b for every model; where a slot's models share x they are one matmul with more outputs."""
    slots, models, out = matrices.shape
    between = x.shape[2:-1]
    if len(between) != 1:
        x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    shared = x.shape[1] < models
    kernels = None if shared else own_products(arithmetic, x, matrices.each)
    if kernels and kernels.few_rows.suits(x.flatten(0, 1), matrices.each, arithmetic.dot):
        return _by_kernels(kernels.few_rows, x, matrices, totals, arithmetic.dot)
    matrices = _as_factors(matrices, arithmetic)
    rows = factor(x[:, 0] if shared else x.flatten(0, 1), arithmetic)
    y = _outputs(rows, matrices, shared)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        assert totals is not None
        each = gradient.reshape(slots * models, -1, out)
        rounded = factor(each, arithmetic)
        x_gradient = product(rounded, matrices.each).view(slots, models, *between, -1) if to_x else None
        if shared:
            side = rounded.view(slots, models, -1, out).transpose(1, 2).flatten(2)
            add_outer(totals.together, side, rows)
        else:
            add_outer(totals.each, rounded, rows)
        _add_rows(totals.bias, each)
        return x_gradient.sum(1, keepdim=True) if shared and x_gradient is not None else x_gradient

    return y.view(slots, models, *between, out), pull


def _by_kernels(
    kernels: Any, x: Tensor, matrices: Matrices, totals: Totals | None, dot: str | None
) -> tuple[Tensor, Pull]:
    """As `linear`, by kernels of our own."""
    slots, models, out = matrices.shape
    rows = x.flatten(0, 1)
    y = kernels.outputs(rows, matrices.each, matrices.bias, dot)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        assert totals is not None
        each = gradient.reshape(slots * models, -1, out)
        x_gradient = kernels.x_gradient(each, matrices.each, dot).view(x.shape) if to_x else None
        kernels.add_weight_gradient(totals.each, each, rows, dot)
        _add_rows(totals.bias, each)
        return x_gradient

    return y.view(*x.shape[:-1], out), pull


def _add_rows(total: Tensor | None, rows: Tensor) -> None:
    """Adds the sum of rows [batch, rows, out] to a bias's total, if there is one."""
    if total is not None and (not rows.is_cuda or rows.shape[1] > MANY_ROWS):
        total.add_(rows.sum(1, keepdim=True))
    elif total is not None:
        total.baddbmm_(rows.new_ones(1, 1, 1).expand(len(rows), 1, rows.shape[1]), rows)


def _outputs(rows: Tensor, matrices: Matrices, shared: bool) -> Tensor:
    slots, models, out = matrices.shape
    if shared:
        y = product(rows, matrices.together_transposed).view(slots, -1, models, out).transpose(1, 2)
        return y.contiguous() if matrices.bias is None else y + matrices.bias.view(slots, models, 1, out)
    if matrices.bias is None:
        return product(rows, matrices.each_transposed)
    if rows.dtype == torch.bfloat16:
        return product(rows, matrices.each_transposed).add_(matrices.bias)
    return torch.baddbmm(matrices.bias, rows, matrices.each_transposed)
