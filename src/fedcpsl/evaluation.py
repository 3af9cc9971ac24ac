"""How good the models are: per device and over all, for the personal, the global and the localized model."""

from math import ceil
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from fedcpsl.simulation import Setup, State

ROWS_AT_ONCE = 16384


class Predictions(NamedTuple):
    """Log-probabilities of every test sample, device by device."""

    personal: Tensor  # [test samples, classes]
    general: Tensor
    localized: Tensor | None
    made_by: NDArray[np.int64]  # the version of each device's localized model, to reuse what has not changed


class Accuracy(NamedTuple):
    """Over the devices' own test sets, unweighted; the worst tenth is the mean of the worst tenth of devices."""

    mean: float
    std: float
    worst_tenth: float
    devices: dict[int, float]


class Evaluation(NamedTuple):
    """All metrics of one state; `localized` is None where the algorithm has no such model."""

    personal: Accuracy
    general: Accuracy
    localized: Accuracy | None
    union: float  # theta on the union of the test sets
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
            "losses": self.losses,
            "pseudo_label_accuracy": self.pseudo_label_accuracy,
            "uplink_bytes": state.uplink_bytes,
            "downlink_bytes": state.downlink_bytes,
            "steps": state.steps,
            "lost_uploads": state.lost,
        }


def evaluate(state: State, earlier: Predictions | None = None) -> Evaluation:
    """Every metric; `earlier` predictions are reused for devices whose localized model has not changed since."""
    predictions = predict(state, earlier)
    roster = state.setup.roster(max(state.round - 1, 0)).tolist()
    losses = {
        "train": _mean([costs[0] for costs in state.costs.values()]),
        "train_personal": _mean([costs[1] for costs in state.costs.values() if len(costs) > 1]),
        "test_personal": _test_loss(state.setup, predictions.personal),
        "test_global": _test_loss(state.setup, predictions.general),
        "test_localized": _test_loss(state.setup, predictions.localized),
    }
    general = _accuracy(state.setup, predictions.general, roster)
    sizes = np.diff(state.setup.shelf.test_start)
    tested = sum(int(sizes[i]) for i in general.devices)
    return Evaluation(
        personal=_accuracy(state.setup, predictions.personal, roster),
        general=general,
        localized=None if predictions.localized is None else _accuracy(state.setup, predictions.localized, roster),
        union=sum(a * int(sizes[i]) for i, a in general.devices.items()) / tested if tested else float("nan"),
        losses=losses,
        pseudo_label_accuracy=pseudo_label_accuracy(state),
        predictions=predictions,
    )


@torch.no_grad()
def predict(state: State, earlier: Predictions | None = None) -> Predictions:
    """What every device predicts for its test set, and what the two models behind that do."""
    setup, network = state.setup, state.setup.method.network
    x = setup.shelf.test_x
    pieces = [network.log_probabilities(state.server.theta, some) for some in x.split(ROWS_AT_ONCE)]
    general = torch.cat(pieces) if len(x) else x.new_zeros(0, network.classes)
    versions = state.active_rounds + (setup.joins < state.round)
    if not setup.method.parts.personal:
        return Predictions(general, general, None, versions)
    localized = torch.empty_like(general) if earlier is None or earlier.localized is None else earlier.localized.clone()
    personal = torch.empty_like(general)
    for i in range(setup.devices):
        rows = setup.shelf.test_rows(i)
        if earlier is None or earlier.made_by[i] != versions[i]:
            localized[rows] = network.log_probabilities(state.devices.theta_lc[i], x[rows])
        personal[rows] = setup.algorithm.predict(setup.method, state.hyper(i), general[rows], localized[rows])
    return Predictions(personal, general, localized, versions)


def pseudo_label_accuracy(state: State) -> float | None:
    """How many pseudo-labels are right, over devices that have been active; None where nobody knows the truth."""
    setup = state.setup
    if not setup.method.parts.unlabelled:
        return None
    right = known = 0
    for i in np.flatnonzero(state.active_rounds).tolist():
        truth = setup.shelf.truth[setup.shelf.unlabelled_rows(i)]
        right += int((state.nu(i).argmax(-1) == truth)[truth >= 0].sum())
        known += int((truth >= 0).sum())
    return right / known if known else None


def _accuracy(setup: Setup, log_h: Tensor, roster: list[int]) -> Accuracy:
    right = (log_h.argmax(-1) == setup.shelf.test_y).double().cpu().numpy()
    rows = {i: setup.shelf.test_rows(i) for i in roster}
    devices = {i: float(right[r].mean()) for i, r in rows.items() if r.stop > r.start}
    if not devices:
        return Accuracy(float("nan"), float("nan"), float("nan"), {})
    values = np.sort(list(devices.values()))
    return Accuracy(float(values.mean()), float(values.std()), float(values[: ceil(len(values) / 10)].mean()), devices)


def _test_loss(setup: Setup, log_h: Tensor | None) -> float | None:
    if log_h is None or not len(log_h):
        return None
    return float(-log_h.gather(1, setup.shelf.test_y[:, None]).mean())


def _mean(values: list[float]) -> float | None:
    return float(np.mean(values)) if values else None


def _summary(accuracy: Accuracy | None) -> dict[str, float] | None:
    if accuracy is None:
        return None
    return {"mean": accuracy.mean, "std": accuracy.std, "worst_tenth": accuracy.worst_tenth}
