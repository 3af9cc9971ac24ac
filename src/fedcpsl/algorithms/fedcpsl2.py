"""FedCPSL's successor: a class prior in every prediction, a residual personal model, labels from weak to strong views.

The device's class distribution pi_i is in every prediction; its own model is the general one plus what the device
changed; its own mixture labels weak views of unlabelled samples, and both models learn the confident ones on strong
views. The rounds are FedCPSL's: momentum, control variates, normalised aggregation.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Method, Roster, Traits, Visit
from fedcpsl.algorithms.family import (
    Broadcast,
    Server,
    Sum,
    Upload,
    broadcast,
    descend,
    effective_steps,
    greeting,
    mean_gradient,
    momentum,
    received_model,
    server_c,
    server_theta,
    started_again,
    update_rate,
)
from fedcpsl.averaging import general_model
from fedcpsl.engine import Leaves
from fedcpsl.problem import PriorCosts, Samples, mixture, with_prior
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, choice, real, whole

__all__ = ["broadcast", "general_model", "greeting", "received_model", "started_again", "update_rate"]

PREDICTS_WITH = ("beta", "log_pi")
VARIANTS = {"fedcpsl2": Traits(unlabelled=True, personal=True, models=2, gradients_per_step=4, follows=True)}


@dataclass(frozen=True)
class Settings:
    """What can be set; each part of the method has its own switch."""

    name: str = choice("fedcpsl2", "the algorithm", *VARIANTS)
    eta: float | str = real(AUTO, "step size of the copy of the global model", 0, open_ends="[", also=(AUTO,))
    eta_lc: float | str = real(AUTO, "step size of the personal model; auto: 2 eta", 0, open_ends="[", also=(AUTO,))
    gamma: float = real(0.8, "momentum of local steps", 0, 1, open_ends="]")
    beta: float = real(0.5, "weight of the personal model in a device's prediction", 0, 1)
    kappa: float = real(0.5, "how much of its own change a device keeps from visit to visit", 0, 1)
    prior: str = choice(
        "em", "the class prior: from labels and unlabelled samples, from labels, none", "em", "labels", "off"
    )
    smoothing: float = real(1.0, "added to each class's count of labels in the prior", 0, open_ends="[")
    em_steps: int = whole(3, "steps of expectation-maximisation a visit, from a device's second visit on", 1)
    lambda_u: float = real(1.0, "weight of unlabelled samples in the costs", 0)
    tau: float = real(0.8, "how confident a prediction must be to become a pseudo-label", 0, 1)
    views: str = choice("auto", "views of samples: by the shape of inputs", "auto", "image", "window", "table")


class Rules(NamedTuple):
    """What the functions decide by."""

    prior: str
    em_steps: int


class Hyper(NamedTuple):
    """Numbers that only scale: one of each per slot, shape [...]."""

    eta: Tensor
    eta_lc: Tensor
    gamma: Tensor
    beta: Tensor
    kappa: Tensor
    smoothing: Tensor
    lambda_u: Tensor
    tau: Tensor


class Device(NamedTuple):
    """What never leaves the device."""

    delta: Tensor  # [..., parameters]: theta_lc - theta_i after its last visit
    c: Tensor  # [..., parameters]
    pi: Tensor  # [..., classes]: its class distribution as it believes it to be
    visits: Tensor  # [...]


class Local(NamedTuple):
    """One device's working state in a round; leaves have a dimension for the two models: theta_i and theta_lc."""

    models: Leaves  # [..., 2, *shape] each
    momenta: Leaves
    correction: Leaves  # [..., *shape] each: c - c_i
    log_pi: Tensor  # [..., classes]
    costs: Tensor  # [..., 2]


class Numbers(NamedTuple):
    """What a device predicts with."""

    beta: Tensor
    log_pi: Tensor


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Rules]:
    """The views are the settings' own."""
    return variant._replace(views=settings.views), Rules(settings.prior, settings.em_steps)


def decided(settings: Settings, _method: Method, eta: float) -> Settings:
    """The settings with every `auto` decided."""
    return replace(settings, eta=eta, eta_lc=choose_eta_lc(settings, eta))


def choose_eta_lc(settings: Settings, eta: float) -> float:
    """2 eta, as FedCPSL's."""
    return 2 * eta if settings.eta_lc == AUTO else float(settings.eta_lc)


def alike(method: Method) -> Hashable:
    """Runs may go side by side where they make their priors in the same way."""
    return method.rules


