"""FedCPSL (Algorithm 1 of the paper) and its family: every baseline is FedCPSL with parts taken out."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Method, Roster, Traits
from fedcpsl.engine import Leaves, cache_last_call, scale_and_add, subtract_scaled
from fedcpsl.errors import InputError
from fedcpsl.problem import (
    Costs,
    LocalCosts,
    Samples,
    closed_form_labels,
    gradient_labels,
    mixture,
)
from fedcpsl.schedule import Sizes
from fedcpsl.settings import AUTO
from fedcpsl.settings import Algorithm as Settings

PREDICTS_WITH = ("beta",)
OWN_NUMBERS = ("beta",)  # that a real device may choose for itself
SWITCHES = ("unlabelled", "personal", "control_variates", "momentum", "normalised")


class Parts(NamedTuple):
    """What an algorithm of the family is made of; an ablation is a change of one of these."""

    unlabelled: bool  # pseudo-labels and the terms in alpha_p, alpha_r
    personal: bool  # a localized model of the device's own
    control_variates: bool
    momentum: bool
    normalised: bool  # aggregation of updates divided by the effective steps
    everyone: bool = False  # defined for full participation only
    alone: bool = False  # no server: each device trains its localized model for itself


class Rules(NamedTuple):
    """What a run's functions decide by."""

    parts: Parts
    costs: Costs
    pseudo_labels: str  # "closed_form" or "gradient"
    eta_g: str | float  # "mean_steps", "mean_effective_steps" or a number
    labels_from: str = "global"  # whose predictions pseudo-labels are made of: "global" or "mixture"


class Hyper(NamedTuple):
    """Numbers that only scale: one of each per slot, shape [...]."""

    eta: Tensor
    eta_lc: Tensor
    gamma: Tensor
    beta: Tensor
    alpha_p: Tensor
    alpha_r: Tensor
    eta_v: Tensor


class Server(NamedTuple):
    """What the server keeps."""

    theta: Tensor  # [parameters]
    c: Tensor  # [parameters], or empty without control variates


class Broadcast(NamedTuple):
    """Server to device: what the downlink pays for."""

    theta: Tensor
    c: Tensor


class Device(NamedTuple):
    """What never leaves the device (with its pseudo-labels, one row per unlabelled sample, kept beside it)."""

    theta_lc: Tensor  # [..., parameters], or empty without a personal model
    c: Tensor  # [..., parameters], or empty without control variates


class Local(NamedTuple):
    """One device's working state in a round, owned by it: `step` may reuse its memory.

    Every leaf has a dimension for the models after the leading ones: 0 is theta_i, 1 is theta_lc. Where only one of
    them is trained, that one is 0.
    """

    models: Leaves  # [..., 1 or 2, *shape] each
    momenta: Leaves  # the same shapes; none where a step needs none
    correction: Leaves  # [..., *shape] each: c - c_i; none without control variates
    costs: Tensor  # [..., 1 or 2]: f_i and F_i summed over the steps so far


class Upload(NamedTuple):
    """Device to server: what privacy and the uplink pay for."""

    delta: Tensor  # [..., parameters], or empty where nothing is sent
    steps: Tensor  # [...]


class Sum(NamedTuple):
    """What the counted uploads of a round add up to, in device order."""

    update: Tensor  # [parameters]
    control: Tensor  # [parameters], or empty
    weight: Tensor
    steps: Tensor
    effective_steps: Tensor
    counted: Tensor


VARIANTS = {
    #                unlabelled, personal, control variates, momentum, normalised, everyone
    "fedcpsl": Parts(True, True, True, True, True),
    "fedshvr": Parts(True, False, True, False, False, everyone=True),
    "fedshvrp": Parts(True, False, True, False, False),
    "apfl": Parts(False, True, False, False, False),
    "apfsl": Parts(True, True, False, False, False),
    "fedavg": Parts(False, False, False, False, False),
    "scaffold": Parts(False, False, True, False, False),
    "local": Parts(False, True, False, True, False, alone=True),
    "local-pseudo": Parts(True, True, False, True, False, alone=True),
}


# What the settings make of it.


