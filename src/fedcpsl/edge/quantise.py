"""Quantised uploads: each tensor of an update to B bits by stochastic rounding, which is unbiased."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.schedule import random_bytes
from fedcpsl.trees import Tree, leaves, rebuilt

AT_ONCE = 1 << 20  # entries that are rounded at once: more would not stay in a processor's cache
ENDS_BITS = 64  # a tensor's minimum and maximum, two float32


def quantised(x: Tensor, bits: int, u: Tensor) -> Tensor:
    """min + step floor((x - min) / step + u), step = (max - min) / (2^B - 1), for u uniform in (0, 1).

    Of every tensor [..., entries]; one whose entries are all the same, or not finite, stays as it is.
    """
    found = torch.empty_like(x)
    _round([x], bits, [u], [found])
    return found


def _round(tensors: Sequence[Tensor], bits: int, numbers: Sequence[Tensor], out: Sequence[Tensor]) -> None:
    """Write tensors [..., entries], rounded by numbers in (0, 1), to `out`."""
    steps = []
    for x, u, found in zip(tensors, numbers, out, strict=True):
        low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)  # faster than aminmax
        step = (high - low) / (2**bits - 1)
        level = torch.sub(x, low, out=found).div_(step).add_(u).floor_().clamp_(0, 2**bits - 1)
        level.mul_(step).add_(low)
        steps.append(step)
    if not bool(_can_round(torch.cat(steps, -1)).all()):  # one look at all of them: they seldom are not
        for x, found, step in zip(tensors, out, steps, strict=True):
            found.copy_(torch.where(_can_round(step), found, x))


def _can_round(step: Tensor) -> Tensor:
    """Whether entries differ and all are finite."""
    return (step > 0) & (step < torch.inf)


def tensors_of(leaf: Tensor, sizes: Sequence[int]) -> list[int]:
    """Entries of the tensors that one device's leaf of an upload is made of; none where it is sent as it is.

    A leaf as long as the model is the model's tensors in a row.
    """
    if not leaf.is_floating_point() or leaf.numel() <= 1:
        return []
    return list(sizes) if leaf.dim() == 1 and leaf.numel() == sum(sizes) else [leaf.numel()]


def quantised_bits(upload: Tree, bits: int, sizes: Sequence[int]) -> int:
    """B bits an entry and two float32 per tensor; what is no tensor of numbers as it is."""
    total = 0
    for leaf in leaves(upload):
        pieces = tensors_of(leaf, sizes)
        total += sum(bits * n + ENDS_BITS for n in pieces) if pieces else 8 * leaf.numel() * leaf.element_size()
    return total


def quantised_uploads(
    upload: Tree, bits: int, sizes: Sequence[int], seed: int, round: int, devices: Sequence[int]
) -> Tree:
    """The uploads of some devices, [devices, ...], as each sends them: rounded by a stream of its own."""
    pieces = [tensors_of(leaf[0], sizes) for leaf in leaves(upload)]
    found = [leaf.new_empty(leaf.shape) if parts else leaf for leaf, parts in zip(leaves(upload), pieces, strict=True)]
    entries = sum(map(sum, pieces))
    if not entries:
        return upload
    some_leaf = next(leaf for leaf, parts in zip(leaves(upload), pieces, strict=True) if parts)
    at_once = max(AT_ONCE // entries, 1)
    for top in range(0, len(devices), at_once):
        some = slice(top, top + at_once)
        drawn = np.stack([random_bytes(entries + 2, seed, "rounding", round, device) for device in devices[some]])
        u, first = uniform(drawn, some_leaf), 0
        for leaf, sent, parts in zip(leaves(upload), found, pieces, strict=True):
            if parts:
                x, out, last = leaf[some].flatten(1), sent[some].flatten(1), first + sum(parts)
                _round(x.split(parts, 1), bits, u[:, first:last].split(parts, 1), out.split(parts, 1))
                first = last
    return rebuilt(upload, found)


def uniform(drawn: NDArray[np.uint8], like: Tensor) -> Tensor:
    """Numbers in (0, 1) from random bytes [devices, entries + 2]: byte / 2^8 + v, [devices, entries].

    v is the middle of one of 2^15 equal parts of (0, 2^-8), by the last two bytes, the same for all entries of a
    device. So each number alone is one of 2^23 equally likely ones, evenly spaced around 1/2, which float32 has
    exactly: rounding by it is unbiased to 2^-24 of a step. The bytes are independent of each other.
    """
    low, high = drawn[:, -2:].T.astype(np.float64)
    v = ((high % 2**7) * 2**8 + low + 0.5) / 2**23
    each, of_all = (torch.from_numpy(t).to(like.device).to(like.dtype) for t in (drawn[:, :-2], v[:, None]))
    return torch.add(of_all, each, alpha=2.0**-8, out=each)
