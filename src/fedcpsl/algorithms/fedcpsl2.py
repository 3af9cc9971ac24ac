"""FedCPSL's successor: a class prior in every prediction, a residual personal model, labels from weak to strong views.

The device's class distribution pi_i is in every prediction; its own model is the general one plus what the device
changed; its own mixture labels weak views of unlabelled samples, and both models learn the confident ones on strong
views. The rounds are FedCPSL's: momentum, control variates, normalised aggregation; step sizes fall along a cosine.
"""

from collections.abc import Hashable
from dataclasses import dataclass, replace
from functools import partial
from math import pi
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl import held_out
from fedcpsl.algorithm import Method, Traits, Visit
from fedcpsl.algorithms.family import (
    Sum,
    Upload,
    admit,
    descend,
    greeting,
    mean_gradient,
    momentum,
    received_model,
    reweighted,
    server_theta,
    started_again,
    sum_of,
    update_rate,
)
from fedcpsl.engine import Leaves
from fedcpsl.errors import InputError
from fedcpsl.prior import count_prior, em_prior, mixed_with_uniform
from fedcpsl.problem import PriorCosts, Samples, mixture, with_prior
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO, SEARCH, choice, real, whole
from fedcpsl.views import CHOICES

__all__ = ["admit", "greeting", "received_model", "reweighted", "started_again", "update_rate"]

PREDICTS_WITH = ("beta", "log_pi")
HELD_OUT = "held-out"
GIVEN_BACK = 0.25  # factor of the step sizes from which on labels held out are trained on too
TEACHERS = ("mixture", "global", "localized")
PRIORS = ("em", "labels", "after", "off")
VARIANTS = {
    "fedcpsl2": Traits(unlabelled=True, personal=True, models=2, gradients_per_step=4, follows=True),
    "fedcpsl2-prior": Traits(unlabelled=True, personal=True, models=1, gradients_per_step=2, follows=True),
    "fedcpsl2-alone": Traits(unlabelled=True, personal=True, alone=True, gradients_per_step=2),
}


@dataclass(frozen=True)
class Settings:
    """What can be set; each part of the method has its own switch."""

    name: str = choice("fedcpsl2", "the algorithm; -prior: no model on devices; -alone: no server", *VARIANTS)
    eta: float | str = real(
        SEARCH,
        "step size of the global model; search: found by short runs on some of the labels; auto: FedCPSL's",
        0,
        open_ends="[",
        also=(SEARCH, AUTO),
    )
    eta_lc: float | str = real(AUTO, "step size of the localized model; auto: 2 eta", 0, open_ends="[", also=(AUTO,))
    decay: str = choice("cosine", "how step sizes fall over the rounds", "cosine", "none")
    gamma: float = real(0.8, "momentum of local steps", 0, 1, open_ends="]")
    control_variates: bool = choice(True, "correct local steps by control variates", True, False)
    beta: float | str = real(
        0.5,
        "weight of the localized model in a device's prediction; held-out: one per device, chosen by held-out labels",
        0,
        1,
        also=(HELD_OUT,),
    )
    kappa: float = real(0.5, "share of its own change that a device keeps from one active round to the next", 0, 1)
    independence: float | str = real(
        AUTO,
        "how much a device relies on its localized model alone, from 0 to 1 (then it alone predicts, and keeps all "
        "its changes); auto: decided by held-out labels",
        0,
        1,
        also=(AUTO,),
    )
    prior: str = choice(
        "em",
        "the class prior; em: from labels and unlabelled samples; labels: from labels; after: as em, but only in "
        "predictions after training; off: none",
        *PRIORS,
    )
    smoothing: float | str = real(
        AUTO,
        "number added to each class's count of labels in the prior; auto: determined from the device's own counts",
        0,
        open_ends="[",
        also=(AUTO,),
    )
    em_steps: int = whole(3, "steps of expectation-maximisation per active round, from a device's second one on", 1)
    em_weight: float = real(10.0, "maximum number of labels that unlabelled samples count for in the prior", 0)
    prior_in_costs: float = real(0.8, "weight of the prior in the costs, the rest is uniform", 0, 1)
    prior_floor: float = real(0.02, "weight of the uniform distribution in the prior of predictions", 0, 1)
    lambda_u: float = real(1.0, "weight of unlabelled samples in the costs", 0)
    tau: float = real(0.8, "how confident a prediction must be to become a pseudo-label", 0, 1)
    soft_weights: bool = choice(False, "weight pseudo-labels by their confidence instead of tau", True, False)
    teacher: str = choice("mixture", "the model whose predictions become pseudo-labels", *TEACHERS)
    views: str = choice("auto", "views of samples; auto: by the shape of inputs", *CHOICES)
    both_ways: bool = choice(True, "predict a photograph from itself and its mirror image", True, False)