def resolve(variant: Parts, settings: Settings, costs: Costs) -> tuple[Traits, Rules]:
    """The variant's own parts, less or plus what the settings switch."""
    switched = {name: getattr(settings, name) for name in SWITCHES}
    parts = variant._replace(**{name: value for name, value in switched.items() if value != AUTO})
    if parts.alone and (not parts.personal or parts.control_variates or parts.normalised):
        raise InputError(f"algorithm.name = {settings.name!r}: has a personal model and no server; leave its parts")
    if settings.pseudo_labels == "closed_form" and parts.unlabelled and not costs.closed_form:
        raise InputError(
            'algorithm.pseudo_labels = "closed_form": belongs to the default loss and regulariser; give "gradient"'
        )
    rules = Rules(parts, costs, settings.pseudo_labels, settings.eta_g, settings.labels_from)
    return _traits(parts, settings.warm_up), rules


def _traits(parts: Parts, warm_up: int) -> Traits:
    models = 2 if parts.personal and not parts.alone else 1
    gradients = models * (2 if parts.unlabelled else 1)
    return Traits(parts.unlabelled, parts.personal, parts.everyone, parts.alone, models, gradients, warm_up)


def phases(method: Method, settings: Settings, *, two_phase: bool) -> tuple[Method, Method]:
    """The method of the rounds with the server, and that of the personal rounds after them.

    In two phases no personal model is trained before the personal rounds.
    """
    rules, parts = _rules(method), _parts(method)
    if parts.alone:
        raise InputError(f"work.personal_rounds: {settings.name} has no server: all its rounds are personal; give 0")
    if not (parts.personal or two_phase):
        raise InputError(
            f"work.personal_rounds: {settings.name} has no personal model to train; give work.two_phase = true, or "
            "algorithm.personal = true"
        )
    if two_phase and settings.labels_from == "mixture":
        raise InputError('algorithm.labels_from = "mixture": two phases label with the global model; give "global"')
    kept = parts._replace(personal=True)
    before = kept._replace(personal=not two_phase)

    def with_parts(parts: Parts, *, personal: bool) -> Method:
        return Method(method.network, _traits(parts, settings.warm_up), rules._replace(parts=parts), personal)

    return with_parts(before, personal=False), with_parts(kept, personal=True)


def decided(settings: Settings, method: Method, eta: float) -> Settings:
    """The settings with every `auto` decided."""
    parts = {name: getattr(_parts(method), name) for name in SWITCHES}
    return replace(settings, eta=eta, eta_lc=choose_eta_lc(settings, eta), **parts)


def choose_eta_lc(settings: Settings, eta: float) -> float:
    """2 eta for FedCPSL and for devices on their own, eta for the others."""
    if settings.eta_lc != AUTO:
        return float(settings.eta_lc)
    return 2 * eta if settings.name in ("fedcpsl", "local", "local-pseudo") else eta


def numbers(method: Method, settings: Settings, sizes: Sizes, *, warming: bool) -> dict[str, float | list[float]]:
    """One of each, or one per device; a device that warms up has no unlabelled terms."""
    parts, eta, devices = _parts(method), float(settings.eta), len(sizes.labelled)
    beta = settings.beta if isinstance(settings.beta, list) else [settings.beta] * devices
    if len(beta) != devices:
        raise InputError(f"algorithm.beta has {len(beta)} values for {devices} devices; give one each, or one number")
    uses = parts.unlabelled and not warming
    return {
        "eta": eta,
        "eta_lc": choose_eta_lc(settings, eta),
        "gamma": settings.gamma if parts.momentum else 0.0,
        "beta": 1.0 if parts.alone else beta,
        "alpha_p": settings.alpha_p if uses else 0.0,
        "alpha_r": settings.alpha_r if uses else 0.0,
        "eta_v": settings.eta_v,
    }


def newcomer(settings: Settings) -> Settings:
    """Of a device that was not in training: it has a personal model, and the mean beta where devices have their own."""
    beta = settings.beta if isinstance(settings.beta, list) else [settings.beta]
    return replace(settings, personal=True, beta=sum(beta) / len(beta))


def without_sums(settings: Settings) -> Settings:
    """Without control variates, whose sum the server could not keep where no update is counted whole."""
    if settings.control_variates is True:
        raise InputError("algorithm.control_variates: works with no such aggregation; leave it out")
    return replace(settings, control_variates=False)


def alone(settings: Settings) -> list[Settings]:
    """The settings of the same devices without a server, as a comparison would have them."""
    by_default = choose_eta_lc(replace(settings, eta_lc=AUTO), float(settings.eta))
    eta_lc = AUTO if settings.eta_lc == by_default else settings.eta_lc
    automatic: dict[str, Any] = dict.fromkeys(SWITCHES, AUTO)
    return [replace(settings, name="local", eta_lc=eta_lc, **automatic)]


