"""Labels that a device holds out of training, to find out by itself whether the global model serves it.

One of five labelled samples is held out, 20 at most, none of fewer than 20: with so few labels a device has no way of
its own to go. Neither the copy of the global model nor the personal model learns them: a global model that did would
know the labels of a device that it cannot serve by heart. Numbers are [...], one per device; `...` stands for any
leading dimensions.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Visit
from fedcpsl.problem import Samples, mixture

ONE_IN, MOST, FEWEST_LABELS = 5, 20, 20
LOG_H_FLOOR = -3.0  # in the score of one label: a confident mistake is not worse than h = 0.05
MARGIN = 0.15  # by which a device's own model must be better, in the mean of log h
KEPT = 0.8  # of the evidence, from visit to visit
LEAST, LARGEST = -1.0, 10.0  # evidence: less would make a device slow to change its mind, more too
NEEDED = 2.0  # evidence before a device goes its own way
NEVER = 1 << 62
BETAS = tuple(k / 10 for k in range(11))


class HeldOut(NamedTuple):
    """Labelled samples that are held out in a visit."""

    x: Tensor  # [..., rows, *shape of one input]
    target: Tensor  # [..., rows, classes]: one-hot labels
    there: Tensor  # [..., rows]: 1 for a sample, 0 for what fills a gap

    @property
    def size(self) -> Tensor:
        """k, how many there are, [...]."""
        return self.there.sum(-1)


def spacing_of(labels: Tensor) -> Tensor:
    """max(5, ceil(n / 20)) for n >= 20 labels, else 0: one of so many labelled samples is held out.

    `labels` has the counts of all classes, [..., classes].
    """
    n = labels.sum(-1)
    spacing = (n / MOST).ceil().clamp_min(ONE_IN)
    return torch.where(n >= FEWEST_LABELS, spacing, torch.zeros_like(spacing))


def period_of(spacing: Tensor) -> Tensor:
    """The spacing as a whole number for `is_held_out`: one that no position reaches where it is 0."""
    return torch.where(spacing > 0, spacing.to(torch.int64), NEVER)


def is_held_out(positions: Tensor, period: Tensor) -> Tensor:
    """Whether labelled samples are held out, by their positions [..., rows]: the last of each period."""
    return (positions + 1) % period[..., None] == 0


def trained_weights(samples: Samples, period: Tensor) -> Tensor:
    """1/k for the k labelled rows of a minibatch that are not held out, [..., samples]; 0 for all others."""
    if samples.which is None:
        return samples.labelled
    weights = samples.labelled.masked_fill(is_held_out(samples.which, period), 0)
    share = weights.sum(-1, keepdim=True)
    return weights * torch.where(share > 0, samples.labelled.sum(-1, keepdim=True) / share, share)


def held_out_of(visit: Visit, spacing: Tensor) -> HeldOut:
    """The samples that are held out in a visit."""
    places = torch.arange(1, MOST + 1, device=spacing.device)
    positions = (places * spacing[..., None] - 1).clamp_min(0)
    there = (spacing[..., None] > 0) & (positions < visit.labels.sum(-1, keepdim=True))
    return HeldOut(*visit.labelled(positions.to(torch.int64)), there.to(spacing))


def score(log_h: Tensor, given: HeldOut) -> Tensor:
    """S = mean of max(log h(x)_y, -3) over the samples held out; 0 without any."""
    each = (log_h * given.target).sum(-1).clamp_min(LOG_H_FLOOR)
    return (given.there * each).sum(-1) / given.size.clamp_min(1)


def more_evidence(evidence: Tensor, own: Tensor, general: Tensor, count: Tensor) -> Tensor:
    """E <- 0.8 E + k (S_own - S_theta - 0.15), within [-1, 10]: that a device's own model is better than theta.

    S_own is the score of the own model after the last visit, S_theta that of the theta that has come since. Older
    evidence fades, because theta learns.
    """
    return (KEPT * evidence + count * (own - general - MARGIN)).clamp(LEAST, LARGEST)


def independence_by(evidence: Tensor) -> Tensor:
    """iota = max(0, tanh((E - 2) / 2)): 0 as long as little speaks for a device's own way, then up to 1."""
    return torch.tanh((evidence - NEEDED) / 2).clamp_min(0)


def own_share(number: Tensor, iota: Tensor) -> Tensor:
    """x + iota (1 - x): beta and kappa of a device that goes its own way as far as iota says."""
    return torch.lerp(number, torch.ones_like(number), iota)


def mean_beta(own: Tensor, general: Tensor, given: HeldOut) -> Tensor:
    """sum_b b p(b) over 11 values, p(b) proportional to prod_x h_p(x)_y with beta = b: 1/2 without any samples.

    `own` and `general` are log h of the two models for the samples held out, [..., rows, classes].
    """
    betas = own.new_tensor(BETAS)
    scores = torch.stack([score(mixture(own, general, b.expand(own.shape[:-2])), given) for b in betas], -1)
    return ((given.size[..., None] * scores).softmax(-1) * betas).sum(-1)
