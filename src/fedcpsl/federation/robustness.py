"""Limits on what one device can do to a federation: the size of its update, its weight, its part in the sum.

A device's update is judged by its rate, the norm of update / (eta Q~): what its mean gradient would have to be. Every
device has one vote, its latest rate, so that no device moves the median by being asked often, and one active device
is compared with those of earlier rounds.
"""

from collections.abc import Mapping, Sequence
from math import floor, sqrt
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.errors import InputError
from fedcpsl.federation.messages import Reply
from fedcpsl.federation.privacy import update_norm
from fedcpsl.federation.server_store import DeviceRecord
from fedcpsl.federation.terms import Terms
from fedcpsl.trees import Tree, leaves, map_tensors

NONE, BOUNDED, CLIPPED, TRIMMED, MEDIAN = AGGREGATIONS = ("none", "bounded", "clipped", "trimmed", "median")
COORDINATE_WISE = (
    TRIMMED,
    MEDIAN,
)  # an update then has no share in the sum that its device could use: c and c_i stay 0
BOUND = 30.0  # times the median rate
MAX_FIRST_CHANGE = (
    10.0  # of each parameter, root mean square: the bound while there are too few devices to compare with
)
SAMPLES_BOUND = 20.0  # times the median count, for a device that has more than MAX_SHARE
MAX_SHARE = 1 / 3  # of all weight, for a device that has more than SAMPLES_BOUND


class Limits(NamedTuple):
    """How far one device is trusted."""

    aggregation: str = BOUNDED
    bound: float = BOUND  # an update whose rate is larger than this many times the median is refused
    trim: float = 0.3  # of the updates at each end that `trimmed` leaves out, number by number
    largest_norm: float = 0.0  # maximum norm of an update; 0: limited by `bound` instead
    largest_samples: int = 0  # maximum count that a device may report; 0: limited by the other counts


class Judgement(NamedTuple):
    """Which updates of a round are counted, and how."""

    factors: dict[str, float]  # of those that are counted
    refused: dict[str, str]  # why the others are not
    rates: dict[str, float]


def check_limits(limits: Limits) -> None:
    """Refuse limits out of range."""
    if limits.aggregation not in AGGREGATIONS:
        raise InputError(f"aggregation = {limits.aggregation!r}: give one of {', '.join(AGGREGATIONS)}")
    if not limits.bound > 1:
        raise InputError(f"bound = {limits.bound:g}: give a number above 1")
    if not 0 < limits.trim < 0.5:
        raise InputError(f"trim = {limits.trim:g}: give a share between 0 and 0.5")
    if not limits.largest_norm >= 0 or limits.largest_samples < 0:
        raise InputError("largest_norm, largest_samples: give numbers of at least 0")


def update_rate(terms: Terms, upload: Tree, steps: int) -> float:
    """Return the size of an update relative to its work, in float64: the norm of large float32 numbers overflows.

    The algorithm may define it (FedCPSL: ||theta_i - theta|| / (eta Q~)); otherwise it is the norm per step.
    """
    rate = optional(terms.algorithm, "update_rate")
    return float(rate(terms.hyper, upload)) if rate else _exact_norm(upload) / max(steps, 1)


def _exact_norm(upload: Tree) -> float:
    return float(update_norm(map_tensors(lambda t: t.double() if t.is_floating_point() else t, upload)))