def alike(method: Method) -> Hashable:
    """Of runs whose devices can go side by side: control variates and momentum may differ, zero is none of them."""
    rules = _rules(method)
    free = rules.parts._replace(control_variates=False, momentum=False, normalised=False, everyone=False)
    return rules._replace(parts=free._replace(unlabelled=False), eta_g=0.0)


def merged(methods: Sequence[Method]) -> Method:
    """A method with control variates and momentum if any has them: those of the others are zero."""
    rules = [_rules(method) for method in methods]
    some = {name: any(getattr(r.parts, name) for r in rules) for name in ("control_variates", "momentum")}
    return methods[0]._replace(rules=rules[0]._replace(parts=rules[0].parts._replace(**some)))


def _rules(method: Method) -> Rules:
    assert isinstance(method.rules, Rules)
    return method.rules


def _parts(method: Method) -> Parts:
    return _rules(method).parts


# What each side starts with.


def init_server(method: Method, _devices: int) -> Server:
    """theta^0 as the network was made, c^0 = 0."""
    theta = method.network.initial.clone()
    return Server(theta, torch.zeros_like(theta) if _parts(method).control_variates else theta.new_zeros(0))


def broadcast(server: Server) -> Broadcast:
    """theta^r and c^r, to every active device."""
    return Broadcast(server.theta, server.c)


def init_device(method: Method, broadcast: Broadcast) -> Device:
    """theta_lc = the theta first received, c_i = 0."""
    theta, nothing = broadcast.theta, broadcast.theta.new_zeros(0)
    return Device(
        theta.clone() if _parts(method).personal else nothing,
        torch.zeros_like(theta) if _parts(method).control_variates else nothing,
    )


def admit(_method: Method, server: Any, before: Roster, after: Roster) -> Any:
    """c = c S_old / S_new: joiners have c_i = 0, so c stays the weighted mean of all c_i."""
    return server._replace(c=server.c * (before.samples / after.samples))


# A device's round.


def relabel(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, x: Tensor, nu: Tensor, count: Tensor
) -> Tensor:
    """nu^{r+1} = arg min over the simplex of f_i(theta^r, nu), or one gradient step towards it.

    A device without a server labels with its own model; `labels_from` may ask for the device's mixture.
    """
    predict = method.network.log_probabilities
    if _parts(method).alone:
        log_h = predict(device.theta_lc, x)
    else:
        log_h = predict(_in_slots(broadcast.theta, hyper), x)
        if _rules(method).labels_from == "mixture" and _parts(method).personal:
            log_h = mixture(predict(device.theta_lc, x), log_h, hyper.beta)
    if _rules(method).pseudo_labels == "closed_form":
        return closed_form_labels(log_h, hyper.alpha_p, hyper.alpha_r)
    return gradient_labels(nu, log_h, hyper.eta_v, hyper.alpha_p, hyper.alpha_r, count, _rules(method).costs)


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """theta_i^{r,0} = theta^r, theta_lc^{r,0} as the device kept it, both momenta zero."""
    split, lead = method.network.split, hyper.eta.dim()
    trained = [] if method.sends_nothing else [_in_slots(broadcast.theta, hyper)]
    trained += [device.theta_lc] if _parts(method).personal else []
    models = tuple(torch.stack(leaves, lead) for leaves in zip(*map(split, trained), strict=True))
    corrected = _parts(method).control_variates and not method.sends_nothing
    return Local(
        models,
        momenta=tuple(map(torch.zeros_like, models)) if _parts(method).momentum or corrected else (),
        correction=split(broadcast.c - device.c) if corrected else (),
        costs=models[0].new_zeros(models[0].shape[: lead + 1]),
    )


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """(11) to (14): one step of both models on one minibatch, both gradients at theta_i^{r,t} before its step."""
    network, models, eta = method.network, local.models, _step_sizes(method, hyper)
    cost = step_cost(method, hyper, models, samples)
    if _parts(method).momentum or local.correction:
        kept = local.momenta or tuple(map(torch.zeros_like, models))  # none where a correction is not c - c_i
        costs = momentum(
            hyper.gamma, kept, local.correction, lambda mu: network.add_gradient(mu, models, *samples.inputs, cost)
        )
        descend(models, eta, kept)
    else:  # mu is the gradient itself
        costs = network.descend(models, eta, *samples.inputs, cost)
    return local._replace(costs=local.costs + costs)


