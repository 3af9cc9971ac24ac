"""Every formula of Section II against numbers worked by hand, and what must hold for any input."""

from math import log

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedcpsl.engine.costs import differentiated
from fedcpsl.problem import (
    Costs,
    LabelledCosts,
    LocalCosts,
    PriorCosts,
    Samples,
    closed_form_labels,
    cross_entropy,
    gradient_labels,
    kl_from_uniform,
    label_kl_from_uniform,
    local_cost,
    mixture,
    project_to_simplex,
    regulariser,
)

H = torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64)
LOG_H = H.log()


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def test_cross_entropy():
    # -<(0, 1, 0), log h> = -log 0.25 = 2 log 2
    assert cross_entropy(LOG_H, number([0.0, 1.0, 0.0])).item() == pytest.approx(2 * log(2))
    # a soft label: -(0.5 log 0.5 + 0.5 log 0.25) = 1.5 log 2
    assert cross_entropy(LOG_H, number([0.5, 0.5, 0.0])).item() == pytest.approx(1.5 * log(2))


def test_kl_from_uniform():
    # 0.5 log 0.5 + 2 * 0.25 log 0.25 + log 3 = -1.5 log 2 + log 3
    assert kl_from_uniform(LOG_H).item() == pytest.approx(log(3) - 1.5 * log(2))
    assert label_kl_from_uniform(H).item() == pytest.approx(log(3) - 1.5 * log(2))
    # a one-hot label is log C away, and 0 log 0 is 0
    assert label_kl_from_uniform(number([1.0, 0.0, 0.0])).item() == pytest.approx(log(3))
    assert kl_from_uniform(torch.full((4,), 0.25).log()).item() == pytest.approx(0, abs=1e-6)


def test_regulariser_is_the_sum_of_both():
    one_hot = number([0.0, 0.0, 1.0])
    assert regulariser(LOG_H, one_hot).item() == pytest.approx(log(3) + log(3) - 1.5 * log(2))


def samples(rows, target, labelled, unlabelled):
    return Samples(torch.zeros(rows, 1), number(target), number(labelled), number(unlabelled))


