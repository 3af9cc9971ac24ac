"""What the server and a device must agree on before their numbers mean the same."""

import json
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from fedcpsl.algorithm import Algorithm, Method
from fedcpsl.algorithms.family import Parts, Rules
from fedcpsl.errors import InputError
from fedcpsl.schedule import Work
from fedcpsl.simulation import Setup
from fedcpsl.trees import Tree, map_tensors

OWN = ("beta",)  # a device may choose these for itself


class Terms(NamedTuple):
    """How one side computes; `hyper` has one number of each."""

    algorithm: Algorithm
    method: Method
    hyper: Tree
    warming: Tree  # the same while unlabelled samples are not used
    work: Work

    @property
    def parameters(self) -> int:
        return self.method.network.initial.numel()

    @property
    def dtype(self) -> torch.dtype:
        return self.method.network.initial.dtype

    @property
    def where(self) -> torch.device:
        return self.method.network.initial.device


def terms_of(setup: Setup, device: int = 0) -> Terms:
    """The terms of one device of a simulation, or of its server."""
    if setup.method.traits.alone:
        raise InputError("algorithm.name: this algorithm has no server; run it with the simulator")
    if not isinstance(setup.method.rules, Rules):
        raise InputError("algorithm.name: only FedCPSL's family runs on real devices so far; simulate this one")
    if setup.personal_rounds:
        raise InputError(f"work.personal_rounds = {setup.personal_rounds}: the simulator alone has them; give 0")
    hyper = map_tensors(lambda t: t[device], setup.hyper)
    warming = type(hyper)(*torch.from_numpy(setup.warming[:, device]).to(setup.hyper[0]))
    return Terms(setup.algorithm, setup.method, hyper, warming, setup.work)


def digest(terms: Terms) -> str:
    """Equal on both sides exactly where they agree."""
    method = terms.method
    agreed = {
        "algorithm": getattr(terms.algorithm, "__name__", type(terms.algorithm).__name__),
        "traits": method.traits._asdict(),
        "rules": _plain(method.rules),
        "hyper": {name: float(t) for name, t in terms.hyper._asdict().items() if name not in OWN},
        "batches": [terms.work.batch_labelled, terms.work.batch_unlabelled],
        "shapes": {name: list(shape) for name, shape in method.network.shapes.items()},
        "classes": method.network.classes,
        "dtype": str(terms.dtype),
    }
    return sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


def _plain(rules: Any) -> Any:
    """Rules as values that are equal on both sides: of functions, their names."""
    if isinstance(rules, tuple):
        return [_plain(each) for each in rules]
    return f"{rules.__module__}.{getattr(rules, '__qualname__', '')}" if callable(rules) else rules


def parts_of(method: Method) -> Parts:
    """What the family's algorithm is made of."""
    assert isinstance(method.rules, Rules)
    return method.rules.parts
