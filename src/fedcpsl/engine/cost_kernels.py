"""The costs of a minibatch and their gradient in a network's outputs, as one Triton kernel.

What log softmax, `fedcpsl.problem.mixture`, `local_cost_and_gradient` and `mixture_share` do one after another, in a
launch instead of twenty: for small networks on a GPU those took longer than the matmuls.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

MOST_CLASSES = 256


@triton.jit
def _log_h(outputs, where, ok):
    z = tl.where(ok, tl.load(outputs + where, mask=ok, other=0.0), float("-inf"))
    z = z - tl.max(tl.where(ok, z, float("-inf")), 1)[:, None]
    return tl.where(ok, z - tl.log(tl.sum(tl.exp(z), 1))[:, None], 0.0)


@triton.jit
def _cost_and_gradient(log_h, target, of_loss, of_regulariser, ok):
    """As `local_cost_and_gradient`, the cost of every row without what R has of the label."""
    flattening = tl.where(ok, of_regulariser * tl.exp(log_h), 0.0)
    gradient = flattening - of_loss * target
    return tl.sum(gradient * log_h, 1), gradient + flattening * log_h


@triton.jit
def _through_softmax(gradient, log_h, ok):
    return gradient - tl.where(ok, tl.exp(log_h), 0.0) * tl.sum(gradient, 1)[:, None]


@triton.jit
def _costs_and_gradient(
    outputs, target, labelled, unlabelled, alpha_p, alpha_r, log_beta, log_rest, costs, gradient, samples,
    MIXED: tl.constexpr, CLASSES: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """A slot's costs [1 or, MIXED, 2 models] and gradients [.., samples, classes]."""
    slot = tl.program_id(0)
    MODELS: tl.constexpr = 2 if MIXED else 1
    c = tl.arange(0, BLOCK_C)[None, :]
    p, r = tl.load(alpha_p + slot), tl.load(alpha_r + slot)
    cost = tl.zeros((BLOCK_S,), outputs.dtype.element_ty)
    mixed_cost = tl.zeros((BLOCK_S,), outputs.dtype.element_ty)
    for first in range(0, samples, BLOCK_S):
        s = first + tl.arange(0, BLOCK_S)
        s_ok = s < samples
        ok = s_ok[:, None] & (c < CLASSES)
        of_labelled = tl.load(labelled + slot * samples + s, mask=s_ok, other=0.0)
        of_unlabelled = tl.load(unlabelled + slot * samples + s, mask=s_ok, other=0.0)
        of_loss, of_regulariser = (of_labelled + p * of_unlabelled)[:, None], (r * of_unlabelled)[:, None]
        y = tl.load(target + (slot * samples + s)[:, None] * CLASSES + c, mask=ok, other=0.0)
        classes = tl.full((BLOCK_S,), CLASSES, outputs.dtype.element_ty)
        of_label = tl.sum(y * tl.log(tl.where(y > 0, y, 1.0)), 1) + 2 * tl.log(classes)  # R has log C twice
        of_label *= r * of_unlabelled
        where = ((slot * MODELS) * samples + s)[:, None] * CLASSES + c
        log_h = _log_h(outputs, where, ok)
        one, one_gradient = _cost_and_gradient(log_h, y, of_loss, of_regulariser, ok)
        cost += one + of_label
        tl.store(gradient + where, _through_softmax(one_gradient, log_h, ok), mask=ok)
        if MIXED:
            where += samples * CLASSES
            log_h_lc = _log_h(outputs, where, ok)
            a, b = tl.load(log_beta + slot) + log_h_lc, tl.load(log_rest + slot) + log_h
            larger = tl.maximum(a, b)
            log_h_p = larger + tl.log(tl.exp(a - larger) + tl.exp(b - larger))
            one, one_gradient = _cost_and_gradient(log_h_p, y, of_loss, of_regulariser, ok)
            mixed_cost += one + of_label
            one_gradient *= tl.exp(a - log_h_p)  # the localized model's share of the mixture
            tl.store(gradient + where, _through_softmax(one_gradient, log_h_lc, ok), mask=ok)
    tl.store(costs + slot * MODELS, tl.sum(cost, 0))
    if MIXED:
        tl.store(costs + slot * MODELS + 1, tl.sum(mixed_cost, 0))


def costs_and_gradient(
    outputs: Tensor,
    target: Tensor,
    weights: tuple[Tensor, Tensor],
    alphas: tuple[Tensor, Tensor],
    log_shares: tuple[Tensor, Tensor] | None,
) -> tuple[Tensor, Tensor]:
    """Costs [slots, models] and gradients, as outputs [slots, models, samples, classes]; `log_shares`: two models."""
    slots, models, samples, classes = outputs.shape
    outputs, target = outputs.contiguous(), target.contiguous()
    costs, gradient = outputs.new_empty(slots, models), torch.empty_like(outputs)
    given = [t.contiguous() for t in (*weights, *alphas, *(log_shares or alphas))]
    block_s, block_c = (1 << (size - 1).bit_length() for size in (min(samples, 64), max(classes, 2)))
    _costs_and_gradient[(slots,)](
        outputs, target, *given, costs, gradient, samples,
        MIXED=log_shares is not None, CLASSES=classes, BLOCK_S=block_s, BLOCK_C=block_c, num_warps=4,
    )  # fmt: skip
    return costs, gradient
