"""FedCPSL's successor: its formulas by hand, and what it does to devices that share nothing but a server."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch

from fedcpsl import prepare, simulate
from fedcpsl.algorithm import Visit
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.config import Run, Work
from fedcpsl.data.federation import Federation
from fedcpsl.evaluation import evaluate
from fedcpsl.problem import PriorCosts, prior_costs
from fedcpsl.simulation import initial_state
from fedcpsl.trees import map_tensors


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_the_prior_of_labels():
    # 3, 1 and 0 labels, each with one more: 4/7, 2/7, 1/7
    assert fedcpsl2.label_prior(number([3.0, 1, 0]), number(1.0)).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert fedcpsl2.label_prior(number([0.0, 0]), number(1.0)).tolist() == [0.5, 0.5]


def test_a_step_of_em():
    # n = (1, 0), s = 1: pi = (2/3, 1/3). A sample with h = (0.5, 0.5) has the posterior pi: counts 2 + 2/3 and 1 + 1/3
    log_h = number([[0.5, 0.5]]).log()
    pi = fedcpsl2.em_prior(number([1.0, 0]), number(1.0), log_h, 1)
    assert pi.tolist() == pytest.approx([2 / 3, 1 / 3])
    # h = (0.2, 0.8): (0.2 2/3, 0.8 1/3) / 0.4 = (1/3, 2/3); counts 2 + 1/3 and 1 + 2/3, of 4
    log_h = number([[0.2, 0.8]]).log()
    assert fedcpsl2.em_prior(number([1.0, 0]), number(1.0), log_h, 1).tolist() == pytest.approx([7 / 12, 5 / 12])
    # without labels EM would feed on itself
    assert fedcpsl2.em_prior(number([0.0, 0]), number(1.0), log_h, 3).tolist() == [0.5, 0.5]


def test_prediction_with_prior_and_mixture():
    # h = (0.5, 0.5) and own (0.2, 0.8), pi = (0.75, 0.25): h_i = (0.75, 0.25); own: (0.15, 0.2) / 0.35 = (3/7, 4/7)
    # beta = 0.5: the mean, (33/56, 23/56)
    given = fedcpsl2.Numbers(number(0.5), number([0.75, 0.25]).log())
    found = fedcpsl2.predict(None, given, number([[0.5, 0.5]]).log(), number([[0.2, 0.8]]).log()).exp()
    assert found.flatten().tolist() == pytest.approx([33 / 56, 23 / 56])
    unknown = fedcpsl2.predict(None, given, number([[0.5, 0.5]]).log(), None)
    assert unknown.exp().flatten().tolist() == pytest.approx([0.5, 0.5])


def test_costs():
    # one labelled row of class 0 and one pseudo-labelled row of class 1 with weights 1 and 2; pi uniform, beta = 0.5
    # theta: h = (0.5, 0.5) in both, f_i = log 2 + 2 log 2; own: (0.75, 0.25): mixtures (0.625, 0.375)
    log_h = number([[[0.5, 0.5]] * 2, [[0.75, 0.25]] * 2]).log().requires_grad_()
    uniform = number([0.5, 0.5]).log()
    costs = prior_costs(PriorCosts(torch.eye(2).double(), number([1.0, 2.0]), uniform, number(0.5)), log_h)
    assert costs.tolist() == pytest.approx([3 * log(2), -log(0.625) - 2 * log(0.375)])
    (gradient,) = torch.autograd.grad(costs[1], log_h)
    assert gradient[0].abs().max() == 0  # theta_i is fixed in F_i
    assert gradient[1].abs().max() > 0


def test_the_personal_model_is_a_residual():
    theta, delta = number([1.0, 2.0]), number([[0.5, -1.0], [0.0, 4.0]])
    assert fedcpsl2.personal_start(theta, number([0.5, 0.25]), delta).tolist() == [[1.25, 1.5], [1.0, 3.0]]


def make(settings=None, **run):
    rng = np.random.default_rng(0)
    device, y = np.arange(300) % 6, rng.integers(0, 2, 300) + 2 * (np.arange(300) % 3)  # two classes on each device
    x = rng.normal(size=(300, 8)) + 2 * np.eye(8)[y]
    federation = Federation.from_arrays(x, y, device, labelled=0.2, stratified=True)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 12), torch.nn.ReLU(), torch.nn.Linear(12, 6))
    work = Work(rounds=12, active=3, unit="steps", amount=8, batch_labelled=8, batch_unlabelled=8)
    return prepare(
        federation,
        model,
        settings or fedcpsl2.Settings(eta=0.05),
        work,
        Run(dtype="float64", device="cpu", processes=1, **run),
    )


def test_devices_that_were_never_visited_know_their_labels():
    state = initial_state(make())
    counts = torch.stack([state.setup.data.label_counts(i) for i in range(6)])
    assert counts.sum() == state.setup.terms.sizes.labelled.sum()
    assert torch.allclose(state.devices.pi, (counts + 1) / (counts + 1).sum(1, keepdim=True))
    assert (state.devices.pi.argsort(1)[:, -2:] // 2 == torch.arange(6)[:, None] % 3).all()  # its own two classes


def test_no_prior_before_a_visit_where_it_is_off_and_the_smoothing_that_was_set():
    off = initial_state(make(fedcpsl2.Settings(eta=0.05, prior="off")))
    assert torch.allclose(off.devices.pi, torch.full((6, 6), 1 / 6, dtype=torch.float64))
    smooth = initial_state(make(fedcpsl2.Settings(eta=0.05, smoothing=3.0)))
    counts = torch.stack([smooth.setup.data.label_counts(i) for i in range(6)])
    assert torch.allclose(smooth.devices.pi, (counts + 3) / (counts + 3).sum(1, keepdim=True))


def test_a_federation_of_one_device():
    x, y = np.random.default_rng(0).normal(size=(40, 3)), np.arange(40) % 2
    federation = Federation.from_arrays(x, y, np.zeros(40, int), labelled=0.5)
    work = Work(rounds=2, active=1, unit="steps", amount=2, batch_labelled=4, batch_unlabelled=4)
    setup = prepare(
        federation, torch.nn.Linear(3, 2), fedcpsl2.Settings(eta=0.05), work, Run(device="cpu", processes=1)
    )
    *_, last = simulate(setup)
    assert last.devices.pi.shape == (1, 2)
    assert evaluate(last).personal.mean >= 0


def test_em_begins_with_the_second_visit():
    setup = make()
    method, state = setup.terms.method, initial_state(setup)
    sent, hyper = fedcpsl2.broadcast(state.server), state.hyper(0)
    visit = Visit(number([2.0, 1, 0, 0, 0, 0]), setup.data.visit(0).x)
    first = fedcpsl2.prepare(method, hyper, sent, state.device(0), visit)
    assert torch.allclose(first.pi, number([3.0, 2, 1, 1, 1, 1]) / 9)
    second = fedcpsl2.prepare(method, hyper, sent, first, visit)
    assert not torch.allclose(second.pi, first.pi)
    assert (first.visits.item(), second.visits.item()) == (1, 2)
    off = fedcpsl2.prepare(method._replace(rules=fedcpsl2.Rules("off", 3)), hyper, sent, first, visit)
    assert torch.allclose(off.pi, number([1 / 6] * 6))


def test_the_prior_and_the_unlabelled_samples_pay():
    """On devices of two classes, which one of the other four never belongs to."""
    best = fedcpsl2.Settings(eta=0.05)
    found = {}
    for name, settings in {"all": best, "no prior": replace(best, prior="off", beta=0.0)}.items():
        *_, last = simulate(make(settings, executor="vectorised"))
        found[name] = evaluate(last).personal.mean
    assert found["all"] > 0.85
    assert found["all"] > found["no prior"] + 0.1


def test_what_a_device_predicts_follows_the_general_model():
    """Its own model is theta plus its change: new with every theta, also where the device was not active."""
    states = [map_tensors(torch.clone, (state.server, state.devices)) for state in simulate(make())]
    for server, devices in states[1:]:
        own = fedcpsl2.own_model(None, fedcpsl2.Hyper(*[number(0.5)] * 8), devices, server.theta)
        assert torch.allclose(own, server.theta + 0.5 * devices.delta)
