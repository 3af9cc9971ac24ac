"""A classifier h(theta; x) as a pure function of its parameters.

At rest theta is one flat vector, so every state of every algorithm is one tensor and the paper's formulas are one
line. In the local steps it is a tuple of the module's own tensors (`Leaves`), which is what matmuls want.
What its passes cost is counted here too: FLOPs of a forward pass, and how many samples pass through it.
"""

import logging
from collections.abc import Hashable, Sequence
from copy import copy, deepcopy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode

from fedcpsl.engine.costs import Cost, Differentiated, differentiated
from fedcpsl.engine.dropout import with_keyed_dropout
from fedcpsl.engine.forward_backward import Bound, backward, bind, forward
from fedcpsl.engine.layer_kinds import (
    as_one_layer,
    differentiated_by_hand,
    is_convolution,
    is_matmul,
    is_parameter_free,
    pool_before_relu,
    refuse_running_statistics,
    runs_without_vmap,
    shares_parameters,
    walk,
)
from fedcpsl.engine.leafwise import Leaves, as_slots, by_model, cache_last_call, subtract_scaled, unbound
from fedcpsl.engine.precision import PRECISIONS, Arithmetic, own_products
from fedcpsl.errors import InputError

AGREE = 0.02  # of the outputs' norm: a GPU may multiply coarsely


