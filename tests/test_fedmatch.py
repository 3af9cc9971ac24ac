"""FedMatch: two models that add up, and helpers whom the server finds by their embeddings."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from fedcpsl.algorithms import fedmatch
from fedcpsl.recorded_runs import read_vector, replay
from fedcpsl.simulation import initial_state, simulate

from .conftest import needs_fork
from .test_conformance import WORK, assert_equal, final, make
from .test_vectors import FOLDER

EASY = {"tau": 0.35, "lam_s": 3.0, "lam_a": 0.5, "lam_i": 0.5, "lam_2": 0.2, "helper_every": 2}
LONGER = replace(WORK, rounds=6)
DROPOUT = {"model": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))}


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_helpers_by_hand():
    """Devices at 0, 1, 2, 1 and 9 on a line; 4 was never counted. Of 0: 1 and 3 are as near, 1 is smaller, then 3."""
    places, counted = number([[0.0], [1.0], [2.0], [1.0], [9.0]]), number([1.0, 1.0, 1.0, 1.0, 0.0])
    which, there = fedmatch.nearest(places, counted, torch.tensor([0, 2, 4]), 2)
    assert which.tolist() == [[1, 3], [1, 3], [2, 1]]
    assert there.tolist() == [[1, 1], [1, 1], [1, 1]]
    which, there = fedmatch.nearest(places[:3], number([1.0, 0.0, 0.0]), torch.tensor([0, 1]), 4)
    assert there.tolist() == [[0, 0, 0, 0], [1, 0, 0, 0]]
    assert which[1, 0] == 0


def test_votes_by_hand():
    """The device for class 0, helpers for 1 and 1: class 1. For 1 and 2: a tie of three, the device's own. The device
    for 2, helpers for 1 and 0 while only the first is there: the device's own; with votes 0, 1, 1, 0 and own 2: 0.
    """
    own = number([[0.8, 0.1, 0.1]])

    def votes(*classes):
        return torch.stack([torch.eye(3, dtype=torch.float64)[[c]] for c in classes])

    assert fedmatch.voted(own, votes(1, 1), number([1.0, 1.0])).tolist() == [1]
    assert fedmatch.voted(own, votes(1, 2), number([1.0, 1.0])).tolist() == [0]
    assert fedmatch.voted(own, votes(1, 1), number([1.0, 0.0])).tolist() == [0]
    third = number([[0.1, 0.1, 0.8]])
    assert fedmatch.voted(third, votes(0, 1, 1, 0), number([1.0] * 4)).tolist() == [0]


def test_theta_is_everybodys_at_first():
    """psi^0 = 0.2 theta^0 and sigma^0 = 0.8 theta^0."""
    setup = make("fedmatch")
    server, theta = initial_state(setup).server, setup.terms.method.network.initial
    assert torch.allclose(server.psi, 0.2 * theta, rtol=1e-15)
    assert torch.allclose(fedmatch.general_model(None, server), theta, rtol=1e-15)
    assert server.noise.shape == (1, 6)
    assert server.devices == 5


def test_psis_gradient_is_that_of_autograd():
    """Phi + lam_2 |psi - sigma|^2 + lam_1 |psi|_1, with what is selected, voted and predicted by helpers fixed."""
    setup = make("fedmatch", **EASY | {"tau": 0.6})
    method, network = setup.terms.method, setup.terms.method.network
    hyper = fedmatch.Hyper(*(t[0] for t in setup.terms.hyper))
    torch.manual_seed(0)
    sigma, psi, *helpers = (network.initial + 0.3 * torch.randn_like(network.initial) for _ in range(4))
    x, strong = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    local = fedmatch.begin(method, hyper, fedmatch.Broadcast(sigma, psi, torch.stack(helpers), number([1.0, 1.0])), ())
    weights = torch.full((5,), 0.2, dtype=torch.float64)
    samples = fedmatch.Samples(x, torch.full((5, 3), 1 / 3, dtype=torch.float64), 0 * weights, weights)
    found, phi = fedmatch.psi_gradient(method, hyper, local, samples, strong)

    free = psi.clone().requires_grad_()
    log_h, log_strong = (network.log_probabilities(sigma + free, rows) for rows in (x, strong))
    theirs = torch.stack([network.log_probabilities(helper, x) for helper in helpers]).exp()
    selected = log_h.exp().amax(-1) >= 0.6
    assert 0 < selected.sum() < 5
    label = fedmatch.voted(log_h.exp().detach(), theirs, number([1.0, 1.0]))
    own = nn.functional.nll_loss(log_strong[selected], label[selected])
    agreement = (theirs * (theirs.log() - log_h)).sum(-1)[:, selected].mean(-1).sum() / 2
    expected_phi = 0.5 * own + 0.5 * agreement
    total = expected_phi + 0.2 * (free - sigma).square().sum() + 1e-4 * free.abs().sum()
    (gradient,) = torch.autograd.grad(total, free)
    assert phi.item() == pytest.approx(expected_phi.item(), rel=1e-12)
    assert torch.allclose(fedmatch.model_of(method, hyper, found, 0), gradient, atol=1e-12)


def test_helpers_are_sent_every_second_round_to_devices_counted_before_and_counted_as_sent():
    setup = make("fedmatch", work=replace(LONGER, active=5, loss_rate=0.0, unit="steps", amount=1), **EASY)
    sent, before = [], 0
    for state in simulate(setup):
        sent.append(state.downlink_bytes - before)
        before = state.downlink_bytes
    parameters = len(setup.terms.method.network.initial)
    assert [bytes_ / (8 * 5 * parameters) for bytes_ in sent[1:]] == [2, 4, 2, 4, 2, 4]


@pytest.mark.parametrize("given", [{}, DROPOUT], ids=["plain", "dropout"])
def test_executors_agree_with_helpers(given):
    reference = final(make("fedmatch", work=LONGER, **EASY, **given))
    assert_equal(reference, final(make("fedmatch", "vectorised", work=LONGER, **EASY, **given)))
    assert_equal(reference, final(make("fedmatch", "vectorised", work=LONGER, slots=2, **EASY, **given)))
    without = final(make("fedmatch", work=LONGER, **EASY | {"helper_every": 100}, **given))
    assert not torch.allclose(reference.server.psi, without.server.psi)


@needs_fork
def test_processes_agree_with_helpers():
    reference = final(make("fedmatch", work=LONGER, **EASY))
    assert_equal(reference, final(make("fedmatch", "vectorised", work=LONGER, processes=2, **EASY)))


def test_a_recorded_start_matters():
    vector = read_vector(FOLDER / "related" / "fedmatch.npz")
    vector["in/noise"] = -3 * vector["in/noise"]
    assert any(d.error > 1 for d in replay(vector, "sequential"))
