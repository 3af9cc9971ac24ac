"""Quantised uploads: each tensor of an update to B bits by stochastic rounding, which is unbiased."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.schedule import random_words
from fedcpsl.trees import Tree, leaves, rebuilt

ENDS_BITS = 64  # a tensor's minimum and maximum, two float32


def quantised(x: Tensor, bits: int, u: Tensor) -> Tensor:
    """min + step floor((x - min) / step + u), step = (max - min) / (2^B - 1), for u uniform in [0, 1).

    Of every tensor [..., entries]; one whose entries are all the same, or not finite, stays as it is.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)  # faster than aminmax
    step = (high - low) / (2**bits - 1)
    level = (x - low).div_(step).add_(u).floor_().clamp_(0, 2**bits - 1)
    found = level.mul_(step).add_(low)
    return found if bool((step > 0).all()) else torch.where(step > 0, found, x)


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
    entries = sum(map(sum, pieces))
    words = np.stack([random_words(entries, seed, "rounding", round, device) for device in devices])
    found, first = [], 0
    for leaf, parts in zip(leaves(upload), pieces, strict=True):
        if parts:
            rows, last = leaf.flatten(1), first + sum(parts)
            each = zip(rows.split(parts, 1), uniform(words[:, first:last], rows).split(parts, 1), strict=True)
            leaf, first = torch.cat([quantised(x, bits, u) for x, u in each], 1).view(leaf.shape), last
        found.append(leaf)
    return rebuilt(upload, found)


def uniform(words: NDArray[np.int32], like: Tensor) -> Tensor:
    """Numbers in [0, 1) from 24 random bits each: 2^-24 (word mod 2^24)."""
    return (torch.from_numpy(words).to(like.device) & (2**24 - 1)).to(like.dtype).mul_(2.0**-24)
