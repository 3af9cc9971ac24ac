"""One device's part of a round: pseudo-labels, then local steps, as many as fit into its time."""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from fedcpsl.device_round import device_round, is_relabelled, relabelled
from fedcpsl.errors import RunError
from fedcpsl.federation.local_data import Holdings, draw_task, minibatches
from fedcpsl.federation.messages import Order
from fedcpsl.federation.terms import Terms
from fedcpsl.trees import Tree, leaves, map_tensors

ROWS_AT_ONCE = 4096
Clock = Callable[[], float]


class Worked(NamedTuple):
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
) -> Worked:
    """Relabel, take at least one and at most `order.steps` steps within `budget` seconds (0: no limit), finish."""
    begun = clock()
    algorithm, method, hyper = terms.algorithm, terms.method, terms.warming if warming else terms.hyper
    broadcast = map_tensors(lambda t: t.to(terms.where), order.broadcast)
    task = draw_task(terms, holdings, order.seed, order.turn.round, order.device, order.steps)
    if not task.steps:
        raise RunError("this device has no samples that the algorithm uses; nothing was done")
    given = (algorithm, method, hyper, broadcast, device)
    if is_relabelled(algorithm, method, warming=warming):
        nu = relabelled(*given, lambda first, last: holdings.x_unlabelled[first:last], nu)
    since = clock()

    def out_of_time(done: int) -> bool:
        now = clock()
        return bool(budget) and now - begun + (now - since) / done > budget

    done = device_round(*given, minibatches(terms, holdings, nu, task), out_of_time)
    if not all(t.isfinite().all() for t in (*leaves(done.upload), *leaves(done.device))):
        raise RunError(
            "this device's loss is no longer a finite number; the server should use a smaller algorithm.eta "
            "(or algorithm.alpha_p)"
        )
    return Worked(done.device, nu, done.upload, done.steps)


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