@cache_last_call
def _step_sizes(method: Method, hyper: Hyper) -> Tensor:
    """eta and eta_lc, of the models that are trained, [..., models]."""
    trained = [] if method.sends_nothing else [hyper.eta]
    return torch.stack([*trained, hyper.eta_lc] if _parts(method).personal else trained, -1)


def step_cost(method: Method, hyper: Hyper, models: Leaves, samples: Samples) -> LocalCosts:
    """f_i of theta_i and F_i of theta_lc, in which theta_i is fixed (and in evaluation mode)."""
    cost = LocalCosts(samples, hyper.alpha_p, hyper.alpha_r, functions=_rules(method).costs)
    if method.sends_nothing:
        return cost if samples.partner is None else cost._replace(beta=hyper.beta, partner=samples.partner)
    if not _parts(method).personal:
        return cost
    if method.network.same_in_both_modes:
        return cost._replace(beta=hyper.beta)
    theta_i = method.network.join([leaf.select(hyper.eta.dim(), 0) for leaf in models])
    return cost._replace(beta=hyper.beta, partner=method.network.log_probabilities(theta_i, samples.x))


def momentum(gamma: Tensor, mu: Leaves, correction: Leaves, add_gradient: Callable[[Leaves], Tensor]) -> Tensor:
    """mu^{t+1} = gamma mu^t + g - c_i + c, in place; mu_lc has no c. Returns the costs of which g is the gradient."""
    scale_and_add(mu, gamma, correction)
    return add_gradient(mu)


def descend(theta: Leaves, eta: Tensor, mu: Leaves) -> Leaves:
    """theta^{t+1} = theta^t - eta mu^{t+1}, with eta for theta_i and eta_lc for theta_lc. In place."""
    subtract_scaled(theta, eta, mu)
    return theta


def costs(local: Local) -> Tensor:
    """f_i and F_i, or the one that is trained, summed over the steps so far."""
    return local.costs


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, steps: Tensor
) -> tuple[Device, Upload]:
    """theta_lc^{r+1} is kept; theta_i^{r+1} - theta^r and the step count are sent."""
    lead, join = hyper.eta.dim(), method.network.join
    if _parts(method).personal:
        device = device._replace(theta_lc=join([leaf.select(lead, -1) for leaf in local.models]))
    if method.sends_nothing:
        return device, Upload(local.costs.new_zeros(*hyper.eta.shape, 0), steps)
    theta_i = join([leaf.select(lead, 0) for leaf in local.models])
    return device, Upload(theta_i.sub_(broadcast.theta), steps)


def effective_steps(gamma: Tensor, steps: Tensor) -> Tensor:
    """Q~ = Q/(1-gamma) - gamma (1 - gamma^Q)/(1-gamma)^2: what Q steps with momentum amount to."""
    gamma, steps, kind = gamma.double(), steps.double(), gamma.dtype  # nearly equal numbers for gamma near 1
    return (steps / (1 - gamma) - gamma * (1 - gamma**steps) / (1 - gamma) ** 2).to(kind)


def mean_gradient(hyper: Any, upload: Upload) -> Tensor:
    """(theta_i^{r+1} - theta^r) / (eta Q~): minus the device's mean corrected gradient over the round."""
    return upload.delta / (hyper.eta * effective_steps(hyper.gamma, upload.steps))[..., None]


def commit(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, upload: Upload) -> Device:
    """c_i^{r+1} = c_i^r - (c^r + (theta_i^{r+1} - theta^r) / (eta Q~)), once the upload was counted."""
    if not _parts(method).control_variates:
        return device
    return device._replace(c=device.c - (broadcast.c + mean_gradient(hyper, upload)))


def greeting(broadcast: Broadcast) -> Broadcast:
    """theta alone: c is for training."""
    return broadcast._replace(c=broadcast.c[:0])


def started_again(state: Server | Device) -> Server | Device:
    """c, or c_i, at 0: what both sides must agree on is reset; models stay."""
    return state._replace(c=torch.zeros_like(state.c))


def update_rate(hyper: Hyper, upload: Upload) -> Tensor:
    """norm(theta_i - theta) / (eta Q~), what the device's mean gradient would have to be; in float64."""
    exact = type(hyper)(*(number.double() for number in hyper))
    return mean_gradient(exact, Upload(upload.delta.double(), upload.steps)).norm()


# The server's round.


