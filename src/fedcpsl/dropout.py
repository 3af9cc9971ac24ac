"""Dropout whose masks are a function of a key per sample, so that every executor draws the same ones."""

import torch
from torch import Tensor, nn

CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)
_GOLDEN, _MIX_1, _MIX_2 = (c - (1 << 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def keyed_uniform(keys: Tensor, layer: int, count: int) -> Tensor:
    """Numbers in [0, 1), shape [..., count], from int64 keys [...]: splitmix64 of key, layer and position."""
    position = torch.arange(1, count + 1, device=keys.device) + (layer << 40)
    z = keys[..., None] + position * _GOLDEN
    z = (z ^ _shift(z, 30)) * _MIX_1
    z = (z ^ _shift(z, 27)) * _MIX_2
    z = z ^ _shift(z, 31)
    return _shift(z, 40).to(torch.float32) / (1 << 24)


def _shift(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)


class KeyedDropout(nn.Module):
    """Stands in for a `nn.Dropout`; `keys` (one per sample, or None for evaluation) is set before a call."""

    def __init__(self, p: float, layer: int, channelwise: bool) -> None:
        super().__init__()
        self.p, self.layer, self.channelwise = p, layer, channelwise
        self.keys: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.keys is None or self.p == 0:
            return x
        return x * kept_by(self, self.keys, x) / (1 - self.p) if self.p < 1 else x * 0


def kept_by(dropout: KeyedDropout, keys: Tensor, x: Tensor) -> Tensor:
    """1 for what is kept of x [samples, ...], else 0, in a shape that broadcasts to x's."""
    per_sample = x.shape[1:2] if dropout.channelwise else x.shape[1:]
    kept = keyed_uniform(keys, dropout.layer, per_sample.numel()) >= dropout.p
    return kept.to(x.dtype).reshape(*x.shape[:1], *per_sample, *(1,) * (x.dim() - 1 - len(per_sample)))


def with_keyed_dropout(module: nn.Module) -> list[KeyedDropout]:
    """Replace every dropout layer inside `module` and return the replacements."""
    found: list[KeyedDropout] = []
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.Dropout or isinstance(child, CHANNELWISE):
                found.append(KeyedDropout(child.p, len(found), isinstance(child, CHANNELWISE)))
                setattr(parent, name, found[-1])
    return found
