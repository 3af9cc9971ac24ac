"""What a network's passes cost: FLOPs of a forward pass, and how many samples pass through it."""

from copy import copy
from math import prod
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fedcpsl.engine.leafwise import Leaves
from fedcpsl.engine.network import Network


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
