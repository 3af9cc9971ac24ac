"""The scikit-learn estimator, with labels and devices as users give them; training and prediction are in `learning`."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from math import prod
from numbers import Integral
from typing import Any

import numpy as np
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin
from sklearn.metrics import accuracy_score, confusion_matrix, f1_score, recall_score
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data

from fedcpsl.config import AUTO, Config, algorithm_settings, with_settings
from fedcpsl.errors import InputError, did_you_mean
from fedcpsl.settings import DEFAULT_ALGORITHM
from fedcpsl.sklearn.learning import Learnt, MakeModel, learn, probabilities

UNLABELLED = -1
MISSING = ("None", "nan", "NaT", "<NA>")  # missing values as text
UNLABELLED_TEXTS = ("-1", "")
SEEDS = 2**31 - 1
NUMBERS = ("beta", "eta", "eta_lc", "gamma", "alpha_p", "alpha_r")  # parameters that are the algorithm's settings
NO_DEVICE = (
    'the global model predicts, because the samples\' devices were not given: give device=, or device="global" to '
    "silence this. A search or a cross-validation passes it on after sklearn.set_config(enable_metadata_routing=True) "
    "with estimator.set_fit_request(device=True).set_predict_request(device=True)"
    ".set_predict_proba_request(device=True).set_score_request(device=True)"
)


def with_marks(y: Any) -> Any:
    """Return labels as an array with -1 for unlabelled: -1 or missing, or as text "-1" or empty."""
    if y is None:
        return None
    y = np.asarray(y)
    if y.dtype.kind == "f":
        missing = np.isnan(y)
        filled = np.where(missing, UNLABELLED, y)
        return filled.astype(np.int64) if missing.any() and _is_whole(filled) else filled
    if y.dtype.kind == "U":
        y = y.astype(object) if np.isin(y, UNLABELLED_TEXTS).any() else y
    if y.dtype != object:
        return y
    marks = np.array([_is_mark(value) for value in y.ravel().tolist()], bool).reshape(y.shape)
    return np.where(marks, UNLABELLED, y)


def known_labels(y: NDArray[Any]) -> tuple[NDArray[np.bool_], NDArray[Any]]:
    """Return which labels are known, and the known ones: as text, or as numbers of one type."""
    if y.dtype != object:
        known = y != UNLABELLED if y.dtype.kind in "iuf" else np.ones(y.shape, bool)
        return known, y[known]
    known = np.array([isinstance(value, str) or value != UNLABELLED for value in y.tolist()], bool)
    return known, _of_one_type(y[known], "y")


def sample_devices(device: Any, samples: int) -> NDArray[Any]:
    """Return the device of every sample, as text or numbers."""
    given = np.asarray(device)
    if given.shape != (samples,):
        raise ValueError(f"device has shape {list(given.shape)} where X has {samples} samples: give one per sample")
    if given.dtype.kind in "fO":
        missing = [row for row, name in enumerate(given.tolist()) if _is_missing(name)]
        if missing:
            raise ValueError(f"device is missing in row {missing[0]}: name the device of every sample")
    return _of_one_type(given, "device") if given.dtype == object else given


def places(names: NDArray[Any], known: NDArray[Any]) -> NDArray[np.int64]:
    """Return the index of every name among the known ones; -1 if it is unknown."""
    place = {name: i for i, name in enumerate(known.tolist())}
    return np.array([place.get(name, -1) for name in names.tolist()], np.int64)


def refuse_unseen(names: NDArray[Any], owner: NDArray[np.int64], known: NDArray[Any]) -> None:
    """Raise ValueError for a device that was not in fit."""
    unseen = names[owner < 0].tolist()
    if unseen:
        raise ValueError(
            f"device {unseen[0]!r} was not in fit; {did_you_mean(str(unseen[0]), map(str, known.tolist()))}; "
            'to use the global model, leave device out or give unseen="global"'
        )


def refuse_text(x: Any) -> None:
    """Raise ValueError for the first column of a frame that has text in it."""
    for name in getattr(x, "columns", ()):
        words = [value for value in np.asarray(x[name]).tolist() if isinstance(value, str) and not _is_number(value)]
        if words:
            fix = "encode it, or leave it out; the samples' devices go into device="
            raise ValueError(f"column {name!r} of X could not be converted: it has text such as {words[0]!r}; {fix}")


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True


def _is_mark(value: Any) -> bool:
    if isinstance(value, str):
        return value in UNLABELLED_TEXTS
    return _is_missing(value) or value == UNLABELLED


def _is_missing(value: Any) -> bool:
    return not isinstance(value, str) and str(value) in MISSING


def _is_whole(y: NDArray[Any]) -> bool:
    return bool(np.isfinite(y).all() and (np.floor(y) == y).all())


def _of_one_type(values: NDArray[Any], name: str) -> NDArray[Any]:
    texts = [isinstance(value, str) for value in values.tolist()]
    if all(texts):
        return values
    if any(texts):
        raise ValueError(f"{name} has both text and {values.tolist()[texts.index(False)]!r}: give one kind")
    return np.array(values.tolist())


class FedCPSLClassifier(ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier from few labels, with a model for every device (person, site, machine) and one for all.

    In `y`, -1 or a missing value (for text also "-1" or "") means unlabelled; anything else is a class. `device` is
    the device of each sample; without it there is one device, 0. What is `auto` is decided as on the command line: of
    the numbers from `beta` to `alpha_r`, which algorithms share, it is the algorithm's own default.

    :param algorithm: `fedcpsl2`, FedCPSL's successor; `fedcpsl`, as published; or a baseline by name: `apfl`, `fedavg`,
        `local` and others.
    :param model: a network by name, `package.module:function`, or a function of (input shape, classes).
    :param hidden: widths of the hidden layers where the model is an `mlp`.
    :param rounds: in each of them some devices train and the global model is renewed.
    :param active: how many devices train in a round, or all where there are fewer; `auto`: 4.
    :param epochs: how often a device goes through its samples in a round.
    :param batch_size: labelled samples, and as many unlabelled ones, of a minibatch.
    :param personal_rounds: rounds at the end in which every device trains its own model alone.
    :param beta: weight of a device's own model in its predictions; for `fedcpsl` also one for each of `devices_`.
    :param eta: step size; `auto`: 0.05 for `fedcpsl`, found by short fits for `fedcpsl2`.
    :param eta_lc: step size of the devices' own models; `auto`: 2 eta for `fedcpsl`, `fedcpsl2` and `local`.
    :param gamma: local momentum.
    :param alpha_p: weight of the pseudo-label loss of `fedcpsl`.
    :param alpha_r: weight of the regulariser of the pseudo-labels of `fedcpsl`.
    :param standardise: whether features are shifted and scaled to mean 0 and deviation 1.
    :param input_shape: of one sample, where rows are flattened images or signals: (1, 28, 28).
    :param unseen: for a device that was not in `fit`: `error`, or `global`: the global model predicts.
    :param compute: where to train: `cpu`, `cuda`; `auto`: cuda where there is one.
    :param processes: that share a round's devices; 1 leaves the cores to a search's `n_jobs`.
    :param settings: any other settings by name, such as `{"work.unit": "hlu"}` or `{"algorithm.kappa": 1.0}`.
    :param random_state: a whole number makes fits repeatable, and is the seed of the same run elsewhere.

    After `fit`: `classes_`, `devices_` (names, sorted), `active_rounds_` (of each device), `n_features_in_` and, for a
    frame, `feature_names_in_`.
    """

    def __init__(
        self,
        *,
        algorithm: str = DEFAULT_ALGORITHM,
        model: str | MakeModel = AUTO,
        hidden: Sequence[int] = (200, 200),
        rounds: int = 100,
        active: int | str = AUTO,
        epochs: int = 2,
        batch_size: int = 32,
        personal_rounds: int = 0,
        beta: float | str | Sequence[float] = AUTO,
        eta: float | str = AUTO,
        eta_lc: float | str = AUTO,
        gamma: float | str = AUTO,
        alpha_p: float | str = AUTO,
        alpha_r: float | str = AUTO,
        standardise: bool = True,
        input_shape: Sequence[int] | None = None,
        unseen: str = "error",
        compute: str = AUTO,
        processes: int | str = 1,
        settings: dict[str, Any] | None = None,
        random_state: Any = None,
    ) -> None:
        self.algorithm = algorithm
        self.model = model
        self.hidden = hidden
        self.rounds = rounds
        self.active = active
        self.epochs = epochs
        self.batch_size = batch_size
        self.personal_rounds = personal_rounds
        self.beta = beta
        self.eta = eta
        self.eta_lc = eta_lc
        self.gamma = gamma
        self.alpha_p = alpha_p
        self.alpha_r = alpha_r
        self.standardise = standardise
        self.input_shape = input_shape
        self.unseen = unseen
        self.compute = compute
        self.processes = processes
        self.settings = settings
        self.random_state = random_state

    def fit(self, X: Any, y: Any, device: Any = None) -> "FedCPSLClassifier":
        """Learn from samples, of which some have labels."""
        if self.unseen not in ("error", "global"):
            raise ValueError(f'unseen = {self.unseen!r}: give "error" or "global"')
        if isinstance(device, str):
            raise ValueError(f"device = {device!r}: give the column itself, an entry for every sample")
        refuse_text(X)
        x, y = validate_data(self, X, with_marks(y), dtype="numeric", order="C")
        known, labels = known_labels(y)
        if not len(labels):
            raise ValueError("no sample has a label: every y is -1 or missing; give some labels")
        check_classification_targets(labels)
        self.classes_, codes = np.unique(labels, return_inverse=True)
        if len(self.classes_) < 2:
            only = self.classes_.tolist()[0]
            raise ValueError(f"only one class has labels, {only!r}; give at least two (-1 means unlabelled)")
        numbers = np.full(len(y), -1, np.int64)
        numbers[known] = codes
        names = np.zeros(len(x), np.int64) if device is None else sample_devices(device, len(x))
        self.devices_, owner = np.unique(names, return_inverse=True)
        with _value_errors():
            config = self._config(len(self.devices_))
            model = self.model if callable(self.model) else config.model.name
            self.learnt_ = learn(config, model, self._shaped(x), numbers, owner, tuple(map(str, self.devices_)))
        self.active_rounds_ = self.learnt_.active_rounds
        _warn_of_idle(self.learnt_, self.devices_)
        return self

    def predict_proba(self, X: Any, device: Any = None) -> NDArray[np.float64]:
        """Return the probability of every class, by the models of the samples' devices.

        `device` is one per sample, or "global" for the global model, which is also the default, with a warning if
        devices have models of their own.
        """
        check_is_fitted(self)
        x = validate_data(self, X, reset=False, dtype="numeric", order="C")
        return probabilities(self.learnt_, x, self._predicting_devices(device, len(x)))

    def predict(self, X: Any, device: Any = None) -> NDArray[Any]:
        """Return the likeliest class of every sample."""
        probable = self.predict_proba(X, device)
        return self.classes_[probable.argmax(1)]

    def score(self, X: Any, y: Any, sample_weight: Any = None, device: Any = None) -> float:
        """Return the accuracy over the samples that have a label."""
        predicted = self.predict(X, device)
        known, labels = known_labels(column_or_1d(with_marks(y)))
        if len(known) != len(predicted):
            raise ValueError(f"y has {len(known)} labels where X has {len(predicted)} samples: give one each")
        if not len(labels):
            raise ValueError("no sample has a label to score by: every y is -1 or missing")
        weight = None if sample_weight is None else np.asarray(sample_weight)[known]
        return float(accuracy_score(labels, predicted[known], sample_weight=weight))

    def class_report(self, X: Any, y: Any, device: Any = None) -> dict[str, Any]:
        """Return accuracy, macro-F1, accuracy per class and the confusion matrix over the samples that have a label.

        Rows of `confusion` are the classes, columns the predictions, both in the order of `classes_`; a label that was
        not in `fit` counts as wrong and has no row, and a class without samples has no accuracy (NaN). With a
        device per sample, `devices` has the accuracy and the number of samples of each.
        """
        predicted = self.predict(X, device)
        known, labels = known_labels(column_or_1d(with_marks(y)))
        if len(known) != len(predicted) or not len(labels):
            raise ValueError(f"y has {len(labels)} labels for {len(predicted)} samples: give some, one per sample")
        given, right = predicted[known], labels == predicted[known]
        recalls = recall_score(labels, given, labels=self.classes_, average=None, zero_division=np.nan)
        report = {
            "accuracy": float(right.mean()),
            "macro_f1": float(f1_score(labels, given, average="macro", zero_division=0)),
            "per_class": dict(zip(self.classes_.tolist(), recalls.tolist(), strict=True)),
            "confusion": confusion_matrix(labels, given, labels=self.classes_),
        }
        if device is not None and not isinstance(device, str):
            names = sample_devices(device, len(predicted))[known]
            of_each = {name: right[names == name] for name in np.unique(names)}
            report["devices"] = {n: {"accuracy": float(r.mean()), "samples": len(r)} for n, r in of_each.items()}
        return report

    def _config(self, devices: int) -> Config:
        """Return the library's settings, checked."""
        active = _plain(self.active)
        normalise = _plain(self.standardise)
        if not isinstance(normalise, bool):
            raise ValueError(f"standardise = {self.standardise!r}: give True or False")
        values = {
            "model.name": AUTO if callable(self.model) else self.model,
            "model.hidden": self.hidden,
            "work.rounds": self.rounds,
            "work.active": min(active, devices) if isinstance(active, int) else active,
            "work.amount": self.epochs,
            "work.batch_labelled": self.batch_size,
            "work.batch_unlabelled": self.batch_size,
            "work.personal_rounds": self.personal_rounds,
            "data.normalise": "standard" if normalise else "none",
            "run.device": self.compute,
            "run.processes": self.processes,
            "run.seed": self._seed(),
        }
        values |= self._algorithm_values()
        for name in self.settings or {}:
            if name.split(".")[0] in ("data", "model", "edge") and name != "data.server":
                raise ValueError(f"settings has {name!r}: give settings of algorithm, work or run, or data.server")
        values |= self.settings or {}
        return with_settings(Config(), {name: _plain(value) for name, value in values.items()})

    def _algorithm_values(self) -> dict[str, Any]:
        """Return the algorithm's name and what is not left to it; InputError where it has no such number."""
        own = [f.name for f in fields(algorithm_settings(self.algorithm))]
        given = {key: _plain(getattr(self, key)) for key in NUMBERS}
        given = {key: value for key, value in given.items() if value != AUTO}
        unknown = [key for key in given if key not in own]
        if unknown:
            raise InputError(
                f"{unknown[0]} = {given[unknown[0]]!r}: {self.algorithm} has no such setting; leave it out, or give an "
                f"algorithm that has, such as algorithm='fedcpsl' ({did_you_mean(unknown[0], own)})"
            )
        return {"algorithm.name": self.algorithm} | {f"algorithm.{key}": value for key, value in given.items()}

    def _seed(self) -> int:
        if isinstance(self.random_state, Integral):
            return int(self.random_state)
        return int(check_random_state(self.random_state).randint(SEEDS))

    def _shaped(self, x: NDArray[Any]) -> NDArray[Any]:
        """Return rows as samples of the model's input shape."""
        if self.input_shape is None:
            return x
        if prod(self.input_shape) != x.shape[1]:
            raise ValueError(f"input_shape = {tuple(self.input_shape)}: does not fit rows of {x.shape[1]} numbers")
        return x.reshape(-1, *self.input_shape)

    def _predicting_devices(self, device: Any, samples: int) -> NDArray[np.int64]:
        """Return the index of the device whose model predicts each sample; -1: the global model."""
        alone = self.learnt_.general is None
        if isinstance(device, str):
            if device != "global" or alone:
                asked = "" if alone else ', or "global"'
                raise ValueError(f"device = {device!r}: give one per sample{asked}")
            return np.full(samples, -1, np.int64)
        if device is None and not alone and len(self.devices_) > 1 and self.learnt_.own is not None:
            _warn_the_caller(NO_DEVICE)
        if device is None and (not alone or len(self.devices_) == 1):
            return np.full(samples, 0 if alone else -1, np.int64)
        if device is None:
            raise ValueError(f"{self.learnt_.settings.name} has no global model: give the samples' devices, device=")
        names = sample_devices(device, samples)
        owner = places(names, self.devices_)
        if alone or self.unseen != "global":
            refuse_unseen(names, owner, self.devices_)
        return owner if alone else np.where(self.learnt_.trained[owner], owner, -1)


