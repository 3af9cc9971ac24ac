"""Labels held out: which ones, what they say, and what a device does that others disagree with."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcpsl import held_out, prepare, simulate
from fedcpsl.algorithm import visit_of
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.config import Run, Work
from fedcpsl.data.federation import Federation
from fedcpsl.evaluation import evaluate
from fedcpsl.held_out import HeldOut
from fedcpsl.simulation import initial_state

from .test_conformance import assert_equal


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_how_many_labels_are_held_out():
    # none of 19; each 5th of 20 and of 100; of 240 one in 12, so that there are 20
    assert held_out.spacing_of(number([[19.0, 0], [9, 11], [50, 50], [120, 120]])).tolist() == [0, 5, 5, 12]


@given(st.integers(0, 5000))
def test_the_samples_that_are_judged_are_those_that_are_not_trained_on(n):
    spacing, places = held_out.spacing_of(number([float(n)])), torch.arange(max(n, 1))
    left_out = places[held_out.is_held_out(places, held_out.period_of(spacing))][:n] if n else places[:0]
    x = torch.arange(n, dtype=torch.float64)[:, None]
    visit = visit_of(number([float(n), 0]), x[:0], x, torch.eye(2, dtype=torch.float64)[[0] * n])
    judged = held_out.held_out_of(visit, spacing)
    assert judged.x.flatten()[judged.there > 0].tolist() == left_out.tolist()
    assert len(left_out) <= 20
    assert len(left_out) == 0 if n < 20 else len(left_out) >= min(n // 5, 11)


def test_scores_and_evidence():
    # log h of the right classes: log 0.5, and log 0.01, which counts as -3; the third row fills a gap
    log_h = number([[0.5, 0.5], [0.99, 0.01], [0.1, 0.9]]).log()
    judges = HeldOut(None, number([[1.0, 0], [0, 1], [1, 0]]), number([1.0, 1, 0]))
    assert held_out.score(log_h, judges).item() == pytest.approx((np.log(0.5) - 3) / 2)
    # 0.8 x 1 + 4 (-0.5 + 1.5 - 0.15) = 4.2; with a better theta 0.8 - 4 x 0.65 is cut off at -1
    assert held_out.more_evidence(number(1.0), number(-0.5), number(-1.5), number(4.0)).item() == pytest.approx(4.2)
    assert held_out.more_evidence(number(1.0), number(-1.0), number(-0.5), number(4.0)).item() == -1
    # tanh(0) = 0 and less, tanh(1) = 0.7616
    assert held_out.independence_by(number([-1.0, 2, 4])).tolist() == pytest.approx([0, 0, 0.76159416])
    assert held_out.own_share(number(0.5), number(0.5)).item() == 0.75


def test_a_beta_by_labels_held_out():
    # h(theta) = 0.2 and h(theta_lc) = 0.8 for the right class: h_p = 0.2 + 0.6 b, so p(b) ~ 0.2 + 0.6 b for one label
    own, general = number([[0.8, 0.2]]).log(), number([[0.2, 0.8]]).log()
    betas = np.arange(11) / 10
    weights = 0.2 + 0.6 * betas
    one = HeldOut(None, number([[1.0, 0]]), number([1.0]))
    assert held_out.mean_beta(own, general, one).item() == pytest.approx((weights * betas).sum() / weights.sum())
    assert held_out.mean_beta(own, general, one._replace(there=number([0.0]))).item() == pytest.approx(0.5)


def shifted_classes(shift, samples=900, devices=3):
    """Devices that see the same inputs; what is class 0 on one is class `shift` on the next."""
    rng = np.random.default_rng(0)
    x, device = rng.normal(size=(samples, 6)), np.arange(samples) % devices
    y = (x[:, :3].argmax(1) + shift * device) % 3
    return Federation.from_arrays(x, y, device, labelled=0.3, stratified=True)


def run(federation, settings, executor="vectorised", rounds=40):
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 24), torch.nn.ReLU(), torch.nn.Linear(24, 3))
    work = Work(rounds, 3, "steps", 20, batch_labelled=16, batch_unlabelled=16)
    where = Run(dtype="float64", device="cpu", processes=1, executor=executor)
    setup = prepare(federation, model, settings, work, where)
    *_, last = simulate(setup)
    return last


def independence_of(state):
    terms = state.setup.terms
    return fedcpsl2.independence(terms.method, terms.hyper, state.devices)


def test_devices_that_disagree_go_their_own_way():
    """One global model is no better than a guess there; without independence devices follow it."""
    found = run(shifted_classes(1), fedcpsl2.Settings(eta=0.03))
    assert independence_of(found).min() > 0.9
    followers = run(shifted_classes(1), fedcpsl2.Settings(eta=0.03, independence=0.0))
    assert independence_of(followers).max() == 0
    assert evaluate(found).personal.mean > evaluate(followers).personal.mean + 0.2


def test_devices_that_agree_do_not():
    assert independence_of(run(shifted_classes(0), fedcpsl2.Settings(eta=0.03))).max() == 0


def test_held_out_labels_do_not_train_until_they_are_given_back():
    """Other labels of held-out samples change nothing in the first visit, and do in the last."""
    federation = shifted_classes(0)
    settings = fedcpsl2.Settings(eta=0.03, prior="off")
    state = initial_state(prepare(federation, torch.nn.Linear(6, 3), settings, Work(), Run(device="cpu", processes=1)))
    data = state.setup.data
    spacing = held_out.spacing_of(data.label_counts(0))
    first = int(data.start[0])
    held = [i for i in range(int(data.labelled[0])) if (i + 1) % int(spacing) == 0]
    lies = federation.y.copy()
    rows = np.flatnonzero((federation.device == 0) & (federation.role == 0))[held]
    assert data.truth[first + held[0]] == federation.y[rows[0]]
    lies[rows] = (lies[rows] + 1) % 3
    lying = replace(federation, y=lies)
    for rounds, same in ((1, True), (8, False)):
        honest, other = (run(f, settings, rounds=rounds) for f in (federation, lying))
        assert torch.equal(honest.devices.delta[0], other.devices.delta[0]) == same


@pytest.mark.parametrize("beta", [0.5, "held-out"])
def test_executors_agree_where_labels_are_held_out(beta):
    settings = fedcpsl2.Settings(eta=0.05, beta=beta)
    one, other = (run(shifted_classes(1), settings, executor, 9) for executor in ("sequential", "vectorised"))
    assert one.devices.evidence.max() > 0
    assert (one.devices.beta != 0.5).any() == (beta == "held-out")
    assert_equal(one, other)


def test_the_variant_without_a_model_on_the_device():
    state = run(shifted_classes(0), fedcpsl2.Settings(name="fedcpsl2-prior", eta=0.05))
    kept = sum(t.numel() for t in state.device(0))
    assert kept < 10  # three classes and five numbers
    measured = evaluate(state)
    assert measured.personal.mean > 0.85
    assert measured.general.mean == pytest.approx(measured.personal.mean, abs=0.05)  # all classes are as frequent


def test_a_device_that_is_told_to_go_its_own_way():
    """iota = 1: its own model alone predicts, and a visit begins where the last one ended, moved as theta has moved."""
    method = run(shifted_classes(0), fedcpsl2.Settings(eta=0.03, independence=1.0), rounds=1).setup.terms.method
    hyper = fedcpsl2.Hyper(*[number(1.0)] * len(fedcpsl2.Hyper._fields))._replace(beta=number(0.5), kappa=number(0.5))
    device = fedcpsl2.Device(*[number(0.0)] * len(fedcpsl2.Device._fields))
    assert fedcpsl2.beta_of(method, hyper, device) == 1
    assert fedcpsl2.kappa_of(method, hyper, device) == 1
