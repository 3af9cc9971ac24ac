"""The scikit-learn estimator: scikit-learn's own checks, its tools, frames, and the library's own numbers."""

import pickle
import warnings

import joblib
import numpy as np
import pandas as pd
import polars as pl
import pytest
import torch
from sklearn import config_context
from sklearn.base import clone
from sklearn.datasets import load_digits
from sklearn.exceptions import NotFittedError
from sklearn.metrics import confusion_matrix, f1_score, recall_score
from sklearn.model_selection import GridSearchCV, GroupKFold, StratifiedKFold, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

from fedcpsl import Algorithm, Federation, Run, Work, evaluate, mlp, prepare, simulate
from fedcpsl.data.split import by_classes
from fedcpsl.errors import RunError
from fedcpsl.schedule import stream
from fedcpsl.settings import DEFAULT_ALGORITHM
from fedcpsl.sklearn import FedCPSLClassifier

NAMES = np.array(["attic", "barn", "cellar"])


def quick(**parameters):
    return FedCPSLClassifier(**{"algorithm": "fedcpsl", "rounds": 3, "hidden": (8,), "random_state": 0} | parameters)


def samples(count=90, seed=0):
    """Three devices that see the same four features with the classes shifted by one from device to device."""
    rng = np.random.default_rng(seed)
    device, kind = np.arange(count) % 3, rng.integers(0, 3, count)
    X = rng.normal(size=(count, 4)) + 3 * np.eye(3, 4)[(kind + device) % 3]
    return X, np.where(rng.random(count) < 0.5, kind, -1), NAMES[device]


@pytest.fixture(scope="module")
def lopsided_digits():
    """20 devices with two digits each; one label in ten; a fifth is for tests."""
    X, y = load_digits(return_X_y=True)
    rng = np.random.default_rng(0)
    return X, y, by_classes(y, 20, 2, 0), rng.random(len(y)) < 0.1, rng.random(len(y)) < 0.2


@pytest.mark.parametrize(("algorithm", "rounds"), [("fedcpsl", 10), (DEFAULT_ALGORITHM, 3)])
def test_it_passes_scikit_learns_checks(algorithm, rounds):
    """All but one, which uses -1 as a class."""
    expected = {"check_classifiers_classes": "-1 means unlabelled"}
    results = check_estimator(
        quick(algorithm=algorithm, rounds=rounds, hidden=(16,)),
        expected_failed_checks=expected,
        on_fail=None,
        on_skip=None,
    )
    assert [r["check_name"] for r in results if r["status"] == "failed"] == []
    assert [r["check_name"] for r in results if r["status"] == "xfail"] == list(expected)
    assert sum(r["status"] == "passed" for r in results) > 40


def test_a_devices_own_model_beats_the_global_one_on_lopsided_digits(lopsided_digits):
    X, y, device, labelled, test = lopsided_digits
    learner = quick(rounds=30, hidden=(64,)).fit(X[~test], np.where(labelled, y, -1)[~test], device=device[~test])
    personal = learner.score(X[test], y[test], device=device[test])
    assert personal > 0.9
    assert personal > learner.score(X[test], y[test], device="global") + 0.03


def test_it_is_the_librarys_own_run(lopsided_digits):
    """The same seed gives what `simulate` gives; only inputs are normalised in float64 here."""
    X, y, device, labelled, test = lopsided_digits
    seen = np.where(labelled | test, y, -1)
    federation = Federation.from_arrays(X, seen, device, test, seed=7)
    torch.manual_seed(int(stream(7, "init").integers(2**63)))
    setup = prepare(federation, mlp(64, 10, [8]), Algorithm(), Work(rounds=30), Run(seed=7, processes=1))
    *_, state = simulate(setup)
    theirs = evaluate(state).predictions
    learner = quick(rounds=30, random_state=7).fit(X[~test], seen[~test], device[~test])
    rows = federation.order[test[federation.order]]
    np.testing.assert_allclose(learner.predict_proba(X[rows], device[rows]), theirs.personal.exp(), atol=1e-3)
    np.testing.assert_allclose(learner.predict_proba(X[rows], device="global"), theirs.general.exp(), atol=1e-3)
    np.testing.assert_array_equal(learner.active_rounds_, state.active_rounds)