class Network:
    """Any `nn.Module` classifier, checked, and evaluated at any stack of parameters.

    `batched=False` calls the module once per model, as plain PyTorch would; `batched=True` runs the whole stack at
    once. The two agree up to rounding.

    `precision` says how a batched network multiplies: `ieee`; `tf32`, which PyTorch has to be told as well; or `bf16`,
    which rounds the factors of its matmuls and convolutions to bfloat16 and adds up in float32.
    """

    def __init__(
        self, module: nn.Module, example: Tensor, classes: int, *, batched: bool = False, precision: str = "ieee"
    ) -> None:
        assert precision in PRECISIONS, precision
        self.batched = batched
        self.arithmetic = Arithmetic(precision)
        self.classes = classes
        self.input_shape = tuple(example.shape[1:])
        self.described = repr(module)
        self.module = deepcopy(module).to(example.device, example.dtype)
        refuse_running_statistics(self.module)
        self._dropouts = with_keyed_dropout(self.module)
        trained = {k: p for k, p in self.module.named_parameters() if p.requires_grad}
        if not trained:
            raise InputError("the model has no trainable parameters")
        self.shapes = {name: parameter.shape for name, parameter in trained.items()}
        self._shares_parameters = shares_parameters(self.module)
        self._first_rank = len(next(iter(self.shapes.values())))
        self._layers = walk(self.module, self.shapes)
        pool_before_relu(self.module)
        self._by_hand = differentiated_by_hand(self._layers)
        # a CPU convolves faster so; another's own module may look at its numbers in memory, so it gets them as they are
        self._wants_channels_last = self._by_hand and any(is_convolution(layer) for layer in self._layers)
        self.sizes = [shape.numel() for shape in self.shapes.values()]
        self.initial = torch.cat([p.detach().flatten() for p in trained.values()])
        self.has_dropout = bool(self._dropouts)
        self._learning = cache_last_call(self._kept_views)
        self.same_in_both_modes = False
        self._check_outputs(example[:2].expand(2, *example.shape[1:]))

    @property
    def fully_batched(self) -> bool:
        """Whether every layer with parameters runs for all models at once by itself, without `vmap`."""
        return all(runs_without_vmap(layer) for layer in self._layers)

    @property
    def fully_linear(self) -> bool:
        """Whether every layer with parameters is linear: then many models at once are faster on a CPU too."""
        return all(is_matmul(layer) or is_parameter_free(layer) for layer in self._layers)

    @property
    def faster_by_hand(self) -> bool:
        """Whether a CPU, too, is better off without autograd: not where layers are normalised, in many small passes."""
        kinds = (is_matmul, is_convolution, is_parameter_free)
        return self.fully_linear or (self._by_hand and all(any(k(layer) for k in kinds) for layer in self._layers))

    @property
    def how(self) -> Hashable:
        """How it is computed: equal for networks that compute in the same way."""
        return self.batched, self.arithmetic.precision

    def set_precision(self) -> None:
        """Tell PyTorch how to multiply: a setting of the whole process, so before each round and each evaluation."""
        allow_tf32 = self.arithmetic.precision == "tf32"  # PyTorch by itself lets convolutions do so
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allow_tf32

    def alike(self, module: nn.Module, outputs: int) -> "Network":
        """Another module for the same inputs, computed in the same way."""
        example = self.initial.new_zeros(2, *self.input_shape)
        return Network(module, example, outputs, batched=self.batched, precision=self.arithmetic.precision)

    def split(self, theta: Tensor) -> Leaves:
        """A flat theta [..., parameters] as the module's tensors, [..., *shape] each."""
        pieces = zip(theta.split(self.sizes, -1), self.shapes.values(), strict=True)
        return tuple(piece.unflatten(-1, shape) if shape else piece[..., 0] for piece, shape in pieces)

    def join(self, leaves: Sequence[Tensor]) -> Tensor:
        """The flat theta of `split`."""
        pieces = zip(leaves, self.shapes.values(), strict=True)
        return torch.cat([leaf.flatten(leaf.dim() - len(s)) if s else leaf[..., None] for leaf, s in pieces], -1)

    def named(self, theta: Tensor) -> dict[str, Tensor]:
        """A flat theta under the module's own parameter names."""
        return dict(zip(self.shapes, self.split(theta), strict=True))

    def log_probabilities(self, theta: Tensor, x: Tensor) -> Tensor:
        """log h(theta; x) in evaluation mode, [..., samples, classes]; theta [..., parameters], x [..., samples, *]."""
        if theta.dim() == 1 and self.batched and self._has_own_kernels(x):
            return self.log_probabilities(theta[None], x[None])[0]
        return self.log_probabilities_at(self.split(theta), x)

    def log_probabilities_at(self, leaves: Leaves, x: Tensor) -> Tensor:
        """As `log_probabilities`, of models that are given as leaves, [..., *shape] each."""
        return torch.log_softmax(self.outputs_at(leaves, x), -1)

    def outputs_at(self, leaves: Leaves, x: Tensor, learning_into: Leaves | None = None) -> Tensor:
        """The outputs before softmax, in evaluation mode, valid until the next call; as `log_probabilities_at`.

        With `learning_into`, where `add_gradient` adds the gradients of the same models, it finds their views ready.
        """
        if not (self.same_in_both_modes and self.batched):
            self._set_mode(training=False)
        lead = self._lead(leaves)
        if not lead:
            return self._one(leaves, x, None)
        if not self.batched:
            return self._each(self._models(by_model(leaves, lead)), x, None, lead)
        usable = self.same_in_both_modes and not x.is_cuda  # a GPU replays what it has captured
        ready = self._learning(leaves, learning_into) if learning_into and usable else None
        bound = ready or bind(self._layers, self._gridded(leaves, lead), None, self.arithmetic)
        outputs, _ = forward(bound, as_slots(x, lead), None)
        return outputs.reshape(*lead, *outputs.shape[2:])

    def _has_own_kernels(self, x: Tensor) -> bool:
        """Whether its convolutions are kernels of our own, which are faster than PyTorch's for one model too."""
        convolves = self._by_hand and any(is_convolution(layer) for layer in self._layers)
        return convolves and own_products(self.arithmetic, x) is not None

    def add_gradient(
        self, into: Leaves, models: Leaves, x: Tensor, keys: Tensor | None, cost: Cost, *, of_outputs: bool = False
    ) -> Tensor:
        """The costs [...] of log h(models; x) in training mode; their gradient in `models` is added to `into`.

        With `of_outputs` the cost is a function of the outputs before softmax in place of log h.

        The first dimensions of all leaves are those of `x` before its samples. With `keys`, one per sample, dropout
        is active and its masks are drawn from them. A batched network spares autograd where the gradient of `cost` is
        known (see `fedcpsl.engine.costs`). Without samples nothing is added.
        """
        self._set_mode(training=True)
        lead = self._lead(models)
        if not x.shape[len(lead)]:
            return models[0].new_zeros(lead)
        if self.batched and lead:
            return self._add_gradient_batched(into, models, x, keys, differentiated(cost), lead, of_outputs=of_outputs)
        costs, gradients = self._gradients(models, x, keys, cost, lead, of_outputs=of_outputs)
        there = [(total, g) for total, g in zip(by_model(into, lead), gradients, strict=True) if g is not None]
        torch._foreach_add_(*map(list, zip(*there, strict=True)))
        return costs

    def descend(
        self, models: Leaves, eta: Tensor, x: Tensor, keys: Tensor | None, cost: Cost, at: Leaves | None = None
    ) -> Tensor:
        """As `add_gradient`: models = models - eta gradient, in place; eta is [...]. The gradient is that of the models
        themselves, or of others (`at`), which stay as they are.

        In a batched network layers take back -eta times the gradient, and each adds its part straight to its
        parameters, once it has no more use for them: the gradient itself is never in memory.
        """
        self._set_mode(training=True)
        lead = self._lead(models)
        if not x.shape[len(lead)]:
            return models[0].new_zeros(lead)
        if self.batched:
            return self._add_gradient_batched(models, at or models, x, keys, differentiated(cost).times(-eta), lead)
        costs, gradients = self._gradients(at or models, x, keys, cost, lead)
        both = zip(by_model(models, lead), gradients, strict=True)
        filled = [torch.zeros_like(piece) if g is None else g for piece, g in both]
        each = (filled[i :: len(models)] for i in range(len(models)))  # a leaf's gradients in all models
        stacked = (g[0] if len(g) == 1 else torch.stack(g) for g in each)
        subtract_scaled(models, eta, tuple(g.reshape(leaf.shape) for g, leaf in zip(stacked, models, strict=True)))
        return costs

    def _gradients(
        self, models: Leaves, x: Tensor, keys: Tensor | None, cost: Cost, lead: torch.Size, *, of_outputs: bool = False
    ) -> tuple[Tensor, Sequence[Tensor | None]]:
        """Costs, and the gradients of all leaves, model by model: each is a tensor of its own to autograd."""
        with torch.enable_grad():
            leaves = [leaf.detach().requires_grad_() for leaf in by_model(models, lead)]
            each = self._models(leaves)
            outputs = self._each(each, x, keys, lead) if lead else self._one(each[0], x, keys)
            costs = cost(outputs if of_outputs else torch.log_softmax(outputs, -1))
            return costs.detach(), torch.autograd.grad(costs.sum(), leaves, allow_unused=True)

    def _add_gradient_batched(
        self,
        into: Leaves,
        models: Leaves,
        x: Tensor,
        keys: Tensor | None,
        cost: Differentiated,
        lead: torch.Size,
        *,
        of_outputs: bool = False,
    ) -> Tensor:
        # inference mode spares each small operation autograd's bookkeeping, where nothing needs autograd
        with torch.inference_mode(cost.by_hand and self._by_hand):
            keys = None if keys is None else as_slots(keys, lead)
            outputs, pulls = forward(self._learning(models, into) or self._bound(models, into), as_slots(x, lead), keys)
            if of_outputs:
                costs, gradient = cost.gradient(outputs.reshape(*lead, *outputs.shape[2:]))
                backward(pulls, gradient.reshape(outputs.shape))
                return costs
            found = cost.fused(outputs) if cost.fused and len(lead) == 2 else None
            if found:
                backward(pulls, found[1])
                return found[0]
            log_h = torch.log_softmax(outputs, -1)
            costs, gradient = cost.gradient(log_h.view(*lead, *log_h.shape[2:]))
            gradient = gradient.reshape(log_h.shape)
            backward(pulls, torch.ops.aten._log_softmax_backward_data(gradient, log_h, -1, log_h.dtype))
            return costs

    def _lead(self, leaves: Leaves) -> torch.Size:
        return leaves[0].shape[: leaves[0].dim() - self._first_rank]

    def _bound(self, models: Leaves, into: Leaves) -> list[Bound]:
        lead = self._lead(models)
        totals = self._gridded(into, lead)
        assert all(map(_same_memory, into, totals.values())), "what is added to a copy would be lost"
        return bind(self._layers, self._gridded(models, lead), totals, self.arithmetic)

    def _kept_views(self, models: Leaves, into: Leaves) -> list[Bound] | None:
        """As `_bound`, but only where they are views, so that they are good for the next step too."""
        return self._bound(models, into) if all(leaf.is_contiguous() for leaf in (*models, *into)) else None

    def _gridded(self, leaves: Leaves, lead: torch.Size) -> dict[str, Tensor]:
        return {name: as_slots(leaf, lead) for name, leaf in zip(self.shapes, leaves, strict=True)}

    def _set_mode(self, *, training: bool) -> None:
        if self.module.training != training:
            self.module.train(training)

    def _models(self, leaves: Sequence[Tensor]) -> list[Leaves]:
        """The leaves of one model after another, model by model."""
        count = len(self.shapes)
        return [tuple(leaves[i : i + count]) for i in range(0, len(leaves), count)]

    def _each(self, models: Sequence[Leaves], x: Tensor, keys: Tensor | None, lead: torch.Size) -> Tensor:
        """One model after another, as plain PyTorch would; the last dimension of x before its samples may be 1."""
        xs = unbound(x.expand(*lead, *x.shape[len(lead) :]), len(lead))
        each_keys = [None] * len(xs) if keys is None else unbound(keys.expand(*lead, keys.shape[-1]), len(lead))
        each = zip(models, xs, each_keys, strict=True)
        return torch.stack([self._one(*model) for model in each]).unflatten(0, lead)

    def _one(self, leaves: Leaves, x: Tensor, keys: Tensor | None) -> Tensor:
        for layer in self._dropouts:
            layer.keys = keys
        named = dict(zip(self.shapes, leaves, strict=True))
        if self._wants_channels_last and x.dim() == 4 and not x.is_cuda:
            x = x.contiguous(memory_format=torch.channels_last)
        outputs: Tensor = functional_call(self.module, named, (x,), tie_weights=self._shares_parameters)
        return outputs

    def _check_outputs(self, example: Tensor) -> None:
        try:
            first = self._trial(example, training=False, seed=0)
        except (RuntimeError, ValueError, IndexError) as error:
            raise InputError(
                f"the model does not accept inputs of shape {list(example.shape[1:])}: {str(error).splitlines()[0]}"
            ) from error
        if not isinstance(first, Tensor) or first.shape != (len(example), self.classes):
            got = list(first.shape[1:]) if isinstance(first, Tensor) else type(first).__name__
            raise InputError(
                f"the model's output does not match the classes: it gives {got} per sample where the data has "
                f"{self.classes} classes; make its last layer give {self.classes} outputs (logits)"
            )
        probes = _probes(example)  # a random layer may draw for some inputs only
        trained = self._trial(probes, training=True, seed=1)
        if not torch.equal(trained, self._trial(probes, training=True, seed=2)):
            raise InputError(
                "the model draws random numbers of its own while training, so executors could not agree; "
                "use nn.Dropout for dropout and remove other random layers"
            )
        evaluated = self._trial(probes, training=False, seed=1)
        if self.classes > 1 and (evaluated >= 0).all() and torch.allclose(evaluated.sum(-1), evaluated.new_ones(())):
            raise InputError(
                "the model's outputs are probabilities, which sum to 1; give logits: leave out the softmax at its end"
            )
        self.same_in_both_modes = not self.has_dropout and torch.equal(trained, evaluated)
        self._check_walk(probes, evaluated)

    def _check_walk(self, probes: Tensor, expected: Tensor) -> None:
        """Take the module as one layer where its layers, computed by hand, do not give what it gives."""
        if not self.fully_batched:
            return
        own = self._gridded(self.split(self.initial[None, None]), torch.Size([1, 1]))
        with torch.no_grad():
            found, _ = forward(bind(self._layers, own, None, Arithmetic(kernels="off")), probes[None, None], None)
        if found[0, 0].shape == expected.shape and (found[0, 0] - expected).norm() <= AGREE * expected.norm():
            return
        logging.getLogger("fedcpsl").warning("the model is more than its layers: it runs as a whole, which is slower")
        self._layers, self._by_hand, self._wants_channels_last = as_one_layer(self.module, self.shapes), False, False

    def _trial(self, example: Tensor, *, training: bool, seed: int) -> Tensor:
        with torch.random.fork_rng(), torch.no_grad():
            torch.manual_seed(seed)
            outputs: Tensor = self.module.train(training)(example)
        self.module.eval()
        return outputs


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.data_ptr() == other.data_ptr()


