"""Linear layers on a CPU: tensors stay as a matmul wrote them, so that no step copies one into another order."""

from collections.abc import Iterator

import torch
from torch import Tensor

from fedcpsl.layers.matrices import Matrices, Totals
from fedcpsl.layers.products import Arithmetic, add_product, factor, product
from fedcpsl.layers.walk import Pull


def linear_on_cpu(
    x: Tensor, matrices: Matrices, totals: Totals | None, arithmetic: Arithmetic
) -> tuple[Tensor, Pull]:
    """x W^T + b of x [slots, models or 1, samples, in].

    Where a slot's models share x they are one matmul with more outputs: in memory a sample's outputs of all models then
    lie side by side. The next layer's matmuls take them so, and give their gradient back so.
    """
    slots, models, out = matrices.shape
    shared = x.shape[1] < models
    rows = factor(x, arithmetic)
    y = _outputs_of_shared(rows[:, 0], matrices) if shared else _outputs(rows, matrices)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        assert totals is not None
        rounded = factor(gradient, arithmetic)
        if shared:
            add_product(totals.together, rounded.transpose(1, 2).flatten(2).mT, rows[:, 0])
        else:
            for total, some, own in _batches(totals.each.view(slots, models, out, -1), rounded, rows):
                add_product(total, some.mT, own)
        if totals.bias is not None:
            totals.bias.add_(gradient.sum(2).view(-1, 1, out))
        if not to_x:
            return None
        x_gradient = x.new_empty(slots, models, *x.shape[2:]) if shared else torch.empty_like(x)
        for into, some, weight in _batches(x_gradient, rounded, matrices.each.view(slots, models, out, -1)):
            torch.bmm(some, weight, out=into)
        return x_gradient.sum(1, keepdim=True) if shared else x_gradient

    return y, pull


def _outputs_of_shared(rows: Tensor, matrices: Matrices) -> Tensor:
    slots, models, out = matrices.shape
    if matrices.bias is None:
        y = product(rows, matrices.together_transposed)
    else:
        y = torch.baddbmm(matrices.bias.view(slots, 1, models * out), rows, matrices.together_transposed)
    return y.view(slots, -1, models, out).transpose(1, 2)


def _outputs(rows: Tensor, matrices: Matrices) -> Tensor:
    slots, models, out = matrices.shape
    y = rows.new_empty(slots, models, rows.shape[2], out)
    weights = matrices.each.view(slots, models, out, -1)
    if matrices.bias is None:
        for into, some, weight in _batches(y, rows, weights):
            torch.bmm(some, weight.mT, out=into)
    else:
        for into, some, weight, bias in _batches(y, rows, weights, matrices.bias.view(slots, models, 1, out)):
            torch.baddbmm(bias, some, weight.mT, out=into)
    return y


def _batches(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors [slots, models, ...] as what one batched matmul each takes: all slots if that needs no copy, or a slot."""
    if all(len(t) == 1 or t.stride(0) == t.shape[1] * t.stride(1) for t in tensors):
        yield tuple(t.flatten(0, 1) for t in tensors)
    else:
        yield from zip(*(t.unbind() for t in tensors), strict=True)
