"""A device's class prior: the distribution of its classes, estimated from its labels and its unlabelled samples.

Counts and distributions are [..., classes]; `...` stands for any leading dimensions.
"""

import torch
from torch import Tensor

from fedcpsl.problem import with_prior

SMOOTHINGS = (0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0)


def log_evidence(counts: Tensor, s: Tensor) -> Tensor:
    """log p(n | s) = log G(C s) - log G(C s + N) + sum_c [log G(s + n_c) - log G(s)], [..., values of s].

    The likelihood of counts whose distribution was drawn from a symmetric Dirichlet distribution of concentration s.
    """
    classes, total = counts.shape[-1], counts.sum(-1, keepdim=True)
    each = torch.lgamma(s[:, None] + counts[..., None, :]).sum(-1) - classes * torch.lgamma(s)
    return torch.lgamma(classes * s) - torch.lgamma(classes * s + total) + each


def smoothed(counts: Tensor, s: Tensor) -> Tensor:
    """pi = (n + s) / (N + C s): frequencies with s added to each class's count; s is [...]."""
    padded = counts + s[..., None]
    return padded / padded.sum(-1, keepdim=True)


def smoothed_by_evidence(counts: Tensor) -> Tensor:
    """pi = sum_s p(s | n) (n + s) / (N + C s), with p(s | n) proportional to p(n | s): smoothing that counts decide.

    Counts of few classes keep those classes; few counts of many classes come out near uniform.
    """
    exact = counts.double()
    s = exact.new_tensor(SMOOTHINGS)
    shares = log_evidence(exact, s).softmax(-1)
    each = (exact[..., None, :] + s[:, None]) / (exact.sum(-1)[..., None, None] + counts.shape[-1] * s[:, None])
    return (shares[..., None] * each).sum(-2).to(counts.dtype)


def count_prior(counts: Tensor, s: Tensor | None) -> Tensor:
    """pi_i = (n_i + s) / sum (n_i + s), with a given s or, for None, with those that the counts speak for."""
    return smoothed_by_evidence(counts) if s is None else smoothed(counts, s)


def em_prior(labels: Tensor, log_h: Tensor, there: Tensor, s: Tensor | None, most: Tensor, steps: int) -> Tensor:
    """pi of n_i, then in each of some steps of n_i + min(M_i, nu) mean_u softmax(log h(theta; u) + log pi).

    Without labels it stays uniform: EM alone would feed on itself.
    """
    first = found = count_prior(labels, s)
    for _ in range(steps):
        found = count_prior(labels + expected_counts(log_h, there, found, most), s)
    return torch.where(labels.sum(-1, keepdim=True) > 0, found, first)


def expected_counts(log_h: Tensor, there: Tensor, pi: Tensor, most: Tensor) -> Tensor:
    """min(M, nu) mean_u softmax(log h(theta; u) + log pi): what M unlabelled samples count, as nu samples at most.

    log_h is [..., rows, classes], `there` [..., rows] is 1 for the rows that are samples and 0 for others, nu [...].
    """
    count = there.sum(-1)
    share = torch.minimum(count, most) / count.clamp_min(1)
    return share[..., None] * (there[..., None] * with_prior(log_h, pi.log()).exp()).sum(-2)


def mixed_with_uniform(pi: Tensor, share: Tensor) -> Tensor:
    """(1 - t) pi + t / C: a prior that is trusted less; t is [...]."""
    return torch.lerp(pi, torch.full_like(pi, 1 / pi.shape[-1]), share[..., None])