class Rules(NamedTuple):
    """What the functions decide by."""

    prior: str
    em_steps: int
    by_evidence: bool  # whether the prior's smoothing follows from the counts
    judges_beta: bool  # whether labels held out choose beta
    judges_independence: bool
    teacher: str
    soft_weights: bool
    control_variates: bool
    decay: bool


class Hyper(NamedTuple):
    """Numbers that only scale: one of each per slot, shape [...]."""

    eta: Tensor
    eta_lc: Tensor
    gamma: Tensor
    beta: Tensor
    kappa: Tensor
    smoothing: Tensor
    em_weight: Tensor
    prior_in_costs: Tensor
    prior_floor: Tensor
    lambda_u: Tensor
    tau: Tensor
    independence: Tensor


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]
    c: Tensor  # [parameters]
    updates: Tensor  # []: how often it has changed theta
    rate: Tensor  # []: the factor of both step sizes


class Broadcast(NamedTuple):
    """What it sends to every active device."""

    theta: Tensor
    c: Tensor
    rate: Tensor


class Device(NamedTuple):
    """What never leaves the device."""

    delta: Tensor  # [..., parameters]: theta_lc - theta_i after its last visit; without a server theta_lc itself
    c: Tensor  # [..., parameters]
    pi: Tensor  # [..., classes]: its class distribution as it believes it to be
    visits: Tensor  # [...]
    spacing: Tensor  # [...]: one of so many labelled samples is held out in this visit; 0: none
    score: Tensor  # [...]: of its own model after the last visit, on the labels held out
    evidence: Tensor  # [...]: that its own model is better than the global one
    beta: Tensor  # [...]: as labels held out choose it


class Local(NamedTuple):
    """One device's working state in a round; leaves have a dimension for the models: theta_i and theta_lc."""

    models: Leaves  # [..., models, *shape] each
    momenta: Leaves
    correction: Leaves  # [..., *shape] each: c - c_i
    rates: Tensor  # [..., models]: step sizes of this round
    log_pi: Tensor  # [..., classes]: of pseudo-labels
    log_pi_costs: Tensor  # [..., classes]
    beta: Tensor  # [...]: the device's own
    period: Tensor  # [...]: of labelled samples that are held out
    costs: Tensor  # [..., models]


class Numbers(NamedTuple):
    """What a device predicts with."""

    beta: Tensor
    log_pi: Tensor


def resolve(variant: Traits, settings: Settings, _costs: Any) -> tuple[Traits, Rules]:
    """The views are the settings' own."""
    both = variant.models == 2
    judges_beta, judges_independence = settings.beta == HELD_OUT and both, settings.independence == AUTO and both
    positions = judges_beta or judges_independence
    traits = variant._replace(views=settings.views, both_ways=settings.both_ways, positions=positions)
    return traits, Rules(
        settings.prior,
        settings.em_steps,
        settings.smoothing == AUTO,
        judges_beta,
        judges_independence,
        settings.teacher,
        settings.soft_weights,
        settings.control_variates and both,
        settings.decay == "cosine",
    )


def phases(method: Method, settings: Settings, *, two_phase: bool) -> tuple[Method, Method]:
    """The method of the rounds with the server, and that of personal rounds, in which theta is fixed."""
    if method.traits.alone:
        raise InputError(f"work.personal_rounds: {settings.name} has no server: all its rounds are personal; give 0")
    if method.traits.models == 1:
        raise InputError(f"work.personal_rounds: {settings.name} has no personal model to train; give 0")
    if two_phase:
        raise InputError(f"work.two_phase: {settings.name} trains both models at once; give false")
    return method, method._replace(personal_round=True)


def decided(settings: Settings, _method: Method, eta: float) -> Settings:
    """The settings with every `auto` decided."""
    return replace(settings, eta=eta, eta_lc=choose_eta_lc(settings, eta))


def choose_eta_lc(settings: Settings, eta: float) -> float:
    """2 eta, as FedCPSL's."""
    return 2 * eta if settings.eta_lc == AUTO else float(settings.eta_lc)