def test_a_whole_number_makes_fits_repeatable():
    X, y, device = samples()
    before = torch.get_rng_state()
    first, again, other = (quick(random_state=seed).fit(X, y, device).predict_proba(X, device) for seed in (1, 1, 2))
    assert torch.equal(before, torch.get_rng_state())
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)
    drawn = np.random.RandomState(3)
    assert not np.array_equal(*(quick(random_state=drawn).fit(X, y).predict_proba(X) for _ in range(2)))


def test_threads_do_not_mix_their_random_numbers():
    X, y, device = samples()

    def learnt(seed):
        return quick(random_state=seed).fit(X, y, device).predict_proba(X, device)

    alone = [learnt(seed) for seed in range(6)]
    together = joblib.Parallel(n_jobs=3, backend="threading")(joblib.delayed(learnt)(seed) for seed in range(6))
    assert all(map(np.array_equal, alone, together))


@pytest.mark.parametrize(
    ("y", "classes"),
    [
        (np.array(["hot", "cold", "-1", ""] * 15), ["cold", "hot"]),
        (["hot", "cold", None, -1] * 15, ["cold", "hot"]),
        (pd.Series(["hot", "cold", None, "-1"] * 15), ["cold", "hot"]),
        (pd.Series(["hot", "cold", None, "cold"] * 15, dtype="category"), ["cold", "hot"]),
        (pl.Series(["hot", "cold", None, "-1"] * 15), ["cold", "hot"]),
        (pl.Series(["nan", "None", None, "-1"] * 15), ["None", "nan"]),
        (pd.Series([7, 5, None, -1] * 15, dtype="Int64"), [5, 7]),
        (pl.Series([7, 5, None, -1] * 15), [5, 7]),
        (np.array([7.0, 5.0, np.nan, -1.0] * 15), [5, 7]),
        (np.array([-2, 5, -1, -1] * 15), [-2, 5]),
        (np.array([7, 5, 200, 5] * 15, np.uint8), [5, 7, 200]),
        (pd.Series([True, False, None, pd.NA] * 15, dtype="boolean"), [False, True]),
        ([True, False, True, True] * 15, [False, True]),
    ],
)
def test_a_missing_label_or_minus_one_is_unlabelled_and_all_else_is_a_class(y, classes):
    X, _, device = samples(60)
    learner = quick().fit(X, y, device=device)
    assert learner.classes_.tolist() == classes
    assert set(learner.predict(X, device=device).tolist()) <= set(classes)
    assert learner.predict_proba(X, device="global").shape == (60, len(classes))
    known = [i for i in range(60) if i % 4 < 2]  # the first two of every four are labelled in all of these
    assert 0 <= learner.score(X[known], [np.asarray(y)[i] for i in known], device="global") <= 1


def test_score_leaves_unlabelled_samples_out():
    X, y, device = samples()
    learner, known = quick().fit(X, y, device), y >= 0
    predicted = learner.predict(X, device)
    assert learner.score(X, y, device=device) == np.mean(predicted[known] == y[known])
    weight = np.arange(len(y))
    right = weight[known & (predicted == y)].sum() / weight[known].sum()
    assert learner.score(X, y, sample_weight=weight, device=device) == pytest.approx(right)


def test_without_devices_there_is_one():
    X, y, _ = samples()
    learner = quick(active=4).fit(X, y)
    assert learner.devices_.tolist() == [0]
    assert learner.active_rounds_.tolist() == [3]
    assert np.array_equal(learner.predict_proba(X), quick().fit(X, y, device=["all"] * 90).predict_proba(X))
    assert not np.array_equal(learner.predict_proba(X), learner.predict_proba(X, device=[0] * 90))


def test_devices_on_their_own_have_no_global_model():
    X, y, device = samples()
    learner = quick(algorithm="local", rounds=20).fit(X, y, device=device)
    assert learner.score(X, y, device=device) > 0.6
    with pytest.raises(ValueError, match="local has no global model: give the samples' devices"):
        learner.predict(X)
    assert quick(algorithm="local").fit(X, y).predict(X).shape == (90,)