def lower_median(values: Sequence[float]) -> float:
    """Return the median, the smaller of two middle values: so one of two devices cannot raise its own bound."""
    return sorted(values)[(len(values) - 1) // 2]


def judge(terms: Terms, limits: Limits, roster: Sequence[DeviceRecord], updates: Mapping[str, Reply]) -> Judgement:
    """Decide which updates are counted, and with which factor."""
    uploads = {name: upload_of(reply, terms) for name, reply in updates.items()}
    rates = {name: update_rate(terms, upload, updates[name].steps) for name, upload in uploads.items()}
    votes = {m.name: m.rate for m in roster if m.rate is not None and not m.forgotten} | rates
    middle = lower_median(list(votes.values())) if votes else 0.0
    refused, factors = {}, {}
    for name, upload in uploads.items():
        reason = reason_to_refuse(limits, upload, rates[name], middle, len(votes))
        if reason:
            refused[name] = f"the update of device {name!r} is refused: {reason}"
        else:
            factors[name] = min(1.0, middle / rates[name]) if limits.aggregation == CLIPPED and rates[name] else 1.0
    return Judgement(factors, refused, rates)


def reason_to_refuse(limits: Limits, upload: Tree, rate: float, middle: float, votes: int) -> str | None:
    """Return why an update cannot be counted, or None."""
    norm, count = _exact_norm(upload), sum(t.numel() for t in leaves(upload) if t.is_floating_point())
    if limits.largest_norm and not norm <= limits.largest_norm:
        return f"its norm is {norm:.3g} where largest_norm allows {limits.largest_norm:g}"
    if limits.aggregation == NONE or limits.largest_norm:
        return None
    change = norm / sqrt(max(count, 1))
    if votes < 3 and not change <= MAX_FIRST_CHANGE:
        return (
            f"it changes the parameters by {change:.3g} (root mean square); at the start at most {MAX_FIRST_CHANGE:g}"
        )
    if votes > 1 and not rate <= limits.bound * middle:
        return (
            f"its rate ||update|| / (eta Q~) is {rate:.3g}, more than {limits.bound:g} times the median of {middle:.3g}"
        )
    return None


def upload_of(reply: Reply, terms: Terms) -> Tree:
    """Return the upload of a reply, on the processor that computes."""
    return map_tensors(lambda t: t.to(terms.where), reply.upload)


def answers_to_refuse(limits: Limits, answers: Mapping[str, Tree]) -> dict[str, str]:
    """Return why some answers of a second exchange cannot be counted: they are far larger than the others."""
    norms = {name: _exact_norm(answer) for name, answer in answers.items()}
    if limits.aggregation == NONE or len(norms) < 3:
        return {}
    middle = lower_median(list(norms.values()))
    return {
        name: f"the answer of device {name!r} is refused: it is {norm:.3g}, more than {limits.bound:g} times the "
        f"median of {middle:.3g}"
        for name, norm in norms.items()
        if not norm <= limits.bound * middle
    }


def robust_sum(limits: Limits, contributions: Sequence[Tree]) -> Tree:
    """Return the number of contributions, of equal weight, times their coordinate-wise trimmed mean or median."""
    count = len(contributions)

    def add(*each: Tensor) -> Tensor:
        together = torch.stack(each)
        return together.sum(0) if together.dim() == 1 else count * robust_mean(limits, together)

    return map_tensors(add, *contributions)


def robust_mean(limits: Limits, each: Tensor) -> Tensor:
    """Return the coordinate-wise median, or the mean without the largest and smallest values."""
    count = len(each)
    cut = (count - 1) // 2 if limits.aggregation == MEDIAN else min(floor(limits.trim * count), (count - 1) // 2)
    return each.sort(0).values[cut : count - cut].mean(0)


def reason_to_exclude(limits: Limits, newcomer: DeviceRecord, others: Sequence[DeviceRecord]) -> str | None:
    """Return why a device's sample count is not accepted, or None."""
    count = newcomer.samples
    if limits.largest_samples:
        if count <= limits.largest_samples:
            return None
        return f"device {newcomer.name!r} reports {count} samples where largest_samples is {limits.largest_samples}"
    counts = [count, *(m.samples for m in others if not m.forgotten)]
    middle = lower_median(counts)
    if count <= SAMPLES_BOUND * middle or count <= MAX_SHARE * sum(counts):
        return None
    return (
        f"device {newcomer.name!r} reports {count} samples, more than {SAMPLES_BOUND:g} times the median of "
        f"{middle} and {count / sum(counts):.0%} of all: it would outweigh the others; where that is true, set "
        "[federation] largest_samples"
    )
