"""What is done to an update before it leaves the device."""

import secrets
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.errors import InputError


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


def protect(delta: Tensor, protection: Protection) -> Tensor:
    """The update as it is sent; its noise comes from a seed that nobody else can know."""
    if protection.clip:
        delta = delta * (protection.clip / delta.norm().clamp_min(protection.clip))
    if protection.noise:
        generator = torch.Generator(delta.device).manual_seed(secrets.randbits(63))
        noise = torch.randn(delta.shape, generator=generator, dtype=delta.dtype, device=delta.device)
        delta = delta + protection.clip * protection.noise * noise
    return delta
