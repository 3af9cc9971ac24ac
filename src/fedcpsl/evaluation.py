"""How good the models are: per device and over all, for the personal, the global and the localized model."""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Method, log_answers, optional, predicting
from fedcpsl.edge.state import metrics_of
from fedcpsl.simulation import State
from fedcpsl.simulation.device_data import Held
from fedcpsl.simulation.store import device_rows, to_device
from fedcpsl.trees import Tree, map_tensors, rebuilt

ROWS_AT_ONCE = 16384
ROWS_SIDE_BY_SIDE = 32768  # of models; not by what memory is free: a run must always be cut the same way


class Predictions(NamedTuple):
    """Log-probabilities of every test sample, device by device; and of every validation sample."""

    personal: Tensor  # [samples, classes]
    general: Tensor | None  # None where there is no server
    localized: Tensor | None
    made_by: NDArray[np.int64]  # the version of each device's localized model, to reuse what has not changed
    hyper: Tree | None = None  # of every sample, to reuse
    validation: "Predictions | None" = None  # None where none are held back


class Accuracy(NamedTuple):
    """Over the devices' own test sets, unweighted; the worst tenth is the mean of the worst tenth of devices."""

    mean: float
    std: float
    worst_tenth: float
    devices: dict[int, float]


class Evaluation(NamedTuple):
    """All metrics of one state; a model is None where the algorithm has none of its kind."""

    personal: Accuracy
    general: Accuracy | None
    localized: Accuracy | None
    union: float | None  # theta on the union of the test sets
    validation: Accuracy | None  # of the personal models, on what was held back for choosing settings
    losses: dict[str, float | None]
    pseudo_label_accuracy: float | None
    pseudo_label_confidence: float | None  # the mean of the largest entry of nu
    predictions: Predictions

    def metrics(self, state: State) -> dict[str, Any]:
        """As one plain object, for a line of metrics.jsonl."""
        return {
            "round": state.round,
            "personal": _summary(self.personal),
            "global": _summary(self.general),
            "localized": _summary(self.localized),
            "union": self.union,
            "validation": _summary(self.validation),
            "losses": self.losses,
            "pseudo_label_accuracy": self.pseudo_label_accuracy,
            "pseudo_label_confidence": self.pseudo_label_confidence,
            "uplink_bytes": state.uplink_bytes,
            "downlink_bytes": state.downlink_bytes,
            "steps": state.steps,
            "lost_uploads": state.lost,
            **({} if state.edge is None else {"edge": metrics_of(state.edge)}),
        }


def evaluate(state: State, earlier: Predictions | None = None) -> Evaluation:
    """Every metric; `earlier` predictions are reused for devices whose localized model has not changed since."""
    return evaluate_together([state], [earlier])[0]


def evaluate_together(states: Sequence[State], earlier: Sequence[Predictions | None]) -> list[Evaluation]:
    """The metrics of many runs."""
    return measure_together(states, earlier).read()


class Pending(NamedTuple):
    """Metrics that are being computed where the models are; the host may go on before it reads them."""

    states: Sequence[State]
    predictions: list[Predictions]
    numbers: Tensor  # on the host
    sizes: list[int]
    known: Any  # an event to wait for, or None

    def read(self) -> list[Evaluation]:
        """The metrics, once they are there."""
        if self.known is not None:
            self.known.synchronize()
        parts = iter(self.numbers.split(self.sizes))
        return [
            _evaluation(state, made, Measured(*(next(parts).numpy() for _ in Measured._fields)))
            for state, made in zip(self.states, self.predictions, strict=True)
        ]


def measure_together(states: Sequence[State], earlier: Sequence[Predictions | None]) -> Pending:
    """Have the metrics of many runs computed, to be brought to the host all at once."""
    predictions = [predict_held_back(*each) for each in zip(states, earlier, strict=True)]
    judges = [to_device(has_labelled(state), state.targets.device) for state in states]
    return pending(states, predictions, [measure(*each) for each in zip(states, predictions, judges, strict=True)])


def pending(states: Sequence[State], predictions: list[Predictions], measured: Sequence[Sequence[Tensor]]) -> Pending:
    """What was measured of many runs, and the costs of their last rounds, on their way to the host."""
    flat = []
    for state, numbers in zip(states, measured, strict=True):
        costs = list(state.costs.values())
        flat += [*numbers, torch.stack(costs).to(numbers[0].dtype).mean(0) if costs else numbers[0][:0]]
    together, known = torch.cat(flat), None
    if together.is_cuda:
        together, known = together.to("cpu", non_blocking=True), torch.cuda.Event()
        known.record()
    return Pending(states, predictions, together.cpu(), [len(number) for number in flat], known)


