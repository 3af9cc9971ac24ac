"""Convolutions, pooling and dropout as Triton kernels: block sizes by shape, and the layers made of them.

Whatever depends on the number of slots is an argument and not a constant, so that one compilation serves all.
"""

from collections.abc import Mapping, Sequence
from functools import cache
from math import ceil
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedcpsl.engine import kernels, pooled_kernels
from fedcpsl.engine.convolution import Geometry, channels_first, channels_last
from fedcpsl.engine.dropout import KeyedDropout
from fedcpsl.engine.elementwise import Pair
from fedcpsl.engine.layer_kinds import Layer, Pull
from fedcpsl.engine.precision import Arithmetic

TILE = (128, 64, 32, 8, 3)  # a convolution's program: rows, most outputs, most inputs at a time; warps, stages
WEIGHT_TILES = {  # a weight gradient's, by its products: rows at a time, most outputs, most inputs; warps, stages
    "bf16": (64, 64, 128, 4, 3),
    "tf32": (16, 64, 128, 2, 4),
    "tf32x3": (16, 64, 64, 2, 4),
    "ieee": (16, 64, 64, 2, 4),
}
SPREAD_TILE = (64, 64, 64, 4, 3)  # an x gradient's: samples, most channels, most outputs at a time; warps, stages
ROOM = 227 << 10  # bytes of shared memory that the kernels with four results at a time may want: a Hopper's
PROGRAMS = 1056  # that the rows of a weight gradient are shared among: 8 for each of an H200's multiprocessors


def convolution(
    layer: Layer,
    geometry: Geometry,
    own: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    x: Tensor,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Pull]:
    """As `fedcpsl.engine.convolution` describes, x [slots, models or 1, samples, channels, rows, columns]."""
    weight, dot = own["weight"], arithmetic.dot
    assert dot is not None
    x = x.expand(*weight.shape[:2], *x.shape[2:])
    y = convolve(x, weight, own.get("bias"), geometry, dot, relu=layer.rectified, kept=kept_as(layer, dot))

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        gradient = channels_first(channels_last(gradient))
        if to_x:
            return take_back(layer, geometry, weight, into, x, gradient, dot)
        add_weight_gradient(x, gradient, into["weight"], into.get("bias"), geometry, dot)
        return None

    return y, pull


def take_back(
    layer: Layer,
    geometry: Geometry,
    weight: Tensor,
    into: Mapping[str, Tensor],
    x: Tensor,
    gradient: Tensor,
    dot: str,
) -> Tensor:
    """Adds to the totals the gradient that a convolution's outputs have, channels last, and hands back x's."""
    back = x_gradient(gradient, weight, geometry, dot, relu_of=x if layer.masks_gradient else None, kept=x.dtype)
    add_weight_gradient(x, gradient, into["weight"], into.get("bias"), geometry, dot)  # may change the weight itself
    return back.sum(1, keepdim=True) if x.stride(1) == 0 and x.shape[1] > 1 else back


def has_room(x: Tensor) -> bool:
    """Whether kernels that keep four results at a time fit onto the GPU."""
    return _shared_memory(x.device) >= ROOM


@cache
def _shared_memory(where: torch.device) -> int:
    """What a program may use, in bytes; where PyTorch does not say, nothing beyond what every GPU has."""
    return int(getattr(torch.cuda.get_device_properties(where), "shared_memory_per_block_optin", 0))


def kept_as(layer: Layer, dot: str) -> torch.dtype:
    """What a convolution's outputs are kept as: rounded already, where the next layer's factors would be anyway."""
    return torch.bfloat16 if dot == "bf16" and layer.narrow else torch.float32


def matrix_of(weight: Tensor, dot: str) -> Tensor:
    """Weights in one piece, rounded where the products want it."""
    return (weight.to(torch.bfloat16) if dot == "bf16" else weight).contiguous()


def convolve(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    geometry: Geometry,
    dot: str,
    *,
    relu: bool = False,
    kept: torch.dtype = torch.float32,
) -> Tensor:
    """The convolution of every slot and model, [slots, models, samples, outputs, rows, columns], channels last."""
    slots, models, outputs = weight.shape[:3]
    matrix = matrix_of(channels_last(weight), dot)
    y = x.new_empty(slots, models, x.shape[2], *geometry.out_size, outputs, dtype=kept)
    reading = forwards(geometry) | {"HAS_BIAS": bias is not None, "RELU": relu, "MASK": False}
    bias = matrix if bias is None else bias.contiguous()
    _convolve(x, matrix, bias, x, y, geometry.channels, reading, dot)
    return channels_first(y)


