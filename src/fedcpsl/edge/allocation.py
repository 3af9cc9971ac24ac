"""How the uplink's bandwidth is divided among a round's devices, once, and never redistributed."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from fedcpsl.edge.radio import LOG2, Numbers

STEPS, EXACT = 40, 1e-8  # of Newton's method; a step so small leaves an error of about its square
Level = Callable[
    [Numbers], tuple[Numbers, Numbers]
]  # of bandwidths: each device's level, and its slope in their logarithms


class Division(NamedTuple):
    """Bandwidths that add up to the whole, and the level that they have in common."""

    bandwidth: Numbers
    level: float


def equal(total: float, devices: int) -> Numbers:
    """W_i = W / n: the same for each of the n drawn."""
    return np.full(devices, total / max(devices, 1))


def equal_time(
    total: float, before: Numbers, bits: Numbers, power: float, received: Numbers, noise: float, interference: float
) -> Division:
    """W_i with t_down_i + t_cmp_i + b_i / r_i the same for all, and sum_i W_i = W; the level is that time.

    `before` is t_down + t_cmp, `received` is g_i a_i.
    """

    signal, wanted = power * received, LOG2 * bits

    def finish(bandwidth: Numbers) -> tuple[Numbers, Numbers]:
        floor = bandwidth * noise + interference
        ratio = signal / floor
        carried = np.log1p(ratio)
        seconds = wanted / (bandwidth * carried)  # b_i / r_i
        # d log(rate) / d log(W) = 1 - (W N0 / (W N0 + I)) (s / (1 + s)) / log(1 + s), s the ratio of signal to noise
        slope = 1 - bandwidth * noise / floor * (ratio / (1 + ratio)) / carried
        return before + seconds, -seconds * slope

    return divided(total, len(before), finish)


def equal_outage(
    total: float, bits: Numbers, slot: float, power: float, gain: Numbers, noise: float, interference: float
) -> Division:
    """W_i with P_out_i the same for all, and sum_i W_i = W; the level is that probability."""

    signal, wanted = power * gain, LOG2 * bits

    def log_hazard(bandwidth: Numbers) -> tuple[Numbers, Numbers]:
        """log(-log(1 - P_out_i)): of any size without overflow."""
        floor, exponent = bandwidth * noise + interference, wanted / (bandwidth * slot)
        shrinks = -np.expm1(-exponent)  # 1 - 2^(-b / (W S))
        level = np.log(floor / signal) + exponent + np.log(shrinks)
        return level, bandwidth * noise / floor - exponent / shrinks

    found = divided(total, len(bits), log_hazard)
    with np.errstate(over="ignore"):  # a hazard too large for a number is a certain loss
        return found._replace(level=float(-np.expm1(-np.exp(found.level))))


def divided(total: float, devices: int, level: Level) -> Division:
    """W_i with level_i(W_i) the same for all, and sum_i W_i = W; each level falls as its bandwidth grows.

    Newton's method for the logarithms of all bandwidths and the common level at once; where it does not settle, nested
    bisection.
    """
    bandwidth = np.full(devices, total / devices)
    for _ in range(STEPS):
        value, slope = level(bandwidth)
        if not slope.all():  # so little power that the level does not depend on the bandwidth any more
            break
        share = bandwidth / slope
        common = (total - bandwidth.sum() + share @ value) / share.sum()
        step = (common - value) / slope
        bandwidth = bandwidth * np.exp(np.minimum(np.maximum(step, -1.5), 1.5))
        bandwidth *= total / bandwidth.sum()
        if np.abs(step).max() < EXACT:
            return Division(bandwidth, float(common))
    return bisected(total, devices, level)


def bisected(total: float, devices: int, level: Level) -> Division:
    """The same by bisection alone: slow, and right whatever the levels are, so long as each falls."""

    def bandwidths_at(common: float) -> Numbers:
        low, high = np.full(devices, np.log(total) - 200.0), np.full(devices, np.log(total))
        for _ in range(80):
            middle = (low + high) / 2
            above = level(np.exp(middle))[0] > common
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        return np.exp(high)

    with np.errstate(over="ignore", divide="ignore"):
        low = float(level(np.full(devices, total))[0].max())  # with less each, the largest is larger
        high = float(np.nanmax(level(np.full(devices, total / devices))[0]))  # with as much each, enough
        for _ in range(200):
            middle = (low + high) / 2
            if bandwidths_at(middle).sum() > total:
                low = middle
            else:
                high = middle
        bandwidth = bandwidths_at(high)
    return Division(bandwidth * (total / bandwidth.sum()), high)
