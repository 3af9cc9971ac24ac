"""The distance of a state from a solution, over all data of all devices: costs, gradient norms, the paper's gaps."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Method
from fedcpsl.algorithms.family import Rules, relabel, step_cost
from fedcpsl.errors import InputError
from fedcpsl.problem import Samples
from fedcpsl.schedule import omega
from fedcpsl.simulation import State


def applies(method: Method) -> bool:
    """Whether the paper's analysis covers an algorithm: only those of its family."""
    return isinstance(method.rules, Rules)


def rules_of(method: Method) -> Rules:
    """Return the rules of an algorithm of FedCPSL's family; InputError for any other."""
    if not isinstance(method.rules, Rules):
        raise InputError("the paper's gaps and bounds hold for FedCPSL's family only; use an algorithm of it")
    return method.rules


class Objectives(NamedTuple):
    """Full-batch costs and squared gradient norms; the personal ones are None without a personal model."""

    objective: float
    grad_norm_sq: float
    personal_objective: float | None
    personal_grad_norm_sq: float | None


def objectives(state: State) -> Objectives:
    """sum_i w_i f_i(theta, nu_i), |its gradient in theta|^2, sum_i w_i F_i and sum_i w_i |grad_{theta_lc} F_i|^2."""
    has_personal = state.setup.terms.method_after(state.round).traits.personal
    total, gradient, personal, personal_norm = 0.0, torch.zeros_like(state.server.theta), 0.0, 0.0
    for device, weight in _weights(state):
        costs, gradients = _full_gradients(state, device)
        total += weight * costs[0].item()
        gradient += weight * gradients[0]
        if has_personal:
            personal += weight * costs[1].item()
            personal_norm += weight * gradients[1].square().sum().item()
    both = (personal, personal_norm) if has_personal else (None, None)
    return Objectives(total, gradient.square().sum().item(), *both)


class Gap(NamedTuple):
    """The optimality gap G and its parts, and the personal gap (None without a personal model)."""

    grad_norm_sq: float  # norm(grad_theta f(theta^r, nu^r))^2
    label_change_sq: float  # sum_i w_i norm(nu~_i^{r+1} - nu_i^r)^2
    total: float
    personal: float | None


def gap(state: State, L: float = 1.0) -> Gap:
    """G(theta^r, nu^r) = norm(grad_theta f(theta^r, nu^r))^2 + (31 L/64) sum_i w_i norm(nu~_i^{r+1} - nu_i^r)^2.

    The gap that Theorem 1 bounds: zero where theta is stationary for f = sum_i w_i f_i and no device would change its
    pseudo-labels. nu~ is the virtual update of every device, active or not, as in the appendix (Phi^r); the text of
    Section IV writes nu^{r+1}, which idle devices do not have. It is the run's own update, closed form or gradient.
    L is the smoothness constant: give yours. It only weights the two parts; the default is 1.
    """
    gradient = torch.zeros_like(state.server.theta)
    change, personal, has_personal = 0.0, 0.0, state.setup.terms.method_after(state.round).traits.personal
    for device, weight in _weights(state):
        gradients = _full_gradients(state, device)[1]
        gradient += weight * gradients[0]
        change += weight * (virtual_labels(state, device) - state.nu(device)).square().sum().item()
        if has_personal:
            personal += weight * gradients[1].square().sum().item()
    norm = gradient.square().sum().item()
    return Gap(norm, change, norm + 31 * L / 64 * change, personal if has_personal else None)


def personal_gap(state: State) -> float | None:
    """sum_i w_i norm(grad_theta_lc F_i(theta_lc^r, theta^r, nu_i^r))^2: the gap that Theorem 2 bounds.

    None without a personal model. `gap` computes it too.
    """
    return objectives(state).personal_grad_norm_sq


def control_error(state: State) -> float:
    """Xi^r = sum_i w_i norm(grad_theta f_i(theta^r, nu_i^r) - c_i^r)^2: the error of the control variates.

    If the algorithm has none, c_i is 0.
    """
    total, has_controls = 0.0, rules_of(state.setup.terms.method).parts.control_variates
    for device, weight in _weights(state):
        gradient = _full_gradients(state, device)[1][0]
        total += weight * (gradient - state.device(device).c if has_controls else gradient).square().sum().item()
    return total


def virtual_labels(state: State, device: int) -> Tensor:
    """nu~_i^{r+1} = what the device's pseudo-labels would become if it were active in the next round."""
    setup, nu = state.setup, state.nu(device)
    if not setup.terms.method.traits.unlabelled or not len(nu):
        return nu
    method, broadcast = setup.terms.method_after(state.round), setup.terms.algorithm.broadcast(state.server)
    x = setup.data.x(setup.data.unlabelled_rows(device))
    return relabel(method, state.hyper(device), broadcast, state.device(device), x, nu, nu.new_tensor(len(nu)))


def all_samples(state: State, device: int) -> Samples:
    """Return all training samples of a device as one batch."""
    if state.setup.data.supply is not None:
        raise InputError("samples made on demand: gaps and objectives need those of all devices; hold them in memory")
    device_data, rows = state.setup.data, state.setup.data.all_rows(device)
    start, stop = rows.start, rows.stop
    if not state.setup.terms.method.traits.unlabelled:
        stop = start + int(device_data.labelled[device])
    is_labelled = torch.arange(start, stop, device=device_data.where) < start + int(device_data.labelled[device])
    labelled, unlabelled = is_labelled.to(device_data.dtype), (~is_labelled).to(device_data.dtype)
    return Samples(
        x=device_data.x(slice(start, stop)),
        target=state.targets[start:stop],
        labelled=labelled / labelled.sum().clamp_min(1),
        unlabelled=unlabelled / unlabelled.sum().clamp_min(1),
    )


def _weights(state: State) -> Iterator[tuple[int, float]]:
    """Yield the devices that have joined, and their omega_i."""
    setup = state.setup
    roster = setup.terms.roster(max(state.round - 1, 0))
    yield from zip(roster.tolist(), omega(setup.terms.sizes, roster, roster).tolist(), strict=True)


def with_both_models(state: State) -> Method:
    """Return the method with both models, as in the analysis, even if a round trains only one of them."""
    method = state.setup.terms.method_after(state.round)
    rules = rules_of(method)
    traits, parts = method.traits._replace(alone=False), rules.parts._replace(alone=False)
    return Method(method.network, traits, rules._replace(parts=parts))


def _full_gradients(state: State, device: int) -> tuple[Tensor, Tensor]:
    """Return f_i (and F_i) and their gradients, [1 or 2, parameters], over all training samples of the device."""
    method, hyper, samples = with_both_models(state), state.hyper(device), all_samples(state, device)
    algorithm, network = state.setup.terms.algorithm, method.network
    local = algorithm.begin(method, hyper, algorithm.broadcast(state.server), state.device(device))
    gradients = tuple(map(torch.zeros_like, local.models))
    if not len(samples.x):
        return local.costs, network.join(gradients)
    cost = step_cost(method, hyper, local.models, samples)
    costs = network.add_gradient(gradients, local.models, samples.x[None], None, cost)
    return costs, network.join(gradients)
