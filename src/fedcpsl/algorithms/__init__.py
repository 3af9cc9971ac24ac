"""One file per algorithm, found by being here, or in a folder that FEDCPSL_ALGORITHMS names."""

import os
from collections.abc import Iterator
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from inspect import isfunction
from pathlib import Path
from pkgutil import iter_modules
from types import CodeType
from typing import Any, cast

from fedcpsl.algorithm import OPTIONAL, Algorithm, Traits
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.problem import Costs
from fedcpsl.settings import ALGORITHM_FOLDERS, FAMILY

__path__ += [folder for folder in os.environ.get(ALGORITHM_FOLDERS, "").split(os.pathsep) if folder]


@cache
def all_algorithms() -> dict[str, tuple[Algorithm, Any]]:
    """Every algorithm by name, with the file that implements it and its variant."""
    known: dict[str, tuple[Algorithm, Any]] = {}
    for folder in __path__:
        if not Path(folder).is_dir():
            raise InputError(f"{ALGORITHM_FOLDERS}: {folder}: no such folder")
    for found in iter_modules(__path__):
        file, where = _imported(found.name), f"algorithms/{found.name}.py"
        missing = missing_names(file)
        if missing:
            raise InputError(f"{where}: lacks {', '.join(missing)}, which every algorithm needs")
        for name, meant in misspelt_names(file):
            raise InputError(f"{where}: fedcpsl does not call {name!r}; did you mean {meant!r}? Else call it _{name}")
        for name, variant in file.VARIANTS.items():
            if name in known:
                raise InputError(f"{where}: {name!r} is the name of another algorithm already; give it another")
            known[name] = (file, variant)
    return known


def _imported(name: str) -> Algorithm:
    """The file of an algorithm, or an error that says which file is wrong."""
    try:
        return cast(Algorithm, import_module(f"{__name__}.{name}"))
    except Exception as error:
        raise InputError(f"algorithms/{name}.py: cannot be imported: {type(error).__name__}: {error}") from error


REPLACED_BY = {"broadcast": "broadcast_each", "contribution": "receive", "apply": "receive", "own_model": "adapted"}


def missing_names(file: Any) -> list[str]:
    """What every algorithm needs and a file does not define."""
    needed = [name for name in vars(Algorithm) if not name.startswith("_")]
    return [name for name in needed if not hasattr(file, name) and not hasattr(file, REPLACED_BY.get(name, name))]


RENAMED = {"prepare": "prepare_visit"}


def misspelt_names(file: Any) -> Iterator[tuple[str, str]]:
    """Functions that a file does not call itself, named nearly as optional ones that it does not have, with these."""
    own = {name: f for name, f in vars(file).items() if isfunction(f) and f.__module__ == file.__name__}
    called = {name for function in own.values() for name in _names_in(function.__code__)}
    absent = sorted(name for name in OPTIONAL if not hasattr(file, name))
    for name in sorted(own.keys() - called - OPTIONAL - vars(Algorithm).keys()):
        if not name.startswith("_"):
            near = [RENAMED[name]] if name in RENAMED else get_close_matches(name, absent, n=1, cutoff=0.85)
            yield from ((name, meant) for meant in near)


def _names_in(code: CodeType) -> Iterator[str]:
    """The names that a function looks up, also in functions inside it."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from _names_in(inner)


GROUPS = ("all", "family", "related")  # of algorithms, wherever several are named


def members(group: str) -> list[str]:
    """The algorithms of a group: all, the paper's family, or what is neither of it nor its successor; family first."""
    successor = "fedcpsl2"
    others = sorted(name for name in all_algorithms() if name not in FAMILY)
    related = [name for name in others if not name.startswith(successor)]
    return {"all": [*FAMILY, *others], "family": list(FAMILY), "related": related}[group]


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
