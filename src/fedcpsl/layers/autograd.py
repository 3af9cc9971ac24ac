"""Any other layer: vmap over its parameters, and autograd for its backward pass."""

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedcpsl.dropout import KeyedDropout
from fedcpsl.layers.layer_kinds import Layer, Pull, is_parameter_free


def other(
    layer: Layer,
    parameters: dict[str, Tensor],
    totals: dict[str, Tensor],
    learning: bool,
    x: Tensor,
    keys: Tensor | None,
) -> tuple[Tensor, Pull]:
    """Any layer, with autograd for its backward pass where it is `learning`."""
    with torch.set_grad_enabled(learning):
        if learning:
            x = x.detach().requires_grad_(x.is_floating_point())
            parameters = {name: t.detach().requires_grad_() for name, t in parameters.items()}
        y = _folded(layer.module, x, keys) if is_parameter_free(layer) else _vmapped(layer.module, parameters, x, keys)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        if not (to_x or parameters):
            return None
        x_gradient, *own = torch.autograd.grad(y, [x, *parameters.values()], gradient, allow_unused=True)
        for name, g in zip(parameters, own, strict=True):
            if g is not None:
                totals[name].add_(g)
        return torch.zeros_like(x) if x_gradient is None else x_gradient

    return y.detach(), pull


def _folded(module: nn.Module, x: Tensor, keys: Tensor | None) -> Tensor:
    """A layer without parameters: all slots, models and samples are one batch to it."""
    _give_keys(module, None if keys is None else keys.expand(x.shape[:3]).flatten())
    return module(x.flatten(0, 2)).unflatten(0, x.shape[:3])


def _vmapped(module: nn.Module, parameters: dict[str, Tensor], x: Tensor, keys: Tensor | None) -> Tensor:
    if not parameters:  # all of them are frozen
        return _folded(module, x, keys)
    slots, models = next(iter(parameters.values())).shape[:2]
    samples = x.shape[2]

    def one(own: dict[str, Tensor], rows: Tensor, row_keys: Tensor | None) -> Tensor:
        _give_keys(module, row_keys)
        return functional_call(module, own, (rows,))

    stacked = {name: t.flatten(0, 1) for name, t in parameters.items()}
    x = x.expand(slots, models, *x.shape[2:]).flatten(0, 1)
    keys = None if keys is None else keys.expand(slots, models, samples).flatten(0, 1)
    outputs: Tensor = vmap(one, in_dims=(0, 0, None if keys is None else 0))(stacked, x, keys)
    return outputs.unflatten(0, (slots, models))


def _give_keys(module: nn.Module, keys: Tensor | None) -> None:
    for layer in module.modules():
        if isinstance(layer, KeyedDropout):
            layer.keys = keys
