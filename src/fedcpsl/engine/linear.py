"""Linear layers as batched matmuls; on a CPU those that follow one another, with the ReLUs among them, are one layer.

A step of a small network is so short that Python and the making of views would be a large part of it. `dense` makes
them once for all steps of a round: every matmul knows where it reads and writes. Where the models of a slot share
their inputs, one matmul gives the outputs of all, which then lie side by side in a row, and nothing is copied.
"""

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.engine.layer_kinds import Named, Pull
from fedcpsl.engine.precision import Arithmetic, add_outer, factor, own_products, product

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
        width = matrices.each.shape[-1]  # -1 would be ambiguous without rows
        x_gradient = product(rounded, matrices.each).view(slots, models, *between, width) if to_x else None
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


LARGE = 1 << 13  # outputs of a slot's first layer from which on more matmuls cost less than a copy of the inputs

back_through_relu = torch.ops.aten.threshold_backward.grad_input

Dense = Callable[[Tensor], tuple[Tensor, Pull]]


class Linear(NamedTuple):
    """A linear layer, and whether a ReLU comes after it."""

    matrices: Matrices
    totals: Totals
    rectified: bool


class Piece(NamedTuple):
    """One matmul of a layer, forwards and twice backwards: of all slots, or of one."""

    bias: Tensor | None
    rows: Tensor | None  # [batch, rows, in]: what the layer before wrote; None: given
    weight: Tensor  # [batch, out, in]
    transposed: Tensor
    y: Tensor  # [batch, rows, out]
    slope: Tensor  # the gradient of y
    slope_transposed: Tensor
    back: Tensor | None  # the gradient of rows; None: of what was given
    total: Tensor  # [batch, out, in]


class LayerBuffers(NamedTuple):
    """A layer's matmuls and what they work on: [slots * models, rows, out], or [slots, rows, models * out]."""

    pieces: Sequence[Piece]
    y: Tensor
    slope: Tensor
    bias_total: Tensor | None
    rectified: bool


def dense(layers: Sequence[Linear]) -> Dense:
    """From x [slots, models or 1, ..., in] to outputs, valid until the next call, and what takes gradients back."""
    (slots, models, out), width = layers[-1].matrices.shape, layers[0].matrices.together_transposed.shape[2]

    @lru_cache(maxsize=2)  # for the rows that are learnt, and for those that are only predicted
    def buffers_for(rows: int, together: bool) -> tuple[list[LayerBuffers], Tensor, Tensor]:
        buffers = _buffers(layers, rows, together)
        return buffers, _in_order(buffers[-1].y, models, out), _in_order(buffers[-1].slope, models, out)

    def forward(x: Tensor) -> tuple[Tensor, Pull]:
        shared, between = x.shape[1] < models, x.shape[2:-1]
        together = shared and (slots == 1 or len(layers) == 1 or between.numel() * width >= LARGE)
        wide = x.expand(-1, models, *x.shape[2:]) if shared and not together else x
        given = wide.reshape(slots if together else slots * models, -1, x.shape[-1])
        buffers, y, slope = buffers_for(given.shape[1], together)
        for buffer in buffers:
            for piece in buffer.pieces:
                rows = given if piece.rows is None else piece.rows
                if piece.bias is None:
                    torch.bmm(rows, piece.transposed, out=piece.y)
                else:
                    torch.baddbmm(piece.bias, rows, piece.transposed, out=piece.y)
            if buffer.rectified:
                buffer.y.relu_()

        def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
            slope.copy_(gradient.reshape(slope.shape))
            x_gradient = None
            for buffer in reversed(buffers):
                if buffer.rectified:
                    back_through_relu(buffer.slope, buffer.y, 0, grad_input=buffer.slope)
                for piece in buffer.pieces:
                    if piece.back is not None:
                        torch.bmm(piece.slope, piece.weight, out=piece.back)
                    elif to_x:
                        x_gradient = torch.bmm(piece.slope, piece.weight).view(wide.shape)
                    piece.total.baddbmm_(piece.slope_transposed, given if piece.rows is None else piece.rows)
                if buffer.bias_total is not None:
                    buffer.bias_total.add_(buffer.slope.sum(1, keepdim=True))
            return x_gradient.sum(1, keepdim=True) if x_gradient is not None and wide is not x else x_gradient

        return y if len(between) == 1 else y.unflatten(2, between), pull

    return forward


def _buffers(layers: Sequence[Linear], rows: int, together: bool) -> list[LayerBuffers]:
    buffers: list[LayerBuffers] = []
    with torch.inference_mode(False):  # what is written to in every mode
        for layer in layers:
            buffers.append(_buffer(layer, rows, together and not buffers, buffers[-1] if buffers else None))
    return buffers


def _buffer(layer: Linear, rows: int, together: bool, before: LayerBuffers | None) -> LayerBuffers:
    """`together`: the models of a slot are one matrix."""
    (slots, models, out), matrices, totals = layer.matrices.shape, layer.matrices, layer.totals
    if together:
        batch, width = slots, models * out
        weight, transposed, total = matrices.together_transposed.mT, matrices.together_transposed, totals.together
    else:
        batch, width = slots * models, out
        weight, transposed, total = matrices.each, matrices.each_transposed, totals.each
    bias = None if matrices.bias is None else matrices.bias.reshape(batch, 1, width)
    bias_total = None if totals.bias is None else totals.bias.view(batch, 1, width)
    y, slope = weight.new_empty(batch, rows, width), weight.new_empty(batch, rows, width)
    all_slots = Piece(bias, None, weight, transposed, y, slope, slope.mT, None, total)
    if before is None:
        pieces = [all_slots]
    elif len(before.y) == batch:
        pieces = [all_slots._replace(rows=before.y, back=before.slope)]
    else:  # what lies side by side in the rows before is no batch of matrices but within a slot
        ends = (_in_order(t, models, weight.shape[2]).unbind() for t in (before.y, before.slope))
        pieces = [
            _of_slot(all_slots, slot, models)._replace(rows=rows_before, back=back)
            for slot, (rows_before, back) in enumerate(zip(*ends, strict=True))
        ]
    return LayerBuffers(pieces, y, slope, bias_total, layer.rectified)


def _of_slot(piece: Piece, slot: int, models: int) -> Piece:
    own: list[Any] = [t if t is None else t.unflatten(0, (-1, models))[slot] for t in piece]
    return Piece(*own)


def _in_order(t: Tensor, models: int, width: int) -> Tensor:
    """Rows of either kind as [slots, models, rows, width], a view."""
    if t.shape[2] == width:
        return t.unflatten(0, (-1, models))
    return t.unflatten(2, (models, width)).transpose(1, 2)
