"""Everything around the rounds, for every algorithm: it works, or it is refused in one clear line.

A new file under algorithms/ is tested by being there, as in the conformance suite.
"""

from dataclasses import fields, replace

import numpy as np
import pytest
import torch

from fedcpsl import config
from fedcpsl.algorithm import optional
from fedcpsl.algorithms import all_algorithms, find_algorithm, traits_of
from fedcpsl.config import Data
from fedcpsl.errors import InputError
from fedcpsl.evaluation import evaluate
from fedcpsl.export.adaptation import adapt
from fedcpsl.export.model_files import export
from fedcpsl.export.saved_run import load_saved_run, model_of_device
from fedcpsl.federation.terms import terms_of
from fedcpsl.simulation import initial_state, prepare, simulate
from fedcpsl.simulation.rounds import simulate_together
from fedcpsl.sklearn import FedCPSLClassifier
from fedcpsl.trees import leaves

from . import faulty
from .conftest import small_federation, small_model
from .small_runs import make_run
from .test_conformance import NAMES, WORK, assert_equal, final, make, settings_for

HAS_SERVER = [name for name in NAMES if not traits_of(name).alone]
PREDICTORS = sorted({file.predict: name for name, (file, _) in reversed(all_algorithms().items())}.values())


def tried(function, *given, **named):
    """What a function returns, and the one line with which it refuses."""
    try:
        return function(*given, **named), ""
    except InputError as error:
        reason = str(error)
    assert reason
    assert "\n" not in reason
    return None, reason


# Rounds.


@pytest.mark.parametrize("name", HAS_SERVER)
def test_a_server_that_counts_nothing_changes_nothing(name):
    """But for a count of rounds, where it keeps one."""
    setup = make(name, work=replace(WORK, loss_rate=1.0))
    expected, round_over = initial_state(setup).server, optional(setup.terms.algorithm, "round_over")
    for _ in range(WORK.rounds if round_over else 0):
        expected = round_over(expected)
    assert all(map(torch.equal, leaves(final(setup).server), leaves(expected)))


@pytest.mark.parametrize("name", NAMES)
def test_executors_agree_where_devices_join(name):
    work = replace(WORK, joiners=2, join_round=2, active=3, rounds=5)
    reference = final(make(name, work=work))
    assert reference.active_rounds[3:].sum() > 0
    assert all(t.isfinite().all() for t in leaves((reference.server, reference.devices)))
    assert_equal(reference, final(make(name, "vectorised", work=work)))


def run_of(name, seed, beside=None, federation=None):
    work = replace(WORK, active="auto") if traits_of(name).everyone else WORK
    run = config.Run(executor="vectorised", processes=1, dtype="float64", seed=seed, device="cpu")
    return prepare(federation, small_model(), settings_for(name, eta=0.02 * (seed + 1)), work, run, beside=beside)


def test_all_of_them_side_by_side_end_where_they_end_alone():
    """Two runs of each, of other seeds and step sizes, over the same samples."""
    federation, setups = small_federation(at_server=7), []
    for name in NAMES:
        for seed in (1, 2):
            setups.append(run_of(name, seed, setups[0] if setups else None, federation))
    *_, together = simulate_together(setups)
    for setup, state in zip(setups, together, strict=True):
        assert_equal(state, final(setup))


@pytest.mark.parametrize("name", NAMES)
def test_states_in_memory_and_on_disk_are_the_same(name, tmp_path):
    setup = make(name)
    reference = final(setup)
    where = setup.machine._replace(store="disk", store_folder=tmp_path)
    other = final(setup._replace(machine=where))
    for device in np.flatnonzero(reference.active_rounds).tolist():
        assert all(map(torch.equal, leaves(reference.device(device)), leaves(other.device(device))))


