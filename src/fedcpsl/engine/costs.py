"""Costs of the networks' outputs with their gradient, from which a backward pass begins.

A cost is a function of log h, [..., models, samples, classes]. The gradients of those that `fedcpsl.problem` declares
are written out here, once for any machine and once as a GPU kernel; autograd differentiates any other.
"""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from math import log
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.engine.leafwise import cache_last_call, has_triton
from fedcpsl.problem import LabelledCosts, LocalCosts, PriorCosts, Weights, row_weights, with_prior

Cost = Callable[[Tensor], Tensor] | LocalCosts | LabelledCosts | PriorCosts  # from log h to costs
Result = tuple[Tensor, Tensor]  # costs and their gradient
Gradient = Callable[[Tensor], Result]  # from log h; the gradient in log h
Fused = Callable[[Tensor], Result | None]  # from outputs; the gradient in them. None where there is no kernel for it


class Differentiated(NamedTuple):
    """A cost with its gradient."""

    gradient: Gradient
    fused: Fused | None = None
    by_hand: bool = False  # whether autograd is not needed

    def times(self, numbers: Tensor) -> "Differentiated":
        """The same with the gradient times a number for each model."""

        def scaled(found: Result | None) -> Result | None:
            return found and (found[0], found[1] * numbers[..., None, None])

        fused = self.fused
        return self._replace(
            gradient=lambda log_h: scaled(self.gradient(log_h)),  # type: ignore[arg-type, return-value]
            fused=fused and (lambda outputs: scaled(fused(outputs))),
        )


def differentiated(cost: Cost) -> Differentiated:
    """A cost with its gradient: written out where it is known, else by autograd."""
    if isinstance(cost, Differentiated):
        return cost
    if isinstance(cost, LabelledCosts) or (isinstance(cost, LocalCosts) and cost.functions.closed_form):
        given = cost if isinstance(cost, LocalCosts) else _without_unlabelled(cost.samples.labelled, cost)
        return Differentiated(partial(local_gradient, given), partial(fused_local_gradient, given), by_hand=True)
    if isinstance(cost, PriorCosts):
        return Differentiated(partial(prior_gradient, cost), by_hand=True)
    return Differentiated(partial(_by_autograd, cost))


def _by_autograd(cost: Cost, log_h: Tensor) -> Result:
    with torch.enable_grad():
        log_h = log_h.detach().requires_grad_()
        costs = cost(log_h)
        (gradient,) = torch.autograd.grad(costs.sum(), log_h)
    return costs.detach(), gradient


def _without_unlabelled(labelled: Tensor, cost: LabelledCosts) -> LocalCosts:
    nothing, zero = _zeros(labelled)
    return LocalCosts(cost.samples._replace(unlabelled=nothing), zero, zero)


@cache_last_call
def _zeros(labelled: Tensor) -> Result:
    """No weight for any row, and zero for every slot."""
    return torch.zeros_like(labelled), labelled.new_zeros(labelled.shape[:-1])


def local_gradient(given: LocalCosts, log_h: Tensor) -> Result:
    """`fedcpsl.problem.local_costs` and their gradient in log h, written out for the default l and R."""
    samples = given.samples
    weights = _weights(samples.labelled, samples.unlabelled, given.alpha_p, given.alpha_r)
    target = samples.target.unsqueeze(-3)
    if given.beta is None:
        return local_cost_and_gradient(log_h, target, weights)
    *others, own = log_h.unbind(-3)
    shares = _log_shares(given.beta)
    mixed = torch.logaddexp(shares[0] + own, shares[1] + (others[0] if given.partner is None else given.partner))
    costs, gradient = local_cost_and_gradient(torch.stack([*others, mixed], -3), target, weights)
    gradient.select(-3, -1).mul_(mixture_share(own, mixed, shares[0]))
    return costs, gradient


