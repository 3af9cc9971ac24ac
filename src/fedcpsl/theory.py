"""The quantities that the paper's analysis speaks of, over all data of all devices."""

from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithms.family import step_costs
from fedcpsl.problem import Samples
from fedcpsl.simulation import State


class Objectives(NamedTuple):
    """Full-batch costs and squared gradient norms; the personal ones are None without a personal model."""

    objective: float
    grad_norm_sq: float
    personal_objective: float | None
    personal_grad_norm_sq: float | None


def objectives(state: State) -> Objectives:
    """sum_i w_i f_i(theta, nu_i), |its gradient in theta|^2, sum_i w_i F_i and sum_i w_i |grad_{theta_lc} F_i|^2."""
    setup = state.setup
    roster = setup.roster(max(state.round - 1, 0))
    samples = setup.samples_in(roster)
    total, gradient, personal, personal_norm = 0.0, torch.zeros_like(state.server.theta), 0.0, 0.0
    for device in roster.tolist():
        weight = float(setup.sizes.labelled[device] + setup.sizes.unlabelled[device]) / samples
        costs, gradients = _full_gradients(state, device)
        total += weight * costs[0].item()
        gradient += weight * gradients[0]
        if setup.method.parts.personal:
            personal += weight * costs[1].item()
            personal_norm += weight * gradients[1].square().sum().item()
    both = (personal, personal_norm) if setup.method.parts.personal else (None, None)
    return Objectives(total, gradient.square().sum().item(), *both)


def all_samples(state: State, device: int) -> Samples:
    """Everything that a device trains on, as one batch."""
    shelf = state.setup.shelf
    start, stop = int(shelf.start[device]), int(shelf.start[device + 1])
    if not state.setup.method.parts.unlabelled:
        stop = start + int(shelf.labelled[device])
    is_labelled = torch.arange(start, stop, device=shelf.x.device) < start + int(shelf.labelled[device])
    labelled, unlabelled = is_labelled.to(shelf.x.dtype), (~is_labelled).to(shelf.x.dtype)
    return Samples(
        x=shelf.x[start:stop],
        target=state.targets[start:stop],
        labelled=labelled / labelled.sum().clamp_min(1),
        unlabelled=unlabelled / unlabelled.sum().clamp_min(1),
    )


def _full_gradients(state: State, device: int) -> tuple[Tensor, Tensor]:
    """f_i (and F_i) and their gradients, [1 or 2, parameters], over all that the device trains on."""
    setup, hyper, samples = state.setup, state.hyper(device), all_samples(state, device)
    network = setup.method.network
    broadcast = setup.algorithm.broadcast(state.server)
    local = setup.algorithm.begin(setup.method, hyper, broadcast, state.device(device))
    cost = partial(step_costs, setup.method, hyper, local.models, samples)
    gradients = local.momenta  # zeros, to add to
    costs = network.add_gradient(gradients, local.models, samples.x[None], None, cost)
    return costs, network.join(gradients)
