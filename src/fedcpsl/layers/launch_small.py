"""Pooling and dropout, and the copies that make a matmul of a convolution, as Triton kernels."""

from collections.abc import Sequence
from math import ceil

import numpy as np
import torch
from torch import Tensor

from fedcpsl.dropout import KeyedDropout
from fedcpsl.layers import kernels, small_kernels
from fedcpsl.layers.geometry import Geometry, Pair, channels_first
from fedcpsl.layers.launch_convolution import block, forwards
from fedcpsl.layers.layer_kinds import Layer, Pull


def patches(grid: Tensor, geometry: Geometry) -> Tensor:
    """`fedcpsl.layers.geometry.patches` in one pass."""
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
    """`fedcpsl.layers.geometry.add_up_patches` in one pass."""
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
    places, block_c = count * out_h * out_w, block(channels, 64)
    shape = (count, channels, out_h, out_w)
    order = torch.contiguous_format if layer.before_flat else torch.channels_last
    y = torch.empty(shape, device=x.device, dtype=x.dtype, memory_format=order)
    chosen = torch.empty(places, channels, device=x.device, dtype=torch.int8)
    grid = (ceil(places / 32), ceil(channels / block_c))
    sizes = {"OUT_H": out_h, "OUT_W": out_w, "C": channels, "KH": kernel[0], "KW": kernel[1]}
    blocks = {"BLOCK_M": 32, "BLOCK_C": block_c, "num_warps": 4}
    small_kernels.pool[grid](
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
    small_kernels.unpool[(ceil(places / 32), ceil(channels / block_c))](
        gradient, chosen, back, places, *place_strides(gradient), *back.stride()[:3],
        OUT_H=out_h, OUT_W=out_w, C=channels, KH=kernel[0], KW=kernel[1], BLOCK_M=32, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return channels_first(back.unflatten(0, lead))


def place_strides(images: Tensor) -> tuple[int, int, int]:
    """Of image, channel and place, rows and columns taken together."""
    return images.stride(0), images.stride(1), images.stride(3)
