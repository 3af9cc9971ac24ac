"""How good the models are: per device and over all, for the personal, the global and the localized model."""

from collections.abc import Sequence
from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.algorithm import Hyper, map_tensors
from fedcpsl.simulation import State
from fedcpsl.simulation.shelf import Held

ROWS_AT_ONCE = 16384


class Predictions(NamedTuple):
    """Log-probabilities of every test sample, device by device."""

    personal: Tensor  # [samples, classes]
    general: Tensor | None  # None where there is no server
    localized: Tensor | None
    made_by: NDArray[np.int64]  # the version of each device's localized model, to reuse what has not changed


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
            "uplink_bytes": state.uplink_bytes,
            "downlink_bytes": state.downlink_bytes,
            "steps": state.steps,
            "lost_uploads": state.lost,
        }


def evaluate(state: State, earlier: Predictions | None = None) -> Evaluation:
    """Every metric; `earlier` predictions are reused for devices whose localized model has not changed since."""
    return evaluate_together([state], [earlier])[0]


def evaluate_together(states: Sequence[State], earlier: Sequence[Predictions | None]) -> list[Evaluation]:
    """The metrics of many runs: everything is computed where the models are, and brought to the host once."""
    predictions = [predict(s, s.setup.shelf.test, e) for s, e in zip(states, earlier, strict=True)]
    measured = [_measure(state, made) for state, made in zip(states, predictions, strict=True)]
    flat = [number for numbers in measured for number in numbers]
    on_host = iter(torch.cat(flat).cpu().split([len(number) for number in flat]))
    return [
        _evaluation(state, made, Measured(*(next(on_host).numpy() for _ in Measured._fields)))
        for state, made in zip(states, predictions, strict=True)
    ]


class Measured(NamedTuple):
    """What an evaluation counts; empty where there is nothing to count."""

    personal: Any  # [devices]: right predictions of every device
    general: Any
    localized: Any
    validation: Any
    losses: Any  # [0 to 3]: of those three
    labels: Any  # right pseudo-labels, and how many could be judged


@torch.no_grad()
def _measure(state: State, made: Predictions) -> Measured:
    tests, validation = state.setup.shelf.test, state.setup.shelf.validation
    exact = torch.float32 if tests.x.device.type == "mps" else torch.float64
    nothing = torch.zeros(0, device=tests.y.device, dtype=exact)

    def right(held: Held, log_h: Tensor | None) -> Tensor:
        if log_h is None:
            return nothing
        hits = torch.nn.functional.pad((log_h.argmax(-1) == held.y).to(exact).cumsum(0), (1, 0))
        return hits[held.bounds].diff()

    models = (made.personal, made.general, made.localized)
    losses = [-m.gather(1, tests.y[:, None]).mean() for m in models if m is not None] if len(tests.x) else []
    return Measured(
        right(tests, made.personal),
        right(tests, made.general),
        right(tests, made.localized),
        right(validation, predict(state, validation).personal) if len(validation.x) else nothing,
        torch.stack(losses).to(exact) if losses else nothing,
        _judged_labels(state).to(exact) if state.setup.method.parts.unlabelled else nothing,
    )


def _evaluation(state: State, made: Predictions, measured: Measured) -> Evaluation:
    tests, validation = state.setup.shelf.test, state.setup.shelf.validation
    roster = state.setup.roster(max(state.round - 1, 0))
    general = _accuracy(tests, measured.general, roster)
    personal = _accuracy(tests, measured.personal, roster)
    assert personal is not None
    right, known = measured.labels.tolist() if len(measured.labels) else (0, 0)
    return Evaluation(
        personal=personal,
        general=general,
        localized=_accuracy(tests, measured.localized, roster),
        union=None if general is None else _over_union(tests, general),
        validation=_accuracy(validation, measured.validation, roster),
        losses=_losses(state, made, measured.losses),
        pseudo_label_accuracy=right / known if known else None,
        predictions=made,
    )


@torch.no_grad()
def predict(state: State, held: Held, earlier: Predictions | None = None) -> Predictions:
    """What every device predicts for its own samples of a held-back set, and what the two models behind that do."""
    setup, method, x = state.setup, state.setup.method_after(state.round), held.x
    network = method.network
    general = None
    if not method.parts.alone:
        pieces = [network.log_probabilities(state.server.theta, some) for some in x.split(ROWS_AT_ONCE)]
        general = torch.cat(pieces) if len(x) else x.new_zeros(0, network.classes)
    versions = state.active_rounds + (setup.joins < state.round) + max(state.round - setup.rounds, 0)
    if not method.parts.personal:
        assert general is not None
        return Predictions(general, general, None, versions)
    if earlier is None or earlier.localized is None:
        localized, changed = x.new_empty(len(x), network.classes), list(range(setup.devices))
    else:
        localized, changed = earlier.localized.clone(), np.flatnonzero(earlier.made_by != versions).tolist()
    for i in changed:
        rows = held.rows(i)
        localized[rows] = network.log_probabilities(state.devices.theta_lc[i], x[rows])
    of_theta = localized if general is None else general
    hyper: Hyper = map_tensors(lambda t: t[held.device], setup.hyper)  # every sample a slot of its own
    personal = setup.algorithm.predict(method, hyper, of_theta[:, None], localized[:, None])[:, 0]
    return Predictions(personal, general, localized, versions)


def _judged_labels(state: State) -> Tensor:
    """How many pseudo-labels are right, and how many could be."""
    setup = state.setup
    labelled_once = state.active_rounds > setup.warm_up
    if setup.two_phase and state.round > setup.rounds:
        labelled_once = np.ones_like(labelled_once)
    shelf = setup.shelf
    judged = torch.from_numpy(labelled_once).to(shelf.where)[shelf.device] & shelf.hidden & (shelf.truth >= 0)
    return torch.stack([((state.targets.argmax(-1) == shelf.truth) & judged).sum(), judged.sum()])


def _losses(state: State, made: Predictions, tested: NDArray[np.float64]) -> dict[str, float | None]:
    costs, of_tests = list(state.costs.values()), iter(tested.tolist())
    alone = state.setup.method_after(state.round).trains_localized_alone
    there = {"personal": made.personal, "global": made.general, "localized": made.localized}
    return {
        "train": None if alone else _mean([c[0] for c in costs]),
        "train_personal": _mean([c[-1] for c in costs if alone or len(c) > 1]),
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


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _summary(accuracy: Accuracy | None) -> dict[str, float] | None:
    if accuracy is None:
        return None
    return {"mean": accuracy.mean, "std": accuracy.std, "worst_tenth": accuracy.worst_tenth}
