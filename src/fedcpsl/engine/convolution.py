"""Convolutions for many models: the library's on a CPU; on a GPU patches and one batched matmul, or our own kernel.

`Geometry` says which inputs the outputs look at; `patches` are the copies that make a matmul of a convolution.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fedcpsl.engine.elementwise import Pair, as_grid, pooling, rectify_gradient
from fedcpsl.engine.layer_kinds import Layer, Pull
from fedcpsl.engine.leafwise import unbound
from fedcpsl.engine.linear import Totals, linear, matrices_of, totals_of
from fedcpsl.engine.precision import Arithmetic, factor, own_kernels, own_products

PATCHES_AT_ONCE = 1 << 26  # numbers in one copy, where nothing needs the copy later


class Geometry(NamedTuple):
    """A convolution on a grid, [rows, columns] each; a signal in time is a grid of one row."""

    channels: int
    size: Pair  # of the input
    kernel: Pair
    stride: Pair
    dilation: Pair
    padding: tuple[Pair, Pair]  # before and after

    @property
    def out_size(self) -> Pair:
        rows, columns = (
            (size + sum(padding) - dilation * (kernel - 1) - 1) // stride + 1
            for size, kernel, stride, dilation, padding in zip(
                self.size, self.kernel, self.stride, self.dilation, self.padding, strict=True
            )
        )
        return rows, columns

    @property
    def patch(self) -> int:
        """How many numbers one output is made from."""
        return self.kernel[0] * self.kernel[1] * self.channels


def geometry_of(module: nn.Module, size: Pair) -> Geometry:
    assert isinstance(module, (nn.Conv1d, nn.Conv2d))
    ends = list(zip(module.kernel_size, module.dilation, strict=True))
    if module.padding == "same":
        padding = [((d * (k - 1)) // 2, d * (k - 1) - (d * (k - 1)) // 2) for k, d in ends]
    elif module.padding == "valid":
        padding = [(0, 0) for _ in ends]
    else:
        padding = [(int(p), int(p)) for p in module.padding]
    return Geometry(
        channels=module.in_channels,
        size=size,
        kernel=_pair(module.kernel_size),
        stride=_pair(module.stride),
        dilation=_pair(module.dilation),
        padding=((0, 0), padding[0]) if len(ends) == 1 else (padding[0], padding[1]),
    )


def _pair(numbers: tuple[int, ...]) -> Pair:
    return (1, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])


def channels_last(x: Tensor) -> Tensor:
    """[..., channels, rows, columns] as [..., rows, columns, channels], contiguous: copied only if it was not so."""
    return x.movedim(-3, -1).contiguous()


def channels_first(grid: Tensor) -> Tensor:
    """The same numbers in memory as PyTorch's order of dimensions."""
    return grid.movedim(-1, -3)


def patches(grid: Tensor, geometry: Geometry) -> Tensor:
    """[images, rows, columns, channels] as [images * out rows * out columns, kernel * channels], a copy."""
    (above, below), (left, right) = geometry.padding
    if above or below or left or right:
        grid = nn.functional.pad(grid, (0, 0, left, right, above, below))
    images, row, column, channel = grid.stride()
    view = grid.as_strided(
        (len(grid), *geometry.out_size, *geometry.kernel, geometry.channels),
        (
            images,
            row * geometry.stride[0],
            column * geometry.stride[1],
            row * geometry.dilation[0],
            column * geometry.dilation[1],
            channel,
        ),
    )
    return view.reshape(-1, geometry.patch)


def add_up_patches(columns: Tensor, geometry: Geometry, images: int) -> Tensor:
    """The transpose of `patches`: every place of the grid gets the sum of its copies."""
    (above, below), (left, right) = geometry.padding
    (rows, cols), (out_rows, out_cols) = geometry.size, geometry.out_size
    view = columns.view(images, out_rows, out_cols, *geometry.kernel, geometry.channels)
    if geometry.kernel == geometry.stride == (1, 1) and geometry.padding == ((0, 0), (0, 0)):
        return view.view(images, rows, cols, geometry.channels)
    total = columns.new_zeros(images, rows + above + below, cols + left + right, geometry.channels)
    for i in range(geometry.kernel[0]):
        for j in range(geometry.kernel[1]):
            top, side = i * geometry.dilation[0], j * geometry.dilation[1]
            bottom, end = top + geometry.stride[0] * out_rows, side + geometry.stride[1] * out_cols
            total[:, top : bottom : geometry.stride[0], side : end : geometry.stride[1]] += view[:, :, :, i, j]
    return total[:, above : above + rows, left : left + cols]