class Measured(NamedTuple):
    """What an evaluation counts; empty where there is nothing to count."""

    personal: Any  # [devices]: right predictions of every device
    general: Any
    localized: Any
    validation: Any
    losses: Any  # [0 to 3]: of those three
    labels: Any  # right pseudo-labels, how many could be judged, their confidences added up, and how many there are
    costs: Any  # [0 to 2]: f_i and F_i of the round's steps, mean over its devices


@torch.no_grad()
def measure(state: State, made: Predictions, judged: Tensor) -> list[Tensor]:
    """All but the last field of `Measured`; `judged` [devices]: whose pseudo-labels count."""
    tests, validation = state.setup.data.test, state.setup.data.validation
    nothing = torch.zeros(0, device=tests.y.device, dtype=torch.float64)

    def right(held: Held, log_h: Tensor) -> Tensor:
        """Right predictions of each device, [models, devices]."""
        hits = torch.nn.functional.pad((log_h.argmax(-1) == held.y).to(torch.float64).cumsum(-1), (1, 0))
        return hits[:, held.bounds].diff()

    models = [m for m in (made.personal, made.general, made.localized) if m is not None]
    each = torch.stack(models)
    losses = -each.gather(2, tests.y.expand(len(each), -1)[..., None]).mean((1, 2)).to(torch.float64)
    hits = iter(right(tests, each))
    return [
        next(hits),
        nothing if made.general is None else next(hits),
        nothing if made.localized is None else next(hits),
        right(validation, made.validation.personal[None])[0] if made.validation else nothing,
        losses if len(tests.x) else nothing,
        _labels(state, judged) if _renews_labels(state) else nothing,
    ]


def _evaluation(state: State, made: Predictions, measured: Measured) -> Evaluation:
    tests, validation = state.setup.data.test, state.setup.data.validation
    roster = state.setup.terms.roster(max(state.round - 1, 0))
    general = _accuracy(tests, measured.general, roster)
    personal = _accuracy(tests, measured.personal, roster)
    assert personal is not None
    right, known, confidence, made_up = measured.labels.tolist() if len(measured.labels) else (0, 0, 0, 0)
    return Evaluation(
        personal=personal,
        general=general,
        localized=_accuracy(tests, measured.localized, roster),
        union=None if general is None else _over_union(tests, general),
        validation=_accuracy(validation, measured.validation, roster),
        losses=_losses(state, made, measured),
        pseudo_label_accuracy=right / known if known else None,
        pseudo_label_confidence=confidence / made_up if made_up else None,
        predictions=made,
    )


def predict_held_back(state: State, earlier: Predictions | None = None, model: Tensor | None = None) -> Predictions:
    """What every device predicts for its test and validation samples; the arguments are as in `predict`."""
    tests, validation = state.setup.data.test, state.setup.data.validation
    made = predict(state, tests, earlier, model)
    if not len(validation.x):
        return made
    return made._replace(validation=predict(state, validation, earlier and earlier.validation, model))


@torch.no_grad()
def predict(state: State, held: Held, earlier: Predictions | None = None, model: Tensor | None = None) -> Predictions:
    """What every device predicts for its own samples of a held-back set, and what the two models behind that do.

    `model` stands for the state's general model where it is given: a copy of it, in memory of the caller's.
    """
    setup, method, x = state.setup, state.setup.terms.method_after(state.round), held.x
    network, algorithm, general = method.network, state.setup.terms.algorithm, None
    network.set_precision()
    theta = algorithm.general_model(method, state.server) if model is None else model
    if theta is not None:
        pieces = [log_answers(method, theta, some) for some in x.split(ROWS_AT_ONCE)]
        general = torch.cat(pieces) if len(x) else x.new_zeros(0, network.classes)
    versions = versions_of(state)
    own = method.traits.personal
    if not len(x):  # no device has such samples
        none = x.new_zeros(0, network.classes)
        return Predictions(none, general, none if own else None, versions)
    localized = _localized(state, held, theta, earlier) if own else None
    hyper = earlier.hyper if earlier else None
    if hyper is None or optional(algorithm, "predicting"):
        tested = np.flatnonzero(np.diff(held.start) > 0)
        place = to_device(np.searchsorted(tested, np.arange(setup.terms.devices)), x.device)[held.device]
        hyper = map_tensors(lambda t: t[place], prediction_numbers(state, tested.tolist()))  # a slot for every sample
    both = (None if each is None else each[:, None] for each in (general, localized))
    personal = algorithm.predict(method, hyper, *both)[:, 0]
    return Predictions(personal, general, localized, versions, hyper)


