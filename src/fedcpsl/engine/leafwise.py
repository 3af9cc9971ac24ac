"""The leaves of models: arithmetic on all at once, with one number per slot, many small operations as one; views of
them, and a cache of the last call by argument identity that keeps such views."""

import logging
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from operator import is_not
from types import ModuleType
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Made = TypeVar("Made")
Leaves = tuple[Tensor, ...]


def cache_last_call(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """Memoise the last call of `make`, by argument identity.

    For functions that hand back views of what they are given, or depend only on what never changes in place: a step
    then finds its views ready instead of making a hundred small objects.
    """
    last: tuple[tuple[object, ...], Made] | None = None  # looked at and replaced as one: other threads ask too

    def remember(*arguments: Given.args, **named: Given.kwargs) -> Made:
        nonlocal last
        asked, kept = (*arguments, *named.values()), last
        if kept is None or len(asked) != len(kept[0]) or any(map(is_not, asked, kept[0])):
            kept = last = asked, make(*arguments, **named)
        return kept[1]

    return remember


def where_slots(chosen: Tensor, ones: Leaves, others: Leaves) -> Leaves:
    """The leaves of the chosen slots [...] from the ones, the rest from the others."""
    if not chosen.is_cuda and not chosen.any():  # known here, and the case in most steps
        return others
    by_slot = (chosen.reshape(chosen.shape + (1,) * (leaf.dim() - chosen.dim())) for leaf in ones)
    return tuple(torch.where(each, w, z) for each, w, z in zip(by_slot, ones, others, strict=True))


def unbound(t: Tensor, lead: int) -> list[Tensor]:
    """Views of a tensor, one for each place in its first dimensions."""
    pieces = [t]
    for _ in range(lead):
        pieces = [part for piece in pieces for part in piece.unbind()]
    return pieces


def by_model(leaves: Sequence[Tensor], lead: torch.Size) -> list[Tensor]:
    """Views of the leaves of one model after another."""
    return [piece for model in zip(*(unbound(leaf, len(lead)) for leaf in leaves), strict=True) for piece in model]


def as_slots(t: Tensor, lead: torch.Size) -> Tensor:
    """A tensor with leading dimensions as [slots, models or 1, ...], without copying what models share."""
    if len(lead) == 2:
        return t
    return t[None] if len(lead) == 1 else t.flatten(0, len(lead) - 2)


def scale_and_add(leaves: Leaves, numbers: Tensor, others: Leaves) -> None:
    """leaf = number leaf, plus other for the first model of every slot; in place.

    Leaves are [..., models, *shape], numbers [...], others [..., *shape] each, or none.
    """
    kernels = _kernels(leaves, others)
    if kernels:
        kernels.scale_and_add(leaves, numbers, others)
        return
    if not others:
        torch._foreach_mul_(leaves, _over_each(numbers, leaves))
        return
    for first, number, other in _first_models(leaves, numbers, others):
        torch.addcmul(other, first, number, out=first)
    later, over = _later_models(leaves, numbers)
    if later:
        torch._foreach_mul_(later, over)


def subtract_scaled(leaves: Leaves, numbers: Tensor, others: Leaves) -> None:
    """leaf = leaf - number other, in place; numbers are [..., models]."""
    kernels = _kernels(leaves, others)
    if kernels:
        kernels.subtract_scaled(leaves, numbers, others)
        return
    torch._foreach_addcmul_(leaves, _over_each_model(numbers, leaves), others, value=-1)


def differences(leaves: Leaves, others: Leaves) -> Leaves:
    """leaf - other."""
    return tuple(torch._foreach_sub(leaves, others))


def _numbers_over_each(numbers: Tensor, leaves: Leaves) -> list[Tensor]:
    return [numbers.reshape((*numbers.shape, *(1,) * (leaf.dim() - numbers.dim()))) for leaf in leaves]


_over_each, _over_each_model = cache_last_call(_numbers_over_each), cache_last_call(_numbers_over_each)


@cache_last_call
def _first_models(leaves: Leaves, numbers: Tensor, others: Leaves) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The first model's leaves of every slot, each with its number and what is added."""
    firsts = [leaf.select(numbers.dim(), 0) for leaf in leaves]
    return list(zip(firsts, _numbers_over_each(numbers, tuple(firsts)), others, strict=True))


@cache_last_call
def _later_models(leaves: Leaves, numbers: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    """The other models' leaves, if there are any, and their numbers."""
    lead = numbers.dim()
    later = [leaf.narrow(lead, 1, leaf.shape[lead] - 1) for leaf in leaves if leaf.shape[lead] > 1]
    return later, _numbers_over_each(numbers, tuple(later))


def _kernels(leaves: Leaves, others: Leaves) -> ModuleType | None:
    """The Triton kernels, for tensors that they can take: on a GPU, in one piece each, slots in one dimension."""
    if not leaves[0].is_cuda or leaves[0].dtype not in (torch.float32, torch.float64):
        return None
    return _loaded() if all(leaf.is_contiguous() for leaf in (*leaves, *others)) else None


def _loaded() -> ModuleType | None:
    return import_module("fedcpsl.engine.leafwise_kernels") if has_triton() else None


@cache
def has_triton() -> bool:
    """Whether kernels of our own can be compiled; PyTorch for some platforms comes without Triton. Asked on a GPU."""
    if find_spec("triton"):
        return True
    logging.getLogger("fedcpsl").warning("Triton is not installed: PyTorch's own operations are used, which are slower")
    return False