def convolution(
    layer: Layer, parameters: Mapping[str, Tensor], totals: Mapping[str, Tensor], x: Tensor, arithmetic: Arithmetic
) -> tuple[Tensor, Pull]:
    """A convolution of x [slots, models or 1, samples, channels, ...], with the ReLU and pooling after it, if any."""
    if layer.pool is None:
        return _alone(layer, parameters, totals, x, arithmetic)
    kernels = own_products(arithmetic, x, parameters["weight"])
    geometry = geometry_of(layer.module, (x.shape[-2], x.shape[-1]))
    if kernels and kernels.pooled.suits(geometry, x, arithmetic.dot):
        return kernels.pooled.convolution_and_pooling(layer, geometry, parameters, totals, x, arithmetic)
    y, take_back = _alone(layer, parameters, totals, x, arithmetic)
    pooled, from_windows = pooling(layer.pool, y, arithmetic)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        handed_back = from_windows(gradient, True)
        assert handed_back is not None
        return take_back(handed_back, to_x)

    return pooled, pull


def _alone(
    layer: Layer, parameters: Mapping[str, Tensor], totals: Mapping[str, Tensor], x: Tensor, arithmetic: Arithmetic
) -> tuple[Tensor, Pull]:
    trailing = x.dim() - 4
    x = as_grid(x, trailing)
    geometry = geometry_of(layer.module, (x.shape[-2], x.shape[-1]))
    own = {name: as_grid(t, trailing) if name == "weight" else t for name, t in parameters.items()}
    into = {name: as_grid(t, trailing) if name == "weight" else t for name, t in totals.items()}
    kernels = own_products(arithmetic, x, own["weight"])
    run = kernels.convolution if kernels else by_library if x.device.type == "cpu" else by_matmul
    y, take_back = run(layer, geometry, own, into, x, arithmetic)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        gradient = as_grid(gradient, trailing)
        if layer.rectified and not layer.masked_later:
            gradient = rectify_gradient(gradient, y)
        handed_back: Tensor | None = take_back(gradient, to_x)
        return handed_back.squeeze(-2) if handed_back is not None and trailing == 1 else handed_back

    return y.squeeze(-2) if trailing == 1 else y, pull


