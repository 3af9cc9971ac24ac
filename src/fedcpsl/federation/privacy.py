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
    """How an update is protected: its norm is clipped, then Gaussian noise is added; 0 turns either off."""

    clip: float = 0.0  # maximum norm
    noise: float = 0.0  # standard deviation of each number's noise, in units of `clip`


def check_protection(protection: Protection) -> None:
    """Refuse numbers that give no protection."""
    if not all(0 <= number < inf for number in protection):
        raise InputError(f"clip = {protection.clip:g}, noise = {protection.noise:g}: give finite numbers of at least 0")
    if protection.noise and not protection.clip:
        raise InputError(f"noise = {protection.noise:g}: is in units of clip; give clip too")


def protect(upload: Tree, protection: Protection) -> Tree:
    """Return the update as it is sent: clipped as one vector, with noise from a secret random seed."""
    if protection.clip:
        factor = protection.clip / update_norm(upload).clamp_min(protection.clip)
        upload = _map_numbers(lambda t: t * factor, upload)
    if protection.noise:
        upload = _map_numbers(lambda t: t + protection.clip * protection.noise * _noise(t), upload)
    return upload


def update_norm(upload: Tree) -> Tensor:
    """Return the norm of all numbers of an update, without step counts."""
    return torch.cat([t.flatten() for t in leaves(upload) if t.is_floating_point()]).norm()


def scale_update(upload: Tree, factor: float) -> Tree:
    """Return an update times the factor that the server counts it with: the same bits on both sides."""
    return upload if factor == 1 else _map_numbers(lambda t: t * factor, upload)


def _map_numbers(change: Callable[[Tensor], Tensor], upload: Tree) -> Tree:
    return map_tensors(lambda t: change(t) if t.is_floating_point() else t, upload)


def _noise(like: Tensor) -> Tensor:
    generator = torch.Generator(like.device).manual_seed(secrets.randbits(63))
    return torch.randn(like.shape, generator=generator, dtype=like.dtype, device=like.device)


def epsilon(noise: float, times: int, delta: float) -> float:
    """Return the epsilon, at this delta, of a device that has sent `times` updates, also against the server.

    Two data sets of one device may differ in any way. Their updates, clipped to the norm `clip`, are at most 2 clip
    apart, and the noise has standard deviation noise * clip: each update is a Gaussian mechanism of multiplier noise/2.
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
        raise InputError("noise: epsilon is computed by dp-accounting; run: pip install 'fedcpsl[privacy]'") from None
    return dp_accounting


def check_delta(delta: float) -> None:
    """Refuse a delta out of range, and a missing dp-accounting."""
    if not 0 < delta < 1:
        raise InputError(f"delta = {delta:g}: give a number between 0 and 1, for example 1e-5")
    _accounting()


def stricter_protection(one: Protection, other: Protection) -> Protection:
    """Return a protection that satisfies both: the smaller norm, the larger standard deviation of the noise."""
    clip = min(filter(None, (one.clip, other.clip)), default=0.0)
    deviation = max(one.clip * one.noise, other.clip * other.noise)
    return Protection(clip, deviation / clip if clip else 0.0)
