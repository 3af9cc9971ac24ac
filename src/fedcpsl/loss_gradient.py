"""Costs of a network's predictions with their gradient, from which a backward pass begins."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

Cost = Callable[[Tensor], Tensor]  # from log h to costs
Slope = Callable[[Tensor], tuple[Tensor, Tensor]]  # from log h to costs and their gradient in log h
SlopeAtOnce = Callable[[Tensor], tuple[Tensor, Tensor] | None]  # the same from outputs and in them, where it can


def differentiated(cost: Cost) -> Slope:
    """A cost with its gradient by autograd."""

    def slope(log_h: Tensor) -> tuple[Tensor, Tensor]:
        with torch.enable_grad():
            log_h = log_h.detach().requires_grad_()
            costs = cost(log_h)
            (gradient,) = torch.autograd.grad(costs.sum(), log_h)
        return costs.detach(), gradient

    return slope


def times(numbers: Tensor, slope: Any) -> Any:
    """A `Slope` or `SlopeAtOnce`, if given, with the gradient times a number for each model."""

    def scaled(given: Tensor) -> tuple[Tensor, Tensor] | None:
        found = slope(given)
        return found and (found[0], found[1] * numbers[..., None, None])

    return scaled if slope else None
