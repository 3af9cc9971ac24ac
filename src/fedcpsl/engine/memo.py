"""Views of tensors, and a cache of the last call by argument identity."""

from collections.abc import Callable, Sequence
from operator import is_not
from typing import ParamSpec, TypeVar

import torch
from torch import Tensor

Given = ParamSpec("Given")
Made = TypeVar("Made")


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