def _localized(state: State, held: Held, theta: Tensor | None, earlier: Predictions | None) -> Tensor:
    """What the devices' own models answer, [samples, classes]; of those that have not changed as it is known."""
    setup, method, x, versions = state.setup, state.setup.terms.method_after(state.round), held.x, versions_of(state)
    if earlier is None or earlier.localized is None:
        localized, changed = x.new_empty(len(x), method.network.classes), np.ones(setup.terms.devices, bool)
    else:
        localized, changed = earlier.localized.clone(), earlier.made_by != versions
    for i in np.flatnonzero(changed & (np.diff(held.start) > 0)).tolist():
        rows = held.rows(i)
        localized[rows] = log_answers(method, own_models(state, [i], theta)[0], x[rows])
    return localized


def own_models(state: State, devices: Sequence[int], general: Tensor | None, method: Method | None = None) -> Tensor:
    """The models of some devices' own, [devices, parameters], where the algorithm has such models."""
    terms = state.setup.terms
    method, adapted = method or terms.method_after(state.round), optional(terms.algorithm, "adapted")
    if adapted:
        samples = state.setup.data.labelled_samples
        return torch.stack([adapted(method, state.hyper(i), general, samples(i)) for i in devices])
    index = to_device(np.array(devices, np.int64), state.targets.device)
    hyper = map_tensors(lambda t: t[index], terms.hyper)
    return _own_model(state, method, hyper, _kept(state, devices, index), general)


def _own_model(state: State, method: Method, hyper: Tree, kept: Tree, general: Tensor | None) -> Tensor:
    found = state.setup.terms.algorithm.own_model(method, hyper, kept, general)
    assert found is not None
    return found


def _kept(state: State, devices: Sequence[int], index: Tensor) -> Tree:
    """What some devices keep, [devices, ...]."""
    if state.sparse is None:
        return device_rows(state.devices, index)
    return map_tensors(lambda *each: torch.stack(each), *(state.device(device) for device in devices))


def prediction_numbers(state: State, devices: Sequence[int]) -> Tree:
    """The numbers that some devices predict with, [devices, ...]."""
    terms, index = state.setup.terms, to_device(np.array(devices, np.int64), state.targets.device)
    method, algorithm = terms.method_after(state.round), terms.algorithm
    if devices and optional(algorithm, "predicting") and state.sparse is not None:  # one by one: states may be large
        each = [predicting(algorithm, method, state.hyper(i), state.device(i)) for i in devices]
        return map_tensors(lambda *rows: torch.stack(rows), *each)
    of_all = terms.hyper
    if devices and optional(algorithm, "predicting"):
        of_all = predicting(algorithm, method, terms.hyper, state.devices)
    return map_tensors(lambda t: t[index], of_all)


def versions_of(state: State) -> NDArray[np.int64]:
    """A number for every device's localized model that changes whenever the model may have."""
    setup = state.setup
    if setup.terms.method.traits.follows:
        return np.full(setup.terms.devices, state.round)
    return state.active_rounds + (setup.terms.joins < state.round) + max(state.round - setup.terms.rounds, 0)


def _renews_labels(state: State) -> bool:
    """Whether devices keep pseudo-labels, renewed once a round, which can be scored."""
    terms = state.setup.terms
    return terms.method.traits.unlabelled and optional(terms.algorithm, "relabel") is not None


def has_labelled(state: State) -> NDArray[np.bool_]:
    """Which devices have made pseudo-labels."""
    if state.setup.terms.two_phase and state.round > state.setup.terms.rounds:
        return np.ones(state.setup.terms.devices, bool)
    return state.active_rounds > state.setup.terms.method.traits.warm_up


def _labels(state: State, judged: Tensor) -> Tensor:
    """Of some devices' pseudo-labels: how many are right, of how many whose truth is known; the largest entries of nu
    added up, and how many pseudo-labels there are.
    """
    device_data = state.setup.data
    theirs = judged[device_data.device] & device_data.hidden
    known = theirs & (device_data.truth >= 0)
    right = (state.targets.argmax(-1) == device_data.truth) & known
    largest = torch.where(theirs, state.targets.amax(-1).to(torch.float64), 0)
    return torch.stack([each.sum().to(torch.float64) for each in (right, known, largest, theirs)])


