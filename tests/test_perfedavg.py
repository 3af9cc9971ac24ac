"""Per-FedAvg: its steps, and a prediction that adapts to a device's labelled samples wherever it is asked for."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from fedcpsl import config
from fedcpsl.algorithms import family, perfedavg
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import from_function
from fedcpsl.device_round import all_labelled
from fedcpsl.evaluation import evaluate, own_models, predict
from fedcpsl.export.saved_run import load_saved_run, model_of_device
from fedcpsl.federation.device import LoopbackTransport, load_device_state
from fedcpsl.federation.device import predict as predict_on_device
from fedcpsl.federation.local_training import empty_local_data
from fedcpsl.problem import Samples
from fedcpsl.runs.experiment import build
from fedcpsl.runs.folder import read_run_config
from fedcpsl.schedule import Drawn
from fedcpsl.simulation import initial_state, prepare
from fedcpsl.simulation.rounds import draw_plan, next_state
from fedcpsl.sklearn import FedCPSLClassifier

from .conftest import small_federation, small_model
from .faulty import failing_disk, participants
from .faulty import make as make_federation
from .small_runs import answers_of, ask, table_run, write_table
from .test_conformance import WORK, final, make
from .test_federation import served

NAMES = sorted(perfedavg.VARIANTS)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_one_adapting_step_by_hand():
    """theta = 0, so h = (1/2, 1/2); x = 2, y = 0: g = ((h - y) x, h - y) = ((-1, 1), (-1/2, 1/2)), p = -0.1 g."""
    model = nn.Linear(1, 2).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    samples = number([[2.0]]).numpy(), np.array([0]), np.array([0]), np.zeros(1, np.int8)
    federation = Federation(*samples, classes=2, names=("phone",))
    settings = perfedavg.Settings(eta=0.1, alpha=0.1)
    setup = prepare(federation, model, settings, config.Work(), config.Run(dtype="float64", device="cpu"))
    (own,) = own_models(initial_state(setup), [0], setup.terms.method.network.initial)
    assert own.tolist() == pytest.approx([0.1, -0.1, 0.05, -0.05], abs=1e-15)


MODEL = small_model().double()


def loss(named, x, y):
    return nn.functional.cross_entropy(functional_call(MODEL, named, (x,)), y)


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_the_hessian_free_direction_is_near_the_exact_one(executor):
    """(I - alpha Hessian) v, the Hessian by automatic differentiation; a central difference errs by about delta^2."""
    setup = make("perfedavg-hf", executor, alpha=0.3, delta=1e-4)
    method, network = setup.terms.method, setup.terms.method.network
    rng = np.random.default_rng(0)
    x, y = torch.from_numpy(rng.normal(size=(5, 6))), torch.tensor([0, 1, 2, 0, 1])
    v = torch.from_numpy(rng.normal(size=network.initial.shape))
    samples = all_labelled(x, nn.functional.one_hot(y, 3).double())
    samples = Samples(*(t[None] for t in samples[:4]))
    hyper = perfedavg.Hyper(*(t[:1] for t in setup.terms.hyper))
    w, along = (perfedavg.stacked(method, hyper, t) for t in (network.initial, v))
    found = perfedavg.model_of(method, hyper, perfedavg.hessian_free(method, hyper, w, along, samples), 0)[0]
    at, direction = network.named(network.initial), network.named(v)

    def slope(named):
        return sum((g * direction[name]).sum() for name, g in grad(loss)(named, x, y).items())

    product = grad(slope)(at)
    expected = v - 0.3 * network.join(list(product.values()))
    assert torch.allclose(found, expected, atol=1e-7)


@pytest.mark.parametrize("name", NAMES)
def test_without_adapting_it_is_fedavg_on_the_second_minibatch(name):
    setup = make(name, alpha=0.0)
    plan = draw_plan(initial_state(setup))
    swapped = [task._replace(labelled=task.extra["batch_l2"].rows) for task in plan]
    ours = next_state(initial_state(setup), plan)
    theirs = next_state(initial_state(make("fedavg")), swapped)
    assert torch.allclose(ours.server.theta, theirs.server.theta, atol=1e-14)
    assert torch.equal(predict(ours, setup.data.test).personal, predict(ours, setup.data.test).general)


def test_its_three_minibatches_are_drawn_on_their_own():
    plan = draw_plan(initial_state(make("perfedavg-hf")))
    busy = max(plan, key=lambda task: task.labelled.size)
    drawn = [busy.labelled, busy.extra["batch_l2"].rows, busy.extra["batch_l3"].rows]
    assert len({each.tobytes() for each in drawn}) == 3
    assert all(isinstance(each, Drawn) for each in busy.extra.values())
    fedavg = draw_plan(initial_state(make("fedavg")))
    assert [task.labelled.tolist() for task in fedavg] == [task.labelled.tolist() for task in plan]


def adapted_by_hand(theta, network, x, y, alpha, steps):
    """Plain PyTorch."""
    named = {name: t.clone() for name, t in network.named(theta).items()}
    for _ in range(steps):
        gradient = grad(loss)(named, x, y)
        named = {name: t - alpha * gradient[name] for name, t in named.items()}
    return network.join(list(named.values()))


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
@pytest.mark.parametrize("store", ["accelerator", "host", "disk"])
def test_evaluation_adapts_the_latest_model_for_every_device(executor, store):
    """Active or not; without labels it is theta. Nothing is kept."""
    run = config.Run(executor=executor, store=store, dtype="float64", processes=1, seed=3, device="cpu")
    settings = perfedavg.Settings(eta=0.05, alpha=0.4, adapt_steps=3)
    setup = prepare(small_federation(), small_model(), settings, replace(WORK, active=2), run)
    last, network, data = final(setup), setup.terms.method.network, setup.data
    found = evaluate(last)
    for i in range(5):
        first, count = int(data.start[i]), int(data.labelled[i])
        x, y = data.x(slice(first, first + count)), data.truth[first : first + count]
        own = adapted_by_hand(last.server.theta, network, x, y, 0.4, 3) if count else last.server.theta
        rows = data.test.rows(i)
        expected = network.log_probabilities(own, data.test.x[rows])
        assert torch.allclose(found.predictions.personal[rows], expected, atol=1e-12)
    again = evaluate(last, found.predictions)
    assert torch.equal(again.predictions.personal, found.predictions.personal)
    assert last.devices == ()


def test_real_devices_adapt_what_they_received(tmp_path):
    """Also once they are asked without their samples."""
    with failing_disk():
        setup = make_federation("perfedavg-fo", alpha=0.4)
        devices = participants(setup, tmp_path)
        last = served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1]
        theta, x = last.server.theta, setup.data.test.x
        for i, device in enumerate(devices.values()):
            data = device.local_data
            own = adapted_by_hand(
                theta, setup.terms.method.network, data.x_labelled, data.labels.argmax(-1), 0.4, 1 if i != 3 else 0
            )
            expected = setup.terms.method.network.log_probabilities(own, x).exp()
            assert torch.allclose(predict_on_device(device, x), expected, atol=1e-9)
            bare = device._replace(local_data=empty_local_data(device.terms, (6,)))
            assert torch.allclose(predict_on_device(bare, x), expected, atol=1e-9)
            assert load_device_state(device.folder, device.terms).committed == ()


def test_the_adapted_model_is_exported(tmp_path, capsys):
    """A run's file holds it: theta moved down the gradient of the loss on the device's labels."""
    run = table_run(
        tmp_path / "run", algorithm__name="perfedavg-fo", algorithm__alpha=0.5, work__rounds=4, run__dtype="float64"
    )
    saved = load_saved_run(run)
    federation, settings = build(read_run_config(run)).federation, perfedavg.Settings(eta=0.1, alpha=0.5)
    run_settings = config.Run(dtype="float64", device="cpu")
    setup = prepare(federation, saved.model, settings, config.Work(), run_settings)
    network = setup.terms.method.network
    theta = network.join([saved.tensors[f"global/{name}"] for name in network.shapes])
    for i in range(3):
        own = network.join([saved.tensors[f"device{i}/localized/{name}"] for name in network.shapes])
        (expected,) = own_models(initial_state(setup), [i], theta)
        assert torch.allclose(own, expected, atol=1e-12)
        assert not torch.allclose(own, theta, atol=1e-4)
    assert model_of_device(saved, "ann").module.localized is not None
    table = write_table(tmp_path / "new.csv", rows=20, seed=3)
    own, general = (answers_of(ask(capsys, "predict", run, table, "--device", who)[1]) for who in ("ann", "global"))
    assert np.abs(own - general).max() > 1e-3


def test_a_new_device_adapts_in_no_round(tmp_path, capsys):
    run = table_run(tmp_path / "run", algorithm__name="perfedavg-fo", algorithm__alpha=1.0, work__rounds=4)
    table = write_table(tmp_path / "dan.csv", rows=60, seed=5, phones=("dan",), unlabelled=0.0)
    code, said, complained = ask(capsys, "adapt", run, "--data", table, "--out", tmp_path / "dan", "--json")
    assert code == 0, complained
    assert json.loads(said)["rounds"] == 0
    own, general = (load_saved_run(tmp_path / "dan").under(f"{which}/") for which in ("device0/localized", "global"))
    assert all(torch.equal(t, load_saved_run(run).under("global/")[name]) for name, t in general.items())
    assert any(not torch.allclose(t, general[name]) for name, t in own.items())


def test_the_classifier_adapts():
    """Two devices whose labels contradict each other: no model for all can serve both."""
    rng = np.random.default_rng(0)
    x, device = rng.normal(size=(80, 2)), np.arange(80) % 2
    y = (x[:, 0] > 0).astype(int) ^ device
    learner = FedCPSLClassifier(
        algorithm="perfedavg-fo",
        rounds=20,
        hidden=(8,),
        random_state=0,
        settings={"algorithm.alpha": 1.0, "algorithm.adapt_steps": 20},
    ).fit(x, y, device=device)
    assert learner.score(x, y, device=device) > 0.8


def test_it_is_not_of_the_family():
    assert not set(NAMES) & set(family.VARIANTS)


def test_devices_whose_samples_are_made_on_demand_adapt_too():
    held = small_federation()

    def samples(device):
        rows = held.order[held.device[held.order] == device]
        return held.x[rows], held.y[rows]

    n, m = held.sizes
    made = from_function(samples, devices=5, classes=3, labelled=n, unlabelled=m, tests=4)
    run = config.Run(dtype="float64", device="cpu", executor="sequential", processes=1, seed=3)
    settings, work = perfedavg.Settings(eta=0.05, alpha=0.4), replace(WORK, active=2)
    ends = [final(prepare(each, small_model(), settings, work, run)) for each in (held, made)]
    ours, theirs = (evaluate(state).predictions.personal for state in ends)
    assert torch.allclose(ours, theirs, atol=1e-12)
