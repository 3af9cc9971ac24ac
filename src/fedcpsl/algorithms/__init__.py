"""One file per algorithm, found by being here."""

from functools import cache
from importlib import import_module
from pkgutil import iter_modules
from typing import Any, cast

from fedcpsl.algorithm import Algorithm, Traits
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.problem import Costs


@cache
def all_algorithms() -> dict[str, tuple[Algorithm, Any]]:
    """Every algorithm by name, with the file that implements it and its variant."""
    known: dict[str, tuple[Algorithm, Any]] = {}
    for found in iter_modules(__path__):
        file = cast(Algorithm, import_module(f"{__name__}.{found.name}"))
        for name, variant in file.VARIANTS.items():
            if name in known:
                raise ValueError(f"algorithms/{found.name}.py: {name!r} is the name of another algorithm already")
            known[name] = (file, variant)
    return known


def find_algorithm(name: str) -> tuple[Algorithm, Any]:
    """The algorithm called `name`, or an error with a name that is nearly the same, else with all of them."""
    known = all_algorithms()
    if name not in known:
        raise InputError(f"algorithm.name = {name!r}: no such algorithm; {did_you_mean(name, known, near=0.75)}")
    return known[name]


def traits_of(name: str) -> Traits:
    """What everybody must know of an algorithm, with its settings as they are by default."""
    file, variant = find_algorithm(name)
    return file.resolve(variant, file.Settings(name=name), Costs())[0]
