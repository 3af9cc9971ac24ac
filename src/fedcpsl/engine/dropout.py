"""Dropout whose masks are a function of a key per sample, so that every executor draws the same ones."""

from functools import lru_cache
from math import ceil
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
CONSTANTS = (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB)
_GOLDEN, _MIX_1, _MIX_2 = (c - (1 << 64) for c in CONSTANTS)


def keyed_uniform(keys: Tensor, layer: int, count: int) -> Tensor:
    """Numbers in [0, 1), shape [..., count], from int64 keys [...]: splitmix64 of key, layer and position.

    In a CPU's memory by NumPy, which has unsigned numbers: fewer operations, and the same bits.
    """
    if _in_cpu_memory(keys):
        return torch.from_numpy(np.right_shift(_mixed(keys, layer, count), np.uint64(40)).astype(np.float32)) / (
            1 << 24
        )
    position = torch.arange(1, count + 1, device=keys.device) + (layer << 40)
    z = keys[..., None] + position * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 40).to(torch.float32) / (1 << 24)


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def keyed_kept(keys: Tensor, layer: int, count: int, p: float) -> Tensor:
    """Which of the numbers of `keyed_uniform` are at least p."""
    if not _in_cpu_memory(keys):
        return keyed_uniform(keys, layer, count) >= p
    least = ceil(float(np.float32(p)) * (1 << 24))  # of the highest 24 bits, which make the number
    return torch.from_numpy(_mixed(keys, layer, count) >= np.uint64(least << 40))


def _in_cpu_memory(keys: Tensor) -> bool:
    return keys.device.type == "cpu" and not torch._C._functorch.is_functorch_wrapped_tensor(keys)


def _mixed(keys: Tensor, layer: int, count: int) -> NDArray[Any]:
    """splitmix64 of key, layer and position, [..., count], of keys in a CPU's memory."""
    _, mix_1, mix_2 = map(np.uint64, CONSTANTS)
    z = keys.numpy().view(np.uint64)[..., None] + _steps(layer, count)
    shifted = np.empty_like(z)
    for bits, mix in ((30, mix_1), (27, mix_2)):
        z ^= np.right_shift(z, np.uint64(bits), out=shifted)
        z *= mix
    z ^= np.right_shift(z, np.uint64(31), out=shifted)
    return z


@lru_cache(maxsize=64)
def _steps(layer: int, count: int) -> NDArray[Any]:
    """What is added to a key for each position."""
    return (np.arange(1, count + 1, dtype=np.uint64) + np.uint64(layer << 40)) * np.uint64(CONSTANTS[0])


class KeyedDropout(nn.Module):
    """Stands in for a `nn.Dropout`; `keys` (one per sample, or None for evaluation) is set before a call."""

    def __init__(self, p: float, layer: int, channelwise: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channelwise = p, layer, channelwise
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keys is None or self.p == 0:
            return x
        return x * kept_by(self, self.keys, x) if self.p < 1 else x * 0


def kept_by(dropout: KeyedDropout, keys: Tensor, x: Tensor) -> Tensor:
    """1 / (1 - p) for what is kept of x [samples, ...], else 0, in a shape that broadcasts to x's; p is below 1."""
    per_sample = x.shape[1:2] if dropout.channelwise else x.shape[1:]
    kept = keyed_kept(keys, dropout.layer, per_sample.numel(), dropout.p).to(x.dtype).mul_(1 / (1 - dropout.p))
    return kept.reshape(*x.shape[:1], *per_sample, *(1,) * (x.dim() - 1 - len(per_sample)))


def with_keyed_dropout(module: nn.Module) -> list[KeyedDropout]:
    """Replace every dropout layer inside `module` and return the replacements."""
    found: list[KeyedDropout] = []
    for parent in list(module.modules()):
        for name, child in list(parent._modules.items()):  # by name: one may be there twice
            if type(child) is nn.Dropout or isinstance(child, CHANNELWISE):
                found.append(KeyedDropout(child.p, len(found), isinstance(child, CHANNELWISE)))
                setattr(parent, name, found[-1])
    return found
