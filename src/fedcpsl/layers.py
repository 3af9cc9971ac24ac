"""One network with many sets of parameters at once: what `torch.func.vmap` does, faster where it matters.

Parameters are [slots, models, *shape], inputs [slots, models, samples, ...], or [slots, 1, samples, ...] where the
models of a slot see the same samples. A `Sequential` is walked; a linear layer becomes one batched matmul; a layer
without parameters sees everything as one long batch; anything else goes through `vmap`.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedcpsl.dropout import KeyedDropout

Named = Mapping[str, Tensor]


class BatchedLinear(torch.autograd.Function):
    """x W^T + b for a stack of models; where a slot's models share x, they are one matmul with more outputs.

    Given `totals` (of W's and b's gradients), the backward pass adds to them inside the matmul instead of handing
    gradients on: a training step is bound by memory traffic, and this saves a third of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, totals: tuple[Tensor, ...]) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.totals = totals
        slots, models, out, _ = weight.shape
        if x.shape[1] < models:
            y = torch.bmm(x[:, 0], weight.flatten(1, 2).mT).unflatten(2, (models, out)).transpose(1, 2)
            return y.contiguous() if bias is None else y + bias[:, :, None]
        rows, matrices = x.flatten(0, 1), weight.flatten(0, 1).mT
        if bias is None:
            return torch.bmm(rows, matrices).unflatten(0, (slots, models))
        return torch.baddbmm(bias.view(-1, 1, out), rows, matrices).unflatten(0, (slots, models))

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        (gradient,) = gradients
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias, _ = ctx.needs_input_grad
        x_gradient = (gradient @ weight).sum_to_size(x.shape) if to_x else None
        if x.shape[1] < weight.shape[1]:
            outputs, rows = gradient.transpose(1, 2).flatten(2), x[:, 0]
        else:
            outputs, rows = gradient.flatten(0, 1), x.flatten(0, 1)
        if not ctx.totals:
            weight_gradient = torch.bmm(outputs.mT, rows).view_as(weight) if to_weight else None
            return x_gradient, weight_gradient, gradient.sum(2) if to_bias else None, None
        total = ctx.totals[0]
        total.view(-1, outputs.shape[2], rows.shape[2]).baddbmm_(outputs.mT, rows)
        if to_bias:
            ctx.totals[1].add_(gradient.sum(2))
        return x_gradient, None, None, None


def is_fully_batched(module: nn.Module) -> bool:
    """Whether every layer with parameters runs as a batched matmul, without `vmap`."""
    if isinstance(module, nn.Sequential):
        return all(is_fully_batched(child) for child in module)
    return isinstance(module, nn.Linear) or _is_parameter_free(module)


def apply_batched(
    module: nn.Module, parameters: Named, x: Tensor, keys: Tensor | None, totals: Named, prefix: str = ""
) -> Tensor:
    """Outputs [slots, models, samples, ...]; gradients of linear layers go to `totals` where it has them."""
    if isinstance(module, nn.Sequential):
        for name, child in module.named_children():
            x = apply_batched(child, parameters, x, keys, totals, f"{prefix}{name}.")
        return x
    if isinstance(module, nn.Linear) and prefix + "weight" in parameters:
        return _linear(x, _own(parameters, prefix), _own(totals, prefix))
    if _is_parameter_free(module):
        _give_keys(module, None if keys is None else keys.expand(x.shape[:3]).flatten())
        return module(x.flatten(0, 2)).unflatten(0, x.shape[:3])
    return _vmapped(module, _own(parameters, prefix), x, keys)


def _own(tensors: Named, prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): t for name, t in tensors.items() if name.startswith(prefix)}


def _linear(x: Tensor, parameters: Named, totals: Named) -> Tensor:
    weight, bias = parameters["weight"], parameters.get("bias")
    outputs: Tensor = BatchedLinear.apply(x.flatten(2, -2), weight, bias, tuple(totals.values()))  # type: ignore[no-untyped-call]
    return outputs.unflatten(2, x.shape[2:-1])


def _vmapped(module: nn.Module, parameters: dict[str, Tensor], x: Tensor, keys: Tensor | None) -> Tensor:
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


def _is_parameter_free(module: nn.Module) -> bool:
    return next(module.parameters(), None) is None


def _give_keys(module: nn.Module, keys: Tensor | None) -> None:
    for layer in module.modules():
        if isinstance(layer, KeyedDropout):
            layer.keys = keys