def _losses(state: State, made: Predictions, measured: Measured) -> dict[str, float | None]:
    costs, of_tests = measured.costs.tolist(), iter(measured.losses.tolist())
    alone = state.setup.terms.method_after(state.round).sends_nothing
    there = {"personal": made.personal, "global": made.general, "localized": made.localized}
    return {
        "train": None if alone or not costs else costs[0],
        "train_personal": costs[-1] if costs and (alone or len(costs) > 1) else None,
        **{f"test_{name}": None if log_h is None else next(of_tests, None) for name, log_h in there.items()},
    }


def _accuracy(held: Held, right: NDArray[np.float64], roster: NDArray[np.int64]) -> Accuracy | None:
    """From the right predictions of every device, over those in the roster that hold samples."""
    if not len(right):
        return None
    sizes = np.diff(held.start)
    tested = roster[sizes[roster] > 0]
    if not len(tested):
        return Accuracy(float("nan"), float("nan"), float("nan"), {})
    each = right[tested] / sizes[tested]
    values = np.sort(each)
    worst = values[: ceil(len(values) / 10)]
    devices = dict(zip(tested.tolist(), each.tolist(), strict=True))
    return Accuracy(float(values.mean()), float(values.std()), float(worst.mean()), devices)


def _over_union(held: Held, accuracy: Accuracy) -> float:
    sizes = np.diff(held.start)
    tested = sum(int(sizes[i]) for i in accuracy.devices)
    return sum(a * int(sizes[i]) for i, a in accuracy.devices.items()) / tested if tested else float("nan")


def _summary(accuracy: Accuracy | None) -> dict[str, float] | None:
    if accuracy is None:
        return None
    return {"mean": accuracy.mean, "std": accuracy.std, "worst_tenth": accuracy.worst_tenth}


# Evaluating the same runs after every round: on a GPU what is the same each time is captured once and replayed.

Examine = Callable[[Sequence[State]], Pending]


class Captured(NamedTuple):
    """A graph and what it reads and writes."""

    methods: list[Method]  # that the runs predicted with
    graph: Any
    models: list[Tensor | None]  # the general ones, copied
    judged: list[Tensor]
    measured: list[list[Tensor]]
    predictions: list[Predictions]


def examiner() -> Examine:
    """What has the metrics of some runs computed, round after round, with what it has kept from the rounds before."""
    earlier: list[Predictions] = []
    kept: list[Captured] = []

    def examine(states: Sequence[State]) -> Pending:
        nonlocal earlier
        on_demand = any(state.setup.data.supply is not None for state in states)
        adapts, changes = (
            any(optional(state.setup.terms.algorithm, name) for state in states) for name in ("adapted", "predicting")
        )
        by_itself = not earlier or on_demand or adapts or not states[0].targets.is_cuda
        if by_itself or changes:  # what predictions need beside the models is no part of a graph
            earlier = earlier if by_itself else _with_new_localized(states, earlier)
            asked = measure_together(states, earlier or [None] * len(states))
            earlier = asked.predictions
            return asked
        methods = [state.setup.terms.method_after(state.round) for state in states]
        if kept and kept[0].methods != methods:
            kept.clear()
            earlier = measure_together(states, earlier).predictions
        earlier = _with_new_localized(states, earlier)
        if not kept:
            kept.append(_capture(states, earlier, methods))
        return _replay(kept[0], states)

    return examine


def _with_new_localized(states: Sequence[State], earlier: Sequence[Predictions]) -> list[Predictions]:
    """Update predictions in place with the localized models that have changed, those of all runs side by side."""
    tests = _renewed(states, [state.setup.data.test for state in states], earlier)
    held_back = [run for run, made in enumerate(earlier) if made.validation]
    some, known = [states[run] for run in held_back], [made.validation for made in earlier if made.validation]
    validation = dict(zip(held_back, _renewed(some, [s.setup.data.validation for s in some], known), strict=True))
    return [made._replace(validation=validation.get(run)) for run, made in enumerate(tests)]