def x_gradient(
    gradient: Tensor,
    weight: Tensor,
    geometry: Geometry,
    dot: str,
    *,
    relu_of: Tensor | None = None,
    kept: torch.dtype = torch.float32,
) -> Tensor:
    """The gradient of a convolution's x, channels last; with `relu_of`, x itself, on through the ReLU that gave it."""
    slots, models, outputs = weight.shape[:3]
    matrix = matrix_of(weight.permute(0, 1, 3, 4, 5, 2), dot)
    back = gradient.new_empty(slots, models, gradient.shape[2], *geometry.size, geometry.channels, dtype=kept)
    if relu_of is None and _spreads(gradient, outputs, geometry, dot):
        _spread_back(gradient, matrix, back, geometry, dot)
        return channels_first(back)
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
    block_m, block_n = (block_m if rows > 64 else 64), block(outputs, block_n)
    block_k = block(reading["KH"] * reading["KW"] * inputs, block_k)
    grid = (ceil(rows / block_m), ceil(outputs / block_n), slots * models)
    sizes = {"OUTS": outputs, "OUT_H": out_h, "OUT_W": out_w, "C": inputs}
    kernels.convolve[grid](
        x, matrix, bias, mask, y, rows, models, *x.stride(),
        **sizes, **reading, DOT=dot, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k,
        num_warps=warps, num_stages=stages,
    )  # fmt: skip


def _spreads(gradient: Tensor, outputs: int, geometry: Geometry, dot: str) -> bool:
    """Whether there are samples enough to fill the programs that leave out what reaches no output."""
    waste = SPREAD_TILE[0] * ceil(gradient.shape[2] / SPREAD_TILE[0]) / gradient.shape[2]
    fits = geometry.stride == geometry.dilation == (1, 1) and outputs % 32 == 0
    return waste <= 4 / 3 and fits and dot != "ieee" and has_room(gradient)


