"""One network with many sets of parameters at once, forwards and backwards.

What `torch.func.vmap` and autograd do, with less work where it matters. Parameters are [slots, models, *shape],
inputs [slots, models, samples, ...], or [slots, 1, samples, ...] where the models of a slot see the same samples.
A `Sequential` is walked; a linear layer becomes one batched matmul, whose gradient is added to the totals inside the
backward matmul (a training step is bound by memory traffic); a layer without parameters sees everything as one long
batch; anything else goes through `vmap`.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from fedcpsl.dropout import KeyedDropout

Named = Mapping[str, Tensor]
Pull = Callable[[Tensor, bool], Tensor | None]  # a layer's backward pass: adds to its totals, hands back x's gradient


class Layer(NamedTuple):
    """One step of the walk: a module and the names of its trained parameters, own name to full name."""

    module: nn.Module
    names: Mapping[str, str]


def walk(module: nn.Module, trained: Mapping[str, object], prefix: str = "") -> list[Layer]:
    """The layers of a module in order: a `Sequential`'s own, or the module itself."""
    if isinstance(module, nn.Sequential):
        return [layer for name, child in module.named_children() for layer in walk(child, trained, f"{prefix}{name}.")]
    return [Layer(module, {name.removeprefix(prefix): name for name in trained if name.startswith(prefix)})]


def is_matmul(layer: Layer) -> bool:
    return isinstance(layer.module, nn.Linear) and "weight" in layer.names


def is_parameter_free(layer: Layer) -> bool:
    return next(layer.module.parameters(), None) is None


def differentiated_by_hand(layers: list[Layer]) -> bool:
    """Whether no layer from the first with parameters on needs autograd."""
    learning = [bool(layer.names) for layer in layers]
    first = learning.index(True) if True in learning else len(layers)
    return all(
        is_matmul(layer) or isinstance(layer.module, nn.ReLU) or _flattens_samples(layer.module)
        for layer in layers[first:]
    )


class Matrices(NamedTuple):
    """The views that a linear layer's matmuls want: a matrix per model, and a slot's models as one."""

    each: Tensor  # [slots * models, out, in]
    each_transposed: Tensor
    together_transposed: Tensor  # [slots, in, models * out]
    bias: Tensor | None  # [slots * models, 1, out]
    shape: tuple[int, int, int]  # slots, models, out


class Totals(NamedTuple):
    """Where a linear layer's gradient is added, in the same two views."""

    each: Tensor  # [slots * models, out, in]
    together: Tensor  # [slots, models * out, in]
    bias: Tensor | None  # [slots * models, 1, out]


class Bound(NamedTuple):
    """A layer with its parameters and, where it is to learn, the totals that its gradient is added to."""

    layer: Layer
    parameters: dict[str, Tensor]
    totals: dict[str, Tensor]
    learning: bool
    matrices: Matrices | None
    matrix_totals: Totals | None


def bind(layers: list[Layer], parameters: Named, totals: Named | None = None) -> list[Bound]:
    """Layers with their parameters [slots, models, *shape]; with `totals`, ready to take gradients back."""
    bound: list[Bound] = []
    learning = False
    for layer in layers:
        learning = totals is not None and (learning or bool(layer.names))  # nothing to learn before the first
        own = {name: parameters[full] for name, full in layer.names.items()}
        into = {} if totals is None else {name: totals[full] for name, full in layer.names.items()}
        matrices = _matrices(own) if is_matmul(layer) else None
        bound.append(Bound(layer, own, into, learning, matrices, _totals(into) if matrices and into else None))
    return bound


def _matrices(own: Named) -> Matrices:
    weight, bias = own["weight"], own.get("bias")
    slots, models, out, _ = weight.shape
    each = weight.flatten(0, 1)
    return Matrices(
        each,
        each.mT,
        weight.flatten(1, 2).mT,
        None if bias is None else bias.reshape(-1, 1, out),
        (slots, models, out),
    )


def _totals(into: Named) -> Totals:
    weight, bias = into["weight"], into.get("bias")
    slots, models, out, inputs = weight.shape
    return Totals(
        weight.view(-1, out, inputs),
        weight.view(slots, models * out, inputs),
        None if bias is None else bias.view(-1, 1, out),
    )


def forward(bound: list[Bound], x: Tensor, keys: Tensor | None) -> tuple[Tensor, list[Pull]]:
    """Outputs [slots, models, samples, ...], and what takes gradients back, layer by layer."""
    pulls: list[Pull] = []
    for part in bound:
        if part.matrices:
            x, pull = _linear(x, part.matrices, part.matrix_totals)
        elif isinstance(part.layer.module, nn.ReLU):
            x, pull = _relu(x)
        elif _flattens_samples(part.layer.module):
            x, pull = _flatten(x)
        else:
            x, pull = _other(part, x, keys)
        if part.learning:
            pulls.append(pull)
    return x, pulls


def backward(pulls: list[Pull], gradient: Tensor) -> None:
    """Take the gradient of the outputs back through the layers, adding to the totals of each."""
    for depth in reversed(range(len(pulls))):
        handed_back = pulls[depth](gradient, depth > 0)
        if handed_back is not None:
            gradient = handed_back


def _linear(x: Tensor, matrices: Matrices, totals: Totals | None) -> tuple[Tensor, Pull]:
    """x W^T + b for every model; where a slot's models share x they are one matmul with more outputs."""
    slots, models, out = matrices.shape
    between = x.shape[2:-1]
    if len(between) != 1:
        x = x.reshape(*x.shape[:2], -1, x.shape[-1])
    shared = x.shape[1] < models
    rows = x[:, 0] if shared else x.flatten(0, 1)
    if shared:
        y = torch.bmm(rows, matrices.together_transposed).view(slots, -1, models, out).transpose(1, 2)
        y = y.contiguous() if matrices.bias is None else y + matrices.bias.view(slots, models, 1, out)
    elif matrices.bias is None:
        y = torch.bmm(rows, matrices.each_transposed)
    else:
        y = torch.baddbmm(matrices.bias, rows, matrices.each_transposed)

    def pull(gradient: Tensor, to_x: bool) -> Tensor | None:
        assert totals is not None
        each = gradient.reshape(slots * models, -1, out)
        if shared:
            side = each.view(slots, models, -1, out).transpose(1, 2).flatten(2)
            totals.together.baddbmm_(side.mT, rows)
        else:
            totals.each.baddbmm_(each.mT, rows)
        if totals.bias is not None:
            totals.bias.baddbmm_(each.new_ones(1, 1, 1).expand(len(each), 1, each.shape[1]), each)  # the sum of rows
        if not to_x:
            return None
        x_gradient = torch.bmm(each, matrices.each).view(slots, models, *between, -1)
        return x_gradient.sum(1, keepdim=True) if shared else x_gradient

    return y.view(slots, models, *between, out), pull


def _flattens_samples(module: nn.Module) -> bool:
    return isinstance(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)


def _flatten(x: Tensor) -> tuple[Tensor, Pull]:
    shape = x.shape
    return x.flatten(3), lambda gradient, _: gradient.view(*gradient.shape[:3], *shape[3:])


def _relu(x: Tensor) -> tuple[Tensor, Pull]:
    y = torch.relu(x)
    return y, lambda gradient, _: torch.ops.aten.threshold_backward(gradient, y, 0)


def _other(part: Bound, x: Tensor, keys: Tensor | None) -> tuple[Tensor, Pull]:
    """Any other layer, with autograd for its backward pass."""
    layer, parameters, totals = part.layer, part.parameters, part.totals
    with torch.set_grad_enabled(part.learning):
        if part.learning:
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