@torch.no_grad()
def _renewed(states: Sequence[State], samples: Sequence[Held], earlier: Sequence[Predictions]) -> list[Predictions]:
    """The predictions of one held-back set of every run."""
    changed = [
        (run, int(device))
        for run, (state, made) in enumerate(zip(states, earlier, strict=True))
        if made.localized is not None
        for device in np.flatnonzero((made.made_by != versions_of(state)) & (np.diff(samples[run].start) > 0))
    ]
    methods = [state.setup.terms.method_after(state.round) for state in states]
    for same in {(id(methods[run].network.module), methods[run].both_ways): run for run, _ in changed}.values():
        like = methods[same]
        like.network.set_precision()
        theirs = [
            (r, i)
            for r, i in changed
            if methods[r].network.module is like.network.module and methods[r].both_ways == like.both_ways
        ]
        most = max(samples[r].rows(i).stop - samples[r].rows(i).start for r, i in theirs)
        at_once = max(1, ROWS_SIDE_BY_SIDE // most)
        for some in (theirs[k : k + at_once] for k in range(0, len(theirs), at_once)):
            rows = [samples[r].rows(i) for r, i in some]
            x = samples[same].x.new_zeros(len(some), most, *samples[same].x.shape[1:])
            for place, (run, _), own in zip(x, some, rows, strict=True):
                place[: own.stop - own.start] = samples[run].x[own]
            log_h = log_answers(like, _own_models_of_runs(states, some), x)
            for each, (run, _), own in zip(log_h, some, rows, strict=True):
                localized = earlier[run].localized
                assert localized is not None
                localized[own] = each[: own.stop - own.start]
    return [made._replace(made_by=versions_of(state)) for state, made in zip(states, earlier, strict=True)]


def _own_models_of_runs(states: Sequence[State], which: Sequence[tuple[int, int]]) -> Tensor:
    """The models of some runs' devices, given as pairs in the order of runs, [pairs, parameters]."""
    by_run = [(states[run], [i for _, i in own]) for run, own in groupby(which, key=lambda pair: pair[0])]
    models = []
    for (state, own), (index, hyper) in zip(by_run, _on_device(by_run), strict=True):
        method = state.setup.terms.method_after(state.round)
        models.append(_own_model(state, method, hyper, _kept(state, own, index), _general_models([state])[0]))
    return torch.cat(models)


def _on_device(by_run: Sequence[tuple[State, Sequence[int]]]) -> Iterator[tuple[Tensor, Tree]]:
    """Some devices of every run as an index, and their numbers, [devices, ...]; those of all runs are sent at once."""
    where, dtype = by_run[0][0].targets.device, by_run[0][0].setup.data.dtype
    tables = [state.setup.terms.numbers[:, own] for state, own in by_run]
    index = to_device(np.concatenate([own for _, own in by_run]), where).split([len(own) for _, own in by_run])
    numbers = to_device(np.concatenate([table.ravel() for table in tables]), where).to(dtype)
    pieces = numbers.split([table.size for table in tables])
    for (state, _), i, table, piece in zip(by_run, index, tables, pieces, strict=True):
        yield i, rebuilt(state.setup.terms.hyper, piece.view(table.shape).unbind())


def _capture(states: Sequence[State], earlier: Sequence[Predictions], methods: list[Method]) -> Captured:
    """The part of an evaluation that does the same every time, as a graph."""
    models = [None if model is None else model.clone() for model in _general_models(states)]
    judged = [to_device(has_labelled(state), state.targets.device) for state in states]

    def measure_all() -> tuple[list[Predictions], list[list[Tensor]]]:
        # new objects, so that whatever depends on them is computed inside the graph and not cached from before
        given = [_with_copied_numbers(made) for made in earlier]
        made = [predict_held_back(*each) for each in zip(states, given, models, strict=True)]
        return made, [measure(*each) for each in zip(states, made, judged, strict=True)]

    beside = torch.cuda.Stream()
    beside.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(beside):
        measure_all()
    torch.cuda.current_stream().wait_stream(beside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        predictions, measured = measure_all()
    return Captured(methods, graph, models, judged, measured, predictions)


def _with_copied_numbers(made: Predictions) -> Predictions:
    """The same predictions; the numbers that they were made with are copies."""
    validation = made.validation and _with_copied_numbers(made.validation)
    hyper = None if made.hyper is None else map_tensors(torch.clone, made.hyper)
    return made._replace(hyper=hyper, validation=validation)


def _general_models(states: Sequence[State]) -> list[Tensor | None]:
    return [s.setup.terms.algorithm.general_model(s.setup.terms.method_after(s.round), s.server) for s in states]


def _replay(captured: Captured, states: Sequence[State]) -> Pending:
    both = zip(captured.models, _general_models(states), strict=True)
    there = [(copy, model) for copy, model in both if copy is not None and model is not None]
    if there:
        torch._foreach_copy_([copy for copy, _ in there], [model for _, model in there])
    where = states[0].targets.device
    flags = to_device(np.concatenate([has_labelled(state) for state in states]), where)
    torch._foreach_copy_(captured.judged, list(flags.split([state.setup.terms.devices for state in states])))
    captured.graph.replay()
    return pending(states, captured.predictions, captured.measured)