def contribution(method: Method, hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
    """omega_i (theta_i^{r+1} - theta^r) / Q~ (not divided where not normalised), and what c needs."""
    parts = _parts(method)
    return sum_of(hyper, upload, weight, normalised=parts.normalised, corrects=parts.control_variates)


def sum_of(hyper: Any, upload: Upload, weight: Tensor, *, normalised: bool, corrects: bool) -> Sum:
    """The `Sum` of one upload: its update, divided by Q~ or not, and what c needs, where there is one."""
    effective = effective_steps(hyper.gamma, upload.steps)
    share = weight / effective if normalised else weight
    return Sum(
        update=share[..., None] * upload.delta,
        control=weight[..., None] * mean_gradient(hyper, upload) if corrects else upload.delta[..., :0],
        weight=weight,
        steps=upload.steps.to(weight.dtype),
        effective_steps=effective,
        counted=torch.ones_like(weight),
    )


def reweighted(total: Sum, factor: Tensor) -> Sum:
    """w_i omega_i (theta_i^{r+1} - theta^r) / Q~: theta's terms alone, times a factor; c keeps omega_i."""
    return total._replace(update=factor[..., None] * total.update)


def late(method: Method, total: Sum, sent: Broadcast, server: Server, weight: Tensor) -> Sum:
    """omega_i (c^s - c^r) is added to what c needs: the device answers, and its c_i changes by, the c^s it was sent."""
    if not _parts(method).control_variates:
        return total
    return total._replace(control=torch.addcmul(total.control, weight[..., None], sent.c - server.c))


def apply(method: Method, server: Server, total: Sum, devices: int) -> Server:
    """theta^{r+1} and c^{r+1} from the round's counted uploads."""
    if _parts(method).alone:
        return server
    theta = server_theta(server.theta, total.update, server_step(method, total), devices, total.counted)
    return Server(theta, server_c(server.c, total) if _parts(method).control_variates else server.c)


def server_step(method: Method, total: Sum) -> Tensor | float:
    """eta_g = the mean of Q, the mean of Q~, or a number; 1 where aggregation is not normalised."""
    if not _parts(method).normalised:
        return 1.0
    if _rules(method).eta_g == "mean_steps":
        return total.steps / total.counted
    if _rules(method).eta_g == "mean_effective_steps":
        return total.effective_steps / total.counted
    return float(_rules(method).eta_g)


def server_theta(theta: Tensor, update: Tensor, eta_g: Tensor | float, devices: int, m: Tensor) -> Tensor:
    """theta^{r+1} = theta^r + eta_g (N/m) sum_i omega_i (theta_i^{r+1} - theta^r) / Q~."""
    return theta + eta_g * (devices / m) * update


def server_c(c: Tensor, total: Sum) -> Tensor:
    """c^{r+1} = c^r - sum_i omega_i (c^r + (theta_i^{r+1} - theta^r) / (eta Q~))."""
    return c - (total.weight * c + total.control)


def invariants(method: Method, server: Server, devices: Device, omega: Tensor) -> dict[str, Tensor]:
    """c = sum_i omega_i c_i, whatever is lost and whoever joins."""
    return {"c - sum omega_i c_i": server.c - omega @ devices.c} if _parts(method).control_variates else {}


# What a device predicts.


def general_model(method: Method, server: Server) -> Tensor | None:
    """theta."""
    return None if _parts(method).alone else server.theta


def own_model(method: Method, _hyper: Hyper, device: Device, _general: Tensor | None) -> Tensor | None:
    """theta_lc."""
    return device.theta_lc if _parts(method).personal else None


def predict(_: Method, hyper: Hyper, log_h: Tensor | None, log_h_own: Tensor | None) -> Tensor:
    """h(theta_p; x) = beta h(theta_lc; x) + (1 - beta) h(theta; x), or the one model that there is."""
    if log_h is None or log_h_own is None:
        found = log_h_own if log_h is None else log_h
        assert found is not None
        return found
    return mixture(log_h_own, log_h, hyper.beta)


def received_model(_: Method, broadcast: Broadcast) -> Tensor:
    """theta, as a device has it."""
    return broadcast.theta


def partner(broadcast: Broadcast) -> Tensor:
    """theta, which stays fixed while a device trains its own model in personal rounds."""
    return broadcast.theta


def _in_slots(theta: Tensor, hyper: Hyper) -> Tensor:
    return theta.expand(*hyper.eta.shape, -1)