def _probes(example: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(62, *example.shape[1:], generator=generator).to(example)
    return torch.cat([example, 3 * noise])


def forward_flops(network: Network) -> float:
    """FLOPs of one sample's forward pass: two for each multiply-add of its matmuls and convolutions."""
    example = network.initial.new_zeros(2, *network.input_shape)
    counter = FlopCounterMode(display=False)
    network.module.eval()
    with torch.no_grad(), counter:
        network.module(example)
    return counter.get_total_flops() / len(example) or _parameters_used(network.module)


def _parameters_used(module: nn.Module) -> float:
    """Two FLOPs for each parameter, where a network has neither matmuls nor convolutions."""
    return 2.0 * sum(p.numel() for p in module.parameters())


class PassCounter:
    """How many samples went through a network, each model by itself: in passes that are trained, and in others."""

    def __init__(self) -> None:
        self.trained = self.forward = 0


def counting(network: Network) -> tuple[Network, PassCounter]:
    """The same network, which counts what passes through it; one model after another."""
    own, counter, rank = copy(network), PassCounter(), len(network.input_shape)
    own.batched = False

    def passes(leaves: Leaves, x: Tensor) -> int:
        return prod(own._lead(leaves)) * x.shape[x.dim() - rank - 1]

    def add_gradient(into: Leaves, models: Leaves, x: Tensor, *given: Any, **options: Any) -> Tensor:
        counter.trained += passes(models, x)
        return Network.add_gradient(own, into, models, x, *given, **options)

    def descend(models: Leaves, eta: Tensor, x: Tensor, *given: Any, **options: Any) -> Tensor:
        counter.trained += passes(models, x)
        return Network.descend(own, models, eta, x, *given, **options)

    def outputs_at(leaves: Leaves, x: Tensor, *given: Any, **options: Any) -> Tensor:
        counter.forward += passes(leaves, x)
        return Network.outputs_at(own, leaves, x, *given, **options)

    vars(own).update(add_gradient=add_gradient, descend=descend, outputs_at=outputs_at)
    return own, counter