def by_matmul(
    layer: Layer,
    geometry: Geometry,
    own: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    x: Tensor,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Pull]:
    slots, models, out, _, *kernel = own["weight"].shape
    images, samples = x.shape[:3], x.shape[2]
    matrices = matrices_of({**own, "weight": channels_last(own["weight"]).flatten(3)})
    gradients = _zeros(into, geometry) if into else None
    grid = factor(channels_last(x), arithmetic)
    kernels = own_kernels(arithmetic, grid)
    copy = kernels.patches if kernels else patches

    def rows_of(some: Tensor) -> Tensor:
        return copy(some.flatten(0, 2), geometry).view(*images[:2], -1, geometry.patch)

    at_once = max(1, PATCHES_AT_ONCE * samples // max(1, images.numel() * _numbers(geometry)))
    pieces = [grid] if into else grid.split(at_once, 2)
    done = [linear(rows_of(some), matrices, gradients, arithmetic) for some in pieces]
    flat, take_back = done[0] if len(done) == 1 else (torch.cat([y for y, _ in done], 2), done[0][1])
    y = channels_first(flat.view(slots, models, samples, *geometry.out_size, out))
    if layer.rectified:
        y = y.relu_()

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        columns = take_back(channels_last(gradient).view(slots, models, -1, out), to_x)
        assert gradients is not None
        into["weight"].add_(channels_first(gradients.each.view(slots, models, out, *kernel, -1)))
        if columns is None:
            return None
        together = columns.shape[1]
        add_up = kernels.add_up_patches if kernels else add_up_patches
        handed = add_up(columns.view(-1, geometry.patch), geometry, slots * together * samples)
        handed = channels_first(handed.unflatten(0, (slots, together, samples)))
        return rectify_gradient(handed, x) if layer.masks_gradient else handed

    return y, pull


def _numbers(geometry: Geometry) -> int:
    return geometry.out_size[0] * geometry.out_size[1] * geometry.patch


def _zeros(into: Mapping[str, Tensor], geometry: Geometry) -> Totals:
    """Totals for the patches' order of weights; those of the bias are the caller's own."""
    weight = into["weight"]
    return totals_of({**into, "weight": weight.new_zeros(*weight.shape[:3], geometry.patch)})


def by_library(
    layer: Layer,
    geometry: Geometry,
    own: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    x: Tensor,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Pull]:
    """A convolution of x [slots, models or 1, samples, channels, rows, columns], with the ReLU after it, if any."""
    slots, models = own["weight"].shape[:2]
    padded, padding = _padded(x, geometry)
    together = models // x.shape[1]  # models that share x
    grid = channels_first(factor(channels_last(padded), arithmetic))
    images = [image for slot in grid.unbind() for image in slot.unbind() * together]
    weights = factor(own["weight"], arithmetic).flatten(0, 1).unbind()
    biases = own["bias"].flatten(0, 1).unbind() if "bias" in own else [None] * len(weights)
    how = (geometry.stride, padding, geometry.dilation)
    y = _stacked([torch.conv2d(*each, *how) for each in zip(images, weights, biases, strict=True)])
    y = y.unflatten(0, (slots, models))
    if layer.rectified:
        y = y.relu_()

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        gradient = channels_last(gradient)
        gradients = channels_first(factor(gradient, arithmetic)).flatten(0, 1).unbind()
        both = [_gradients(*each, *how, to_x) for each in zip(gradients, images, weights, strict=True)]
        handed = _stacked([of_x for of_x, _ in both if of_x is not None]) if to_x else None
        for total, (_, of_weight) in zip(unbound(into["weight"], 2), both, strict=True):
            total.add_(of_weight)
        if "bias" in into:
            into["bias"].add_(gradient.sum((2, 3, 4)))
        if handed is None:
            return None
        handed = _unpadded(handed.unflatten(0, (slots, models)), geometry)
        handed = handed.sum(1, keepdim=True) if together > 1 else handed
        return rectify_gradient(handed, x) if layer.masks_gradient else handed

    return y, pull


def _gradients(
    gradient: Tensor,
    x: Tensor,
    weight: Tensor,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    to_x: bool,
) -> tuple[Tensor | None, Tensor]:
    """Of x, if that is wanted, and of the weights."""
    how, wanted = (stride, padding, dilation, False, [0, 0], 1), [to_x, True, False]
    of_x, of_weight, _ = torch.ops.aten.convolution_backward(gradient, x, weight, None, *how, wanted)
    return of_x, of_weight


def _padded(x: Tensor, geometry: Geometry) -> tuple[Tensor, list[int]]:
    """x, and what the library is to pad it by; it does so alike before and after, and anything else is done here."""
    if _evenly(geometry):
        return x, [before for before, _ in geometry.padding]
    (above, below), (left, right) = geometry.padding
    return nn.functional.pad(x, (left, right, above, below)), [0, 0]


def _unpadded(x: Tensor, geometry: Geometry) -> Tensor:
    """Without what `_padded` put around it."""
    if _evenly(geometry):
        return x
    (above, _), (left, _), (rows, columns) = *geometry.padding, geometry.size
    return x[..., above : above + rows, left : left + columns]


def _evenly(geometry: Geometry) -> bool:
    return all(before == after for before, after in geometry.padding)


def _stacked(images: Sequence[Tensor]) -> Tensor:
    """[models, samples, channels, rows, columns] in the images' own order in memory; one model's are not copied."""
    return images[0][None] if len(images) == 1 else channels_first(torch.stack([channels_last(t) for t in images]))