def alone(settings: Settings) -> list[Settings]:
    """The settings of the same devices without a server, as a comparison would have them; and from labels alone.

    Without the models of others, pseudo-labels do harm where a device has few labels of many classes.
    """
    by_default = settings.eta_lc == 2 * float(settings.eta)
    same = replace(settings, name="fedcpsl2-alone", eta_lc=AUTO if by_default else settings.eta_lc)
    return [same, replace(same, lambda_u=0.0)]


def newcomer(settings: Settings) -> Settings:
    """Of a device that was not in training: it may have a model of its own."""
    return replace(settings, name="fedcpsl2") if settings.name == "fedcpsl2-prior" else settings


def without_sums(settings: Settings) -> Settings:
    """Without control variates, whose sum the server could not keep where no update is counted whole."""
    return replace(settings, control_variates=False)


def alike(method: Method) -> Hashable:
    """Runs may go side by side where they decide by the same rules and count as many rounds."""
    return method.traits.alone, method.traits.models, method.rules, method.rounds


def numbers(method: Method, settings: Settings, _sizes: Sizes, *, warming: bool) -> dict[str, float]:
    """One of each; no unlabelled terms while a device warms up."""
    eta = float(settings.eta)
    beta = 1.0 if method.traits.alone else 0.5 if settings.beta == HELD_OUT else float(settings.beta)
    return {
        "eta": eta,
        "eta_lc": choose_eta_lc(settings, eta),
        "gamma": settings.gamma,
        "beta": beta,
        "kappa": settings.kappa,
        "smoothing": 1.0 if settings.smoothing == AUTO else float(settings.smoothing),
        "em_weight": settings.em_weight,
        "prior_in_costs": settings.prior_in_costs,
        "prior_floor": settings.prior_floor,
        "lambda_u": 0.0 if warming else settings.lambda_u,
        "tau": settings.tau,
        "independence": 0.0 if settings.independence == AUTO else float(settings.independence),
    }


def _rules(method: Method) -> Rules:
    assert isinstance(method.rules, Rules)
    return method.rules


# What each side starts with.


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made, c^0 = 0."""
    theta = method.network.initial.clone()
    c = torch.zeros_like(theta) if _rules(method).control_variates else theta.new_zeros(0)
    return Server(theta, c, torch.zeros_like(theta[0]), torch.ones_like(theta[0]))


def broadcast(server: Server) -> Broadcast:
    """theta^r, c^r and the factor of the round's step sizes, to every active device."""
    return Broadcast(server.theta, server.c, server.rate)


def init_device(method: Method, broadcast: Broadcast) -> Device:
    """delta_i = 0, c_i = 0, pi_i uniform; a device without a server begins with theta^0."""
    nothing, classes = torch.zeros_like(broadcast.theta), method.network.classes
    delta = broadcast.theta.clone() if method.traits.alone else nothing if method.traits.models == 2 else nothing[:0]
    c = nothing.clone() if _rules(method).control_variates else nothing[:0]
    pi_i = nothing.new_full((classes,), 1 / classes)
    visits, spacing, score, evidence = (nothing.new_zeros(()) for _ in range(4))
    return Device(delta, c, pi_i, visits, spacing, score, evidence, beta=nothing.new_tensor(0.5))


def with_labels(method: Method, hyper: Hyper, device: Device, labels: Tensor) -> Device:
    """pi_i of the labels alone, until the first visit; uniform where the prior is off."""
    if _rules(method).prior == "off":
        return device
    return device._replace(pi=count_prior(labels, _smoothing(method, hyper)))


# The prior.


def _smoothing(method: Method, hyper: Hyper) -> Tensor | None:
    """s, or None where the counts decide."""
    return None if _rules(method).by_evidence else hyper.smoothing


@torch.no_grad()
def prepare_visit(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, visit: Visit) -> Device:
    """pi_i of a visit: uniform, of the labels, or by EM at theta^r from the second visit on."""
    rules = _rules(method)
    found = torch.full_like(device.pi, 1 / device.pi.shape[-1])
    if rules.prior != "off":
        found = count_prior(visit.labels, _smoothing(method, hyper))
    if rules.prior in ("em", "after"):
        theta = device.delta if method.traits.alone else _sent_model(broadcast, device)
        pieces = [(method.network.log_probabilities(theta, x), there) for x, there in visit.pieces()]
        if pieces:
            log_h, there = torch.cat([log_h for log_h, _ in pieces], -2), torch.cat([there for _, there in pieces], -1)
            by_em = em_prior(visit.labels, log_h, there, _smoothing(method, hyper), hyper.em_weight, rules.em_steps)
            found = torch.where(((device.visits > 0) & (visit.unlabelled > 0))[..., None], by_em, found)
    device = device._replace(pi=found)
    if method.traits.positions:
        device = _judged(method, hyper, broadcast, device, visit)
    return device._replace(visits=device.visits + 1)


