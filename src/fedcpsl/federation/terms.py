"""What the server and a device must agree on before their numbers mean the same."""

import json
from hashlib import sha256
from typing import NamedTuple

import torch

from fedcpsl.algorithm import Algorithm, Hyper, Method, map_tensors
from fedcpsl.errors import InputError
from fedcpsl.schedule import Work
from fedcpsl.simulation import Setup

OWN = ("beta",)  # a device may choose these for itself


class Terms(NamedTuple):
    """How one side computes; `hyper` has one number of each."""

    algorithm: Algorithm
    method: Method
    hyper: Hyper
    work: Work
    warm_up: int = 0

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
    if setup.method.parts.alone:
        raise InputError("algorithm.name: this algorithm has no server; run it with the simulator")
    if setup.personal_rounds:
        raise InputError(f"work.personal_rounds = {setup.personal_rounds}: the simulator alone has them; give 0")
    hyper: Hyper = map_tensors(lambda t: t[device], setup.hyper)
    return Terms(setup.algorithm, setup.method, hyper, setup.work, setup.warm_up)


def digest(terms: Terms) -> str:
    """Equal on both sides exactly where they agree."""
    method = terms.method
    agreed = {
        "algorithm": getattr(terms.algorithm, "__name__", type(terms.algorithm).__name__),
        "parts": method.parts._asdict(),
        "costs": [f"{cost.__module__}.{getattr(cost, '__qualname__', '')}" for cost in method.costs],
        "rules": [method.pseudo_labels, method.eta_g, method.labels_from],
        "hyper": {name: float(t) for name, t in terms.hyper._asdict().items() if name not in OWN},
        "batches": [terms.work.batch_labelled, terms.work.batch_unlabelled],
        "warm_up": terms.warm_up,
        "shapes": {name: list(shape) for name, shape in method.network.shapes.items()},
        "classes": method.network.classes,
        "dtype": str(terms.dtype),
    }
    return sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]