def _spread_back(gradient: Tensor, matrix: Tensor, back: Tensor, geometry: Geometry, dot: str) -> None:
    slots, models, samples, _, _, outputs = channels_last(gradient).shape
    block_m, most_n, most_k, warps, stages = SPREAD_TILE
    block_n, block_k = block(geometry.channels, most_n), (most_k if dot == "bf16" and outputs % most_k == 0 else 32)
    blocks = ceil(geometry.size[0] / 2) * ceil(geometry.size[1] / 2)
    pairs = {
        "OUT_": geometry.out_size, "K": geometry.kernel, "IN_": geometry.size,
        "PAD_": (geometry.padding[0][0], geometry.padding[1][0]),
    }  # fmt: skip
    sizes = {f"{name}{axis}": pair[i] for name, pair in pairs.items() for i, axis in enumerate("HW")}
    grid = (blocks * ceil(samples / block_m), ceil(geometry.channels / block_n), slots * models)
    pooled_kernels.spread_back[grid](
        gradient, matrix, back, samples, **sizes, OUTS=outputs, C=geometry.channels, DOT=dot,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip


class Parts:
    """A weight gradient's parts, one of each share of the rows."""

    def __init__(self, weight_total: Tensor, geometry: Geometry, shares: int) -> None:
        slots, models, self.outputs = weight_total.shape[:3]
        self.geometry, self.shares, self.count = geometry, shares, slots * models
        self.weight = weight_total.new_empty(shares, self.count, self.outputs, geometry.patch)
        self.bias = weight_total.new_empty(shares, self.count, self.outputs)

    def add_to(self, weight_total: Tensor, bias_total: Tensor | None) -> None:
        """In order, to totals of the weight and, if there is one, the bias."""
        assert weight_total.is_contiguous()
        places = self.geometry.kernel[0] * self.geometry.kernel[1]
        at_once = min(16, 1 << (self.shares - 1).bit_length())
        kernels.add_parts[(self.count, ceil(self.outputs * self.geometry.patch / 256))](
            self.weight, self.bias, weight_total, self.bias if bias_total is None else bias_total, self.shares,
            OUTS=self.outputs, C=self.geometry.channels, PLACES=places, HAS_BIAS=bias_total is not None,
            AT_ONCE=at_once, BLOCK=256,
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
    block_m, most_n, most_k, warps, stages = WEIGHT_TILES[dot]
    block_n, block_k = block(outputs, most_n), block(geometry.patch, most_k)
    tiles = ceil(outputs / block_n) * ceil(geometry.patch / block_k)
    wanted = max(1, PROGRAMS // (slots * models * tiles))
    rows_each = block_m * ceil(rows / (block_m * wanted))
    parts = Parts(weight_total, geometry, ceil(rows / rows_each))
    sizes = {"OUTS": outputs, "OUT_H": geometry.out_size[0], "OUT_W": geometry.out_size[1], "C": geometry.channels}
    kernels.weigh[(tiles, parts.shares, slots * models)](
        x, gradient, parts.weight, parts.bias, rows, rows_each, models, *x.stride(),
        **sizes, **forwards(geometry), HAS_BIAS=bias_total is not None, DOT=dot,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    parts.add_to(weight_total, bias_total)


def forwards(geometry: Geometry) -> dict[str, Any]:
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


def block(size: int, most: int) -> int:
    """The power of two from 16 up to `most` that holds `size`."""
    return min(most, max(16, 1 << (size - 1).bit_length()))


def patches(grid: Tensor, geometry: Geometry) -> Tensor:
    """`fedcpsl.engine.convolution.patches` in one pass."""
    rows = len(grid) * geometry.out_size[0] * geometry.out_size[1]
    y = grid.new_empty(rows, geometry.patch)
    block_k = block(geometry.patch, 64)
    images, row, column, channel = grid.stride()
    sizes = {"OUT_H": geometry.out_size[0], "OUT_W": geometry.out_size[1], "C": geometry.channels}
    kernels.copy_patches[(ceil(rows / 64), ceil(geometry.patch / block_k))](
        grid, y, rows, images, channel, row, column,
        **sizes, **forwards(geometry), BLOCK_M=64, BLOCK_K=block_k, num_warps=4,
    )  # fmt: skip
    return y


def add_up_patches(columns: Tensor, geometry: Geometry, images: int) -> Tensor:
    """`fedcpsl.engine.convolution.add_up_patches` in one pass."""
    y = columns.new_empty(images, *geometry.size, geometry.channels)
    rows, block_c = images * geometry.size[0] * geometry.size[1], block(geometry.channels, 64)
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
    kernels.drop[(keys.numel(), ceil(count / 1024))](
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
    places, block_c = count * out_h * out_w, block(channels, 64)
    shape = (count, channels, out_h, out_w)
    order = torch.contiguous_format if layer.before_flat else torch.channels_last
    y = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=order)
    chosen = torch.empty(places, channels, device=x.device, dtype=torch.int8)
    grid = (ceil(places / 32), ceil(channels / block_c))
    sizes = {"OUT_H": out_h, "OUT_W": out_w, "C": channels, "KH": kernel[0], "KW": kernel[1]}
    blocks = {"BLOCK_M": 32, "BLOCK_C": block_c, "num_warps": 4}
    kernels.pool[grid](
        images, y, chosen, places, *images.stride(), *place_strides(y), **sizes, RELU=layer.rectified, **blocks
    )

    def pull(gradient: Tensor, _: bool) -> Tensor:
        return unpool(gradient, chosen, (rows, columns), kernel, x.dtype)

    return y.unflatten(0, lead), pull


def unpool(gradient: Tensor, chosen: Tensor, size: Pair, kernel: Pair, kept: torch.dtype) -> Tensor:
    """The gradient of what was pooled, images of `size`, channels last, from that of [.., channels, windows]."""
    lead, gradient = gradient.shape[:3], gradient.flatten(0, 2)
    count, channels, out_h, out_w = gradient.shape
    if gradient.stride(2) != gradient.stride(3) * out_w:
        gradient = gradient.contiguous()
    covered = size == (out_h * kernel[0], out_w * kernel[1])
    make = torch.empty if covered else torch.zeros
    back = make((count, *size, channels), device=gradient.device, dtype=kept)
    places, block_c = count * out_h * out_w, block(channels, 64)
    kernels.unpool[(ceil(places / 32), ceil(channels / block_c))](
        gradient, chosen, back, places, *place_strides(gradient), *back.stride()[:3],
        OUT_H=out_h, OUT_W=out_w, C=channels, KH=kernel[0], KW=kernel[1], BLOCK_M=32, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return channels_first(back.unflatten(0, lead))


def place_strides(images: Tensor) -> tuple[int, int, int]:
    """Of image, channel and place, rows and columns taken together."""
    return images.stride(0), images.stride(1), images.stride(3)