# Labels held out, which say how far a device goes its own way.


def independence(method: Method, hyper: Hyper, device: Device) -> Tensor:
    """iota_i: how far a device goes its own way, as labels held out speak for it, or as set."""
    if not _rules(method).judges_independence:
        return hyper.independence
    return held_out.independence_by(device.evidence)


def beta_of(method: Method, hyper: Hyper, device: Device) -> Tensor:
    """beta_i."""
    given = device.beta if _rules(method).judges_beta else hyper.beta
    return held_out.own_share(given, independence(method, hyper, device))


def kappa_of(method: Method, hyper: Hyper, device: Device) -> Tensor:
    """kappa_i."""
    return held_out.own_share(hyper.kappa, independence(method, hyper, device))


def _judged(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, visit: Visit) -> Device:
    """What the labels held out say of theta^r and of the device's own model; late in a run they are trained on too."""
    spacing = held_out.spacing_of(visit.labels) * (broadcast.rate > GIVEN_BACK)
    if method.personal_round:
        return device._replace(spacing=torch.zeros_like(spacing))
    given, theta = held_out.held_out_of(visit, spacing), _sent_model(broadcast, device)
    general = _with_own_prior(method, hyper, device, theta, given.x)
    found = held_out.more_evidence(device.evidence, device.score, held_out.score(general, given), given.size)
    known = (device.spacing > 0) & (spacing > 0)  # a score of the visit before, and something to compare it on
    device = device._replace(evidence=torch.where(known, found, device.evidence), spacing=spacing)
    if not _rules(method).judges_beta:
        return device
    own = _with_own_prior(method, hyper, device, own_model(method, hyper, device, theta), given.x)
    return device._replace(beta=torch.where(given.size > 0, held_out.mean_beta(own, general, given), device.beta))


def _with_own_prior(method: Method, hyper: Hyper, device: Device, model: Tensor, x: Tensor) -> Tensor:
    """log h_i(model; x), with the device's prior."""
    log_pi = mixed_with_uniform(device.pi, hyper.prior_floor).log()
    return with_prior(method.network.log_probabilities(model, x), log_pi)


def _sent_model(broadcast: Broadcast, device: Device) -> Tensor:
    """theta^r, [..., parameters]."""
    return broadcast.theta.expand(*device.visits.shape, broadcast.theta.shape[-1])


@torch.no_grad()
def review(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, upload: Upload, visit: Visit) -> Device:
    """The score of the device's own model after a visit, for the next one to compare theta with."""
    if not method.traits.positions or method.personal_round:
        return device
    theta_lc = device.delta + _partner_of_change(method, hyper, broadcast, device, upload.delta)
    given = held_out.held_out_of(visit, device.spacing)
    return device._replace(score=held_out.score(_with_own_prior(method, hyper, device, theta_lc, given.x), given))


# A device's round.


def personal_start(theta: Tensor, kappa: Tensor, delta: Tensor) -> Tensor:
    """theta_lc = theta^r + kappa_i delta_i."""
    return theta + kappa[..., None] * delta


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """theta_i^{r,0} = theta^r, theta_lc^{r,0} = theta^r + kappa delta_i, both momenta zero.

    The costs have a prior that is trusted less than that of pseudo-labels, so that theta keeps learning about classes
    that the device does not have.
    """
    rules, split, lead = _rules(method), method.network.split, hyper.eta.dim()
    trained = [device.delta]
    if not method.traits.alone:
        theta = _sent_model(broadcast, device)
        trained = [theta, own_model(method, hyper, device, theta)][: method.traits.models]
    models = tuple(torch.stack(leaves, lead) for leaves in zip(*map(split, trained), strict=True))
    corrected = rules.control_variates and not method.sends_nothing
    pi_i = torch.full_like(device.pi, 1 / device.pi.shape[-1]) if rules.prior == "after" else device.pi
    return Local(
        models,
        momenta=tuple(map(torch.zeros_like, models)),
        correction=split(broadcast.c - device.c) if corrected else (),
        rates=step_sizes(method, hyper, broadcast.rate),
        log_pi=mixed_with_uniform(pi_i, hyper.prior_floor).log(),
        log_pi_costs=mixed_with_uniform(pi_i, 1 - hyper.prior_in_costs).log(),
        beta=beta_of(method, hyper, device),
        period=held_out.period_of(device.spacing),
        costs=models[0].new_zeros(*hyper.eta.shape, len(trained)),
    )


