"""Layers without matmuls, each with its backward pass: ReLU, pooling, means, dropout, group normalisation, ..."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from fedcpsl.engine.dropout import KeyedDropout, kept_by
from fedcpsl.engine.layer_kinds import Layer, Pull
from fedcpsl.engine.precision import Arithmetic, own_kernels

Pair = tuple[int, int]  # of rows and columns


def flatten(x: Tensor) -> tuple[Tensor, Pull]:
    shape = x.shape
    return x.flatten(3), lambda gradient, _: gradient.reshape(*gradient.shape[:3], *shape[3:])


def relu(x: Tensor) -> tuple[Tensor, Pull]:
    y = torch.relu(x)
    return y, lambda gradient, _: rectify_gradient(gradient, y)


def rectify_gradient(gradient: Tensor, y: Tensor) -> Tensor:
    """A gradient taken back through the ReLU that gave y."""
    return torch.ops.aten.threshold_backward(gradient.to(y.dtype), y, 0)


def dropout(module: KeyedDropout, x: Tensor, keys: Tensor | None, arithmetic: Arithmetic) -> tuple[Tensor, Pull]:
    """Dropout by keys [slots, models or 1, samples]; without keys x is left as it is."""
    if keys is None or module.p == 0:
        return x, lambda gradient, _: gradient
    keys = keys.expand(x.shape[:3])
    kernels = own_kernels(arithmetic, x) if module.p < 1 else None
    if kernels:
        return kernels.dropout(module, x, keys), lambda gradient, _: kernels.dropout(module, gradient, keys)
    if module.p == 1:
        return x * 0, lambda gradient, _: gradient * 0
    kept = kept_by(module, keys.flatten(), x.flatten(0, 2)).unflatten(0, x.shape[:3])
    return x * kept, lambda gradient, _: gradient * kept


def as_grid(x: Tensor, trailing: int) -> Tensor:
    """[..., channels, time] or [..., channels, rows, columns] as the latter."""
    return x.unsqueeze(-2) if trailing == 1 else x


def pooling(layer: Layer, x: Tensor, arithmetic: Arithmetic) -> tuple[Tensor, Pull]:
    """The largest value of each window, as PyTorch picks it, and with `rectified` the ReLU before it.

    A ReLU of the largest value is the largest of the ReLUs, and where that is 0 no gradient goes back.
    """
    module, trailing = layer.module, x.dim() - 4
    assert isinstance(module, (nn.MaxPool1d, nn.MaxPool2d))
    grid = as_grid(x, trailing)
    given = (module.kernel_size, module.stride, module.padding, module.dilation)
    options = [_pair(numbers, fill, trailing) for numbers, fill in zip(given, (1, 1, 0, 1), strict=True)]
    kernels = own_kernels(arithmetic, x)
    if kernels and kernels.pools(options, module.ceil_mode):
        y, take_back = kernels.pooling(layer, options[0], grid)
    else:
        y, take_back = _pooling(layer, (*options, module.ceil_mode), grid)
    if trailing == 2:
        return y, take_back
    return y.squeeze(-2), lambda gradient, to_x: take_back(gradient.unsqueeze(-2), to_x).squeeze(-2)


def _pair(numbers: int | tuple[int, ...], fill: int, trailing: int) -> Pair:
    """A number for rows and one for columns; a signal in time has `fill` for rows."""
    each = (numbers,) * trailing if isinstance(numbers, int) else numbers
    return (fill, each[0]) if trailing == 1 else (each[0], each[1])


def _pooling(layer: Layer, options: tuple[object, ...], x: Tensor) -> tuple[Tensor, Pull]:
    lead, images = x.shape[:3], x.flatten(0, 2)
    y, where = torch.ops.aten.max_pool2d_with_indices(images, *options)
    order = torch.channels_last if y.is_contiguous(memory_format=torch.channels_last) else torch.contiguous_format
    if layer.before_flat:
        y = y.contiguous()  # as the layers after it want it, dropout for one
    if layer.rectified:
        y = y.relu_()

    def pull(gradient: Tensor, _: bool) -> Tensor:
        gradient = gradient.flatten(0, 2)
        if layer.rectified:
            gradient = rectify_gradient(gradient, y)
        gradient = gradient.contiguous(memory_format=order)
        back = torch.ops.aten.max_pool2d_with_indices_backward(gradient, images, *options, where)
        return back.unflatten(0, lead)

    return y.unflatten(0, lead), pull


def mean_of_channels(x: Tensor) -> tuple[Tensor, Pull]:
    """The mean over time, or over rows and columns, which stay as dimensions of one place."""
    places, spread = tuple(range(4, x.dim())), x.shape[4:]

    def pull(gradient: Tensor, _: bool) -> Tensor:
        return (gradient / spread.numel()).expand(*gradient.shape[:4], *spread)

    return x.mean(places, keepdim=True), pull


def group_norm(
    module: nn.Module, parameters: Mapping[str, Tensor], totals: Mapping[str, Tensor], x: Tensor
) -> tuple[Tensor, Pull]:
    """Zero mean and unit variance over each group of channels of a sample, then a scale and a shift per channel."""
    assert isinstance(module, nn.GroupNorm)
    lead, channels, places = x.shape[:3], x.shape[3], x.shape[4:].numel()
    how = (lead.numel(), channels, places, module.num_groups)
    rows = _contiguous(x.flatten(0, 2))
    normal, mean, deviation = torch.ops.aten.native_group_norm(rows, None, None, *how, module.eps)
    flat = normal.unflatten(0, lead)
    ones = (1,) * (x.dim() - 4)
    each = {name: t.view(*t.shape[:2], 1, t.shape[2], *ones) for name, t in parameters.items()}
    y = torch.addcmul(each["bias"], flat, each["weight"]) if each else flat

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        back = handed_back(gradient) if to_x else None
        if totals:
            summed = (2, *range(4, x.dim()))
            totals["weight"].add_((gradient * flat).sum(summed))
            totals["bias"].add_(gradient.sum(summed))
        return back

    def handed_back(gradient: Tensor) -> Tensor:
        slope = gradient * each["weight"] if each else gradient
        if lead[1] < slope.shape[1]:  # models that share x
            slope = slope.sum(1, keepdim=True)
        wanted = [True, False, False]
        slopes = _contiguous(slope.flatten(0, 2))
        back, _, _ = torch.ops.aten.native_group_norm_backward(slopes, rows, mean, deviation, None, *how, wanted)
        return back.unflatten(0, lead)

    return y, pull


def _contiguous(rows: Tensor) -> Tensor:
    """Samples as PyTorch's kernels read them: on a CPU, those of images may have their channels last in memory."""
    if rows.dim() == 4 and not rows.is_cuda and rows.is_contiguous(memory_format=torch.channels_last):
        return rows
    return rows.contiguous()
