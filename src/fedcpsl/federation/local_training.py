"""A device's local training: its samples, its minibatches, and its part of a round within a time budget."""

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Visit, log_answers, optional, predicting, visit_of
from fedcpsl.data.federation import Federation
from fedcpsl.device_round import (
    all_labelled,
    device_round,
    is_relabelled,
    prepared,
    relabelled,
    reviewed,
    visit_if_needed,
)
from fedcpsl.errors import RunError
from fedcpsl.federation.messages import Instruction
from fedcpsl.federation.terms import Terms
from fedcpsl.methods import check_recordings
from fedcpsl.problem import Samples
from fedcpsl.schedule import DeviceRound, Draw, Drawn, Sizes, Work, draw_extra, draw_tasks
from fedcpsl.simulation import Setup
from fedcpsl.simulation.device_data import DeviceData, place_samples
from fedcpsl.trees import Tree, leaves, map_tensors
from fedcpsl.views import Axes, viewed, views_for

ROWS_AT_ONCE = 4096  # in a prediction
Clock = Callable[[], float]


class LocalData(NamedTuple):
    """One device's samples as its network takes them, on the processor that trains it."""

    x_labelled: Tensor
    labels: Tensor  # one-hot
    x_unlabelled: Tensor
    x_test: Tensor
    y_test: Tensor
    axes: tuple[Axes, ...] = ()  # of windows, for views
    recordings: NDArray[np.int64] | None = None  # lengths, of its unlabelled samples; None: not known

    @property
    def all_labelled(self) -> Samples:
        return all_labelled(self.x_labelled, self.labels)

    @property
    def visit(self) -> Visit:
        return visit_of(self.labels.sum(0), self.x_unlabelled, self.x_labelled, self.labels)

    @property
    def labelled(self) -> int:
        return len(self.x_labelled)

    @property
    def unlabelled(self) -> int:
        return len(self.x_unlabelled)


def local_data_of(setup: Setup, device: int = 0) -> LocalData:
    """Return the samples of one device of a simulation."""
    return _rows_of(setup.data, device)


def _rows_of(device_data: DeviceData, device: int) -> LocalData:
    hidden, mine = device_data.unlabelled_rows(device), device_data.all_rows(device)
    seen, test = slice(mine.start, hidden.start), device_data.test.rows(device)
    return LocalData(
        device_data.x(seen),
        device_data.one_hot[seen],
        device_data.x(hidden),
        device_data.test.x[test],
        device_data.test.y[test],
        device_data.axes,
        None if device_data.recordings is None else device_data.recordings[device],
    )


def empty_local_data(terms: Terms, shape: Sequence[int]) -> LocalData:
    """Return data without samples, for a device that only predicts."""
    x = torch.zeros(0, *shape, dtype=terms.dtype, device=terms.where)
    labels, classes = x.new_zeros(0, terms.method.network.classes), torch.zeros(0, dtype=torch.int64)
    return LocalData(x, labels, x, x, classes)


def local_data_from(federation: Federation, terms: Terms) -> LocalData:
    """Return the samples of the only device of a federation, on the processor and in the dtype of its network."""
    check_recordings(terms.method, federation.recordings)
    device_data = place_samples(federation, terms.where, terms.dtype, None, np.zeros(1, np.int64))
    return _rows_of(device_data, 0)


def draw_task(terms: Terms, local_data: LocalData, seed: int, round: int, device: int, steps: int) -> DeviceRound:
    """Draw a device's part of a round from the same random streams as the simulator."""
    sizes = _sizes_of(local_data, device)
    work = terms.work._replace(unit="steps", amount=steps, loss_rate=0.0)
    recordings = None if local_data.recordings is None else {device: local_data.recordings}
    (task,) = draw_tasks(seed, round, [device], sizes, work, **terms.method.draws, recordings=recordings)
    return task


def _sizes_of(local_data: LocalData, device: int) -> Sizes:
    """Return the numbers of samples with those of one device at its index, and no memory for the others."""
    own = local_data.labelled, local_data.unlabelled
    return Sizes(*(np.broadcast_to(np.int64(count), device + 1) for count in own))


