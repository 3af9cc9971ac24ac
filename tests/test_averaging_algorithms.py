"""FedProx, FedNova and pFedMe: numbers worked out by hand, and what they become without what is new in them."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcpsl import averaging
from fedcpsl.algorithms import fednova, fedprox, pfedme
from fedcpsl.errors import InputError
from fedcpsl.federation.robustness import update_rate
from fedcpsl.federation.terms import terms_of
from fedcpsl.problem import Samples

from .test_conformance import WORK, final, make


def number(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_the_pull(executor):
    """Where no sample counts, w <- w - eta mu (w - anchor): 3 - 0.2 0.5 (3 - 1) = 2.8, and 3 - 0.1 2 (3 - 1) = 2.6."""
    method = make("fedprox", executor).terms.method
    hyper = fedprox.Hyper(number([0.2, 0.1]), number([0.5, 2.0]))
    w, anchor = (averaging.stacked(method, hyper, torch.full_like(method.network.initial, v)) for v in (3.0, 1.0))
    none = Samples(number([[[0.5] * 6]] * 2), number([[[1.0, 0.0, 0.0]]] * 2), number([[0.0]] * 2), number([[0.0]] * 2))
    averaging.descend_labelled_towards(method, w, hyper.eta, none, hyper.mu, anchor)
    for leaf in w:
        assert leaf[0].flatten().tolist() == pytest.approx([2.8] * leaf[0].numel())
        assert leaf[1].flatten().tolist() == pytest.approx([2.6] * leaf[1].numel())


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_gradient_of_other_models(executor):
    """w <- w - eta g(w'; B), while w' stays."""
    method = make("fedprox", executor).terms.method
    hyper = fedprox.Hyper(number([0.2]), number([0.5]))
    initial = method.network.initial
    w, other, into = (averaging.stacked(method, hyper, t) for t in (initial, initial * 2, initial * 0))
    x = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 4, 6)))
    weights = torch.full((1, 4), 0.25, dtype=torch.float64)
    samples = Samples(x, torch.eye(3, dtype=torch.float64)[[0, 1, 2, 0]][None], weights, weights * 0)
    before = tuple(map(torch.clone, other))
    averaging.add_labelled_gradient(method, into, other, samples)
    averaging.descend_labelled(method, w, hyper.eta, samples, at=other)
    found = averaging.model_of(method, hyper, w, 0)[0]
    assert torch.allclose(found, initial - 0.2 * averaging.model_of(method, hyper, into, 0)[0], rtol=0, atol=1e-14)
    assert all(map(torch.equal, other, before))


@pytest.mark.parametrize("name", ["fedprox", "fednova"])
def test_without_a_pull_it_is_fedavg(name):
    """FedNova with equal steps: the mean of s_i is what it divides by."""
    work = replace(WORK, unit="steps", amount=3)
    ours, theirs = final(make(name, work=work, mu=0.0)), final(make("fedavg", work=work))
    assert torch.allclose(ours.server.theta, theirs.server.theta, rtol=1e-12, atol=1e-14)


def test_effective_steps_by_hand():
    """gamma = 0.5, eta mu = 0.1, Q = 3: k = 1, 1.5, 1.75 and s = 1, 0.9 + 1.5 = 2.4, 2.16 + 1.75 = 3.91; Q plainly."""
    hyper = fednova.Hyper(number([0.1, 0.1]), number([0.5, 0.0]), number([1.0, 0.0]))
    assert fednova.effective_steps(hyper, torch.tensor([3, 7])).tolist() == pytest.approx([3.91, 7])


@given(
    steps=st.integers(1, 200),
    gamma=st.sampled_from([0.0, 0.5, 0.8, 0.9, 0.95]) | st.floats(0, 0.99),
    pulled=st.sampled_from([0.0, 1.0, 0.5, 0.2, 0.1, 0.05, 1e-9]) | st.floats(0, 1),
)
def test_effective_steps_are_those_of_the_recursion(steps, gamma, pulled):
    """Also where 1 - eta mu is gamma, or nearly 1, or 0."""
    k = s = 0.0
    for _ in range(steps):
        k = gamma * k + 1
        s = (1 - pulled) * s + k
    found = fednova.effective_steps(fednova.Hyper(number(1.0), number(gamma), number(pulled)), torch.tensor(steps))
    assert found.item() == pytest.approx(s, rel=1e-9)


def test_fednovas_server():
    """s = 2, 4 and omega = 1/4, 3/4 of N/m = 3/2: tau = (0.5 + 3)/1 = 3.5, the rest 1.5 (0.25 * 6/2 + 0.75 * 8/4)."""
    hyper = fednova.Hyper(number([1.0, 1.0]), number([0.0, 0.0]), number([0.0, 0.0]))
    uploads, weights = fednova.Upload(number([[6.0], [8.0]]), torch.tensor([2, 4])), number([0.25, 0.75])
    added = fednova.contribution(None, hyper, uploads, weights)
    server = fednova.apply(None, fednova.Server(number([1.0])), fednova.Sum(*(t.sum(0) for t in added)), 3)
    assert server.theta.tolist() == pytest.approx([1 + 3.5 * 1.5 * 2.25])


def test_fednovas_rate_is_of_the_update_alone():
    """|(3, 4)| / (0.05 * 2) = 50, whatever the step count is as a number beside it."""
    terms = terms_of(make("fednova"))
    assert update_rate(terms, fednova.Upload(number([3.0, 4.0]), torch.tensor(2)), 2) == pytest.approx(50)


def test_pfedme_makes_k_steps_and_then_one():
    """No data (all weights 0), lam = 2, eta_lc = eta = 0.25, K = 2, theta = 1 with p at 3: p - w halves twice, to 0.5;
    then w <- w - 0.5 (w - p) = 1 + 0.25.
    """
    setup = make("pfedme", lam=2.0, eta=0.25, eta_lc=0.25, K=2)
    method, theta = setup.terms.method, torch.ones_like(setup.terms.method.network.initial)
    hyper = pfedme.Hyper(number(0.25), number(0.25), number(2.0))
    local = pfedme.begin(method, hyper, pfedme.Broadcast(theta), None)
    local = local._replace(own=tuple(3 * leaf for leaf in local.own))
    x = torch.zeros(2, 6, dtype=torch.float64)
    nothing = torch.zeros(2, dtype=torch.float64)
    samples = pfedme.Samples(x, torch.zeros(2, 3, dtype=torch.float64), nothing, nothing)
    local = pfedme.step(method, hyper, local, samples)
    assert all(torch.allclose(leaf, number(1.5)) for leaf in local.own)
    assert all(torch.allclose(leaf, number(1.25)) for leaf in local.models)
    assert method.traits.gradients_per_step == 2


def test_pfedmes_server_takes_a_step_of_its_own():
    twice, once = (final(make("pfedme", eta_g=eta_g, work=replace(WORK, rounds=1))) for eta_g in (2.0, 1.0))
    start = once.setup.terms.method.network.initial
    assert torch.allclose(twice.server.theta - start, 2 * (once.server.theta - start), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "numbers", "words"),
    [
        ("fednova", {"mu": 30.0}, r"algorithm.mu = 30: eta mu must not be above 1"),
        ("pfedme", {"lam": 60.0}, r"algorithm.eta = 0.05: with lam = 60 its steps overshoot"),
        ("pfedme", {"eta_lc": 0.2}, r"algorithm.eta_lc = 0.2: .* give less than 2 / lam = 0.133"),
    ],
)
def test_step_sizes_that_overshoot_are_refused(name, numbers, words):
    with pytest.raises(InputError, match=words):
        make(name, **numbers)
