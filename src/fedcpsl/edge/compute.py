"""What local work costs: cycles, seconds and joules of a device's processor, and the steps that time allows."""

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from fedcpsl.edge.radio import Numbers

TRAINED, FORWARD = 3, 1  # times the forward pass: a pass that is trained, and one without gradient


class Passes(NamedTuple):
    """How many samples an algorithm sends through a network: with and without a gradient, each model by itself."""

    trained: float
    forward: float


def flops(forward_flops: float, passes: Passes) -> float:
    """FLOPs = 3 x trained passes x forward FLOPs + passes without gradient x forward FLOPs."""
    return forward_flops * (TRAINED * passes.trained + FORWARD * passes.forward)


def cycles(flops: float, flops_per_cycle: float) -> float:
    """C = FLOPs / FLOPs per cycle."""
    return flops / flops_per_cycle


def clock(base: Numbers, sigma: float, z: Numbers) -> Numbers:
    """f_i = base_i exp(sigma z): a log-normal factor each round, for z standard normal."""
    found: Numbers = base * np.exp(sigma * z)
    return found


def visit_cycles(steps: NDArray[np.int64], cycles: float, once: Numbers | float = 0.0) -> Numbers:
    """Q_i C (and what is done once a visit, where there are steps)."""
    found: Numbers = steps * np.float64(cycles) + np.where(steps > 0, once, np.float64(0))
    return found


def compute_seconds(cycles: Numbers, clock: Numbers) -> Numbers:
    """t_cmp_i = Q_i C / f_i, of a visit's cycles."""
    return cycles / clock


def compute_joules(cycles: Numbers, clock: Numbers, kappa: float) -> Numbers:
    """E_cmp_i = kappa Q_i C f_i^2, of a visit's cycles."""
    found: Numbers = kappa * cycles * clock**2
    return found


def steps_in_time(
    planned: NDArray[np.int64],
    deadline: float,
    download: Numbers,
    slot: float,
    cycles: float,
    clock: Numbers,
    once: Numbers | float = 0.0,
) -> NDArray[np.int64]:
    """Q_i = max(0, min(planned, floor((T - t_down_i - S) f_i / C))) (less what is done once a visit)."""
    budget = (deadline - download - slot) * clock - once
    possible = np.clip(np.floor(budget / cycles), 0, planned) if cycles else np.where(budget >= 0, planned, 0)
    return possible.astype(np.int64)
