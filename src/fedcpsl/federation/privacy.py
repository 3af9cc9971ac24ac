"""Protect updates before they leave a device (clip the norm, add Gaussian noise), and the epsilon that this gives."""

import secrets
from collections.abc import Callable
from math import inf
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedcpsl.errors import InputError
from fedcpsl.trees import Tree, leaves, map_tensors


class Protection(NamedTuple):
    """Bound the norm of an update, then add Gaussian noise; 0: not."""

    clip: float = 0.0  # largest norm
    noise: float = 0.0  # standard deviation of each number's noise, in units of `clip`


def check_protection(protection: Protection) -> None:
    """Refuse what protects nobody."""
    if not all(0 <= number < inf for number in protection):
        raise InputError(f"clip = {protection.clip:g}, noise = {protection.noise:g}: give finite numbers of at least 0")
    if protection.noise and not protection.clip:
        raise InputError(f"noise = {protection.noise:g}: is in units of the largest norm; give clip too")


def protect(upload: Tree, protection: Protection) -> Tree:
    """The update as it is sent, its numbers as one vector; its noise comes from a seed that nobody else can know."""
    if protection.clip:
        factor = protection.clip / norm_of(upload).clamp_min(protection.clip)
        upload = _of_numbers(lambda t: t * factor, upload)
    if protection.noise:
        upload = _of_numbers(lambda t: t + protection.clip * protection.noise * _noise(t), upload)
    return upload


def norm_of(upload: Tree) -> Tensor:
    """Of all numbers of an update, step counts aside."""
    return torch.cat([t.flatten() for t in leaves(upload) if t.is_floating_point()]).norm()


def scaled(upload: Tree, factor: float) -> Tree:
    """An update as the server counts it: the same bits on both sides."""
    return upload if factor == 1 else _of_numbers(lambda t: t * factor, upload)


def _of_numbers(change: Callable[[Tensor], Tensor], upload: Tree) -> Tree:
    return map_tensors(lambda t: change(t) if t.is_floating_point() else t, upload)


def _noise(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(secrets.randbits(63))
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def epsilon(noise: float, times: int, delta: float) -> float:
    """The epsilon, at this delta, of a device that has let go so many updates, against everybody, the server too.

    Two devices are told apart by any difference in their data. Their updates, shortened to the norm `clip`, are at most
    2 clip apart, and the noise has deviation noise * clip: each update is a Gaussian mechanism of multiplier noise/2.
    """
    if not times:
        return 0.0
    dp = _accounting()
    accountant = dp.rdp.RdpAccountant()
    accountant.compose(dp.SelfComposedDpEvent(dp.GaussianDpEvent(noise / 2), times))
    return float(accountant.get_epsilon(delta))


def _accounting() -> Any:
    try:
        import dp_accounting
        import dp_accounting.rdp
    except ImportError:
        raise InputError("noise: epsilon is counted by dp-accounting; run: pip install 'fedcpsl[privacy]'") from None
    return dp_accounting


def check_delta(delta: float) -> None:
    if not 0 < delta < 1:
        raise InputError(f"delta = {delta:g}: give a number between 0 and 1, for example 1e-5")
    _accounting()


def strictest(one: Protection, other: Protection) -> Protection:
    """What satisfies both: the smaller norm, the larger deviation of the noise."""
    clip = min(filter(None, (one.clip, other.clip)), default=0.0)
    deviation = max(one.clip * one.noise, other.clip * other.noise)
    return Protection(clip, deviation / clip if clip else 0.0)
