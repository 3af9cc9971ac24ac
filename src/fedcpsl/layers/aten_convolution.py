"""Convolutions on a CPU: the library's own, model by model, with a pixel's channels side by side in memory all along.

No copy of patches keeps up with it, for it looks at each image in cache. Only its sums for the bias are slow.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from fedcpsl.layers.geometry import Geometry, channels_first, channels_last, rectify_gradient
from fedcpsl.layers.layer_kinds import Layer, Pull
from fedcpsl.layers.precision import Arithmetic, factor
from fedcpsl.memo import unbound


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
        slopes = channels_first(factor(gradient, arithmetic)).flatten(0, 1).unbind()
        both = [_gradients(*each, *how, to_x) for each in zip(slopes, images, weights, strict=True)]
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