def local_minibatches(terms: Terms, local_data: LocalData, nu: Tensor, task: DeviceRound) -> Iterator[Samples]:
    """Yield the minibatch of each step of a round."""
    where, widths = terms.where, (task.labelled.shape[1], task.unlabelled.shape[1])
    labelled, unlabelled = (torch.from_numpy(drawn).to(where) for drawn in (task.labelled, task.unlabelled))
    keys = None if task.keys is None else torch.from_numpy(_keys_of(task, terms.work.batch_labelled)).to(where)
    weights = torch.zeros(2, sum(widths), dtype=terms.dtype, device=where)
    weights[0, : widths[0]] = 1 / max(widths[0], 1)
    weights[1, widths[0] :] = 1 / max(widths[1], 1)
    views = views_for(terms.method.traits.views, tuple(local_data.x_labelled.shape[1:]), local_data.axes)
    view_keys = None if views is None else torch.from_numpy(_view_keys_of(task, terms.work)).to(where)
    traits = terms.method.traits
    unlabelled_count = weights.new_tensor(local_data.unlabelled) if traits.per_sample else None
    positions = bool(traits.per_sample) or traits.positions
    draws = [draw for draw in terms.method.traits.draws if not draw.per_visit]
    extra = {draw.name: _extra_minibatches(terms, local_data, nu, draw, task.extra[draw.name]) for draw in draws}
    for t in range(task.steps):
        x, strong = torch.cat([local_data.x_labelled[labelled[t]], local_data.x_unlabelled[unlabelled[t]]]), None
        if views is not None and view_keys is not None:
            x, strong = viewed(views, x, view_keys[t])
        yield Samples(
            x=x,
            target=torch.cat([local_data.labels[labelled[t]], nu[unlabelled[t]]]),
            labelled=weights[0],
            unlabelled=weights[1],
            keys=None if keys is None else keys[t],
            strong=strong,
            extra={name: next(others) for name, others in extra.items()},
            which=torch.cat([labelled[t], unlabelled[t]]) if positions else None,
            unlabelled_count=unlabelled_count,
        )


def _extra_minibatches(terms: Terms, local_data: LocalData, nu: Tensor, draw: Draw, drawn: Drawn) -> Iterator[Samples]:
    """Yield what an extra draw gives each step; the one minibatch of a visit."""
    seen = draw.of == "labelled"
    x, targets = (local_data.x_labelled, local_data.labels) if seen else (local_data.x_unlabelled, nu)
    width = drawn.rows.shape[-1]
    weight = torch.full((width,), 1 / max(width, 1), dtype=terms.dtype, device=terms.where)
    nothing = torch.zeros_like(weight)
    keys = None if drawn.keys is None else torch.from_numpy(drawn.keys).to(terms.where)
    of_steps = torch.from_numpy(drawn.rows[None] if draw.per_visit else drawn.rows).to(terms.where)
    for t, rows in enumerate(of_steps.unbind()):
        both = (weight, nothing) if seen else (nothing, weight)
        yield Samples(x[rows], targets[rows], *both, None if keys is None else keys[t])


def samples_of_draws(terms: Terms, local_data: LocalData, nu: Tensor, task: DeviceRound) -> dict[str, Samples | Tensor]:
    """Return what the draws of a visit gave a device: samples, or the number of a step."""
    draws = [draw for draw in terms.method.traits.draws if draw.for_device]
    return {draw.name: samples_of_draw(terms, local_data, nu, draw, task.extra[draw.name]) for draw in draws}


def samples_of_draw(terms: Terms, local_data: LocalData, nu: Tensor, draw: Draw, drawn: Drawn) -> Samples | Tensor:
    if draw.of == "step":
        return torch.from_numpy(drawn.rows).to(terms.where)
    return next(_extra_minibatches(terms, local_data, nu, draw, drawn))


def _keys_of(task: DeviceRound, batch_labelled: int) -> NDArray[np.int64]:
    """Return the dropout keys of the drawn rows. Keys of labelled rows come first, even where a device has none."""
    assert task.keys is not None
    first, rest = np.split(task.keys, [batch_labelled], 1)
    return np.concatenate([first[:, : task.labelled.shape[1]], rest[:, : task.unlabelled.shape[1]]], 1)


def _view_keys_of(task: DeviceRound, work: Work) -> NDArray[np.int64]:
    """Return the keys of the drawn rows' views: weak ones of labelled and unlabelled rows, then strong ones."""
    assert task.views is not None
    weak, unlabelled, strong = np.split(task.views, np.cumsum([work.batch_labelled, work.batch_unlabelled]), 1)
    widths = task.labelled.shape[1], task.unlabelled.shape[1]
    return np.concatenate([weak[:, : widths[0]], unlabelled[:, : widths[1]], strong[:, : widths[1]]], 1)


class TrainingResult(NamedTuple):
    """The device's state after a round, and its update before protection."""

    device: Tree
    nu: Tensor
    upload: Tree
    steps: int


