"""The Triton kernels as functions of tensors: block sizes by shape, and the layers made of them.

Whatever depends on the number of slots is an argument and not a constant, so that one compilation serves all.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcpsl.dropout import KeyedDropout
from fedcpsl.layers import kernels, small_kernels
from fedcpsl.layers import launch_linear as few_rows
from fedcpsl.layers.geometry import Geometry, Pair, channels_first, channels_last
from fedcpsl.layers.products import Arithmetic
from fedcpsl.layers.walk import Layer, Pull

__all__ = ["add_up_patches", "convolution", "dropout", "few_rows", "patches", "pooling", "pools"]
TILE = (128, 64, 32, 8, 3)  # a convolution's program: rows, most outputs, most inputs at a time; warps, stages
WEIGHT_TILE = (16, 64, 64, 2, 4)  # a weight gradient's: rows at a time, most outputs, most inputs; warps, stages
WEIGHT_TILE_BF16 = (32, 64, 128, 4, 3)  # Hopper's matrix units take transposed factors of two bytes only
PROGRAMS = 1056  # that the rows of a weight gradient are shared among: 8 for each of an H200's multiprocessors


def convolution(
    layer: Layer,
    geometry: Geometry,
    own: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    x: Tensor,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Pull]:
    """As `fedcpsl.layers.convolution` describes, x [slots, models or 1, samples, channels, rows, columns]."""
    weight, dot = own["weight"], arithmetic.dot
    assert dot is not None
    x = x.expand(*weight.shape[:2], *x.shape[2:])
    y = convolve(x, weight, own.get("bias"), geometry, dot, relu=layer.rectified)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        gradient = channels_first(channels_last(gradient))
        add_weight_gradient(x, gradient, into["weight"], into.get("bias"), geometry, dot)
        if not to_x:
            return None
        back = x_gradient(gradient, weight, geometry, dot, relu_of=x if layer.masks_gradient else None)
        return back.sum(1, keepdim=True) if x.stride(1) == 0 and x.shape[1] > 1 else back

    return y, pull


def convolve(
    x: Tensor, weight: Tensor, bias: Tensor | None, geometry: Geometry, dot: str, *, relu: bool = False
) -> Tensor:
    """The convolution of every slot and model, [slots, models, samples, outputs, rows, columns], channels last."""
    slots, models, outputs = weight.shape[:3]
    matrix = channels_last(weight)
    y = x.new_empty(slots, models, x.shape[2], *geometry.out_size, outputs)
    reading = _forwards(geometry) | {"HAS_BIAS": bias is not None, "RELU": relu, "MASK": False}
    bias = matrix if bias is None else bias.contiguous()
    _convolve(x, matrix, bias, x, y, geometry.channels, reading, dot)
    return channels_first(y)


def x_gradient(
    gradient: Tensor, weight: Tensor, geometry: Geometry, dot: str, *, relu_of: Tensor | None = None
) -> Tensor:
    """The gradient of a convolution's x, channels last; with `relu_of`, x itself, on through the ReLU that gave it."""
    slots, models, outputs = weight.shape[:3]
    matrix = weight.permute(0, 1, 3, 4, 5, 2).contiguous()
    back = gradient.new_empty(slots, models, gradient.shape[2], *geometry.size, geometry.channels)
    reading = _backwards(geometry) | {"HAS_BIAS": False, "RELU": False, "MASK": relu_of is not None}
    mask = gradient if relu_of is None else channels_last(relu_of)
    _convolve(gradient, matrix, matrix, mask, back, outputs, reading, dot)
    return channels_first(back)


