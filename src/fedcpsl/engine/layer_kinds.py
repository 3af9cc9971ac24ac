"""The layers of a network in order, and which of them are computed and differentiated by hand."""

from collections.abc import Callable, Mapping
from typing import NamedTuple, TypeGuard, TypeVar

from torch import Tensor, nn

from fedcpsl.engine.dropout import KeyedDropout
from fedcpsl.errors import InputError
from fedcpsl.models import ResidualBlock

Named = Mapping[str, Tensor]
_KEEPS_STATISTICS = (nn.modules.batchnorm._BatchNorm, nn.modules.instancenorm._InstanceNorm)
Kind = TypeVar("Kind", bound=nn.Module)
Pull = Callable[[Tensor, bool], Tensor | None]  # a layer's backward pass: adds to its totals, hands back x's gradient


class Layer(NamedTuple):
    """One step of the walk: a module and the names of its trained parameters, own name to full name.

    A ReLU beside a convolution or a pooling is taken into it, which spares a pass over the largest tensors there are.
    """

    module: nn.Module
    names: Mapping[str, str]
    rectified: bool = False  # a ReLU follows the convolution, or precedes the pooling, and is part of the layer
    masked_later: bool = False  # the next layer takes the gradient back through this layer's ReLU
    masks_gradient: bool = False  # x came from a ReLU, through which this layer takes its gradient back
    before_flat: bool = False  # no layer on a grid follows
    pool: "Layer | None" = None  # the 2 x 2 pooling that follows the convolution, part of the layer too
    narrow: bool = False  # only layers that pick or drop numbers come between the convolution and the next matmul
    branches: "tuple[tuple[Layer, ...], ...]" = ()  # of a residual block: its main layers and its shortcut's


def walk(module: nn.Module, trained: Mapping[str, object]) -> list[Layer]:
    """The layers of a module in order: a `Sequential`'s own, or the module itself."""
    if shares_parameters(module):
        return as_one_layer(module, trained)
    return _with_neighbours(_flat(module, trained, ""))


def _with_neighbours(layers: list[Layer], *, grid_follows: bool = False) -> list[Layer]:
    """Layers that know what is beside them; `grid_follows`: the last of them is not that of the network."""
    layers = _with_relus_taken_in(layers)
    for i, layer in enumerate(layers):
        after = layers[i + 1] if i + 1 < len(layers) else None
        if is_convolution(layer) and layer.rectified and after and is_convolution(after):
            layers[i], layers[i + 1] = layer._replace(masked_later=True), after._replace(masks_gradient=True)
        kinds = (is_convolution, is_pooling, is_residual)
        on_grid = grid_follows or any(kind(other) for other in layers[i + 1 :] for kind in kinds)
        layers[i] = layers[i]._replace(before_flat=not on_grid, narrow=_feeds_a_matmul(layers[i + 1 :]))
    return _with_pooling_taken_in(layers)


def as_one_layer(module: nn.Module, trained: Mapping[str, object]) -> list[Layer]:
    """The module as one layer, whatever is in it."""
    return [Layer(module, {name: name for name in trained})]


def shares_parameters(module: nn.Module) -> bool:
    """Whether layers have a parameter in common: its gradient is known after the last of them."""
    return len(list(module.named_parameters(remove_duplicate=False))) > len(list(module.parameters()))


def _is(module: nn.Module, kind: type[Kind]) -> TypeGuard[Kind]:
    """Whether a module does what its kind does, and nothing of its own beside it."""
    return type(module) is kind and not _has_hooks(module)


def _has_hooks(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks)


def _feeds_a_matmul(after: list[Layer]) -> bool:
    for layer in after:
        if is_convolution(layer) or is_matmul(layer):
            return True
        if not (is_pooling(layer) or is_dropout(layer) or is_relu(layer.module) or _is(layer.module, nn.Flatten)):
            return False
    return False


def _with_pooling_taken_in(layers: list[Layer]) -> list[Layer]:
    joined: list[Layer] = []
    for layer in layers:
        if joined and is_convolution(joined[-1]) and joined[-1].pool is None and _halves(layer):
            joined[-1] = joined[-1]._replace(pool=layer, before_flat=layer.before_flat)
        else:
            joined.append(layer)
    return joined


def _halves(layer: Layer) -> bool:
    """Whether it is a max pooling of 2 x 2 windows side by side."""
    pool = layer.module
    if not (is_pooling(layer) and isinstance(pool, nn.MaxPool2d)):
        return False
    given = (pool.kernel_size, pool.stride, pool.padding, pool.dilation)
    plain = all(number in (one, (one, one)) for number, one in zip(given, (2, 2, 0, 1), strict=True))
    return plain and not pool.ceil_mode


