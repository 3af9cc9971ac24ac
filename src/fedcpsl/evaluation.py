"""How good the models are: per device and over all, for the personal, the global and the localized model."""

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
    setup = state.setup
    tests, validation = setup.shelf.test, setup.shelf.validation
    predictions = predict(state, tests, earlier)
    roster = setup.roster(max(state.round - 1, 0)).tolist()
    general = _accuracy(tests, predictions.general, roster)
    personal = _accuracy(tests, predictions.personal, roster)
    assert personal is not None
    return Evaluation(
        personal=personal,
        general=general,
        localized=_accuracy(tests, predictions.localized, roster),
        union=None if general is None else _over_union(tests, general),
        validation=_accuracy(validation, predict(state, validation).personal, roster) if len(validation.x) else None,
        losses=_losses(state, predictions),
        pseudo_label_accuracy=pseudo_label_accuracy(state),
        predictions=predictions,
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


def pseudo_label_accuracy(state: State) -> float | None:
    """How many pseudo-labels are right, over devices that have made some; None where nobody knows the truth."""
    setup = state.setup
    if not setup.method.parts.unlabelled:
        return None
    labelled_once = state.active_rounds > setup.warm_up
    if setup.two_phase and state.round > setup.rounds:
        labelled_once = np.ones_like(labelled_once)
    shelf = setup.shelf
    judged = torch.from_numpy(labelled_once).to(shelf.device.device)[shelf.device] & shelf.hidden & (shelf.truth >= 0)
    right, known = torch.stack([((state.targets.argmax(-1) == shelf.truth) & judged).sum(), judged.sum()]).tolist()
    return right / known if known else None


def _losses(state: State, predictions: Predictions) -> dict[str, float | None]:
    costs, tests = list(state.costs.values()), state.setup.shelf.test
    alone = state.setup.method_after(state.round).trains_localized_alone
    return {
        "train": None if alone else _mean([c[0] for c in costs]),
        "train_personal": _mean([c[-1] for c in costs if alone or len(c) > 1]),
        "test_personal": _loss(tests, predictions.personal),
        "test_global": _loss(tests, predictions.general),
        "test_localized": _loss(tests, predictions.localized),
    }


def _accuracy(held: Held, log_h: Tensor | None, roster: list[int]) -> Accuracy | None:
    if log_h is None:
        return None
    right = (log_h.argmax(-1) == held.y).double().cpu().numpy()
    rows = {i: held.rows(i) for i in roster}
    devices = {i: float(right[r].mean()) for i, r in rows.items() if r.stop > r.start}
    if not devices:
        return Accuracy(float("nan"), float("nan"), float("nan"), {})
    values = np.sort(list(devices.values()))
    return Accuracy(float(values.mean()), float(values.std()), float(values[: ceil(len(values) / 10)].mean()), devices)


def _over_union(held: Held, accuracy: Accuracy) -> float:
    sizes = np.diff(held.start)
    tested = sum(int(sizes[i]) for i in accuracy.devices)
    return sum(a * int(sizes[i]) for i, a in accuracy.devices.items()) / tested if tested else float("nan")


def _loss(held: Held, log_h: Tensor | None) -> float | None:
    if log_h is None or not len(log_h):
        return None
    return float(-log_h.gather(1, held.y[:, None]).mean())


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _summary(accuracy: Accuracy | None) -> dict[str, float] | None:
    if accuracy is None:
        return None
    return {"mean": accuracy.mean, "std": accuracy.std, "worst_tenth": accuracy.worst_tenth}
