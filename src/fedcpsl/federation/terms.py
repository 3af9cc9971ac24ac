"""The terms that the server and all devices agree on before training: algorithm, network, numbers, batch sizes."""

import json
from collections.abc import Mapping
from dataclasses import asdict, is_dataclass
from hashlib import sha256
from typing import Any, NamedTuple

import torch

from fedcpsl.algorithm import Algorithm, Method, Traits, optional
from fedcpsl.engine import Network, cache_last_call
from fedcpsl.errors import InputError
from fedcpsl.methods import numbers_of, resolved, unknown_sizes
from fedcpsl.problem import Samples
from fedcpsl.schedule import Work, work_of
from fedcpsl.settings import Work as WorkSettings
from fedcpsl.simulation import Setup
from fedcpsl.trees import Tree, leaves, map_tensors

# left out of digests where an algorithm has none: older jobs stay what they were
LATER_TRAITS = ("follows", "views", "draws", "per_sample", "positions", "probe", "server_data")
NOT_AGREED = ("both_ways",)  # changes neither messages nor states


class Terms(NamedTuple):
    """What one side computes with; each field of `hyper` is one number."""

    algorithm: Algorithm
    method: Method
    hyper: Tree
    warming: Tree  # `hyper` during warm-up, while unlabelled samples are not used
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


class Shapes(NamedTuple):
    """Templates of all states, for reading them from a message or a file."""

    server: Tree
    broadcast: Tree  # for training
    greeting: Tree  # the part of a broadcast that a device needs to start, and to predict after the last round
    device: Tree
    upload: Tree
    probe: Tree | None = None  # what the server sends in a second exchange of a round, where there is one
    answer: Tree | None = None


@cache_last_call
def shapes_of(terms: Terms) -> Shapes:
    """Make the templates with the algorithm's own functions, at the network's initial parameters."""
    algorithm, method = terms.algorithm, terms.method
    server = algorithm.init_server(method, 1)
    broadcast = sent_to(terms, server, 0)
    device = algorithm.init_device(method, broadcast)
    local = algorithm.begin(method, terms.hyper, broadcast, device)
    one = torch.ones((), dtype=torch.int64, device=terms.where)
    upload = algorithm.finish(method, terms.hyper, broadcast, device, local, one)[1]
    shapes = Shapes(server, broadcast, greeting_of(terms, broadcast), device, upload)
    if method.traits.probe is None:
        return shapes
    probe = optional(algorithm, "probe_broadcast")(method, server)
    x, weight = (terms.hyper[0].new_zeros(shape) for shape in ((1, *method.network.input_shape), (1,)))
    samples = Samples(x, x.new_zeros(1, method.network.classes), weight, weight)
    return shapes._replace(probe=probe, answer=optional(algorithm, "probe_upload")(method, terms.hyper, probe, samples))


def sent_to(terms: Terms, server: Tree, device: int, drawn: Mapping[str, list[list[int]]] | None = None) -> Tree:
    """Return what the server sends to one device for training: the same as to all others, or a broadcast of its own.

    `drawn` has the orders of devices that were drawn for it, where the algorithm asks for some.
    """
    each = optional(terms.algorithm, "broadcast_each")
    if each is None:
        return terms.algorithm.broadcast(server)
    ids = torch.tensor([device], device=terms.where)
    sent = each(terms.method, server, ids, drawn) if drawn else each(terms.method, server, ids)
    return map_tensors(lambda t: t[0], sent)


def keeps_sums(terms: Terms) -> bool:
    """Return whether a state of the server must stay the sum of device states (FedCPSL: c and every c_i)."""
    declared, shapes = optional(terms.algorithm, "invariants"), shapes_of(terms)
    one = map_tensors(lambda t: t[None], shapes.device)
    return bool(declared and declared(terms.method, shapes.server, one, terms.hyper[0].new_ones(1)))


def sends_kinds(terms: Terms) -> bool:
    """Return whether an update says which of its parts a device has sent (FedHAR): zeros must not count as numbers."""
    return any(t.dtype == torch.bool for t in leaves(shapes_of(terms).upload))


def greeting_of(terms: Terms, broadcast: Tree) -> Tree:
    """Return a broadcast without what only training needs."""
    without = optional(terms.algorithm, "greeting")
    return without(broadcast) if without else broadcast


def terms_of(setup: Setup, device: int = 0) -> Terms:
    """Return the terms of one device of a simulation, or of its server."""
    hyper, warming = (
        setup.terms.algorithm.Hyper(*torch.from_numpy(table[:, device]).to(setup.terms.hyper[0]))
        for table in (setup.terms.numbers, setup.terms.warming)
    )
    return _deployable(
        Terms(setup.terms.algorithm, setup.terms.method, hyper, warming, setup.terms.work), setup.terms.personal_rounds
    )


def terms_from(settings: Any, network: Network, work: WorkSettings, active: int) -> Terms:
    """Make the terms from settings and a network; no samples are needed."""
    found = resolved(settings, network, work)
    both = numbers_of(found.algorithm, found.method, settings, unknown_sizes(1))
    hyper, warming = (found.algorithm.Hyper(*torch.from_numpy(t[:, 0]).to(network.initial)) for t in both)
    drawn = work_of(work, active, alone=found.method.traits.alone)
    return _deployable(Terms(found.algorithm, found.method, hyper, warming, drawn), work.personal_rounds)


def _deployable(terms: Terms, personal_rounds: int) -> Terms:
    """Return the terms; InputError where they cannot run on real devices."""
    if terms.method.traits.alone:
        raise InputError("algorithm.name: this algorithm has no server; run it with the simulator")
    why_not = optional(terms.algorithm, "not_deployable")
    if reason := why_not(terms.method) if why_not else "":
        raise InputError(f"algorithm.name: cannot run on real devices: {reason}")
    if personal_rounds:
        raise InputError(f"work.personal_rounds = {personal_rounds}: only the simulator has them; give 0")
    return terms


def digest(terms: Terms) -> str:
    """Return a hash of the terms: equal on both sides exactly where they agree."""
    method, own = terms.method, optional(terms.algorithm, "OWN_NUMBERS") or ()  # which each device chooses
    agreed = {
        "algorithm": getattr(terms.algorithm, "__name__", type(terms.algorithm).__name__),
        "traits": {
            name: _plain(trait)
            for name, trait in method.traits._asdict().items()
            if name not in NOT_AGREED and (name not in LATER_TRAITS or trait != Traits._field_defaults[name])
        },
        "rules": _plain(method.rules),
        "hyper": {name: float(t) for name, t in terms.hyper._asdict().items() if name not in own},
        "batches": [terms.work.batch_labelled, terms.work.batch_unlabelled],
        "shapes": {name: list(shape) for name, shape in method.network.shapes.items()},
        "classes": method.network.classes,
        "dtype": str(terms.dtype),
    }
    return sha256(json.dumps(agreed, sort_keys=True).encode()).hexdigest()[:16]


def _plain(rules: Any) -> Any:
    """Return rules as plain values that are equal on both sides; functions are given by name."""
    if is_dataclass(rules) and not isinstance(rules, type):
        return asdict(rules)
    if isinstance(rules, tuple):
        return [_plain(each) for each in rules]
    return f"{rules.__module__}.{getattr(rules, '__qualname__', '')}" if callable(rules) else rules