# Models.


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A finished run of an algorithm on small windows, made once."""
    folder, made = tmp_path_factory.mktemp("runs"), {}
    rng = np.random.default_rng(0)
    y = np.arange(90) % 3
    x = (rng.normal(size=(90, 6)) + 2 * np.eye(3, 6)[y]).astype(np.float32)
    arrays = {"x": x, "y": y, "device": np.arange(90) // 3 % 3, "recording": np.repeat(np.arange(3), 30)}
    np.savez(folder / "mine.npz", **arrays)

    def run(name):
        if name not in made:
            own = {"algorithm__T": 3} if "T" in {f.name for f in fields(config.algorithm_settings(name))} else {}
            everyone = {"work__active": "auto" if traits_of(name).everyone else 3}
            given = {"data__file": str(folder / "mine.npz"), "data__labelled": 0.3, "data__server": 0.2}
            size = {"model__name": "mlp", "model__hidden": [6], "algorithm__name": name, "algorithm__eta": 0.05}
            made[name] = load_saved_run(make_run(folder / name, **given, **size, **own, **everyone))
        return made[name], folder / "mine.npz", x

    return run


def has_general(name):
    file, _ = find_algorithm(name)
    setup = make(name)
    return file.general_model(setup.terms.method, setup.terms.first_server()) is not None


@pytest.mark.parametrize("name", NAMES)
def test_a_models_module_predicts_as_the_run_does(name, runs):
    """The module that is exported and the predictor, which asks the algorithm."""
    run, _, x = runs(name)
    for device in ("0", "2", "global"):
        made, refused = tried(model_of_device, run, device)
        assert ("no global model" in refused) == (device == "global" and not has_general(name)), refused
        if made is None:
            continue
        found = made.module(torch.from_numpy(x)).detach().numpy()
        assert np.allclose(found, made.predictor.predict(x), atol=1e-5)
        assert np.allclose(found.sum(-1), 1, atol=1e-5)


@pytest.mark.parametrize("name", NAMES)
def test_weights_are_exported(name, runs, tmp_path):
    assert export(model_of_device(runs(name)[0], "0"), "safetensors", tmp_path / "model.safetensors") < 1e-5


@pytest.mark.parametrize("name", PREDICTORS)
def test_every_way_to_predict_is_exported_to_onnx(name, runs, tmp_path):
    assert export(model_of_device(runs(name)[0], "0"), "onnx", tmp_path / "model.onnx") < 1e-5


@pytest.mark.parametrize("name", NAMES)
def test_a_new_device_gets_a_model_or_a_reason(name, runs):
    run, path, _ = runs(name)
    data = Data(file=str(path), dataset="own", labelled=1.0, test=0.3, partition="iid")
    found, refused = tried(adapt, run, data, "new", 1)
    if found is None:
        assert ("no global model" if not has_general(name) else "no personal rounds") in refused
    else:
        assert 0 <= found.personal <= 1


@pytest.mark.parametrize("name", NAMES)
def test_the_classifier_fits_or_says_why_not(name):
    rng = np.random.default_rng(0)
    y, device = np.arange(60) % 3, np.arange(60) // 3 % 4
    x = rng.normal(size=(60, 6)) + 3 * np.eye(3, 6)[y]
    known = np.where(rng.random(60) < 0.5, y, -1)
    own = {"data.server": 0.2} if traits_of(name).server_data else {}
    made = FedCPSLClassifier(algorithm=name, rounds=2, eta=0.05, hidden=[6], settings=own, random_state=0)
    if any(draw.of == "runs" for draw in traits_of(name).draws):
        with pytest.raises(ValueError, match="order of time"):
            made.fit(x, known, device=device)
        return
    found = made.fit(x, known, device=device).predict_proba(x, device=device)
    assert np.allclose(found.sum(1), 1)


@pytest.mark.parametrize("name", [name for name in NAMES if name not in faulty.NAMES])
def test_who_cannot_run_on_real_devices_says_so(name):
    _, refused = tried(terms_of, make(name))
    assert "simulat" in refused


@pytest.mark.parametrize("name", NAMES)
def test_personal_rounds_run_or_are_refused(name):
    setup, refused = tried(make, name, work=replace(WORK, personal_rounds=1))
    if setup is None:
        assert "work.personal_rounds" in refused
        return
    *_, last = simulate(setup)
    assert last.round == WORK.rounds + 1
    found = evaluate(last).predictions
    assert found.localized is not None
    assert torch.isfinite(found.personal).all()