def step_sizes(method: Method, hyper: Hyper, rate: Tensor) -> Tensor:
    """eta and eta_lc times the round's factor, [..., models]; in personal rounds theta stays and nothing falls."""
    if method.traits.models == 1:
        return ((hyper.eta_lc if method.traits.alone else hyper.eta) * rate)[..., None]
    if method.personal_round:
        return torch.stack([torch.zeros_like(hyper.eta), hyper.eta_lc], -1)
    return torch.stack([hyper.eta * rate, hyper.eta_lc * rate], -1)


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """One step of both models: labels on weak views, the device's confident pseudo-labels on strong ones."""
    assert samples.strong is not None
    network, lead, models = method.network, hyper.eta.dim(), local.models
    unlabelled = samples.strong.shape[lead]
    labelled = samples.x.shape[lead] - unlabelled
    believed, confident = pseudo_labels(method, hyper, local, samples.x.narrow(lead, labelled, unlabelled))
    each = samples._replace(x=torch.cat([samples.x.narrow(lead, 0, labelled), samples.strong], lead))
    target = torch.cat([samples.target.narrow(lead, 0, labelled), believed], lead)
    weights = held_out.trained_weights(samples, local.period) + hyper.lambda_u[..., None] * samples.unlabelled
    weights = torch.cat([weights.narrow(-1, 0, labelled), weights.narrow(-1, labelled, unlabelled) * confident], -1)
    beta, partner = local.beta if method.traits.models == 2 else None, None
    if beta is not None and not network.same_in_both_modes:
        partner = network.log_probabilities(network.join([leaf.select(lead, 0) for leaf in models]), each.x)
    (x, keys), cost = each.inputs, PriorCosts(target, weights, local.log_pi_costs, beta, partner)
    add_gradient = partial(network.add_gradient, models=models, x=x, keys=keys, cost=cost, of_outputs=True)
    costs = momentum(hyper.gamma, local.momenta, local.correction, add_gradient)
    descend(models, local.rates, local.momenta)
    return local._replace(costs=local.costs + costs)


@torch.no_grad()
def pseudo_labels(method: Method, hyper: Hyper, local: Local, weak: Tensor) -> tuple[Tensor, Tensor]:
    """yhat = arg max h_p(a(u)), one-hot, and 1[max h_p(a(u)) >= tau], of weak views [..., samples, *].

    Soft weights are max h_p(a(u)) itself. The teacher may be one of the two models instead of their mixture.
    """
    lead = hyper.eta.dim()
    outputs = method.network.outputs_at(local.models, weak.unsqueeze(lead), local.momenta)
    log_h = with_prior(outputs, local.log_pi.unsqueeze(lead))
    mixed = log_h.select(lead, -1)
    if method.traits.models == 2 and _rules(method).teacher != "localized":
        general = log_h.select(lead, 0)
        mixed = general if _rules(method).teacher == "global" else mixture(mixed, general, local.beta)
    log_sure, which = mixed.max(-1)
    sure = log_sure.exp()
    weights = sure if _rules(method).soft_weights else (sure >= hyper.tau[..., None]).to(mixed)
    return torch.zeros_like(mixed).scatter_(-1, which.unsqueeze(-1), 1.0), weights


