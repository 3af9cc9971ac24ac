"""Colour images are predicted from themselves and their mirror images, by everything that predicts."""

import numpy as np
import pytest
import torch

from fedcpsl import prepare, simulate
from fedcpsl.algorithm import log_answers, mean_of_both
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.config import Data, Run, Work, algorithm_settings
from fedcpsl.data.federation import Federation
from fedcpsl.deployment.device_process import DeviceConfig, make_participant
from fedcpsl.deployment.job import explicit_job, job_terms, read_job, trial_of
from fedcpsl.evaluation import _with_new_localized, evaluate, own_models, predict, prediction_numbers
from fedcpsl.export.saved_run import load_saved_run, model_of_device
from fedcpsl.federation.local_training import log_predictions
from fedcpsl.federation.terms import digest, terms_of
from fedcpsl.simulation import simulate_together
from fedcpsl.sklearn import FedCPSLClassifier
from fedcpsl.step_size import search_eta
from fedcpsl.views import mirrored
from tests.small_runs import answers_of, array_run, ask
from tests.test_fedcpsl2 import make

FORMATS = {"onnx": ".onnx", "torch": ".pt2", "safetensors": ".safetensors"}
SETTINGS = {"algorithm__name": "fedcpsl2", "algorithm__eta": 0.05, "model__name": "mlp"}


def images(channels=3, count=36, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, channels, 8, 8), dtype=np.uint8)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return array_run(tmp_path_factory.mktemp("images") / "run", images(), **SETTINGS)


def test_the_mean_of_logits():
    # logits (2, 0) and (0, 4): their mean is (1, 2)
    one, other = (torch.log_softmax(torch.tensor(z), -1) for z in ([2.0, 0.0], [0.0, 4.0]))
    assert mean_of_both(one, other).tolist() == pytest.approx(torch.log_softmax(torch.tensor([1.0, 2.0]), -1).tolist())


@pytest.mark.parametrize(("shape", "turned"), [((3, 8, 8), True), ((1, 8, 8), False), ((3, 8), False), ((3,), False)])
def test_only_three_channels_of_an_image_are_colours(shape, turned):
    assert mirrored("auto", shape) == mirrored("image", shape) == turned


def test_only_colour_images_are_turned():
    settings = algorithm_settings("fedcpsl2")(eta=0.1)
    method = make(settings).terms.method  # of tables
    assert method.traits.both_ways
    assert not method.both_ways
    for name, expected in (("fedcpsl2-alone", True), ("fedcpsl2-prior", True), ("fedcpsl", False), ("fedavg", False)):
        assert make(algorithm_settings(name)(name=name, eta=0.1)).terms.method.traits.both_ways == expected


def test_a_mirror_image_has_the_same_answer(run):
    saved = load_saved_run(run)
    predict = model_of_device(saved, "0").predictor.predict
    x = images(count=5, seed=1)
    assert predict(x) == pytest.approx(predict(x[..., ::-1].copy()), abs=1e-6)
    assert predict(x) != pytest.approx(predict(x[..., ::-1, :].copy()), abs=1e-3)


@pytest.mark.parametrize("given", [{"algorithm__both_ways": False}, {"algorithm__views": "drawing"}])
def test_off_the_answer_depends_on_the_side(tmp_path, given):
    saved = load_saved_run(array_run(tmp_path / "run", images(), **SETTINGS, **given))
    predict = model_of_device(saved, "0").predictor.predict
    x = images(count=5, seed=1)
    assert predict(x) != pytest.approx(predict(x[..., ::-1].copy()), abs=1e-3)


@pytest.mark.parametrize("kind", FORMATS)
@pytest.mark.parametrize("device", ["0", "global"])
def test_exported_models_answer_as_the_run(run, tmp_path, capsys, kind, device):
    if kind == "onnx":
        pytest.importorskip("onnxruntime")
    path, x = tmp_path / f"model{FORMATS[kind]}", images(count=5, seed=2)
    code, _, err = ask(capsys, "export", run, "--device", device, "--format", kind, "--out", path)
    assert (code, err) == (0, "")
    np.savez(tmp_path / "new.npz", x=x)
    _, out, _ = ask(capsys, "predict", path, tmp_path / "new.npz")
    np.savez(tmp_path / "mirrored.npz", x=x[..., ::-1])
    _, mirrored, _ = ask(capsys, "predict", path, tmp_path / "mirrored.npz")
    expected = model_of_device(load_saved_run(run), device).predictor.predict(x)
    for text in (out, mirrored):
        assert answers_of(text) == pytest.approx(expected, abs=1e-5)


JOB = """
[model]
name = "mlp"
[algorithm]
name = "fedcpsl2"
eta = 0.1
[federation]
shape = [3, 8, 8]
classes = ["a", "b"]
"""


def test_server_and_devices_need_not_agree_on_it():
    texts = [JOB.replace("eta = 0.1", f"eta = 0.1\nboth_ways = {value}") for value in ("true", "false")]
    one, other = (job_terms(read_job(explicit_job(text, "job.toml"), "job.toml")) for text in texts)
    assert one.method.both_ways
    assert not other.method.both_ways
    assert digest(one) == digest(other)  # it changes neither messages nor states


