"""FedCPSL (Algorithm 1 of the paper) and its family: every baseline is FedCPSL with parts taken out."""

from functools import partial

import torch
from torch import Tensor

from fedcpsl.algorithm import Broadcast, Device, Hyper, Local, Method, Parts, Server, Sum, Upload
from fedcpsl.each import scale_and_add, subtract_scaled
from fedcpsl.network import Leaves
from fedcpsl.problem import (
    Samples,
    Weights,
    closed_form_labels,
    costs_and_slope_at_once,
    gradient_labels,
    local_cost,
    local_cost_and_slope,
    mixture,
    mixture_share,
    row_weights,
)
from fedcpsl.views import remembered

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


# What each side starts with.


def init_server(method: Method) -> Server:
    """theta^0 as the network was made, c^0 = 0."""
    theta = method.network.initial.clone()
    return Server(theta, torch.zeros_like(theta) if method.parts.control_variates else theta.new_zeros(0))


def broadcast(server: Server) -> Broadcast:
    """theta^r and c^r, to every active device."""
    return Broadcast(server.theta, server.c)


def init_device(method: Method, broadcast: Broadcast) -> Device:
    """theta_lc = the theta first received, c_i = 0."""
    theta, nothing = broadcast.theta, broadcast.theta.new_zeros(0)
    return Device(
        theta.clone() if method.parts.personal else nothing,
        torch.zeros_like(theta) if method.parts.control_variates else nothing,
    )


def admit(method: Method, server: Server, samples_before: int, samples_after: int) -> Server:
    """c = c S_old / S_new: joiners have c_i = 0, so c stays the weighted mean of all c_i."""
    if not method.parts.control_variates:
        return server
    return server._replace(c=server.c * (samples_before / samples_after))


# A device's round.


def relabel(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, x: Tensor, nu: Tensor, count: int
) -> Tensor:
    """nu^{r+1} = arg min over the simplex of f_i(theta^r, nu), or one gradient step towards it.

    A device without a server labels with its own model; `labels_from` may ask for the device's mixture.
    """
    predict = method.network.log_probabilities
    if method.parts.alone:
        log_h = predict(device.theta_lc, x)
    else:
        log_h = predict(_in_slots(broadcast.theta, hyper), x)
        if method.labels_from == "mixture" and method.parts.personal:
            log_h = mixture(predict(device.theta_lc, x), log_h, hyper.beta)
    if method.pseudo_labels == "closed_form":
        return closed_form_labels(log_h, hyper.alpha_p, hyper.alpha_r)
    return gradient_labels(nu, log_h, hyper.eta_v, hyper.alpha_p, hyper.alpha_r, count, method.costs)


def begin(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device) -> Local:
    """theta_i^{r,0} = theta^r, theta_lc^{r,0} as the device kept it, both momenta zero."""
    split, lead = method.network.split, hyper.eta.dim()
    trained = [] if method.trains_localized_alone else [_in_slots(broadcast.theta, hyper)]
    trained += [device.theta_lc] if method.parts.personal else []
    models = tuple(torch.stack(leaves, lead) for leaves in zip(*map(split, trained), strict=True))
    corrected = method.parts.control_variates and not method.trains_localized_alone
    return Local(
        models,
        momenta=tuple(map(torch.zeros_like, models)) if method.parts.momentum or corrected else (),
        correction=split(broadcast.c - device.c) if corrected else (),
        costs=models[0].new_zeros(models[0].shape[: lead + 1]),
    )


def step(method: Method, hyper: Hyper, local: Local, samples: Samples) -> Local:
    """One step of both models on one minibatch, both gradients at theta_i^{r,t} before its step."""
    models, lead, network, etas = local.models, hyper.eta.dim(), method.network, _etas(method, hyper)
    keys = None if samples.keys is None else samples.keys.unsqueeze(lead)
    given, x = (method, hyper, models, samples), samples.x.unsqueeze(lead)
    cost, at_once = partial(step_costs, *given), partial(step_slope_at_once, method, hyper, samples)
    slopes = (partial(step_slope, *given), at_once) if method.costs.closed_form else ()
    if method.parts.momentum or local.correction:
        kept = local.momenta or tuple(map(torch.zeros_like, models))  # none where a correction is not c - c_i
        momenta = momentum(hyper.gamma, kept, local.correction)
        costs = network.add_gradient(momenta, models, x, keys, cost, *slopes)
        descend(models, etas, momenta)
    elif network.batched:
        costs = network.descend(models, etas, x, keys, cost, *slopes)
    else:
        costs, gradients = network.gradient(models, x, keys, cost)
        descend(models, etas, gradients)
    return local._replace(costs=local.costs + costs)


