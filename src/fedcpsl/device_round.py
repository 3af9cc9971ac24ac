"""One device's round, used by all that run one device at a time: the simulator's loop, `adapt`, a real device."""

from collections.abc import Callable, Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import Algorithm, Method, Visit, optional
from fedcpsl.problem import Samples
from fedcpsl.trees import Tree

ROWS_AT_ONCE = 4096


class Trained(NamedTuple):
    """What a round leaves: what the device keeps, its upload, the costs of its steps added up, and their number."""

    device: Tree
    upload: Tree
    costs: Tensor
    steps: int


def all_labelled(x: Tensor, target: Tensor) -> Samples:
    """All labelled samples of a device as one minibatch, each with a weight of 1/n; `target` has one-hot labels."""
    weights = target.new_full((len(target),), 1 / max(len(target), 1))
    return Samples(x, target, weights, torch.zeros_like(weights))


def is_relabelled(algorithm: Algorithm, method: Method, *, warming: bool) -> bool:
    """Whether a device renews its pseudo-labels before its steps."""
    return method.traits.unlabelled and not warming and optional(algorithm, "relabel") is not None


def relabelled(
    algorithm: Algorithm,
    method: Method,
    hyper: Tree,
    broadcast: Tree,
    device: Tree,
    inputs: Callable[[int, int], Tensor],
    nu: Tensor,
) -> Tensor:
    """A device's new pseudo-labels, [samples, classes], some rows at a time; `inputs` gives those of some samples."""
    relabel, count = optional(algorithm, "relabel"), torch.tensor(len(nu), device=nu.device)
    pieces = []
    for first in range(0, len(nu), ROWS_AT_ONCE):
        last = min(first + ROWS_AT_ONCE, len(nu))
        pieces.append(relabel(method, hyper, broadcast, device, inputs(first, last), nu[first:last], count))
    return torch.cat(pieces) if pieces else nu


def visit_if_needed(algorithm: Algorithm, make: Callable[[], Visit]) -> Visit | None:
    """What a device holds, for an algorithm that looks at it before or after a visit; else None."""
    return make() if optional(algorithm, "prepare_visit") or optional(algorithm, "review") else None


def prepared(
    algorithm: Algorithm, method: Method, hyper: Tree, broadcast: Tree, device: Tree, visit: Visit | None
) -> Tree:
    """What a device keeps once the algorithm has looked at all that it holds, before the first step."""
    prepare_visit = optional(algorithm, "prepare_visit")
    return prepare_visit(method, hyper, broadcast, device, visit) if prepare_visit else device


def reviewed(
    algorithm: Algorithm, method: Method, hyper: Tree, broadcast: Tree, device: Tree, upload: Tree, visit: Visit | None
) -> Tree:
    """What a device keeps once the algorithm has looked at what the visit left, after `finish`."""
    review = optional(algorithm, "review")
    return review(method, hyper, broadcast, device, upload, visit) if review else device


def begun(
    algorithm: Algorithm,
    method: Method,
    hyper: Tree,
    broadcast: Tree,
    device: Tree,
    drawn: Mapping[str, Samples | Tensor] | None,
) -> Tree:
    """The working state before the first step: begin, then `use_draws` where samples were drawn for the visit."""
    local = algorithm.begin(method, hyper, broadcast, device)
    return optional(algorithm, "use_draws")(method, hyper, broadcast, local, drawn) if drawn else local


def device_round(
    algorithm: Algorithm,
    method: Method,
    hyper: Tree,
    broadcast: Tree,
    device: Tree,
    minibatches: Iterable[Samples],
    stop_after: Callable[[int], bool] = lambda _: False,
    drawn: Mapping[str, Samples | Tensor] | None = None,
) -> Trained:
    """begin, a step on each minibatch until `stop_after(steps)`, finish; `drawn`: what the draws of the visit gave."""
    local, steps = begun(algorithm, method, hyper, broadcast, device, drawn), 0
    for samples in minibatches:
        local, steps = algorithm.step(method, hyper, local, samples), steps + 1
        if stop_after(steps):
            break
    count = torch.tensor(steps, device=method.network.initial.device)
    kept, upload = algorithm.finish(method, hyper, broadcast, device, local, count)
    return Trained(kept, upload, algorithm.costs(local), steps)