def _convolve(
    x: Tensor, matrix: Tensor, bias: Tensor, mask: Tensor, y: Tensor, inputs: int, reading: dict[str, Any], dot: str
) -> None:
    slots, models, samples, out_h, out_w, outputs = y.shape
    rows = samples * out_h * out_w
    block_m, block_n, block_k, warps, stages = TILE
    block_m, block_n = (block_m if rows > 64 else 64), _block(outputs, block_n)
    block_k = _block(reading["KH"] * reading["KW"] * inputs, block_k)
    grid = (ceil(rows / block_m), ceil(outputs / block_n), slots * models)
    sizes = {"OUTS": outputs, "OUT_H": out_h, "OUT_W": out_w, "C": inputs}
    kernels.convolve[grid](
        x, matrix, bias, mask, y, rows, models, *x.stride(),
        **sizes, **reading, DOT=dot, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def add_weight_gradient(
    x: Tensor,
    gradient: Tensor,
    weight_total: Tensor,
    bias_total: Tensor | None,
    geometry: Geometry,
    dot: str,
) -> None:
    """Adds a convolution's gradient to the totals of its weight and bias; `gradient` is channels last."""
    slots, models, outputs = weight_total.shape[:3]
    rows = x.shape[2] * geometry.out_size[0] * geometry.out_size[1]
    block_m, most_n, most_k, warps, stages = WEIGHT_TILE_BF16 if dot == "bf16" else WEIGHT_TILE
    block_n, block_k = _block(outputs, most_n), _block(geometry.patch, most_k)
    tiles = ceil(outputs / block_n) * ceil(geometry.patch / block_k)
    wanted = max(1, PROGRAMS // (slots * models * tiles))
    rows_each = block_m * ceil(rows / (block_m * wanted))
    shares = ceil(rows / rows_each)
    parts = x.new_empty(shares, slots * models, outputs, geometry.patch)
    bias_parts = x.new_empty(shares, slots * models, outputs)
    sizes = {"OUTS": outputs, "OUT_H": geometry.out_size[0], "OUT_W": geometry.out_size[1], "C": geometry.channels}
    has_bias = bias_total is not None
    kernels.weigh[(tiles, shares, slots * models)](
        x, gradient, parts, bias_parts, rows, rows_each, models, *x.stride(),
        **sizes, **_forwards(geometry), HAS_BIAS=has_bias, DOT=dot,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    assert weight_total.is_contiguous()
    kernels.add_parts[(slots * models, ceil(outputs * geometry.patch / 512))](
        parts, bias_parts, weight_total, parts if bias_total is None else bias_total, shares,
        OUTS=outputs, C=geometry.channels, PLACES=geometry.kernel[0] * geometry.kernel[1], HAS_BIAS=has_bias, BLOCK=512,
    )  # fmt: skip


def _forwards(geometry: Geometry) -> dict[str, Any]:
    """Where a convolution reads its x."""
    (above, below), (left, right) = geometry.padding
    return _reading(geometry, geometry.size, geometry.stride, (-above, -left), geometry.dilation, (1, 1)) | {
        "INSIDE": not (above or below or left or right)
    }


def _backwards(geometry: Geometry) -> dict[str, Any]:
    """Where the gradient of its x reads the gradient of its outputs."""
    down = -geometry.dilation[0], -geometry.dilation[1]
    off = geometry.padding[0][0], geometry.padding[1][0]
    return _reading(geometry, geometry.out_size, (1, 1), off, down, geometry.stride) | {"INSIDE": False}


def _reading(geometry: Geometry, size: Pair, up: Pair, off: Pair, step: Pair, down: Pair) -> dict[str, Any]:
    pairs = {"K": geometry.kernel, "UP_": up, "OFF_": off, "STEP_": step, "DOWN_": down, "IN_": size}
    return {f"{name}{axis}": pair[i] for name, pair in pairs.items() for i, axis in enumerate("HW")}


def _block(size: int, most: int) -> int:
    """The power of two from 16 up to `most` that holds `size`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def patches(grid: Tensor, geometry: Geometry) -> Tensor:
    """`fedcpsl.layers.geometry.patches` in one pass."""
    rows = len(grid) * geometry.out_size[0] * geometry.out_size[1]
    y = grid.new_empty(rows, geometry.patch)
    block_k = _block(geometry.patch, 64)
    images, row, column, channel = grid.stride()
    sizes = {"OUT_H": geometry.out_size[0], "OUT_W": geometry.out_size[1], "C": geometry.channels}
    kernels.copy_patches[(ceil(rows / 64), ceil(geometry.patch / block_k))](
        grid, y, rows, images, channel, row, column,
        **sizes, **_forwards(geometry), BLOCK_M=64, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return y


def add_up_patches(columns: Tensor, geometry: Geometry, images: int) -> Tensor:
    """`fedcpsl.layers.geometry.add_up_patches` in one pass."""
    y = columns.new_empty(images, *geometry.size, geometry.channels)
    rows, block_c = images * geometry.size[0] * geometry.size[1], _block(geometry.channels, 64)
    pairs = {
        "OUT_": geometry.out_size, "K": geometry.kernel, "IN_": geometry.size, "STRIDE_": geometry.stride,
        "DILATION_": geometry.dilation, "PAD_": (geometry.padding[0][0], geometry.padding[1][0]),
    }  # fmt: skip
    sizes = {f"{name}{axis}": pair[i] for name, pair in pairs.items() for i, axis in enumerate("HW")}
    kernels.sum_patches[(ceil(rows / 64), ceil(geometry.channels / block_c))](
        columns, y, rows, **sizes, C=geometry.channels, BLOCK_M=64, BLOCK_C=block_c, num_warps=4
    )
    return y


def dropout(module: KeyedDropout, x: Tensor, keys: Tensor) -> Tensor:
    """`KeyedDropout` of x [slots, models, samples, ...] by keys [slots, models, samples], contiguous."""
    x, keys = x.contiguous(), keys.contiguous()
    y = torch.empty_like(x)
    count = x[0, 0, 0].numel()
    inner = x[0, 0, 0, 0].numel() if module.channelwise else 1
    least = ceil(float(np.float32(module.p)) * (1 << 24))  # of the 24 bits that make the number
    scale = float(np.float32(1) / np.float32(1 - module.p))  # PyTorch divides by a scalar so
    small_kernels.drop[(keys.numel(), ceil(count / 1024))](
        x, keys, y, count, module.layer, least, scale, INNER=inner, BLOCK=1024, num_warps=4
    )
    return y


def pools(options: Sequence[Pair], ceil_mode: bool) -> bool:
    """Whether `pooling` can do it: small windows side by side. Options are kernel, stride, padding and dilation."""
    kernel, stride, padding, dilation = options
    return kernel == stride and padding == (0, 0) and dilation == (1, 1) and not ceil_mode and max(kernel) <= 4


def pooling(layer: Layer, kernel: Pair, x: Tensor) -> tuple[Tensor, Pull]:
    """Max pooling of x [slots, models, samples, channels, rows, columns] in windows side by side."""
    lead, images = x.shape[:3], x.flatten(0, 2)
    count, channels, rows, columns = images.shape
    out_h, out_w = rows // kernel[0], columns // kernel[1]
    places, block_c = count * out_h * out_w, _block(channels, 64)
    shape = (count, channels, out_h, out_w)
    order = torch.contiguous_format if layer.before_flat else torch.channels_last
    y = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=order)
    chosen = torch.empty(places, channels, device=x.device, dtype=torch.int8)
    grid = (ceil(places / 32), ceil(channels / block_c))
    sizes = {"OUT_H": out_h, "OUT_W": out_w, "C": channels, "KH": kernel[0], "KW": kernel[1]}
    blocks = {"BLOCK_M": 32, "BLOCK_C": block_c, "num_warps": 4}
    small_kernels.pool[grid](
        images, y, chosen, places, *images.stride(), *_place_strides(y), **sizes, RELU=layer.rectified, **blocks
    )

    def pull(gradient: Tensor, _: bool) -> Tensor:
        gradient = gradient.flatten(0, 2)
        if gradient.stride(2) != gradient.stride(3) * out_w:
            gradient = gradient.contiguous()
        covered = (rows, columns) == (out_h * kernel[0], out_w * kernel[1])
        make = torch.empty if covered else torch.zeros
        back = make((count, rows, columns, channels), device=x.device, dtype=x.dtype)
        strides = back.stride()[:3]
        small_kernels.unpool[grid](
            gradient, chosen, back, places, *_place_strides(gradient), *strides, **sizes, **blocks
        )
        return channels_first(back.unflatten(0, lead))

    return y.unflatten(0, lead), pull


def _place_strides(images: Tensor) -> tuple[int, int, int]:
    """Of image, channel and place, rows and columns taken together."""
    return images.stride(0), images.stride(1), images.stride(3)
