"""A device's local training: its samples, its minibatches, and its part of a round within a time budget."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedcpsl.data.federation import Federation
from fedcpsl.device_round import device_round, is_relabelled, relabelled
from fedcpsl.errors import RunError
from fedcpsl.federation.messages import Order
from fedcpsl.federation.terms import Terms
from fedcpsl.problem import Samples
from fedcpsl.schedule import DeviceRound, Sizes, draw_tasks
from fedcpsl.simulation import Setup
from fedcpsl.simulation.device_data import DeviceData, place_samples
from fedcpsl.trees import Tree, leaves, map_tensors


class Holdings(NamedTuple):
    """One device's samples as a network is given them, where they are computed with."""

    x_labelled: Tensor
    labels: Tensor  # one-hot
    x_unlabelled: Tensor
    x_test: Tensor
    y_test: Tensor

    @property
    def labelled(self) -> int:
        return len(self.x_labelled)

    @property
    def unlabelled(self) -> int:
        return len(self.x_unlabelled)


def holdings_of(setup: Setup, device: int = 0) -> Holdings:
    """What one device of a setup holds."""
    return _of(setup.device_data, device)


def _of(device_data: DeviceData, device: int) -> Holdings:
    hidden, mine = device_data.unlabelled_rows(device), device_data.all_rows(device)
    seen, test = slice(mine.start, hidden.start), device_data.test.rows(device)
    return Holdings(
        device_data.x(seen),
        device_data.one_hot[seen],
        device_data.x(hidden),
        device_data.test.x[test],
        device_data.test.y[test],
    )


def no_holdings(terms: Terms, shape: Sequence[int]) -> Holdings:
    """Of who holds nothing, and predicts all the same."""
    x = torch.zeros(0, *shape, dtype=terms.dtype, device=terms.where)
    labels, classes = x.new_zeros(0, terms.method.network.classes), torch.zeros(0, dtype=torch.int64)
    return Holdings(x, labels, x, x, classes)


def held(federation: Federation, terms: Terms) -> Holdings:
    """What the only device of a federation holds, where and of the type that its network is."""
    device_data = place_samples(federation, terms.where, terms.dtype, None, np.zeros(1, np.int64))
    return _of(device_data, 0)


def draw_task(terms: Terms, holdings: Holdings, seed: int, round: int, device: int, steps: int) -> DeviceRound:
    """A device's part of a round, from the streams that the simulator would draw it from."""
    own = holdings.labelled, holdings.unlabelled
    sizes = Sizes(*(np.broadcast_to(np.int64(count), device + 1) for count in own))  # no memory for other devices
    work = terms.work._replace(unit="steps", amount=steps, loss_rate=0.0)
    method = terms.method
    (task,) = draw_tasks(
        seed, round, [device], sizes, work, unlabelled=method.traits.unlabelled, dropout=method.network.has_dropout
    )
    return task


def minibatches(terms: Terms, holdings: Holdings, nu: Tensor, task: DeviceRound) -> Iterator[Samples]:
    """The samples of a round's steps, one step at a time."""
    where, widths = terms.where, (task.labelled.shape[1], task.unlabelled.shape[1])
    labelled, unlabelled = (torch.from_numpy(drawn).to(where) for drawn in (task.labelled, task.unlabelled))
    keys = None if task.keys is None else torch.from_numpy(_keys_of(task, terms.work.batch_labelled)).to(where)
    weights = torch.zeros(2, sum(widths), dtype=terms.dtype, device=where)
    weights[0, : widths[0]] = 1 / max(widths[0], 1)
    weights[1, widths[0] :] = 1 / max(widths[1], 1)
    for t in range(task.steps):
        yield Samples(
            x=torch.cat([holdings.x_labelled[labelled[t]], holdings.x_unlabelled[unlabelled[t]]]),
            target=torch.cat([holdings.labels[labelled[t]], nu[unlabelled[t]]]),
            labelled=weights[0],
            unlabelled=weights[1],
            keys=None if keys is None else keys[t],
        )


def _keys_of(task: DeviceRound, batch_labelled: int) -> np.ndarray[tuple[int, ...], np.dtype[np.int64]]:
    """The dropout keys of the rows that are there: labelled rows' keys come first, also where a device has none."""
    assert task.keys is not None
    first, rest = np.split(task.keys, [batch_labelled], 1)
    return np.concatenate([first[:, : task.labelled.shape[1]], rest[:, : task.unlabelled.shape[1]]], 1)


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