def test_a_device_judges_trials_by_the_image_alone(tmp_path):
    np.savez(tmp_path / "ann.npz", x=images(), y=np.arange(36) % 2)
    data = Data(dataset="own", file=str(tmp_path / "ann.npz"), partition="iid", devices=1, labelled=1.0)
    config, text = DeviceConfig("ann", data, tmp_path / "ann"), JOB.replace('["a", "b"]', '["0", "1"]')
    job = read_job(explicit_job(text, "job.toml"), "job.toml")
    assert make_participant(config, job, "r").terms.method.both_ways
    assert not make_participant(config, trial_of(job, 0.1, 2), "t").terms.method.both_ways


def colour_federation():
    """Three devices with colour images."""
    rng = np.random.default_rng(3)
    y = np.arange(90) % 3
    x = rng.normal(size=(90, 3, 8, 8)) + y[:, None, None, None]
    return Federation.from_arrays(x, y, np.arange(90) // 3 % 3, labelled=0.5)


def linear():
    torch.manual_seed(0)
    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(192, 3))


def prepared(settings, executor="sequential", beside=None):
    run = Run(executor=executor, processes=1, dtype="float64", device="cpu")
    return prepare(colour_federation(), linear(), settings, Work(rounds=2, active=2), run, beside=beside)


def test_the_search_for_a_step_size_does_not_depend_on_it():
    run = Run(processes=1, dtype="float64", device="cpu")
    one, other = (
        search_eta(colour_federation(), linear(), fedcpsl2.Settings(both_ways=both), Work(rounds=5, active=2), run)
        for both in (True, False)
    )
    assert one.losses == other.losses


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_evaluation_turns_images_and_training_does_not(executor):
    states = {}
    for both in (True, False):
        settings = fedcpsl2.Settings(eta=0.05, both_ways=both)
        states[both] = list(simulate(prepared(settings, executor)))[-1]
    assert torch.equal(states[True].server.theta, states[False].server.theta)
    state, theta = states[True], states[True].server.theta
    tests, method = state.setup.data.test, state.setup.terms.method_after(state.round)
    found = evaluate(state).predictions
    assert not torch.equal(found.personal, evaluate(states[False]).predictions.personal)
    expected = mean_of_both(*(method.network.log_probabilities(theta, x) for x in (tests.x, tests.x.flip(-1))))
    assert torch.allclose(found.general, expected, atol=1e-12)
    own, rows = own_models(state, [1], theta)[0], tests.rows(1)
    both = (log_answers(method, model, tests.x[rows])[:, None] for model in (theta, own))
    expected = fedcpsl2.predict(method, prediction_numbers(state, [1]), *both)[:, 0]
    assert torch.allclose(found.personal[rows], expected, atol=1e-12)


def test_runs_side_by_side_turn_images_each_as_it_should():
    first = prepared(fedcpsl2.Settings(eta=0.05), "vectorised")
    setups = [first, prepared(fedcpsl2.Settings(eta=0.05, both_ways=False), "vectorised", first)]
    assert setups[0].terms.method.network.module is setups[1].terms.method.network.module
    history = list(simulate_together(setups))
    for runs in ((0, 1), (1, 0)):
        before, after = ([states[run] for run in runs] for states in (history[0], history[-1]))
        expected = [predict(state, state.setup.data.test).localized for state in after]
        earlier = [predict(state, state.setup.data.test) for state in before]
        for found, each in zip(_with_new_localized(after, earlier), expected, strict=True):
            assert torch.allclose(found.localized, each, atol=1e-12)


def test_a_real_device_turns_images():
    state = list(simulate(prepared(fedcpsl2.Settings(eta=0.05))))[-1]
    terms, sent = terms_of(state.setup, 1), fedcpsl2.broadcast(state.server)
    assert terms.method.both_ways
    x = state.setup.data.test.x
    answer = log_predictions(terms, sent, state.device(1), x)
    assert torch.allclose(answer, log_predictions(terms, sent, state.device(1), x.flip(-1)), atol=1e-12)
    rows = state.setup.data.test.rows(1)
    assert torch.allclose(answer[rows], evaluate(state).predictions.personal[rows], atol=1e-12)


def test_the_classifier_turns_images():
    def rows(x):
        return x.reshape(len(x), -1) / 255

    x, device = images(count=48), np.arange(48) // 3 % 3
    given = {"rounds": 2, "active": 3, "model": "mlp", "hidden": (6,), "standardise": False, "random_state": 0}
    found = FedCPSLClassifier(eta=0.05, input_shape=(3, 8, 8), **given)
    found.fit(rows(x), np.arange(48) % 3, device=device)
    new = images(count=6, seed=5)
    for whose in (device[:6], "global"):
        answer = found.predict_proba(rows(new), device=whose)
        assert answer == pytest.approx(found.predict_proba(rows(new[..., ::-1]), device=whose), abs=1e-6)
        assert answer != pytest.approx(found.predict_proba(rows(new[..., ::-1, :]), device=whose), abs=1e-3)