def test_without_personal_models_the_global_one_answers_for_all():
    X, y, device = samples()
    learner = quick(algorithm="fedavg").fit(X, y, device=device)
    assert np.array_equal(learner.predict_proba(X), learner.predict_proba(X, device=device))


def test_a_device_that_was_not_there():
    X, y, device = samples()
    learner = quick().fit(X, y, device=device)
    strange = np.where(np.arange(90) == 4, "cellr", device)
    with pytest.raises(ValueError, match="device 'cellr' was not in fit; did you mean 'cellar'"):
        learner.predict(X, device=strange)
    answers = learner.set_params(unseen="global").predict_proba(X, device=strange)
    assert np.array_equal(answers[4], learner.predict_proba(X, device="global")[4])
    others = np.delete(learner.predict_proba(X, device=device), 4, 0)
    assert np.delete(answers, 4, 0) == pytest.approx(others, abs=1e-6)  # one row fewer may be rounded otherwise


def test_a_device_that_never_trained_is_answered_by_the_global_model():
    X, y, device = samples()
    with pytest.warns(UserWarning, match="2 of 3 devices never trained .*: the global model predicts for them"):
        learner = quick(rounds=1, active=1).fit(X, y, device=device)
    idle = np.isin(device, learner.devices_[learner.active_rounds_ == 0])
    personal, general = learner.predict_proba(X, device), learner.predict_proba(X, device="global")
    assert np.array_equal(personal[idle], general[idle])
    assert not np.array_equal(personal[~idle], general[~idle])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        quick(rounds=1, active=1, personal_rounds=1).fit(X, y, device=device)


@pytest.mark.parametrize("frame", [pd.DataFrame, pl.DataFrame])
@pytest.mark.parametrize("series", [pd.Series, pl.Series])
def test_frames_go_in(frame, series):
    X, y, device = samples()
    table = frame({f"f{k}": X[:, k] for k in range(4)})
    learner = quick().fit(table, series(y), device=series(device))
    assert learner.feature_names_in_.tolist() == ["f0", "f1", "f2", "f3"]
    assert learner.n_features_in_ == 4
    plain = quick().fit(X, y, device)
    assert np.array_equal(learner.predict_proba(table, device=series(device)), plain.predict_proba(X, device))
    with pytest.raises(ValueError, match="feature names should match"):
        learner.predict(table[["f1", "f0", "f2", "f3"]])


def test_it_is_cloned_pickled_and_dumped(tmp_path):
    X, y, device = samples()
    learner = quick(settings={"algorithm.warm_up": 1}).fit(X, y, device=device)
    answers = learner.predict_proba(X, device=device)
    joblib.dump(learner, tmp_path / "learner.joblib")
    for copy in (pickle.loads(pickle.dumps(learner)), joblib.load(tmp_path / "learner.joblib")):
        assert np.array_equal(copy.predict_proba(X, device=device), answers)
    fresh = clone(learner)
    assert not hasattr(fresh, "classes_")
    assert np.array_equal(fresh.fit(X, y, device).predict_proba(X, device), answers)
    with pytest.raises(NotFittedError):
        clone(learner).predict(X)


def test_no_file_is_written(tmp_path, monkeypatch):
    X, y, device = samples()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.TemporaryFile", lambda *_, **__: pytest.fail("a temporary file"))
    quick(settings={"run.store": "disk"}).fit(X, y, device=device).predict(X, device)
    assert not any(tmp_path.iterdir())


def routed(**parameters):
    learner = quick(**{"rounds": 10} | parameters).set_fit_request(device=True)
    return learner.set_score_request(device=True).set_predict_request(device=True)


def test_device_is_routed_through_a_pipeline():
    X, y, device = samples()
    with config_context(enable_metadata_routing=True):
        pipe = make_pipeline(MinMaxScaler(), routed()).fit(X, y, device=device)
        scaled = MinMaxScaler().fit_transform(X)
        alone = quick(rounds=10).fit(scaled, y, device=device)
        assert np.array_equal(pipe.predict(X, device=device), alone.predict(scaled, device=device))
        assert pipe.score(X, y, device=device) == alone.score(scaled, y, device=device)
    plain = make_pipeline(MinMaxScaler(), quick(rounds=10)).fit(X, y, fedcpslclassifier__device=device)
    assert np.array_equal(plain.predict(X, device="global"), alone.predict(scaled, device="global"))


