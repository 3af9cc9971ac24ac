"""The two ways a command ends badly: the input was wrong, or the run could not go on."""

import re
from collections.abc import Iterable
from difflib import get_close_matches

# control characters, separators of lines, marks that turn the direction of writing, halves of characters
_UNSAFE = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


class InputError(Exception):
    """A setting, file or model is wrong; the message names it and the fix. Exit code 2."""


class RefusedError(InputError):
    """Settings that are right by themselves and that a run's data, algorithm or cell does not allow.

    Among many runs, that run alone fails.
    """


class RunError(Exception):
    """A run could not go on (a NaN, a full disk, a corrupt checkpoint). Exit code 1."""

    run: int | None = None  # which, where several go together


class LostRankError(RunError):
    """Another rank of the job is gone, or cannot be reached."""


def did_you_mean(name: str, known: Iterable[str], near: float = 0.5) -> str:
    """A hint for a misspelt name: the nearest known one, if it is near enough (1: the same), or all of them."""
    known = sorted(known)
    spelt = {k.lower(): k for k in known}
    nearest = get_close_matches(name.lower(), spelt, n=1, cutoff=near)
    return f"did you mean {spelt[nearest[0]]!r}?" if nearest else f"known: {', '.join(known)}"


def printable(text: object, most: int = 1000) -> str:
    """What somebody else wrote, fit for one line of a log or a terminal: no line breaks, no escape sequences."""
    return _UNSAFE.sub("?", str(text)[:most])
