"""All layers of a network forwards and backwards; what no layer here knows goes through `vmap` and autograd."""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedcpsl.engine.convolution import convolution
from fedcpsl.engine.dropout import KeyedDropout
from fedcpsl.engine.elementwise import dropout, flatten, group_norm, mean_of_channels, pooling, rectify_gradient, relu
from fedcpsl.engine.layer_kinds import (
    Layer,
    Named,
    Pull,
    flattens_samples,
    is_convolution,
    is_group_norm,
    is_matmul,
    is_mean,
    is_parameter_free,
    is_pooling,
    is_relu,
)
from fedcpsl.engine.linear import Dense, Linear, Matrices, Totals, dense, linear, matrices_of, totals_of
from fedcpsl.engine.precision import Arithmetic


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


DEFAULT = Arithmetic()


class Bound(NamedTuple):
    """A layer with its parameters and, where it is to learn, the totals that its gradient is added to."""

    layer: Layer
    parameters: dict[str, Tensor]
    totals: dict[str, Tensor]
    learning: bool
    matrices: Matrices | None
    matrix_totals: Totals | None
    arithmetic: Arithmetic
    dense: Dense | None = None  # it and linear layers after it, as one
    branches: "tuple[list[Bound], ...]" = ()  # of a residual block


def bind(
    layers: Sequence[Layer],
    parameters: Named,
    totals: Named | None = None,
    arithmetic: Arithmetic = DEFAULT,
    *,
    to_x: bool = False,
) -> list[Bound]:
    """Layers with their parameters [slots, models, *shape]; with `totals`, ready to take gradients back.

    `to_x`: as far as the layers' input, too.
    """
    bound: list[Bound] = []
    learning = to_x and totals is not None
    for layer in layers:
        learning = totals is not None and (learning or bool(layer.names))  # nothing to learn before the first
        own = {name: parameters[full] for name, full in layer.names.items()}
        into = {} if totals is None else {name: totals[full] for name, full in layer.names.items()}
        matrices = matrices_of(own) if is_matmul(layer) else None
        matrix_totals = totals_of(into) if matrices and into else None
        branches = tuple(bind(branch, parameters, totals, arithmetic, to_x=True) for branch in layer.branches)
        bound.append(Bound(layer, own, into, learning, matrices, matrix_totals, arithmetic, branches=branches))
    on_cpu = all(t.device.type == "cpu" for t in parameters.values())
    return _with_dense(bound) if on_cpu and totals is not None and arithmetic.precision != "bf16" else bound


def _with_dense(bound: list[Bound]) -> list[Bound]:
    """Linear layers that learn, and the ReLUs after them, taken together as far as they follow one another."""
    stacks: list[tuple[Bound, list[Linear]]] = []  # a layer, and what it begins if it is linear
    for part in bound:
        stack = stacks[-1][1] if stacks else []
        if stack and is_relu(part.layer.module):
            stack[-1] = stack[-1]._replace(rectified=True)
        elif part.matrices and part.matrix_totals:
            if not stack:
                stacks.append((part, stack := []))
            stack.append(Linear(part.matrices, part.matrix_totals, rectified=False))
        else:
            stacks.append((part, []))
    return [part._replace(dense=dense(stack)) if stack else part for part, stack in stacks]


def forward(bound: list[Bound], x: Tensor, keys: Tensor | None) -> tuple[Tensor, list[Pull]]:
    """Outputs [slots, models, samples, ...], and what takes gradients back, layer by layer."""
    pulls: list[Pull] = []
    for part in bound:
        x, pull = _layer(part, x, keys)
        if part.learning:
            pulls.append(pull)
    return x, pulls


def _layer(part: Bound, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Pull]:
    module = part.layer.module
    if part.dense:
        return part.dense(x)
    if part.matrices:
        return linear(x, part.matrices, part.matrix_totals, part.arithmetic)
    if is_relu(module):
        return relu(x)
    if flattens_samples(module):
        return flatten(x)
    if is_convolution(part.layer):
        return convolution(part.layer, part.parameters, part.totals, x, part.arithmetic)
    if part.branches:
        return _residual(part.branches, x, keys)
    if is_pooling(part.layer):
        return pooling(part.layer, x, part.arithmetic)
    if is_mean(part.layer):
        return mean_of_channels(x)
    if isinstance(module, KeyedDropout):
        return dropout(module, x, keys, part.arithmetic)
    if is_group_norm(part.layer):
        return group_norm(module, part.parameters, part.totals, x)
    return other(part.layer, part.parameters, part.totals, part.learning, x, keys)


def _residual(branches: Sequence[list[Bound]], x: Tensor, keys: Tensor | None) -> tuple[Tensor, Pull]:
    """The ReLU of the sum of both branches."""
    outputs, pulls = zip(*(forward(branch, x, keys) for branch in branches), strict=True)
    y = (outputs[0] + outputs[1]).relu_()

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        gradient = rectify_gradient(gradient, y)
        handed_back = [backward(branch, gradient, to_x=to_x) for branch in pulls]
        if not to_x:
            return None
        shared = [g.sum(1, keepdim=True) if x.shape[1] < g.shape[1] else g for g in handed_back]
        return shared[0] + shared[1]

    return y, pull


def backward(pulls: list[Pull], gradient: Tensor, *, to_x: bool = False) -> Tensor:
    """Take the gradient of the outputs back through the layers, adding to the totals of each; with `to_x` the input's.

    Else what is returned means nothing.
    """
    for depth in reversed(range(len(pulls))):
        handed_back = pulls[depth](gradient, to_x or depth > 0)
        if handed_back is not None:
            gradient = handed_back
    return gradient