@remembered
def _etas(method: Method, hyper: Hyper) -> Tensor:
    """The step size of each model that is trained."""
    trained = [] if method.trains_localized_alone else [hyper.eta]
    return torch.stack([*trained, hyper.eta_lc] if method.parts.personal else trained, -1)


def step_costs(method: Method, hyper: Hyper, models: Leaves, samples: Samples, log_h: Tensor) -> Tensor:
    """f_i(theta_i, nu_i) and F_i(theta_lc, theta_i, nu_i), [..., 1 or 2]: gradients of F_i reach theta_lc alone."""
    lead = hyper.eta.dim()
    each = samples._replace(
        target=samples.target.unsqueeze(lead),
        labelled=samples.labelled.unsqueeze(lead),
        unlabelled=samples.unlabelled.unsqueeze(lead),
    )
    predictions = log_h
    if method.trains_localized_alone:
        predictions = log_h if samples.partner is None else _mixed_alone(hyper, samples, log_h)
    elif method.parts.personal:
        predictions = torch.stack([log_h.select(lead, 0), _mixed(method, hyper, models, samples, log_h)], lead)
    return local_cost(predictions, each, hyper.alpha_p[..., None], hyper.alpha_r[..., None], method.costs)


def step_slope(method: Method, hyper: Hyper, models: Leaves, samples: Samples, log_h: Tensor) -> tuple[Tensor, Tensor]:
    """The costs of `step_costs` and their gradient in log h, written out for the default l and R."""
    lead = hyper.eta.dim()
    weights = _weights_for_each_model(samples.labelled, samples.unlabelled, hyper)
    target = samples.target.unsqueeze(lead)
    if method.trains_localized_alone and samples.partner is not None:
        mixed = _mixed_alone(hyper, samples, log_h)
        costs, slope = local_cost_and_slope(mixed, target, weights)
        return costs, slope.mul_(mixture_share(log_h.squeeze(lead), mixed.squeeze(lead), hyper.beta).unsqueeze(lead))
    if method.trains_localized_alone or not method.parts.personal:
        return local_cost_and_slope(log_h, target, weights)
    own, log_h_lc = log_h.unbind(lead)
    mixed = _mixed(method, hyper, models, samples, log_h)
    costs, slope = local_cost_and_slope(torch.stack([own, mixed], lead), target, weights)
    slope.select(lead, 1).mul_(mixture_share(log_h_lc, mixed, hyper.beta))
    return costs, slope


def step_slope_at_once(method: Method, hyper: Hyper, samples: Samples, outputs: Tensor) -> tuple[Tensor, Tensor] | None:
    """As `step_slope`, from the networks' outputs and in them, where there is a kernel for it."""
    mixes = method.parts.personal and not method.trains_localized_alone
    if samples.partner is not None or (mixes and not method.network.same_in_both_modes):
        return None
    alphas, beta = (hyper.alpha_p, hyper.alpha_r), hyper.beta if mixes else None
    return costs_and_slope_at_once(outputs, samples.target, samples.labelled, samples.unlabelled, alphas, beta)


def _mixed(method: Method, hyper: Hyper, models: Leaves, samples: Samples, log_h: Tensor) -> Tensor:
    """log h(theta_p), theta_i its frozen partner (in evaluation mode)."""
    lead = hyper.eta.dim()
    frozen = log_h.select(lead, 0).detach()
    if not method.network.same_in_both_modes:
        theta_i = method.network.join([leaf.select(lead, 0) for leaf in models])
        frozen = method.network.log_probabilities(theta_i, samples.x)
    return mixture(log_h.select(lead, 1), frozen, hyper.beta)


def _mixed_alone(hyper: Hyper, samples: Samples, log_h: Tensor) -> Tensor:
    """log h(theta_p) where theta_lc alone is trained, [..., 1, samples, classes]."""
    assert samples.partner is not None
    lead = hyper.eta.dim()
    return mixture(log_h.squeeze(lead), samples.partner, hyper.beta).unsqueeze(lead)


@remembered
def _weights_for_each_model(labelled: Tensor, unlabelled: Tensor, hyper: Hyper) -> Weights:
    lead, alphas = hyper.eta.dim(), (hyper.alpha_p[..., None], hyper.alpha_r[..., None])
    return row_weights(labelled.unsqueeze(lead), unlabelled.unsqueeze(lead), *alphas)


def momentum(gamma: Tensor, mu: Leaves, correction: Leaves) -> Leaves:
    """mu^{t+1} = gamma mu^t - c_i + c, to which the step's gradient is then added; mu_lc has no c. In place."""
    scale_and_add(mu, gamma, correction)
    return mu


