"""The views of a linear layer's parameters that its matmuls want, and of the totals that its gradient is added to."""

from typing import NamedTuple

from torch import Tensor

from fedcpsl.layers.walk import Named


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