def test_local_cost():
    # one labelled sample of class 0 and two unlabelled ones, all predicted as h:
    # mean_L l = log 2; mean_U l = (2 log 2 + 1.5 log 2)/2 = 1.75 log 2
    # R of (0,1,0): log 3 + K; R of (.5,.5,0): (log 3 - log 2) + K, with K = log 3 - 1.5 log 2
    # mean_U R = 2 log 3 - 2 log 2
    log_h = LOG_H.expand(3, 3)
    target = [[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [0.5, 0.5, 0.0]]
    batch = samples(3, target, [1.0, 0.0, 0.0], [0.0, 0.5, 0.5])
    f = local_cost(log_h, batch, number(0.3), number(0.1), Costs()).item()
    assert f == pytest.approx(log(2) + 0.3 * 1.75 * log(2) + 0.1 * (2 * log(3) - 2 * log(2)))


def test_an_empty_set_leaves_its_terms_zero():
    log_h = LOG_H.expand(1, 3)
    unlabelled_only = samples(1, [[0.0, 1.0, 0.0]], [0.0], [1.0])
    assert local_cost(log_h, unlabelled_only, number(1.0), number(0.0), Costs()).item() == pytest.approx(2 * log(2))
    assert local_cost(log_h, unlabelled_only, number(0.0), number(0.0), Costs()).item() == 0


def test_mixture():
    # 0.75 (0.5, 0.25, 0.25) + 0.25 (0.2, 0.2, 0.6) = (0.425, 0.2375, 0.3375)
    mixed = mixture(LOG_H[None], number([0.2, 0.2, 0.6]).log()[None], number(0.75)).exp()
    assert mixed[0].tolist() == pytest.approx([0.425, 0.2375, 0.3375])


@pytest.mark.parametrize(("beta", "expected"), [(0.0, 0), (1.0, 1)])
def test_mixture_at_its_ends_is_one_model_with_finite_gradients(beta, expected):
    both = torch.log_softmax(torch.randn(2, 4, 3, dtype=torch.float64), -1).requires_grad_()
    mixed = mixture(both[1], both[0].detach(), number(beta))
    assert torch.allclose(mixed, both[expected])
    (gradient,) = torch.autograd.grad(mixed.square().sum(), both, create_graph=True)
    (second,) = torch.autograd.grad(gradient.square().sum(), both)
    assert gradient.isfinite().all()
    assert second.isfinite().all()


def test_mixture_is_stable_where_probabilities_underflow():
    tiny = torch.tensor([[-2000.0, 0.0]], dtype=torch.float64)
    assert mixture(tiny, tiny, number(0.3))[0, 0].item() == pytest.approx(-2000)


def test_closed_form_labels():
    # softmax(2 log h) is h^2 / sum h^2 = (4, 1, 1)/6
    nu = closed_form_labels(LOG_H[None], number(0.02), number(0.01))
    assert nu[0].tolist() == pytest.approx([4 / 6, 1 / 6, 1 / 6])


def test_closed_form_labels_without_regulariser_are_one_hot():
    nu = closed_form_labels(LOG_H[None], number(0.02), number(0.0))
    assert nu[0].tolist() == [1, 0, 0]


def test_closed_form_minimises_the_cost_over_labels():
    log_h = torch.log_softmax(torch.randn(1, 4, dtype=torch.float64), -1)
    alpha_p, alpha_r = number(0.5), number(0.2)

    def cost(nu):
        return (alpha_p * cross_entropy(log_h, nu) + alpha_r * regulariser(log_h, nu)).item()

    best = closed_form_labels(log_h, alpha_p, alpha_r)
    for _ in range(50):
        other = torch.softmax(torch.randn(1, 4, dtype=torch.float64), -1)
        assert cost(best) <= cost(other) + 1e-12


def test_gradient_labels():
    # m_i = 2, alpha_p = 0.4, alpha_r = 0.2, eta_v = 1, nu uniform over 2 classes, h = (0.8, 0.2):
    # gradient = (0.4 (-log h) + 0.2 (log 0.5 + 1 + log 2)) / 2 up to what is equal in both coordinates,
    # so the step moves nu by +-0.1 (log 0.8 - log 0.2) = +-0.1 log 4 and stays on the simplex
    nu = gradient_labels(
        number([[0.5, 0.5]]), number([[0.8, 0.2]]).log(), number(1.0), number(0.4), number(0.2), 2, Costs()
    )
    assert nu[0].tolist() == pytest.approx([0.5 + 0.1 * log(4), 0.5 - 0.1 * log(4)])


def test_gradient_labels_floor_the_logarithm():
    # at nu = (1, 0): gradient in nu_2 is alpha_r (log 1e-12 + 1 + log 2) - alpha_p log h_2, in nu_1 alpha_r (1 + log 2)
    # - alpha_p log h_1; with alpha_p = 0 the gap is alpha_r log 1e-12 = -27.63 alpha_r, halved between the two
    nu = gradient_labels(
        number([[1.0, 0.0]]), number([[0.5, 0.5]]).log(), number(0.01), number(0.0), number(1.0), 1, Costs()
    )
    shift = 0.01 * 12 * log(10) / 2
    assert nu[0].tolist() == pytest.approx([1 - shift, shift])


def test_the_projection_of_what_cannot_be_projected():
    """Losses of a run that diverges: not finite, or so large that rounding leaves no support."""
    assert torch.isnan(project_to_simplex(torch.tensor([torch.nan, 1.0, 2.0]))).any()
    for v in ([1e8, 3e7, 1.0], [1e9, 1e9, 1e9]):
        p = project_to_simplex(torch.tensor(v))
        assert p.shape == (3,)
        assert (p >= 0).all()


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=8))
def test_projection_gives_the_nearest_probability_vector(values):
    v = number(values)
    p = project_to_simplex(v)
    assert p.sum().item() == pytest.approx(1)
    assert (p >= 0).all()
    # optimality: v - p is constant on the support and not larger off it
    gap = v - p
    assert torch.allclose(gap[p > 0], gap[p > 0].max())
    assert (gap <= gap[p > 0].max() + 1e-9).all()


def test_costs_know_whether_the_closed_form_is_theirs():
    assert Costs().closed_form
    assert not Costs(regulariser=lambda log_h, _: log_h.exp().square().sum(-1)).closed_form


@given(st.integers(0, 10**6), st.sampled_from(["labels alone", "f_i", "F_i beside theta_i", "F_i alone", "prior"]))
def test_written_out_gradients_are_the_derivatives_of_the_costs(seed, kind):
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape):
        return torch.randn(2, *shape, generator=generator, dtype=torch.float64)

    models = 2 if kind in ("F_i beside theta_i", "prior") else 1
    log_h = torch.log_softmax(draw(models, 4, 3), -1).requires_grad_()
    batch = Samples(draw(4, 1), torch.softmax(draw(4, 3), -1), draw(4).abs(), draw(4).abs())
    cost = LocalCosts(batch, draw().abs(), draw().abs())
    if kind.startswith("F_i"):
        partner = None if models == 2 else torch.log_softmax(draw(4, 3), -1)
        cost = cost._replace(beta=torch.sigmoid(draw()), partner=partner)
    if kind == "labels alone":
        cost = LabelledCosts(batch)
    if kind == "prior":
        cost = PriorCosts(batch.target, batch.labelled, torch.log_softmax(draw(3), -1), torch.sigmoid(draw()))
    costs = cost(log_h)
    (expected,) = torch.autograd.grad(costs.sum(), log_h)
    given = differentiated(cost)
    assert given.by_hand
    with torch.no_grad():
        found, gradient = given.gradient(log_h.detach())
    assert torch.allclose(found, costs)
    assert torch.allclose(gradient, expected)
    assert torch.allclose(given.times(draw(models)).gradient(log_h.detach())[0], costs)