def descend(theta: Leaves, eta: Tensor, mu: Leaves) -> Leaves:
    """theta^{t+1} = theta^t - eta mu^{t+1}, with eta for theta_i and eta_lc for theta_lc. In place."""
    subtract_scaled(theta, eta, mu)
    return theta


def finish(
    method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, local: Local, steps: Tensor
) -> tuple[Device, Upload]:
    """theta_lc^{r+1} is kept; theta_i^{r+1} - theta^r and the step count are sent."""
    lead, join = hyper.eta.dim(), method.network.join
    if method.parts.personal:
        device = device._replace(theta_lc=join([leaf.select(lead, -1) for leaf in local.models]))
    if method.trains_localized_alone:
        return device, Upload(local.costs.new_zeros(*hyper.eta.shape, 0), steps)
    theta_i = join([leaf.select(lead, 0) for leaf in local.models])
    return device, Upload(theta_i.sub_(broadcast.theta), steps)


def effective_steps(gamma: Tensor, steps: Tensor) -> Tensor:
    """Q~ = Q/(1-gamma) - gamma (1 - gamma^Q)/(1-gamma)^2: what Q steps with momentum amount to."""
    steps = steps.to(gamma.dtype)
    return steps / (1 - gamma) - gamma * (1 - gamma**steps) / (1 - gamma) ** 2


def mean_gradient(hyper: Hyper, upload: Upload) -> Tensor:
    """(theta_i^{r+1} - theta^r) / (eta Q~): minus the device's mean corrected gradient over the round."""
    return upload.delta / (hyper.eta * effective_steps(hyper.gamma, upload.steps))[..., None]


def commit(method: Method, hyper: Hyper, broadcast: Broadcast, device: Device, upload: Upload) -> Device:
    """c_i^{r+1} = c_i^r - (c^r + (theta_i^{r+1} - theta^r) / (eta Q~)), once the upload was counted."""
    if not method.parts.control_variates:
        return device
    return device._replace(c=device.c - (broadcast.c + mean_gradient(hyper, upload)))


# The server's round.


def contribution(method: Method, hyper: Hyper, upload: Upload, weight: Tensor) -> Sum:
    """omega_i (theta_i^{r+1} - theta^r) / Q~ (not divided where not normalised), and what c needs."""
    effective = effective_steps(hyper.gamma, upload.steps)
    share = weight / effective if method.parts.normalised else weight
    return Sum(
        update=share[..., None] * upload.delta,
        control=(
            weight[..., None] * mean_gradient(hyper, upload) if method.parts.control_variates else upload.delta[..., :0]
        ),
        weight=weight,
        steps=upload.steps.to(weight.dtype),
        effective_steps=effective,
        counted=torch.ones_like(weight),
    )


def apply(method: Method, server: Server, total: Sum, devices: int) -> Server:
    """theta^{r+1} and c^{r+1} from the round's counted uploads."""
    if method.parts.alone:
        return server
    theta = server_theta(server.theta, total.update, server_step(method, total), devices, total.counted)
    return Server(theta, server_c(server.c, total) if method.parts.control_variates else server.c)


def server_step(method: Method, total: Sum) -> Tensor | float:
    """eta_g = the mean of Q, the mean of Q~, or a number; 1 where aggregation is not normalised."""
    if not method.parts.normalised:
        return 1.0
    if method.eta_g == "mean_steps":
        return total.steps / total.counted
    if method.eta_g == "mean_effective_steps":
        return total.effective_steps / total.counted
    return float(method.eta_g)


def server_theta(theta: Tensor, update: Tensor, eta_g: Tensor | float, devices: int, m: Tensor) -> Tensor:
    """theta^{r+1} = theta^r + eta_g (N/m) sum_i omega_i (theta_i^{r+1} - theta^r) / Q~."""
    return theta + eta_g * (devices / m) * update


def server_c(c: Tensor, total: Sum) -> Tensor:
    """c^{r+1} = c^r - sum_i omega_i (c^r + (theta_i^{r+1} - theta^r) / (eta Q~))."""
    return c - (total.weight * c + total.control)


# What a device predicts.


def predict(method: Method, hyper: Hyper, log_h: Tensor, log_h_lc: Tensor | None) -> Tensor:
    """h(theta_p; x) = beta h(theta_lc; x) + (1 - beta) h(theta; x), or the one model that there is."""
    if log_h_lc is None or not method.parts.personal:
        return log_h
    return log_h_lc if method.parts.alone else mixture(log_h_lc, log_h, hyper.beta)


def _in_slots(theta: Tensor, hyper: Hyper) -> Tensor:
    return theta.expand(*hyper.eta.shape, -1)