def test_device_is_routed_through_cross_validation():
    X, y, device = samples(180)
    folds = StratifiedKFold(3).split(X, device)  # every device in every fold
    with config_context(enable_metadata_routing=True):
        personal = cross_val_score(routed(rounds=30), X, y, cv=list(folds), params={"device": device})
        blind = cross_val_score(quick(rounds=30), X, y, cv=3)
        groups = {"device": device, "groups": device}
        newcomers = cross_val_score(routed(unseen="global"), X, y, cv=GroupKFold(3), params=groups)
    assert personal.mean() > 0.75 > blind.mean()  # the devices disagree on what is what
    assert newcomers.shape == (3,)


def test_device_is_routed_through_a_grid_search():
    X, y, device = samples()
    grid = {"beta": np.linspace(0, 1, 3), "rounds": np.arange(4, 8, 3)}
    with config_context(enable_metadata_routing=True):
        search = GridSearchCV(routed(), grid, cv=list(StratifiedKFold(3).split(X, device)), error_score="raise")
        search.fit(X, y, device=device)
        assert search.best_params_["beta"] > 0
        assert search.score(X, y, device=device) > 0.75
    assert search.best_estimator_.predict(X, device=device).shape == (90,)


def frozen_and_linear(shape, classes):
    """A random layer that is never trained, before one that is."""
    first = nn.Linear(shape[0], 16)
    first.requires_grad_(False)
    return nn.Sequential(first, nn.ReLU(), nn.Linear(16, classes))


@pytest.mark.parametrize("model", [frozen_and_linear, "tests.test_sklearn:frozen_and_linear"])
def test_a_model_of_ones_own(model):
    X, y, device = samples()
    learner = quick(model=model, rounds=20).fit(X, y, device=device)
    assert learner.score(X, y, device=device) > 0.75
    torch.manual_seed(99)  # what is never trained is kept with the models
    copy = pickle.loads(pickle.dumps(learner))
    assert np.array_equal(copy.predict_proba(X, device), learner.predict_proba(X, device))


def test_rows_may_be_images():
    X, y = load_digits(n_class=3, return_X_y=True)
    learner = quick(model="resnet8", input_shape=(1, 8, 8), rounds=2, epochs=1).fit(X[:60], y[:60])
    assert learner.learnt_.scaling.shift.shape == (1, 1, 1)
    assert learner.predict_proba(X[:5], device="global").shape == (5, 3)
    with pytest.raises(ValueError, match=r"input_shape = \(1, 28, 28\): does not fit rows of 64 numbers"):
        quick(input_shape=(1, 28, 28)).fit(X, y)


def test_features_far_from_zero_are_standardised():
    X, y, device = samples()
    near, far = (quick().fit(x, y, device).predict_proba(x, device) for x in (X, 1e9 + X))
    np.testing.assert_allclose(near, far, atol=1e-4)
    as_they_are = quick(standardise=False).fit(X, y, device)
    assert as_they_are.learnt_.scaling is None
    assert not np.array_equal(as_they_are.predict_proba(X, device), near)


