"""One device's part of a round: pseudo-labels, then local steps, as many as fit into its time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.algorithm import optional
from fedcpsl.errors import RunError
from fedcpsl.federation.holdings import Holdings, draw_task, minibatches
from fedcpsl.federation.messages import Order
from fedcpsl.federation.terms import Terms
from fedcpsl.trees import Tree, leaves, map_tensors

ROWS_AT_ONCE = 4096
Clock = Callable[[], float]


class Trained(NamedTuple):
    """What a round leaves on the device, and the update before anything is done to it."""

    device: Tree
    nu: Tensor
    upload: Tree
    steps: int


def train(
    terms: Terms,
    holdings: Holdings,
    device: Tree,
    nu: Tensor,
    order: Order,
    budget: float,
    clock: Clock,
    *,
    warming: bool,
) -> Trained:
    """Relabel, take at least one and at most `order.steps` steps within `budget` seconds (0: no limit), finish."""
    begun = clock()
    algorithm, method, hyper = terms.algorithm, terms.method, terms.warming if warming else terms.hyper
    broadcast = map_tensors(lambda t: t.to(terms.where), order.broadcast)
    task = draw_task(terms, holdings, order.seed, order.turn.round, order.device, order.steps)
    if not task.steps:
        raise RunError("this device has no samples that the algorithm uses; nothing was done")
    if method.traits.unlabelled and not warming and optional(algorithm, "relabel"):
        nu = _relabel(terms, hyper, holdings, broadcast, device, nu)
    local = algorithm.begin(method, hyper, broadcast, device)
    done, since = 0, clock()
    for samples in minibatches(terms, holdings, nu, task):
        local = algorithm.step(method, hyper, local, samples)
        done, now = done + 1, clock()
        if budget and now - begun + (now - since) / done > budget:
            break
    steps = torch.tensor(done, device=terms.where)
    device, upload = algorithm.finish(method, hyper, broadcast, device, local, steps)
    if not all(t.isfinite().all() for t in (*leaves(upload), *leaves(device))):
        raise RunError(
            "this device's loss is no longer a finite number; the server should use a smaller algorithm.eta "
            "(or algorithm.alpha_p)"
        )
    return Trained(device, nu, upload, done)


def first_labels(terms: Terms, holdings: Holdings) -> Tensor:
    """Uniform pseudo-labels; none where unlabelled samples are not used."""
    classes = terms.method.network.classes
    count = holdings.unlabelled if terms.method.traits.unlabelled else 0
    return torch.full((count, classes), 1 / classes, dtype=terms.dtype, device=terms.where)


def log_predictions(terms: Terms, received: Tree, device: Tree, x: Tensor) -> Tensor:
    """What a device answers to inputs, from what it was sent last and what it keeps, as log-probabilities."""
    algorithm, method = terms.algorithm, terms.method
    models = algorithm.received_model(method, received), algorithm.own_model(method, device)
    pieces = []
    with torch.no_grad():
        for some in x.split(ROWS_AT_ONCE):
            both = [None if m is None else method.network.log_probabilities(m, some) for m in models]
            pieces.append(algorithm.predict(method, terms.hyper, *both))
    return torch.cat(pieces)


def _relabel(terms: Terms, hyper: Tree, holdings: Holdings, broadcast: Tree, device: Tree, nu: Tensor) -> Tensor:
    renew, count = optional(terms.algorithm, "relabel"), torch.tensor(holdings.unlabelled, device=terms.where)
    pieces = zip(holdings.x_unlabelled.split(ROWS_AT_ONCE), nu.split(ROWS_AT_ONCE), strict=True)
    return torch.cat([renew(terms.method, hyper, broadcast, device, x, part, count) for x, part in pieces])