def _warn_the_caller(text: str) -> None:
    """Warn with the line of the user's code that called the classifier."""
    frame, level = sys._getframe(1), 2
    while frame.f_back and frame.f_back.f_code.co_filename == __file__:
        frame, level = frame.f_back, level + 1
    warnings.warn(text, stacklevel=level + 1)


def _plain(value: Any) -> Any:
    """Return Python's number for NumPy's, and a list for an array or a tuple."""
    return value.tolist() if isinstance(value, np.generic | np.ndarray) else _listed(value)


def _listed(value: Any) -> Any:
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


@contextmanager
def _value_errors() -> Iterator[None]:
    """Raise InputError as ValueError, as scikit-learn expects."""
    try:
        yield
    except InputError as error:
        raise ValueError(str(error)) from error


def _warn_of_idle(learnt: Learnt, devices: NDArray[Any]) -> None:
    idle = devices[~learnt.trained].tolist() if learnt.own is not None else []
    if idle:
        meanwhile = "their models are untrained" if learnt.general is None else "the global model predicts for them"
        warnings.warn(
            f"{len(idle)} of {len(devices)} devices never trained (such as {idle[0]!r}): {meanwhile}; "
            "give more rounds or active devices, or labels where the algorithm uses nothing else",
            stacklevel=3,
        )