@pytest.mark.parametrize(
    ("parameters", "message"),
    [
        ({"rounds": 0}, "work.rounds = 0: give a whole number of at least 1"),
        ({"beta": 2}, "algorithm.beta = 2: give a number from 0 to 1"),
        ({"beta": [0.5, 0.5]}, "algorithm.beta has 2 values for 3 devices"),
        ({"algorithm": "fedcspl"}, "did you mean 'fedcpsl'"),
        ({"model": "mpl"}, "did you mean 'mlp'"),
        ({"model": nn.Linear(4, 3)}, "model: is a network; give a function"),
        ({"model": lambda *_: 3}, "model: returned a int where an nn.Module is needed"),
        ({"settings": {"work.unitt": "hlu"}}, "work.unitt: no such setting; did you mean 'unit'"),
        ({"settings": {"data.labelled": 0.1}}, "settings has 'data.labelled': give settings of algorithm, work or run"),
        ({"unseen": "guess"}, 'unseen = \'guess\': give "error" or "global"'),
        ({"standardise": "yes"}, "standardise = 'yes': give True or False"),
        ({"compute": "abacus"}, "run.device = 'abacus'"),
        ({"random_state": -1}, "run.seed = -1: give a whole number of at least 0"),
    ],
)
def test_a_wrong_parameter_is_named(parameters, message):
    X, y, device = samples()
    with pytest.raises(ValueError) as refused:
        quick(**parameters).fit(X, y, device=device)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"y": np.full(90, -1)}, "no sample has a label"),
        ({"y": [None] * 90}, "no sample has a label"),
        ({"device": "phone"}, "give the column itself"),
        ({"X": pd.DataFrame({"a": range(90), "who": ["ann"] * 90})}, "column 'who' of X could not be converted"),
        ({"y": np.where(np.arange(90) % 2, 1, -1)}, "only one class has labels, 1; give at least two"),
        ({"y": np.array(["a", 1, -1] * 30, object)}, "y has both text and 1"),
        ({"device": ["attic"] * 89}, "device has shape [89] where X has 90 samples"),
        ({"device": ["attic", "barn", None] * 30}, "device is missing in row 2"),
        ({"device": np.where(np.arange(90) == 5, np.nan, 0.0)}, "device is missing in row 5"),
        ({"device": np.array(["attic", "barn", 3] * 30, object)}, "device has both text and 3"),
    ],
)
def test_wrong_samples_are_named(change, message):
    X, y, device = samples()
    with pytest.raises(ValueError) as refused:
        quick().fit(**{"X": X, "y": y, "device": device} | change)
    assert message in str(refused.value)


def test_a_run_that_cannot_go_on_says_so():
    X, y, device = samples()
    with pytest.raises(RunError, match=r"use a smaller algorithm\.eta"):
        quick(eta=1e30, rounds=20).fit(X, y, device=device)
    with pytest.raises(ValueError, match="no sample has a label to score by"):
        quick().fit(X, y, device=device).score(X, np.full(90, -1), device=device)


def test_a_search_without_routing_is_warned_of():
    """Scikit-learn passes device to fit alone then, and the global model would be scored silently."""
    X, y, device = samples()
    folds = list(StratifiedKFold(3).split(X, device))
    with pytest.warns(UserWarning, match=r"the global model predicts.*enable_metadata_routing=True"):
        GridSearchCV(quick(rounds=2), {"beta": [0.5]}, cv=folds).fit(X, y, device=device)
    learner = quick(rounds=2).fit(X, y, device=device)
    with pytest.warns(UserWarning, match="give device=") as raised:
        blind = learner.predict_proba(X)
    assert raised[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert np.array_equal(learner.predict_proba(X, device="global"), blind)
        learner.score(X, y, device=device)
        quick(rounds=2).fit(X, y).predict(X)  # of one device
        quick(rounds=2, algorithm="fedavg").fit(X, y, device=device).predict(X)  # has one model for all
    with pytest.raises(ValueError, match="give one per sample"):
        learner.predict(X, device="ann")


def test_the_report_of_classes_is_scikit_learns():
    X, y, device = samples()
    learner = quick(rounds=20).fit(X, y, device=device)
    truth = np.where(np.arange(len(y)) % 7 == 0, -1, y)
    known = truth != -1
    found, predicted = learner.class_report(X, truth, device=device), learner.predict(X, device=device)
    assert found["accuracy"] == pytest.approx(learner.score(X, truth, device=device))
    labels = learner.classes_
    assert np.array_equal(found["confusion"], confusion_matrix(truth[known], predicted[known], labels=labels))
    assert found["macro_f1"] == pytest.approx(f1_score(truth[known], predicted[known], average="macro"))
    recalls = recall_score(truth[known], predicted[known], labels=labels, average=None, zero_division=0)
    assert list(found["per_class"].values()) == pytest.approx(recalls.tolist())
    assert sum(each["samples"] for each in found["devices"].values()) == known.sum()
    assert "devices" not in learner.class_report(X, truth, device="global")
    with pytest.raises(ValueError, match="0 labels"):
        learner.class_report(X, np.full(len(y), -1), device=device)