def _flat(module: nn.Module, trained: Mapping[str, object], prefix: str) -> list[Layer]:
    in_order = isinstance(module, nn.Sequential) and type(module).forward is nn.Sequential.forward
    if in_order and not _has_hooks(module):  # its modules by name: one may be there twice
        children = [(name, child) for name, child in module._modules.items() if child is not None]
        return [layer for name, child in children for layer in _flat(child, trained, f"{prefix}{name}.")]
    layer = Layer(module, {name.removeprefix(prefix): name for name in trained if name.startswith(prefix)})
    if not _is(module, ResidualBlock):
        return [layer]
    branches = [_flat(getattr(module, branch), trained, f"{prefix}{branch}.") for branch in ("main", "shortcut")]
    if not all(runs_without_vmap(part) for branch in branches for part in branch):
        return [layer]
    return [layer._replace(branches=tuple(tuple(_with_neighbours(branch, grid_follows=True)) for branch in branches))]


def _with_relus_taken_in(layers: list[Layer]) -> list[Layer]:
    kept: list[Layer] = []
    for layer in layers:
        if is_pooling(layer) and kept and is_relu(kept[-1].module):
            kept[-1] = layer._replace(rectified=True)
        else:
            kept.append(layer)
    joined: list[Layer] = []
    for layer in kept:
        if is_relu(layer.module) and joined and is_convolution(joined[-1]) and not joined[-1].rectified:
            joined[-1] = joined[-1]._replace(rectified=True)
        else:
            joined.append(layer)
    return joined


def pool_before_relu(module: nn.Module) -> None:
    """Swap every ReLU with the max pooling after it, in place: the same values and gradients, of fewer numbers."""
    for part in module.modules():
        if _is(part, nn.Sequential):
            for i in range(len(part) - 1):
                if is_relu(part[i]) and is_pooling(Layer(part[i + 1], {})):
                    part[i], part[i + 1] = part[i + 1], part[i]


def is_relu(module: nn.Module) -> bool:
    return _is(module, nn.ReLU)


def _learns(layer: Layer) -> bool:
    """Whether all of its parameters are trained."""
    return set(layer.names) == {name for name, _ in layer.module.named_parameters()}


def is_matmul(layer: Layer) -> bool:
    return _is(layer.module, nn.Linear) and _learns(layer)


def is_convolution(layer: Layer) -> bool:
    """Whether the layer is a convolution that is computed by hand."""
    module = layer.module
    if _is(module, nn.Conv1d) or _is(module, nn.Conv2d):
        return module.groups == 1 and module.padding_mode == "zeros" and _learns(layer)
    return False


def is_pooling(layer: Layer) -> bool:
    module = layer.module
    return (_is(module, nn.MaxPool1d) or _is(module, nn.MaxPool2d)) and not module.return_indices


def is_group_norm(layer: Layer) -> bool:
    return (
        _is(layer.module, nn.GroupNorm)
        and set(layer.names) in (set(), {"weight", "bias"})
        and (layer.module.affine == bool(layer.names))
    )


def is_residual(layer: Layer) -> bool:
    """Whether it is a residual block whose layers are known."""
    return bool(layer.branches)


def is_mean(layer: Layer) -> bool:
    """Whether it takes the mean of each channel."""
    module = layer.module
    if _is(module, nn.AdaptiveAvgPool1d) or _is(module, nn.AdaptiveAvgPool2d):
        return module.output_size in (1, (1,), (1, 1))
    return False


def is_dropout(layer: Layer) -> bool:
    return isinstance(layer.module, KeyedDropout)


def is_parameter_free(layer: Layer) -> bool:
    return next(layer.module.parameters(), None) is None


def flattens_samples(module: nn.Module) -> bool:
    return _is(module, nn.Flatten) and (module.start_dim, module.end_dim) == (1, -1)


def runs_without_vmap(layer: Layer) -> bool:
    """Whether a layer runs for all models at once as it is."""
    kinds = (is_matmul, is_convolution, is_group_norm, is_residual, is_parameter_free)
    return any(kind(layer) for kind in kinds)


def differentiated_by_hand(layers: list[Layer]) -> bool:
    """Whether no layer from the first with parameters on needs autograd."""
    learning = [bool(layer.names) for layer in layers]
    first = learning.index(True) if True in learning else len(layers)
    return all(map(_is_by_hand, layers[first:]))


def _is_by_hand(layer: Layer) -> bool:
    if is_residual(layer):
        return all(_is_by_hand(part) for branch in layer.branches for part in branch)
    by_hand = (is_matmul, is_convolution, is_pooling, is_mean, is_group_norm, is_dropout)
    return is_relu(layer.module) or flattens_samples(layer.module) or any(kind(layer) for kind in by_hand)


def refuse_running_statistics(module: nn.Module) -> None:
    """Stop at layers whose outputs depend on other samples than their own."""
    for name, layer in module.named_modules():
        if isinstance(layer, _KEEPS_STATISTICS) and (
            layer.track_running_stats or isinstance(layer, nn.modules.batchnorm._BatchNorm)
        ):
            raise InputError(
                f"layer {name!r} ({type(layer).__name__}) mixes samples or keeps statistics across them, which has "
                "no meaning over devices; use nn.GroupNorm instead"
            )
