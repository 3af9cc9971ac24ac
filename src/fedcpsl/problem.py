"""The problem of the paper's Section II: one function per equation.

Models enter as log-probabilities `log_h`, shape [..., samples, classes]; `...` stands for any leading
dimensions (none for one device, one slot per device when many run side by side). Numbers such as
`alpha_p` have the shape of those leading dimensions.
"""

from collections.abc import Callable, Mapping
from math import log
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor

LOG_FLOOR = 1e-12
SampleCost = Callable[[Tensor, Tensor], Tensor]


def cross_entropy(log_h: Tensor, target: Tensor) -> Tensor:
    """l(h, y) = -<y, log h>: the loss of one sample against its label or pseudo-label."""
    return -(target * log_h).sum(-1)


def kl_from_uniform(log_p: Tensor) -> Tensor:
    """KL(p, 1/C) = <p, log p> + log C: how far a prediction is from undecided."""
    return (log_p.exp() * log_p).sum(-1) + log(log_p.shape[-1])


def label_kl_from_uniform(nu: Tensor) -> Tensor:
    """KL(nu, 1/C) = <nu, log nu> + log C: how far a pseudo-label is from undecided, log nu floored."""
    value = (nu * nu.detach().clamp_min(LOG_FLOOR).log()).sum(-1) + log(nu.shape[-1])
    if nu.requires_grad:  # the derivative of <nu, log nu> is log nu + 1; the floored log gave the first part
        value = value + nu.sum(-1) - nu.detach().sum(-1)
    return value


def regulariser(log_h: Tensor, nu: Tensor) -> Tensor:
    """R(h, nu) = KL(nu, 1/C) + KL(h, 1/C): the paper's regulariser of one unlabelled sample."""
    return label_kl_from_uniform(nu) + kl_from_uniform(log_h)


class Costs(NamedTuple):
    """The replaceable functions l and R of one sample. The closed-form pseudo-labels belong to the defaults."""

    loss: SampleCost = cross_entropy
    regulariser: SampleCost = regulariser

    @property
    def closed_form(self) -> bool:
        return self == Costs()


class Samples(NamedTuple):
    """Samples of one device with what weighs them: a minibatch, or all it has.

    `labelled` is 1/n on the labelled rows and 0 elsewhere, `unlabelled` likewise: a row that is padding
    has both zero, and an empty set leaves its terms zero.
    """

    x: Tensor  # [..., samples, *shape of one input]
    target: Tensor  # [..., samples, classes]: one-hot labels and pseudo-labels
    labelled: Tensor  # [..., samples]
    unlabelled: Tensor  # [..., samples]
    keys: Tensor | None = None  # [..., samples]: where dropout masks come from
    partner: Tensor | None = None  # [..., samples, classes]: log h(theta; x) of a theta that stays fixed
    strong: Tensor | None = None  # [..., unlabelled samples, ...]: strong views of them; x then has weak views of all
    extra: "Mapping[str, Samples]" = MappingProxyType({})  # further minibatches of the step, by the name of their draw
    which: Tensor | None = None  # [..., samples]: where each row is among the device's labelled or unlabelled samples,
    # if the algorithm keeps a state of each or asks for positions
    unlabelled_count: Tensor | None = None  # [...]: of the device's samples, if it keeps a state of each

    @property
    def inputs(self) -> tuple[Tensor, Tensor | None]:
        """x and keys with a dimension for the models that share them, [..., 1, samples, ...]."""
        lead = self.target.dim() - 2
        return self.x.unsqueeze(lead), None if self.keys is None else self.keys.unsqueeze(lead)


def local_cost(log_h: Tensor, samples: Samples, alpha_p: Tensor, alpha_r: Tensor, costs: Costs) -> Tensor:
    """f_i(theta, nu_i) = mean_L l(h, y) + alpha_p mean_U l(h, nu) + alpha_r mean_U R(h, nu).

    With a mixture's log-probabilities in place of log h(theta) this is F_i(theta_lc, theta, nu_i).
    """
    weights = row_weights(samples.labelled, samples.unlabelled, alpha_p, alpha_r)
    loss, regularisation = costs.loss(log_h, samples.target), costs.regulariser(log_h, samples.target)
    return (weights.loss * loss + weights.regulariser * regularisation).sum(-1)


class Weights(NamedTuple):
    """What each row counts in the loss and in the regulariser, [..., samples]."""

    loss: Tensor
    regulariser: Tensor


def row_weights(labelled: Tensor, unlabelled: Tensor, alpha_p: Tensor, alpha_r: Tensor) -> Weights:
    """w_L + alpha_p w_U and alpha_r w_U: what a row counts, from its weights w_L and w_U in the two means."""
    return Weights(labelled + alpha_p[..., None] * unlabelled, alpha_r[..., None] * unlabelled)


class LocalCosts(NamedTuple):
    """The costs of a minibatch as a function of the networks' outputs: of f_i, and of F_i where a model is mixed."""

    samples: Samples
    alpha_p: Tensor  # [...]
    alpha_r: Tensor
    beta: Tensor | None = None  # the weight of the last model in its mixture with `partner`; None: nothing is mixed
    partner: Tensor | None = None  # [..., samples, classes]: log h, fixed; None: the first model's output
    functions: Costs = Costs()

    def __call__(self, log_h: Tensor) -> Tensor:
        return local_costs(self, log_h)