def costs(local: Local) -> Tensor:
    """f_i and F_i, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, steps: Tensor
) -> tuple[Device, Upload]:
    """delta_i = theta_lc - (1 - iota_i) theta_i - iota_i theta^r is kept; theta_i - theta^r and the steps are sent.

    After a personal round theta + kappa_i delta_i is theta_lc.
    """
    lead, join = hyper.eta.dim(), method.network.join
    theta_lc = join([leaf.select(lead, -1) for leaf in local.models])
    if method.sends_nothing:
        kappa = kappa_of(method, hyper, device)
        kept = theta_lc if method.traits.alone else kept_change(broadcast.theta, kappa, theta_lc)
        return device._replace(delta=kept), Upload(theta_lc[..., :0], steps)
    update = join([leaf.select(lead, 0) for leaf in local.models]) - broadcast.theta
    if method.traits.models == 1:
        return device, Upload(update, steps)
    delta = theta_lc - _partner_of_change(method, hyper, broadcast, device, update)
    return device._replace(delta=delta), Upload(update, steps)


def _partner_of_change(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, update: Tensor) -> Tensor:
    """(1 - iota_i) theta_i + iota_i theta^r: what a device compares its own model with after a visit."""
    return broadcast.theta + (1 - independence(method, hyper, device))[..., None] * update


def kept_change(theta: Tensor, kappa: Tensor, theta_lc: Tensor) -> Tensor:
    """delta_i = (theta_lc - theta) / kappa_i, so that theta + kappa_i delta_i is theta_lc; zero where kappa_i is."""
    change = (theta_lc - theta) / kappa[..., None]
    return torch.where(kappa[..., None] > 0, change, torch.zeros_like(change))


def commit(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, upload: Upload) -> Device:
    """c_i^{r+1} = c_i^r - (c^r + (theta_i^{r+1} - theta^r) / (eta^r Q~)), once the upload was counted."""
    if not _rules(method).control_variates:
        return device
    change = mean_gradient(hyper, upload) / broadcast.rate[..., None]
    return device._replace(c=device.c - (broadcast.c + change))


# The server's round.


def contribution(method: Method, hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
    """omega_i (theta_i^{r+1} - theta^r) / Q~, and what c needs."""
    return sum_of(hyper, upload, weight, normalised=True, corrects=_rules(method).control_variates)


def late(_method: Method, total: Sum, sent: Broadcast, server: Server, weight: Tensor) -> Sum:
    """eta^r (control / eta^s + omega_i (c^s - c^r)): c changes by the c^s and eta^s that the device was sent."""
    then = total.control / sent.rate[..., None] + weight[..., None] * (sent.c - server.c)
    return total._replace(control=server.rate * then)


def apply(method: Method, server: Server, total: Sum, devices: int) -> Server:
    """theta^{r+1} and c^{r+1} from the round's counted uploads; eta_g is the mean of Q~."""
    if method.traits.alone:
        return server
    eta_g, updates = total.effective_steps / total.counted, server.updates + 1
    theta = server_theta(server.theta, total.update, eta_g, devices, total.counted)
    return Server(theta, server_c(server, total), updates, decay(method, updates))


def server_c(server: Server, total: Sum) -> Tensor:
    """c^{r+1} = c^r - sum_i omega_i (c^r + (theta_i^{r+1} - theta^r) / (eta^r Q~)), eta^r being this round's."""
    return server.c - (total.weight * server.c + total.control / server.rate)


def decay(method: Method, updates: Tensor) -> Tensor:
    """(1 + cos(pi r / R)) / 2, after r updates of theta: what step sizes are multiplied by; never zero."""
    if not _rules(method).decay or not method.rounds:
        return torch.ones_like(updates)
    left = method.rounds - updates.clamp(max=method.rounds - 1)
    return torch.sin(left * (pi / (2 * method.rounds))) ** 2  # 1 + cos would be 0 in float32 after very many rounds


def invariants(method: Method, server: Server, devices: Device, omega: Tensor) -> dict[str, Tensor]:
    """c = sum_i omega_i c_i, whatever is lost and whoever joins."""
    return {"c - sum omega_i c_i": server.c - omega @ devices.c} if _rules(method).control_variates else {}


# What a device predicts.


def general_model(method: Method, server: Server) -> Tensor | None:
    """theta."""
    return None if method.traits.alone else server.theta


def own_model(method: Method, hyper: Hyper, device: Device, general: Tensor | None) -> Tensor:
    """theta + kappa_i delta_i; theta_lc without a server; theta itself where the device keeps no model."""
    if general is None:
        return device.delta
    if method.traits.models == 1:
        return general.expand(*device.visits.shape, general.shape[-1])
    return personal_start(general, kappa_of(method, hyper, device), device.delta)


def predicting(method: Method, hyper: Hyper, device: Device) -> Numbers:
    """beta_i and log pi_i, with a floor."""
    return Numbers(beta_of(method, hyper, device), mixed_with_uniform(device.pi, hyper.prior_floor).log())


def predict(_: Method, given: Numbers, log_h: Tensor | None, log_h_own: Tensor | None) -> Tensor:
    """h_p(x) = beta h_i(theta_lc; x) + (1 - beta) h_i(theta; x); h(theta; x) for a device that is not known."""
    if log_h_own is None:
        assert log_h is not None
        return log_h
    own = with_prior(log_h_own, given.log_pi)
    return own if log_h is None else mixture(own, with_prior(log_h, given.log_pi), given.beta)