def numbers(_method: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> dict[str, float]:
    """One of each; no unlabelled terms while a device warms up."""
    eta = float(settings.eta)
    return {
        "eta": eta,
        "eta_lc": choose_eta_lc(settings, eta),
        "gamma": settings.gamma,
        "beta": settings.beta,
        "kappa": settings.kappa,
        "smoothing": settings.smoothing,
        "lambda_u": 0.0 if warming else settings.lambda_u,
        "tau": settings.tau,
    }


# What each side starts with.


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made, c^0 = 0."""
    theta = method.network.initial.clone()
    return Server(theta, torch.zeros_like(theta))


def init_device(method: Method, broadcast: Broadcast) -> Device:
    """delta_i = 0, c_i = 0, pi_i uniform."""
    nothing, classes = torch.zeros_like(broadcast.theta), method.network.classes
    return Device(nothing, nothing.clone(), nothing.new_full((classes,), 1 / classes), nothing.new_zeros(()))


def with_labels(method: Method, hyper: Hyper, device: Device, labels: Tensor) -> Device:
    """pi_i of the labels alone, until the first visit; uniform where the prior is off."""
    return device if _rules(method).prior == "off" else device._replace(pi=label_prior(labels, hyper.smoothing))


def admit(_method: Method, server: Server, before: Roster, after: Roster) -> Server:
    """c = c S_old / S_new: joiners have c_i = 0, so c stays the weighted mean of all c_i."""
    return server._replace(c=server.c * (before.samples / after.samples))


# The prior.


def label_prior(labels: Tensor, smoothing: Tensor) -> Tensor:
    """pi_i = (n_i + s) / sum (n_i + s), and uniform without labels."""
    counts = labels + smoothing[..., None]
    uniform = torch.full_like(counts, 1 / counts.shape[-1])
    return torch.where(labels.sum(-1, keepdim=True) > 0, counts / counts.sum(-1, keepdim=True), uniform)


def em_prior(labels: Tensor, smoothing: Tensor, log_h: Tensor, steps: int) -> Tensor:
    """pi <- (n_i + s + sum_u softmax(log h(theta; u) + log pi)) / its sum, in each of some steps."""
    pi = label_prior(labels, smoothing)
    for _ in range(steps):
        counts = labels + smoothing[..., None] + with_prior(log_h, pi.log()).exp().sum(-2)
        pi = counts / counts.sum(-1, keepdim=True)
    return torch.where(labels.sum(-1, keepdim=True) > 0, pi, label_prior(labels, smoothing))


@torch.no_grad()
def prepare(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, visit: Visit) -> Device:
    """pi_i of a visit: uniform, of the labels, or by EM at theta^r from the second visit on."""
    rules = _rules(method)
    pi = torch.full_like(device.pi, 1 / device.pi.shape[-1])
    if rules.prior != "off":
        pi = label_prior(visit.labels, hyper.smoothing)
    if rules.prior == "em" and len(visit.x):
        pieces = [method.network.log_probabilities(broadcast.theta, some) for some in visit.x.split(4096)]
        by_em = em_prior(visit.labels, hyper.smoothing, torch.cat(pieces), rules.em_steps)
        pi = torch.where(device.visits > 0, by_em, pi)
    return device._replace(pi=pi, visits=device.visits + 1)


def _rules(method: Method) -> Rules:
    assert isinstance(method.rules, Rules)
    return method.rules


# A device's round.


def personal_start(theta: Tensor, kappa: Tensor, delta: Tensor) -> Tensor:
    """theta_lc = theta^r + kappa delta_i."""
    return theta + kappa[..., None] * delta


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """theta_i^{r,0} = theta^r, theta_lc^{r,0} = theta^r + kappa delta_i, both momenta zero."""
    split, lead = method.network.split, hyper.eta.dim()
    both = broadcast.theta.expand_as(device.delta), personal_start(broadcast.theta, hyper.kappa, device.delta)
    models = tuple(torch.stack(leaves, lead) for leaves in zip(*map(split, both), strict=True))
    momenta = tuple(map(torch.zeros_like, models))
    costs = models[0].new_zeros(*hyper.eta.shape, 2)
    return Local(models, momenta, split(broadcast.c - device.c), device.pi.log(), costs)


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """One step of both models: labels on weak views, the device's confident pseudo-labels on strong ones."""
    assert samples.strong is not None
    network, lead, models = method.network, hyper.eta.dim(), local.models
    unlabelled = samples.strong.shape[lead]
    labelled = samples.x.shape[lead] - unlabelled
    believed, confident = pseudo_labels(method, hyper, local, samples.x.narrow(lead, labelled, unlabelled))
    each = samples._replace(x=torch.cat([samples.x.narrow(lead, 0, labelled), samples.strong], lead))
    target = torch.cat([samples.target.narrow(lead, 0, labelled), believed], lead)
    weights = samples.labelled + hyper.lambda_u[..., None] * samples.unlabelled
    weights = torch.cat([weights.narrow(-1, 0, labelled), weights.narrow(-1, labelled, unlabelled) * confident], -1)

    mu = momentum(hyper.gamma, local.momenta, local.correction)
    costs = network.add_gradient(mu, models, *each.inputs, PriorCosts(target, weights, local.log_pi, hyper.beta))
    descend(models, torch.stack([hyper.eta, hyper.eta_lc], -1), mu)
    return local._replace(costs=local.costs + costs)


@torch.no_grad()
def pseudo_labels(method: Method, hyper: Hyper, local: Local, weak: Tensor) -> tuple[Tensor, Tensor]:
    """yhat = arg max h_p(a(u)), one-hot, and whether max h_p(a(u)) >= tau, of weak views [..., samples, *]."""
    lead = hyper.eta.dim()
    log_h = method.network.log_probabilities_at(local.models, weak.unsqueeze(lead))
    log_h = with_prior(log_h, local.log_pi.unsqueeze(lead))
    mixed = mixture(log_h.select(lead, 1), log_h.select(lead, 0), hyper.beta)
    sure, which = mixed.max(-1)
    return torch.nn.functional.one_hot(which, mixed.shape[-1]).to(mixed), (sure.exp() >= hyper.tau[..., None]).to(mixed)


def costs(local: Local) -> Tensor:
    """f_i and F_i, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, steps: Tensor
) -> tuple[Device, Upload]:
    """delta_i = theta_lc - theta_i is kept; theta_i^{r+1} - theta^r and the step count are sent."""
    lead, join = hyper.eta.dim(), method.network.join
    theta_i, theta_lc = (join([leaf.select(lead, which) for leaf in local.models]) for which in (0, 1))
    return device._replace(delta=theta_lc - theta_i), Upload(theta_i - broadcast.theta, steps)


def commit(_method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, upload: Upload) -> Device:
    """c_i^{r+1} = c_i^r - (c^r + (theta_i^{r+1} - theta^r) / (eta Q~)), once the upload was counted."""
    return device._replace(c=device.c - (broadcast.c + mean_gradient(hyper, upload)))


# The server's round.


def contribution(_method: Method, hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
    """omega_i (theta_i^{r+1} - theta^r) / Q~, and what c needs."""
    effective = effective_steps(hyper.gamma, upload.steps)
    return Sum(
        update=(weight / effective)[..., None] * upload.delta,
        control=weight[..., None] * mean_gradient(hyper, upload),
        weight=weight,
        steps=upload.steps.to(weight.dtype),
        effective_steps=effective,
        counted=torch.ones_like(weight),
    )


def apply(_method: Method, server: Server, total: Sum, devices: int) -> Server:
    """theta^{r+1} and c^{r+1} from the round's counted uploads; eta_g is the mean of Q~."""
    eta_g = total.effective_steps / total.counted
    theta = server_theta(server.theta, total.update, eta_g, devices, total.counted)
    return Server(theta, server_c(server.c, total))


def invariants(_method: Method, server: Server, devices: Device, omega: Tensor) -> dict[str, Tensor]:
    """c = sum_i omega_i c_i, whatever is lost and whoever joins."""
    return {"c - sum omega_i c_i": server.c - omega @ devices.c}


# What a device predicts.


def own_model(_method: Method, hyper: Hyper, device: Device, general: Tensor | None) -> Tensor:
    """theta + kappa delta_i."""
    assert general is not None
    return personal_start(general, hyper.kappa, device.delta)


def predicting(_method: Method, hyper: Hyper, device: Device) -> Numbers:
    """beta and log pi_i."""
    return Numbers(hyper.beta, device.pi.log())


def predict(_: Method, given: Numbers, log_h: Tensor | None, log_h_own: Tensor | None) -> Tensor:
    """h_p(x) = beta h_i(theta_lc; x) + (1 - beta) h_i(theta; x); h(theta; x) for a device that is not known."""
    assert log_h is not None
    if log_h_own is None:
        return log_h
    return mixture(with_prior(log_h_own, given.log_pi), with_prior(log_h, given.log_pi), given.beta)