def local_costs(given: LocalCosts, log_h: Tensor) -> Tensor:
    """f_i(theta_i, nu_i) and F_i(theta_lc, theta_i, nu_i), of the models in log_h [..., models, samples, classes].

    No gradient of F_i reaches theta_i.
    """
    if given.beta is not None:
        *others, own = log_h.unbind(-3)
        partner = others[0].detach() if given.partner is None else given.partner
        log_h = torch.stack([*others, mixture(own, partner, given.beta)], -3)
    samples = given.samples._replace(
        target=given.samples.target.unsqueeze(-3),
        labelled=given.samples.labelled.unsqueeze(-2),
        unlabelled=given.samples.unlabelled.unsqueeze(-2),
    )
    return local_cost(log_h, samples, given.alpha_p[..., None], given.alpha_r[..., None], given.functions)


class LabelledCosts(NamedTuple):
    """The loss of each model on the labelled samples of a minibatch as a function of the networks' outputs."""

    samples: Samples

    def __call__(self, log_h: Tensor) -> Tensor:
        return labelled_costs(self, log_h)


def labelled_costs(given: LabelledCosts, log_h: Tensor) -> Tensor:
    """l(w; B) = mean_B -log h(w; x)_y, zero for an empty B, of the models in log_h [..., models, samples, classes]."""
    loss = cross_entropy(log_h, given.samples.target.unsqueeze(-3))
    return (given.samples.labelled.unsqueeze(-2) * loss).sum(-1)


def with_prior(log_h: Tensor, log_pi: Tensor) -> Tensor:
    """log h_i(theta; x) = log softmax(log h(theta; x) + log pi_i): a prediction that knows the device's class prior.

    The outputs of a network before softmax give the same in place of log h.
    """
    return torch.log_softmax(log_h + log_pi[..., None, :], -1)


class PriorCosts(NamedTuple):
    """The costs of two models with a class prior, the second mixed with the first, as a function of their outputs.

    Without beta nothing is mixed.
    """

    target: Tensor  # [..., samples, classes]
    weights: Tensor  # [..., samples]
    log_pi: Tensor  # [..., classes]
    beta: Tensor | None  # [...]
    partner: Tensor | None = None  # log h(theta_i) in evaluation mode, where the mode matters

    def __call__(self, log_h: Tensor) -> Tensor:
        return prior_costs(self, log_h)


def prior_costs(given: PriorCosts, log_h: Tensor) -> Tensor:
    """f_i(theta_i) = mean_L CE(y, h_i) + lambda_u mean_U 1[max h_p >= tau] CE(yhat, h_i), and F_i with h_p for h_i.

    The weights have lambda_u and whether a pseudo-label is confident. No gradient of F_i reaches theta_i.
    """
    log_h = with_prior(log_h, given.log_pi.unsqueeze(-2))
    if given.beta is not None:
        general, own = log_h.unbind(-3)
        fixed = general.detach() if given.partner is None else with_prior(given.partner, given.log_pi)
        log_h = torch.stack([general, mixture(own, fixed, given.beta)], -3)
    loss = cross_entropy(log_h, given.target.unsqueeze(-3))
    return (given.weights.unsqueeze(-2) * loss).sum(-1)


def mixture(log_h_lc: Tensor, log_h: Tensor, beta: Tensor) -> Tensor:
    """h(theta_p; x) = beta h(theta_lc; x) + (1 - beta) h(theta; x), in logarithms and computed stably."""
    beta = beta[..., None, None]
    a, b = beta.log() + log_h_lc, (-beta).log1p() + log_h
    if not torch.is_grad_enabled():
        return torch.logaddexp(a, b)
    larger = torch.maximum(a, b).detach()  # at beta = 0 and 1 logaddexp has no second derivative
    return larger + ((a - larger).exp() + (b - larger).exp()).log()


def closed_form_labels(log_h: Tensor, alpha_p: Tensor, alpha_r: Tensor) -> Tensor:
    """nu = softmax((alpha_p / alpha_r) log h), and one-hot at the arg max of h where alpha_r = 0."""
    alpha_p, alpha_r = alpha_p[..., None, None], alpha_r[..., None, None]
    hard = alpha_r == 0
    soft = torch.softmax(alpha_p / torch.where(hard, torch.ones_like(alpha_r), alpha_r) * log_h, -1)
    one_hot = torch.nn.functional.one_hot(log_h.argmax(-1), log_h.shape[-1]).to(log_h.dtype)
    return torch.where(hard, one_hot, soft)


def gradient_labels(
    nu: Tensor,
    log_h: Tensor,
    eta_v: Tensor,
    alpha_p: Tensor,
    alpha_r: Tensor,
    unlabelled_count: Tensor | int,
    costs: Costs,
) -> Tensor:
    """nu = P(nu - eta_v grad_nu f_i(theta, nu)): one gradient step, then onto the simplex."""
    with torch.enable_grad():
        nu = nu.detach().requires_grad_()
        per_sample = alpha_p[..., None] * costs.loss(log_h, nu) + alpha_r[..., None] * costs.regulariser(log_h, nu)
        (gradient,) = torch.autograd.grad((per_sample.sum(-1) / unlabelled_count).sum(), nu)
    return project_to_simplex(nu.detach() - eta_v[..., None, None] * gradient)


def project_to_simplex(v: Tensor) -> Tensor:
    """P(v) = max(v - tau, 0) with tau such that it sums to 1: the nearest probability vector."""
    ordered = v.sort(-1, descending=True).values
    excess = ordered.cumsum(-1) - 1
    ranks = torch.arange(1, v.shape[-1] + 1, device=v.device, dtype=v.dtype)
    support = (ordered - excess / ranks > 0).sum(-1, keepdim=True).clamp_min(1)  # 0 by rounding, or of NaN
    tau = excess.gather(-1, support - 1) / support
    return (v - tau).clamp_min(0)
