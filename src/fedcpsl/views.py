"""Views of tensors, made once and kept for as long as the same tensors are asked about."""

from collections.abc import Callable
from operator import is_not
from typing import ParamSpec, TypeVar

Given = ParamSpec("Given")
Made = TypeVar("Made")


def remembered(make: Callable[Given, Made]) -> Callable[Given, Made]:
    """`make`, called again only where an argument is another object than last time.

    For functions that hand back views of what they are given, or depend only on what never changes in place: a step
    then finds its views ready instead of making a hundred small objects.
    """
    given: tuple[object, ...] = ()
    made: list[Made] = []

    def remember(*arguments: Given.args, **named: Given.kwargs) -> Made:
        nonlocal given
        asked = (*arguments, *named.values())
        if not made or len(asked) != len(given) or any(map(is_not, asked, given)):
            made[:] = [make(*arguments, **named)]
            given = asked
        return made[0]

    return remember
