"""Convolutions on a CPU: the library's own, model by model, with a pixel's channels side by side in memory all along.

Its gradient of the weights is slower than a matmul with patches, if those of a few images at a time stay in cache.
"""

from collections.abc import Mapping
from itertools import cycle

import torch
from torch import Tensor, nn

from fedcpsl.layers.geometry import Geometry, channels_first, channels_last, rectify_gradient, windows
from fedcpsl.layers.products import Arithmetic, factor
from fedcpsl.layers.walk import Layer, Pull

PATCHES_IN_CACHE = 1 << 19  # numbers


def by_library(
    layer: Layer,
    geometry: Geometry,
    own: Mapping[str, Tensor],
    into: Mapping[str, Tensor],
    x: Tensor,
    arithmetic: Arithmetic,
) -> tuple[Tensor, Pull]:
    """A convolution of x [slots, models or 1, samples, channels, rows, columns], with the ReLU after it, if any."""
    padded, inner = _evenly_padded(x, geometry)
    grid = factor(channels_last(padded), arithmetic)
    weight, bias = factor(own["weight"], arithmetic), own.get("bias")
    slots, models = weight.shape[:2]
    images = [each for slot in channels_first(grid).unbind() for each in slot.unbind() * (models // x.shape[1])]
    weights = weight.flatten(0, 1).unbind()
    biases = [None] * len(weights) if bias is None else bias.flatten(0, 1).unbind()
    how = (geometry.stride, [before for before, _ in inner.padding], geometry.dilation)
    y = _stacked([torch.conv2d(*each, *how) for each in zip(images, weights, biases, strict=True)])
    y = y.unflatten(0, (slots, models))
    if layer.rectified:
        y = y.relu_()

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        gradient = channels_last(gradient)
        rounded = factor(gradient, arithmetic)
        handed = None
        if to_x:
            towards = channels_first(rounded).flatten(0, 1).unbind()
            handed = _stacked([_x_gradient(*each, how) for each in zip(towards, images, weights, strict=True)])
            handed = _unpadded(handed.unflatten(0, (slots, models)), geometry, inner)
            handed = handed.sum(1, keepdim=True) if x.shape[1] < models else handed
            handed = rectify_gradient(handed, x) if layer.masks_gradient else handed
        for slot in range(slots):
            found = _weight_gradients(rounded[slot], grid[slot], inner)
            into["weight"][slot].add_(channels_first(found.unflatten(-1, (*geometry.kernel, -1))))
        if bias is not None:
            into["bias"].add_(gradient.sum((2, 3, 4)))
        return handed

    return y, pull


def _x_gradient(gradient: Tensor, x: Tensor, weight: Tensor, how: tuple[object, ...]) -> Tensor:
    wanted = [True, False, False]
    found: Tensor = torch.ops.aten.convolution_backward(gradient, x, weight, None, *how, False, [0, 0], 1, wanted)[0]
    return found


def _weight_gradients(gradient: Tensor, grid: Tensor, geometry: Geometry) -> Tensor:
    """Of the models of one slot, [models, out, patch]; both are channels last, and the models may share the grid."""
    models, _, *out_size, out = gradient.shape
    places = out_size[0] * out_size[1]
    at_once = max(1, PATCHES_IN_CACHE // max(1, places * geometry.patch))
    total = gradient.new_zeros(models, out, geometry.patch)
    totals, towards = total.unbind(), gradient.flatten(1, 3).split(at_once * places, 1)
    seen = [windows(images, geometry).split(at_once) for images in grid]
    for some, *pieces in zip(towards, *seen, strict=True):
        rows = [piece.reshape(-1, geometry.patch) for piece in pieces]
        for into, slope, patches in zip(totals, some.mT.unbind(), cycle(rows)):
            into.addmm_(slope, patches)
    return total


def _evenly_padded(x: Tensor, geometry: Geometry) -> tuple[Tensor, Geometry]:
    """As they are, or padded already where the library could not pad: it does so alike before and after."""
    (above, below), (left, right) = geometry.padding
    if above == below and left == right:
        return x, geometry
    rows, columns = geometry.size
    inner = geometry._replace(size=(rows + above + below, columns + left + right), padding=((0, 0), (0, 0)))
    return nn.functional.pad(x, (left, right, above, below)), inner


def _unpadded(x: Tensor, geometry: Geometry, inner: Geometry) -> Tensor:
    """What `_evenly_padded` was given."""
    if inner == geometry:
        return x
    (above, _), (left, _), (rows, columns) = *geometry.padding, geometry.size
    return x[..., above : above + rows, left : left + columns]


def _stacked(images: list[Tensor]) -> Tensor:
    """[models, samples, channels, rows, columns] in the images' own order in memory; one model's are not copied."""
    return images[0][None] if len(images) == 1 else channels_first(torch.stack([channels_last(t) for t in images]))