def train(
    terms: Terms,
    local_data: LocalData,
    device: Tree,
    nu: Tensor,
    instruction: Instruction,
    budget: float,
    clock: Clock,
    *,
    warming: bool,
) -> TrainingResult:
    """Relabel, take 1 to `instruction.steps` steps within `budget` seconds (0: no limit), and finish the round."""
    begun = clock()
    algorithm, method, hyper = terms.algorithm, terms.method, terms.warming if warming else terms.hyper
    broadcast = map_tensors(lambda t: t.to(terms.where), instruction.broadcast)
    seed, round = instruction.seed, instruction.attempt.round
    task = draw_task(terms, local_data, seed, round, instruction.device, instruction.steps)
    if not task.steps:
        raise RunError("this device has no samples that the algorithm uses; nothing was done")
    given = (algorithm, method, hyper, broadcast)
    if is_relabelled(algorithm, method, warming=warming):  # with the state as the visit finds it
        nu = relabelled(*given, device, lambda first, last: local_data.x_unlabelled[first:last], nu)
    visit = visit_if_needed(algorithm, lambda: local_data.visit)
    device = prepared(*given, device, visit)
    since = clock()

    def out_of_time(done: int) -> bool:
        now = clock()
        return bool(budget) and now - begun + (now - since) / done > budget

    drawn = samples_of_draws(terms, local_data, nu, task)
    done = device_round(*given, device, local_minibatches(terms, local_data, nu, task), out_of_time, drawn)
    if not all(t.isfinite().all() for t in (*leaves(done.upload), *leaves(done.device))):
        raise RunError(
            "this device's loss is no longer a finite number; the server should use a smaller algorithm.eta, or "
            "normalise inputs ([federation] shift and scale)"
        )
    kept = reviewed(*given, done.device, done.upload, visit)
    return TrainingResult(kept, nu, done.upload, done.steps)


def answer(terms: Terms, local_data: LocalData, nu: Tensor, instruction: Instruction) -> Tree:
    """Return a device's answer in the second exchange of a round, about samples that it draws as the simulator does."""
    draw = terms.method.traits.probe
    assert draw is not None
    sizes, place = _sizes_of(local_data, instruction.device), (instruction.seed, instruction.attempt.round)
    drawn = draw_extra(draw, *place, instruction.device, 1, sizes, terms.work)
    if not drawn.rows.size:
        raise RunError("this device has no samples of which it could be asked; nothing was done")
    sent = map_tensors(lambda t: t.to(terms.where), instruction.broadcast)
    samples = samples_of_draw(terms, local_data, nu, draw, drawn)
    found = optional(terms.algorithm, "probe_upload")(terms.method, terms.hyper, sent, samples)
    if not all(t.isfinite().all() for t in leaves(found)):
        raise RunError("this device's answer is not a finite number; the server should use a smaller algorithm.eta")
    return found


def initial_pseudo_labels(terms: Terms, local_data: LocalData) -> Tensor:
    """Return uniform pseudo-labels, with no rows where unlabelled samples are not used."""
    classes = terms.method.network.classes
    count = local_data.unlabelled if terms.method.traits.unlabelled else 0
    return torch.full((count, classes), 1 / classes, dtype=terms.dtype, device=terms.where)


def adapted_model(terms: Terms, received: Tree, local_data: LocalData) -> Tensor | None:
    """Return the model of a broadcast adapted to a device's labelled samples; None where the algorithm does not."""
    adapted, received = optional(terms.algorithm, "adapted"), map_tensors(lambda t: t.to(terms.where), received)
    if adapted is None:
        return None
    general = terms.algorithm.received_model(terms.method, received)
    found: Tensor = adapted(terms.method, terms.hyper, general, local_data.all_labelled).cpu()
    return found


def log_predictions(terms: Terms, received: Tree, device: Tree, x: Tensor, adapted: Tensor | None = None) -> Tensor:
    """Return a device's predictions as log-probabilities, from the last broadcast and its own state."""
    algorithm, method = terms.algorithm, terms.method
    general = algorithm.received_model(method, received)
    own = algorithm.own_model(method, terms.hyper, device, general) if adapted is None else adapted.to(terms.where)
    models = general, own
    hyper = predicting(algorithm, method, terms.hyper, device)
    pieces = []
    with torch.no_grad():
        for rows in x.split(ROWS_AT_ONCE):
            both = [None if m is None else log_answers(method, m, rows) for m in models]
            pieces.append(algorithm.predict(method, hyper, *both))
    return torch.cat(pieces)
