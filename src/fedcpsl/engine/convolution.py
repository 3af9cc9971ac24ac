"""Convolutions for many models: the library's on a CPU; on a GPU patches and one batched matmul, or our own kernel."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcpsl.engine.elementwise import pooling
from fedcpsl.engine.geometry import (
    Geometry,
    add_up_patches,
    as_grid,
    channels_first,
    channels_last,
    geometry_of,
    patches,
    rectify_gradient,
)
from fedcpsl.engine.layer_kinds import Layer, Pull
from fedcpsl.engine.linear import Totals, linear, matrices_of, totals_of
from fedcpsl.engine.memo import unbound
from fedcpsl.engine.precision import Arithmetic, factor, own_kernels, own_products

PATCHES_AT_ONCE = 1 << 26  # numbers in one copy, where nothing needs the copy later


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
