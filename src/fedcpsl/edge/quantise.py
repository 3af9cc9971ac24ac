"""Quantised uploads: each tensor of an update to B bits by stochastic rounding, which is unbiased."""

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.schedule import random_words
from fedcpsl.trees import Tree, leaves, rebuilt

AT_ONCE = 1 << 19  # entries that are rounded at once: more would not stay in a processor's cache
ENDS_BITS = 64  # a tensor's minimum and maximum, two float32


def quantised(x: Tensor, bits: int, u: Tensor, out: Tensor | None = None) -> Tensor:
    """min + step floor((x - min) / step + u), step = (max - min) / (2^B - 1), for u uniform in (0, 1).

    Of every tensor [..., entries]; one whose entries are all the same, or not finite, stays as it is.
    """
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)  # faster than aminmax
    step = (high - low) / (2**bits - 1)
    level = torch.sub(x, low, out=out).div_(step).add_(u).floor_().clamp_(0, 2**bits - 1)
    found = level.mul_(step).add_(low)
    return found if bool((step > 0).all()) else found.copy_(torch.where(step > 0, found, x))


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
    at_once = max(AT_ONCE // max(entries, 1), 1)
    for top in range(0, len(devices), at_once):
        some = slice(top, top + at_once)
        words = np.stack([random_words(entries, seed, "rounding", round, device) for device in devices[some]])
        first = 0
        for leaf, sent, parts in zip(leaves(upload), found, pieces, strict=True):
            if parts:
                x, out, last = leaf[some].flatten(1), sent[some].flatten(1), first + sum(parts)
                tensors = (t.split(parts, 1) for t in (x, uniform(words[:, first:last], x), out))
                for each, u, room in zip(*tensors, strict=True):
                    quantised(each, bits, u, room)
                first = last
    return rebuilt(upload, found)


def uniform(words: NDArray[np.int16], like: Tensor) -> Tensor:
    """Numbers in (0, 1) from words of 16 random bits: (word mod 2^15, made odd) / 2^15; overwrites the words.

    They are the middles of 2^14 equal intervals, so rounding by them is unbiased to 2^-15 of a step.
    """
    words &= np.int16(2**15 - 1)
    words |= np.int16(1)
    return torch.from_numpy(words).to(like.device).to(like.dtype).mul_(2.0**-15)
