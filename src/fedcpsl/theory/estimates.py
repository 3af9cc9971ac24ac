"""The constants of the theorems, as far as they can be computed from a run."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithms.family import effective_steps
from fedcpsl.errors import InputError
from fedcpsl.problem import local_cost, mixture
from fedcpsl.schedule import draw_steps
from fedcpsl.simulation import Setup, State
from fedcpsl.theory.bounds import Constants, Start, potential
from fedcpsl.theory.gaps import all_samples, control_error, objectives, rules_of, with_both_models


class LowerEstimate(NamedTuple):
    """Local lower estimates of L and L_F: the true constants, which hold everywhere, are at least these."""

    smoothness: float  # at most L
    personal_smoothness: float | None  # at most L_F; None without a personal model


def lipschitz_lower_estimate(state: State, iterations: int = 50, tolerance: float = 1e-3) -> LowerEstimate:
    """max_i norm(Hessian of f_i in theta): a lower estimate of L, at this state alone; and of L_F by F_i in theta_lc.

    Assumption 3 asks for one L for all devices, at every theta and nu. This evaluates one point only, and leaves
    out the curvature in nu: that of the default regulariser, alpha_r/(m_i nu), is unbounded as nu approaches 0. So a
    step size that `eta_limit` allows for this estimate may still be too large. With ReLU it misses the kinks.

    Power iteration on Hessian-vector products; it stops when an iteration adds less than `tolerance` of the estimate.
    """
    norms = [_curvatures(state, device, iterations, tolerance) for device in range(state.setup.terms.devices)]
    personal = with_both_models(state).traits.personal
    return LowerEstimate(max(f for f, _ in norms), max(F for _, F in norms) if personal else None)


def _curvatures(state: State, device: int, iterations: int, tolerance: float) -> tuple[float, float]:
    """Return the norms of the Hessians of f_i in theta and of F_i in theta_lc (0 without), for one device."""
    method, hyper, samples = with_both_models(state), state.hyper(device), all_samples(state, device)
    theta, theta_lc = state.server.theta, state.device(device).theta_lc
    if not len(samples.x):
        return 0.0, 0.0

    def predict(theta: Tensor) -> Tensor:
        return method.network.log_probabilities(theta, samples.x)

    def cost(log_h: Tensor) -> Tensor:
        return local_cost(log_h, samples, hyper.alpha_p, hyper.alpha_r, rules_of(method).costs)

    of_f = hessian_norm(lambda theta: cost(predict(theta)), theta, iterations, tolerance)
    if not method.traits.personal:
        return of_f, 0.0
    partner = predict(theta)
    of_F = hessian_norm(
        lambda theta_lc: cost(mixture(predict(theta_lc), partner, hyper.beta)), theta_lc, iterations, tolerance
    )
    return of_f, of_F


def hessian_norm(
    cost: Callable[[Tensor], Tensor], theta: Tensor, iterations: int = 50, tolerance: float = 1e-3
) -> float:
    """norm(H) >= norm(H v) with v = H^k v_0 normalised: a lower estimate of the maximum curvature, by power iteration.

    For a symmetric H the estimate never decreases from one iteration to the next. v_0 is the same in every call.
    """
    with torch.enable_grad():
        theta = theta.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(cost(theta), theta, create_graph=True)
    v = torch.randn(theta.shape, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(theta)
    norm = 0.0
    for _ in range(iterations):
        (product,) = torch.autograd.grad(gradient, theta, v / v.norm(), retain_graph=True)
        v, before, norm = product, norm, product.norm().item()
        if norm - before <= tolerance * norm:
            break
    return norm


def constants_of(setup: Setup, L: float, sigma: float = 0.0) -> Constants:
    """Return N, m, eta_g, the extreme Q~ and the minibatch size of a run, with the L and sigma that you give."""
    device_steps = [_steps(setup, device) for device in range(setup.terms.devices)]
    counts = torch.tensor([steps for steps in device_steps if steps]).T.to(
        setup.terms.hyper.gamma
    )  # [2, devices at work]
    gamma = setup.terms.hyper.gamma[[bool(steps) for steps in device_steps]]
    effective = effective_steps(gamma, counts)
    return Constants(
        L=L,
        N=setup.terms.devices,
        m=setup.terms.work.active,
        eta_g=_eta_g(setup, counts, effective),
        Q_max=effective.max().item(),
        Q_min=effective.min().item(),
        sigma=sigma,
        S=setup.terms.work.batch_labelled
        + (setup.terms.work.batch_unlabelled if setup.terms.method.traits.unlabelled else 0),
    )


def _steps(setup: Setup, device: int) -> tuple[int, int] | None:
    """Return the minimum and maximum local steps of a device in a round; None if it has no samples to train on."""
    work, unlabelled = setup.terms.work, setup.terms.method.traits.unlabelled
    extremes = [work, work]
    if work.unit == "hlu":
        extremes = [work._replace(unit="epochs", amount=epochs) for epochs in work.hlu]
    fewest, most = (
        draw_steps(setup.terms.seed, 0, device, setup.terms.sizes, extreme, unlabelled) for extreme in extremes
    )
    return (fewest, most) if most else None


def _eta_g(setup: Setup, counts: Tensor, effective: Tensor) -> float:
    rules = rules_of(setup.terms.method)
    if not rules.parts.normalised:
        raise InputError("algorithm.normalised = false: the theorems need normalised aggregation")
    if isinstance(rules.eta_g, float | int):
        return float(rules.eta_g)
    steps = counts if rules.eta_g == "mean_steps" else effective
    if steps.min() < steps.max():
        raise InputError(
            f'algorithm.eta_g = "{rules.eta_g}": differs from round to round here, as devices take '
            f"{int(counts.min())} to {int(counts.max())} steps, and the theorems need one; give a number"
        )
    return steps.max().item()


def start_of(state: State, constants: Constants, eta: float, lowest: float = 0.0) -> Start:
    """Return f and P of a state, for the right-hand sides of the theorems."""
    objective = objectives(state).objective
    return Start(objective, potential(constants, eta, objective, control_error(state)), lowest)
