"""The kinds of settings: what values each accepts, and how that is said. Nothing here imports torch."""

import json
from collections.abc import Callable, Sequence
from dataclasses import field
from math import inf, isfinite
from typing import Any


def toml_value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(toml_value, value)) + "]"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(value, ensure_ascii=False) if isinstance(value, str) else str(value)


def setting_of(default: Any, help: str, accepts: str, test: Callable[[Any], bool], choices: Sequence[str] = ()) -> Any:
    metadata = {"help": help, "accepts": accepts, "test": test, "choices": choices}
    if isinstance(default, list):
        return field(default_factory=lambda: list(default), metadata=metadata)
    return field(default=default, metadata=metadata)


def _is_real(value: Any) -> bool:
    try:
        return isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
    except OverflowError:  # a whole number beyond every float
        return False


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def real(
    default: Any, help: str, low: float, high: float = inf, *, open_ends: str = "", also: Sequence[str] = ()
) -> Any:
    """A number from `low` to `high`; `open_ends` has "[" or "]" where the end itself is excluded."""

    def test(value: Any) -> bool:
        return value in also if isinstance(value, str) else _is_real(value) and _inside(value, low, high, open_ends)

    return setting_of(default, help, _or(_interval(low, high, open_ends), also), test)


def _inside(value: float, low: float, high: float, open_ends: str) -> bool:
    return low <= value <= high and not ("[" in open_ends and value == low) and not ("]" in open_ends and value == high)


def _interval(low: float, high: float, open_ends: str) -> str:
    if high == inf:
        return f"a number {'above' if '[' in open_ends else 'of at least'} {low:g}"
    excluded = [f"{end:g}" for end, mark in ((low, "["), (high, "]")) if mark in open_ends]
    return f"a number from {low:g} to {high:g}" + (f", {' and '.join(excluded)} excluded" if excluded else "")


def whole(default: Any, help: str, low: int, *, also: Sequence[str] = ()) -> Any:
    def test(value: Any) -> bool:
        return value in also if isinstance(value, str) else _is_whole(value) and value >= low

    return setting_of(default, help, _or(f"a whole number of at least {low}", also), test)


def choice(default: Any, help: str, *choices: Any) -> Any:
    def test(value: Any) -> bool:
        return any(value == choice and type(value) is type(choice) for choice in choices)

    words = [choice if isinstance(choice, str) else toml_value(choice) for choice in choices]
    return setting_of(default, help, "one of " + ", ".join(map(toml_value, choices)), test, words)


def text(default: str, help: str) -> Any:
    return setting_of(default, help, "text in quotes", lambda value: isinstance(value, str))


def _or(accepts: str, also: Sequence[str]) -> str:
    return " or ".join([accepts, *map(toml_value, also)])


def is_share_or_list(value: Any) -> bool:
    numbers = value if isinstance(value, list) else [value]
    return bool(numbers) and all(_is_real(v) and 0 <= v <= 1 for v in numbers)


def is_labelled_share(value: Any) -> bool:
    if isinstance(value, list):
        return is_share_or_list(value) and any(value)
    return value == "auto" or (_is_real(value) and 0 < value <= 1)


def is_range(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(map(_is_whole, value)) and 1 <= value[0] <= value[1]


def is_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(_is_whole(v) and v >= 1 for v in value)
