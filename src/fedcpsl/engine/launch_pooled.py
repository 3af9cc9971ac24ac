"""A convolution and the 2 x 2 max pooling after it as one layer of Triton kernels."""

from collections.abc import Mapping
from math import ceil
from typing import Any

import torch
from torch import Tensor

from fedcpsl.engine import pooled_kernels
from fedcpsl.engine.convolution import Geometry, channels_first, channels_last
from fedcpsl.engine.launch_convolution import (
    PROGRAMS,
    Parts,
    block,
    has_room,
    kept_as,
    matrix_of,
    place_strides,
    take_back,
    unpool,
)
from fedcpsl.engine.layer_kinds import Layer, Pull
from fedcpsl.engine.precision import Arithmetic

TILE = (64, 64, 32, 4, 3)  # a convolution's program: windows, most outputs, most inputs at a time; warps, stages
TILE_OF_THREE = (64, 64, 16, 4, 3)  # where each product is three
GATHER_TILE = (64, 64, 16, 8, 3)  # where it is one, and the channels of a place do not fill a block
FEW_TILE = (64, 64, 128, 8, 2)  # where all that a window looks at does
FEW_PROGRAMS = 264  # that its windows are shared among: 2 for each of an H200's multiprocessors
WEIGHT_TILE = (32, 64, 128, 4, 1)  # a weight gradient's: windows at a time, most outputs, most inputs; warps, stages


def suits(geometry: Geometry, x: Tensor, dot: str) -> bool:
    """Whether there is a kernel for it."""
    plain = geometry.stride == geometry.dilation == (1, 1) and min(geometry.out_size) >= 2
    return plain and dot != "ieee" and has_room(x)


def _few(geometry: Geometry, dot: str) -> bool:
    """Whether few channels come in, so that all that a window looks at fits into a block; not once for each of three
    products."""
    window = (geometry.kernel[0] + 1) * (geometry.kernel[1] + 1) * geometry.channels
    return geometry.channels % TILE[2] != 0 and window <= FEW_TILE[2] and dot != "tf32x3"


def _tile(geometry: Geometry, dot: str) -> tuple[int, ...]:
    if dot == "tf32x3":
        return TILE_OF_THREE
    if _few(geometry, dot):
        return FEW_TILE
    return GATHER_TILE if geometry.channels % TILE[2] else TILE


def convolution_and_pooling(
    layer: Layer,
    geometry: Geometry,
    own: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    x: Tensor,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Pull]:
    """As `launch_convolution.convolution`, on to the pooling, with the ReLU between or before."""
    weight, dot = own["weight"], arithmetic.dot
    assert dot is not None
    assert layer.pool is not None
    slots, models, outputs = weight.shape[:3]
    samples, side = x.shape[2], (geometry.out_size[0] // 2, geometry.out_size[1] // 2)
    together = models if x.shape[1] == 1 else 1
    x = x.expand(*weight.shape[:2], *x.shape[2:])
    rows = samples * side[0] * side[1]
    matrix = matrix_of(channels_last(weight), dot)
    grid = (outputs, *side) if layer.before_flat else (*side, outputs)
    y = torch.empty(slots, models, samples, *grid, device=x.device, dtype=kept_as(layer, dot))
    chosen = x.new_empty(slots * models, rows, outputs if into else 0, dtype=torch.int8)
    bias, few, shape = own.get("bias"), _few(geometry, dot), _shape(geometry, outputs, together, side)
    block_m, most_n, most_k, warps, stages = _tile(geometry, dot)
    block_n, block_k = block(together * outputs, most_n), most_k if few else block(geometry.patch, most_k)
    across, count = ceil(together * outputs / block_n), slots * models // together
    rows_each = _share(rows, block_m, FEW_PROGRAMS // (across * count)) if few else block_m
    stages += few and dot == "bf16"  # half as large
    kernel = pooled_kernels.convolve_and_pool_few if few else pooled_kernels.convolve_and_pool
    kernel[(ceil(rows / rows_each), across, count)](
        x, matrix, matrix if bias is None else bias.contiguous(), y, chosen, rows, rows_each, models, *x.stride(),
        *((1, side[0] * side[1]) if layer.before_flat else (outputs, 1)),
        **shape, HAS_BIAS=bias is not None, RELU=layer.rectified or layer.pool.rectified, LEARNS=bool(into), DOT=dot,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    y = y if layer.before_flat else channels_first(y)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        if not to_x:
            _add_weight_gradient(x, gradient, chosen, into, geometry, shape, dot)
            return None
        full = unpool(gradient, chosen, geometry.out_size, (2, 2), kept_as(layer, dot))
        return take_back(layer, geometry, weight, into, x, full, dot)

    return y, pull


def _shape(geometry: Geometry, outputs: int, together: int, side: tuple[int, int]) -> dict[str, Any]:
    (above, below), (left, right) = geometry.padding
    sizes = {"POOLED_": side, "K": geometry.kernel, "IN_": geometry.size, "OFF_": (-above, -left)}
    return {f"{name}{axis}": pair[i] for name, pair in sizes.items() for i, axis in enumerate("HW")} | {
        "OUTS": outputs,
        "TOGETHER": together,
        "C": geometry.channels,
        "INSIDE": not (above or below or left or right),
    }


def _add_weight_gradient(
    x: Tensor,
    gradient: Tensor,
    chosen: Tensor,
    into: Mapping[str, Tensor],
    geometry: Geometry,
    shape: Mapping[str, Any],
    dot: str,
) -> None:
    """Adds a convolution's gradient, given that of the windows after it, to the totals of its weight and bias."""
    weight_total, bias_total = into["weight"], into.get("bias")
    slots, models, outputs = weight_total.shape[:3]
    rows, together = chosen.shape[1], shape["TOGETHER"]
    image, out, place = place_strides(gradient.flatten(0, 2))
    if image != gradient[0, 0, 0].numel() or gradient.stride(4) != place * gradient.shape[5]:
        gradient, place, out = gradient.contiguous(), 1, gradient.shape[4] * gradient.shape[5]
    block_m, most_n, most_k, warps, stages = WEIGHT_TILE
    block_n, block_k = block(together * outputs, most_n), block(geometry.patch, most_k)
    tiles, count = ceil(together * outputs / block_n) * ceil(geometry.patch / block_k), slots * models // together
    rows_each = _share(rows, block_m, PROGRAMS // (2 * tiles * count))
    parts = Parts(weight_total, geometry, ceil(rows / rows_each))
    pooled_kernels.weigh_pooled[(tiles, parts.shares, count)](
        x, gradient, chosen, parts.weight, parts.bias, rows, rows_each, models, *x.stride(), place, out,
        **shape, HAS_BIAS=bias_total is not None, DOT=dot,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    parts.add_to(weight_total, bias_total)


def _share(rows: int, block_m: int, programs: int) -> int:
    """How many rows, in whole blocks, each of `programs` programs gets."""
    return block_m * ceil(rows / (block_m * max(1, programs)))