def local_cost_and_gradient(log_h: Tensor, target: Tensor, weights: Weights) -> Result:
    """df_i/dlog h = -(w_L + alpha_p w_U) y + alpha_r w_U h (1 + log h), with the default l and R; and f_i before it.

    What `fedcpsl.problem.local_cost` and autograd find, in fewer operations.
    """
    of_loss, of_regulariser, uncertain = _over_classes(weights)
    flattening = log_h.exp().mul_(of_regulariser)  # alpha_r w_U h
    gradient = torch.addcmul(flattening, of_loss, target, value=-1)
    each = (gradient * log_h).addcmul_(of_regulariser, torch.special.entr(target), value=-1)
    cost = torch.add(each.sum((-2, -1)), uncertain, alpha=2 * log(log_h.shape[-1]))  # R has log C twice
    return cost, gradient.addcmul_(flattening, log_h)


def mixture_share(log_h_lc: Tensor, log_h_p: Tensor, log_beta: Tensor) -> Tensor:
    """dlog h(theta_p)/dlog h(theta_lc) = beta h(theta_lc) / h(theta_p): the localized model's share of a mixture."""
    return (log_beta + log_h_lc).sub_(log_h_p).exp_()


def fused_local_gradient(given: LocalCosts, outputs: Tensor) -> Result | None:
    """grad_z f_i = df_i/dlog h - h <1, df_i/dlog h>, in the networks' outputs z; and f_i before it: one GPU kernel.

    Outputs are [slots, models, samples, classes]. None where there is no kernel: `local_gradient` gives the same, up to
    rounding.
    """
    of_a_kind = outputs.is_cuda and outputs.dim() == 4 and outputs.dtype in (torch.float32, torch.float64)
    if not (of_a_kind and has_triton()) or given.partner is not None:
        return None
    kernels = import_module("fedcpsl.engine.cost_kernels")
    if outputs.shape[-1] > kernels.MOST_CLASSES or outputs.shape[1] != (1 if given.beta is None else 2):
        return None
    samples, alphas = given.samples, (given.alpha_p, given.alpha_r)
    shares = None if given.beta is None else _log_shares(given.beta)
    weights = samples.labelled, samples.unlabelled
    found: Result = kernels.costs_and_gradient(outputs, samples.target, weights, alphas, shares)
    return found


def prior_gradient(given: PriorCosts, log_h: Tensor) -> Result:
    """`fedcpsl.problem.prior_costs` and their gradient in log h, written out.

    With w the weight of a row and s the own model's share of the mixture it is w (h_i - y) for theta_i, and
    g - h_i <1, g> with g = -w s y for theta_lc.
    """
    adjusted = with_prior(log_h, given.log_pi.unsqueeze(-2))
    weighted = given.weights[..., None] * given.target
    if given.beta is None:
        falls = weighted.unsqueeze(-3).expand_as(adjusted)
        return -(falls * adjusted).sum((-2, -1)), (adjusted.exp() * falls.sum(-1, keepdim=True)).sub_(falls)
    general, own = adjusted.unbind(-3)
    shares = _log_shares(given.beta)
    fixed = general if given.partner is None else with_prior(given.partner, given.log_pi)
    mixed = torch.logaddexp(shares[0] + own, shares[1] + fixed)
    costs = -(weighted.unsqueeze(-3) * torch.stack([general, mixed], -3)).sum((-2, -1))
    of_own = weighted * mixture_share(own, mixed, shares[0])
    falls = torch.stack([weighted, of_own], -3)
    return costs, (adjusted.exp() * falls.sum(-1, keepdim=True)).sub_(falls)


@cache_last_call
def _weights(labelled: Tensor, unlabelled: Tensor, alpha_p: Tensor, alpha_r: Tensor) -> Weights:
    """The weights of rows with a dimension for the models."""
    return row_weights(labelled.unsqueeze(-2), unlabelled.unsqueeze(-2), alpha_p[..., None], alpha_r[..., None])


@cache_last_call
def _over_classes(weights: Weights) -> tuple[Tensor, Tensor, Tensor]:
    """Weights shaped to go with log h, and the regulariser's sum."""
    return weights.loss[..., None], weights.regulariser[..., None], weights.regulariser.sum(-1)


@cache_last_call
def _log_shares(beta: Tensor) -> Result:
    """log beta and log (1 - beta): the weights of the two models of a mixture, shaped to go with log h."""
    beta = beta[..., None, None]
    return beta.log(), (-beta).log1p()
