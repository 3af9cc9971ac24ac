"""Gaps, estimates and Theorem 1 itself, against brute force and a run."""

from math import exp, log, sqrt

import numpy as np
import pytest
import torch
from torch import nn

from fedcpsl import Algorithm, InputError, Run, Work, prepare, simulate, theory
from fedcpsl.data.federation import LABELLED, TEST, UNLABELLED, Federation
from fedcpsl.schedule import DeviceRound, draw_active
from fedcpsl.simulation import initial_state
from fedcpsl.simulation.rounds import next_state
from fedcpsl.theory import Constants
from fedcpsl.theory.estimates import hessian_norm
from fedcpsl.trees import map_tensors

from .conftest import small_federation, small_model

RUN = Run(dtype="float64", processes=1)

# The gaps


def distributions(x, theta):
    """h(theta; x) of the small model, without any of the package's own code."""
    model = small_model().double()
    nn.utils.vector_to_parameters(theta, model.parameters())
    return torch.softmax(model(x), -1), list(model.parameters())


def plain_cost(h, target, labelled, alpha_p, alpha_r):
    """The cost of one device, written out with logarithms of probabilities."""
    y, nu, h_l, h_u = target[:labelled], target[labelled:], h[:labelled], h[labelled:]
    cost = -(y * h_l.log()).sum() / len(y) if len(y) else 0
    if len(nu):
        kl = torch.xlogy(nu, nu).sum() + (h_u * h_u.log()).sum() + 2 * len(nu) * log(h.shape[-1])
        cost = cost + (-alpha_p * (nu * h_u.log()).sum() + alpha_r * kl) / len(nu)
    return cost


def flat_gradient(cost, parameters):
    return torch.cat([g.flatten() for g in torch.autograd.grad(cost, parameters)])


def nearest_distribution(v):
    """By bisection for the shift that makes max(v - shift, 0) sum to 1."""
    low, high = v.min() - 1, v.max()
    for _ in range(100):
        middle = (low + high) / 2
        low, high = (middle, high) if (v - middle).clamp_min(0).sum() > 1 else (low, middle)
    return (v - low).clamp_min(0)


def plain_gap(state, alpha_p, alpha_r, beta, eta_v=None):
    """The gap's parts, Xi and the personal gap; eta_v for the gradient form."""
    device_data, change, xi, personal, gradient = state.setup.data, 0.0, 0.0, 0.0, 0
    total = int(device_data.start[-1])
    for device in range(state.setup.terms.devices):
        rows, n = device_data.all_rows(device), int(device_data.labelled[device])
        x, target, weight = device_data.x(rows), state.targets[rows], (rows.stop - rows.start) / total
        h, theta = distributions(x, state.server.theta)
        own = flat_gradient(plain_cost(h, target, n, alpha_p, alpha_r), theta)
        gradient = gradient + weight * own
        xi += weight * (own - state.devices.c[device]).square().sum().item()
        h = h.detach()
        h_lc, theta_lc = distributions(x, state.devices.theta_lc[device])
        mixed = plain_cost(beta * h_lc + (1 - beta) * h, target, n, alpha_p, alpha_r)
        personal += weight * flat_gradient(mixed, theta_lc).square().sum().item()
        for nu, p in zip(target[n:], h[n:], strict=True):
            power = p ** (alpha_p / alpha_r)
            new = power / power.sum()
            if eta_v:
                slope = (-alpha_p * p.log() + alpha_r * (nu.clamp_min(1e-12).log() + 1)) / (len(x) - n)
                new = nearest_distribution(nu - eta_v * slope)
            change += weight * (new - nu).square().sum().item()
    return gradient.square().sum().item(), change, personal, xi


@pytest.mark.parametrize("labels", ["closed_form", "gradient"])
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_gap_is_what_brute_force_finds(labels, executor):
    """Two of five devices are active in a round: the others' virtual pseudo-labels count all the same."""
    algorithm = Algorithm(alpha_p=0.6, alpha_r=0.4, beta=0.75, pseudo_labels=labels, eta_v=2.0)
    work, run = Work(rounds=3, active=2), Run(dtype="float64", executor=executor, processes=1)
    setup = prepare(small_federation(), small_model(), algorithm, work, run)
    for state in simulate(setup):
        found = theory.gap(state, L=3.0)
        norm, change, personal, xi = plain_gap(state, 0.6, 0.4, 0.75, 2.0 if labels == "gradient" else None)
        assert change > 1e-4
        assert found == pytest.approx((norm, change, norm + 31 * 3 / 64 * change, personal), rel=1e-9)
        assert theory.personal_gap(state) == pytest.approx(personal, rel=1e-9)
        assert theory.control_error(state) == pytest.approx(xi, rel=1e-9)


def test_personal_gap_of_two_phases():
    """The localized models come with the personal rounds, and so does their gap."""
    algorithm = Algorithm(alpha_p=0.6, alpha_r=0.4, beta=0.75)
    work = Work(rounds=2, active=2, personal_rounds=2, two_phase=True)
    for state in simulate(prepare(small_federation(), small_model(), algorithm, work, RUN)):
        found = theory.gap(state)
        if state.round <= 2:
            assert found.personal is None
        else:
            norm, change, personal, _ = plain_gap(state, 0.6, 0.4, 0.75)
            assert found == pytest.approx((norm, change, norm + 31 / 64 * change, personal), rel=1e-9)


def test_personal_gap_without_a_server():
    """Alone, a device predicts with its localized model, which is beta = 1."""
    algorithm = Algorithm(name="local-pseudo", alpha_p=0.6, alpha_r=0.4, beta=0.75)
    setup = prepare(small_federation(), small_model(), algorithm, Work(rounds=1, active=5), RUN)
    *_, state = simulate(setup)
    state = state._replace(devices=state.devices._replace(c=torch.zeros_like(state.devices.theta_lc)))
    assert theory.personal_gap(state) == pytest.approx(plain_gap(state, 0.6, 0.4, 1.0)[2], rel=1e-9)


def test_gap_without_pseudo_labels_or_personal_model():
    setup = prepare(small_federation(), small_model(), Algorithm(name="scaffold"), Work(), RUN)
    state = initial_state(setup)
    found = theory.gap(state)
    assert (found.label_change_sq, found.personal) == (0, None)
    assert found.total == found.grad_norm_sq == theory.objectives(state).grad_norm_sq > 0
    assert theory.personal_gap(state) is None


def tables(devices, features, scale=1.0):
    """A federation of scaled unit vectors: a device is (labels per feature, unlabelled samples per feature)."""
    x, y, device, role = [], [], [], []
    for i, (labels, unlabelled) in enumerate(devices):
        for feature in range(features):
            count = [*labels[feature], *[0] * unlabelled[feature]]
            x += [scale * np.eye(features)[feature]] * len(count)
            y += count
            device += [i] * len(count)
            role += [LABELLED] * len(labels[feature]) + [UNLABELLED] * unlabelled[feature]
        x, y, device, role = [*x, np.zeros(features)], [*y, 0], [*device, i], [*role, TEST]
    names = tuple(f"phone-{i}" for i in range(len(devices)))
    return Federation(np.array(x), np.array(y), np.array(device), np.array(role, np.int8), 2, names)


def linear(features, weight):
    model = nn.Linear(features, 2, bias=False).double()
    model.weight.data = torch.tensor(weight, dtype=torch.float64)
    return model


@pytest.mark.parametrize("labels", ["closed_form", "gradient"])
def test_gap_is_zero_at_a_stationary_point(labels):
    """Labelled samples predicted at their frequencies, unlabelled ones undecided on a feature of their own."""
    devices = [(([0, 0, 0, 1], [0, 1], []), (0, 0, 3)), (([0, 0, 0, 1], [1, 0], []), (0, 0, 5))]
    stationary = [[log(0.75), log(0.5), 0.0], [log(0.25), log(0.5), 0.0]]
    algorithm = Algorithm(alpha_p=0.5, alpha_r=0.5, pseudo_labels=labels)
    found = theory.gap(initial_state(prepare(tables(devices, 3), linear(3, stationary), algorithm, Work(), RUN)))
    assert found == pytest.approx((0, 0, 0, 0), abs=1e-28)
    moved = [[log(0.75), log(0.5), 0.1], [log(0.25), log(0.5), 0.0]]
    found = theory.gap(initial_state(prepare(tables(devices, 3), linear(3, moved), algorithm, Work(), RUN)))
    assert min(found) > 1e-6


# The estimate of L


def exact_norm(cost, theta):
    hessian = torch.autograd.functional.hessian(cost, theta.detach().clone())
    return torch.linalg.eigvalsh(hessian).abs().max().item()


def test_hessian_norm_of_a_matrix():
    # eigenvalues 3, -5 and 0: the largest by size is the negative one
    matrix = torch.tensor([[-1.0, 4.0, 0.0], [4.0, -1.0, 0.0], [0.0, 0.0, 0.0]], dtype=torch.float64)
    at = torch.ones(3, dtype=torch.float64)
    assert hessian_norm(lambda v: v @ matrix @ v / 2, at, 200, 1e-12) == pytest.approx(5)
    assert hessian_norm(lambda v: v @ matrix @ v / 2, at, 1) < 5
    assert hessian_norm(lambda v: v.sum() + 0 * v @ v, at) == 0


@pytest.mark.parametrize("dtype", ["float64", "float32"])
def test_lower_estimate_is_the_exact_norm_at_a_point(dtype):
    algorithm = Algorithm(alpha_p=0.6, alpha_r=0.4, beta=0.75)
    setup = prepare(small_federation(), small_model(), algorithm, Work(rounds=3), RUN)
    *_, state = simulate(setup)
    norms, personal_norms = [], []
    for device in range(setup.terms.devices):
        rows, n = setup.data.all_rows(device), int(setup.data.labelled[device])
        x, target = setup.data.x(rows), state.targets[rows]

        def h(theta, x=x):
            first, bias, second, other = theta.split([48, 8, 24, 3])
            hidden = torch.tanh(x @ first.view(8, 6).T + bias)
            return torch.softmax(hidden @ second.view(3, 8).T + other, -1)

        fixed = h(state.server.theta)
        given = (target, n, 0.6, 0.4)
        norms.append(exact_norm(lambda theta, h=h, g=given: plain_cost(h(theta), *g), state.server.theta))
        personal_norms.append(
            exact_norm(
                lambda theta, h=h, g=given, f=fixed: plain_cost(0.75 * h(theta) + 0.25 * f, *g),
                state.devices.theta_lc[device],
            )
        )
    if dtype == "float32":
        setup = prepare(small_federation(), small_model(), algorithm, Work(rounds=3), Run(processes=1))
        *_, state = simulate(setup)
    iterations, tolerance, close = (500, 1e-13, 1e-6) if dtype == "float64" else (50, 1e-4, 0.02)
    found = theory.lipschitz_lower_estimate(state, iterations, tolerance)
    assert found == pytest.approx((max(norms), max(personal_norms)), rel=close)
    assert found == theory.lipschitz_lower_estimate(state, iterations, tolerance), "the start vector differs"
    assert theory.lipschitz_lower_estimate(state, 2).smoothness <= max(norms) * (1 + 1e-5)


class Reshaping(nn.Linear):
    def forward(self, x):
        return super().forward(x.reshape(len(x), -1))  # which has no meaning for no samples


def test_lower_estimate_without_a_personal_model_or_data():
    """Device 3 has no labels, so nothing that FedAvg uses."""
    setup = prepare(small_federation(), Reshaping(6, 3), Algorithm(name="fedavg"), Work(), RUN)
    found = theory.lipschitz_lower_estimate(initial_state(setup))
    assert found.personal_smoothness is None
    assert found.smoothness > 0


# What a run tells


def test_constants_of_a_run():
    """Sizes (3, 5), (1, 7), (4, 2), (0, 6), (5, 0) in batches of 2 and 3: epochs of 2, 3, 2, 2 and 3 steps."""
    algorithm = Algorithm(gamma=0.5, eta_g=1.5)
    work = Work(active=2, amount=1, batch_labelled=2, batch_unlabelled=3)
    setup = prepare(small_federation(), small_model(), algorithm, work, RUN)
    # Q~ of 2 and 3 steps with gamma = 0.5: 1 + 1.5 and 1 + 1.5 + 1.75
    assert theory.constants_of(setup, L=7, sigma=3) == Constants(7, 5, 2, 1.5, 4.25, 2.5, 3, 5)
    heterogeneous = prepare(
        small_federation(), small_model(), Algorithm(gamma=0, eta_g=1.5), Work(unit="hlu", hlu=[2, 4]), RUN
    )
    found = theory.constants_of(heterogeneous, L=7)  # one step an epoch
    assert (found.Q_min, found.Q_max) == (2, 4)


def test_constants_of_a_run_need_one_eta_g():
    work = Work(active=2, unit="steps", amount=3)
    for rule, eta_g in (("mean_steps", 3), ("mean_effective_steps", 4.25)):
        setup = prepare(small_federation(), small_model(), Algorithm(gamma=0.5, eta_g=rule), work, RUN)
        assert theory.constants_of(setup, L=1).eta_g == pytest.approx(eta_g)
    setup = prepare(small_federation(), small_model(), Algorithm(), Work(unit="hlu"), RUN)
    with pytest.raises(InputError, match=r"1 to 5 steps.*give a number"):
        theory.constants_of(setup, L=1)
    setup = prepare(small_federation(), small_model(), Algorithm(name="apfl"), work, RUN)
    with pytest.raises(InputError, match="normalised"):
        theory.constants_of(setup, L=1)


# Theorem 1, on a problem whose L is known

ALPHA, LOWEST_NU, START = 0.2, 0.2, [[0.7, -0.7], [-0.7, 0.7]]  # the start is sure, and wrong
PHONES = [
    (([0, 1, 1, 1], [0, 0, 0, 1]), (2, 2)),
    (([1, 1, 1, 1, 0, 1], [1, 0, 0, 1, 0, 0]), (2, 2)),
    (([0, 1, 0], [0, 0, 1]), (3, 3)),
]


def smoothness_of(federation):
    """An L for Assumption 3 in a linear model of two classes with x'x averaging to the identity on either set.

    With logits z, h = softmax(z), s = z_0 - z_1 and p = h_0: the Hessian in z of -<y, log h> is p (1 - p) times
    [1 -1; -1 1], whose norm is 2; so at most 1/2. That of KL(h, 1/2) is p (1 - p) (1 - s tanh(s/2)) times the same:
    p (1 - p) <= 1/4, and p (1 - p) (s tanh(s/2) - 1) <= e^-s (s - 1) <= e^-2; so at most 1/2 too. As the mean of x x'
    is the identity, the Hessian of f_i in theta has norm a <= (1 + alpha_p + alpha_r)/2. Between theta and nu it is
    that of alpha_p/m_i sum_k -<nu_k, theta x_k>: b <= alpha_p/sqrt(m_i). In nu, d <= alpha_r/(m_i min nu).
    """
    norms = []
    for m in federation.sizes.unlabelled.tolist():
        a, b, d = (1 + 2 * ALPHA) / 2, ALPHA / sqrt(m), ALPHA / (m * LOWEST_NU)
        norms.append(np.linalg.norm([[a, b], [b, d]], 2).item())
    return max(norms)


def full_batches(setup, round, active):
    """The given devices, each with 1 to 3 steps over all that it has."""
    plan = []
    for device in active:
        steps = int(np.random.default_rng([round, device]).integers(1, 4))
        n, m = (int(count[device]) for count in setup.terms.sizes)
        plan.append(
            DeviceRound(
                device=device,
                steps=steps,
                labelled=np.tile(np.arange(n), (steps, 1)),
                unlabelled=np.tile(np.arange(m), (steps, 1)),
            )
        )
    return plan


def prepared(federation, L, eta, work):
    algorithm = Algorithm(
        eta=eta,
        eta_v=theory.eta_v_limit(L),
        eta_g=2.0,
        gamma=0.5,
        alpha_p=ALPHA,
        alpha_r=ALPHA,
        pseudo_labels="gradient",
    )
    return prepare(federation, linear(2, START), algorithm, work, RUN)


def with_full_batches():
    """A setup with the largest steps that Theorem 1 allows, and its constants."""
    federation = tables(PHONES, 2, scale=sqrt(2))
    L, work = smoothness_of(federation), Work(active=2, unit="steps", amount=3, batch_labelled=12, batch_unlabelled=6)
    c = theory.constants_of(prepared(federation, L, 1.0, work), L)
    eta = theory.eta_limit(c)
    return prepared(federation, L, eta, work), c, eta


def test_theorem_1_with_full_batches():
    """The mean gap is under the bound, and falls as 1/R as the bound does."""
    setup, c, eta = with_full_batches()
    state, gaps = initial_state(setup), []
    start = theory.start_of(state, c, eta)
    assert theory.lipschitz_lower_estimate(state).smoothness <= c.L
    for round in range(600):
        gaps.append(theory.gap(state, c.L).total)
        state = next_state(state, full_batches(setup, round, draw_active(0, round, range(3), 2)))
        assert min(state.nu(device).min().item() for device in range(3)) > LOWEST_NU, "L is too small"
    assert theory.lipschitz_lower_estimate(state).smoothness <= c.L
    for rounds in (1, 10, 40, 150, 600):
        assert np.mean(gaps[:rounds]) <= theory.gap_bound(c, eta, start, rounds)
    assert np.mean(gaps[:600]) <= 1.2 / 4 * np.mean(gaps[:150])
    # the bound says something here, and the mean gap is not under it for want of size: a factor of 8 lies between them
    bound = theory.gap_bound(c, eta, start, 600)
    assert bound < gaps[0]
    assert bound / 12 < np.mean(gaps)


def test_the_potential_falls_as_the_proof_says():
    """E[P^{r+1}] - P^r <= -(eta eta_g/4) norm(grad f)^2 - (31 m L/(64 N)) Phi, over all three pairs of devices."""
    setup, c, eta = with_full_batches()
    state = initial_state(setup)
    for round in range(40):
        if round % 13 == 0:
            P, found, after = theory.start_of(state, c, eta).potential, theory.gap(state, c.L), []
            for pair in ([0, 1], [0, 2], [1, 2]):
                devices = map_tensors(torch.clone, state.devices)  # a round writes into what it is given
                copy = state._replace(devices=devices, targets=state.targets.clone())
                after.append(theory.start_of(next_state(copy, full_batches(setup, round, pair)), c, eta).potential)
            fall = eta * c.eta_g / 4 * found.grad_norm_sq + 31 * c.m * c.L / (64 * c.N) * found.label_change_sq
            assert np.mean(after) - P <= -fall
        state = next_state(state, full_batches(setup, round, draw_active(0, round, range(3), 2)))


def test_theorem_1_with_minibatches():
    """Draws as in any run: the bound then has its noise, and is on the mean of several runs."""
    federation, size = tables(PHONES, 2, scale=sqrt(2)), 64
    work = Work(rounds=60, active=2, unit="steps", amount=2, batch_labelled=size, batch_unlabelled=size)
    # A sample's gradient is (h - y) x' with |h - y|^2 <= 2 and |x|^2 = 2: its square is at most 4. Of an unlabelled
    # one, alpha_p (h - nu) + alpha_r p (1 - p) s (1, -1) with p (1 - p) s <= 1/e: at most (2 alpha (1 + 1/e))^2.
    variance = (4 + (2 * ALPHA * (1 + exp(-1))) ** 2) / size
    L = smoothness_of(federation)
    c = theory.constants_of(prepared(federation, L, 1.0, work), L, sigma=sqrt(variance * 2 * size))
    eta, runs = theory.eta_limit(c), []
    for seed in range(3):
        setup = prepared(federation, L, eta, work)
        setup = setup._replace(terms=setup.terms._replace(seed=seed))
        runs.append([theory.gap(state, L).total for state in simulate(setup)][:60])
    mean = np.mean(runs, 0)
    start = theory.start_of(initial_state(setup), c, eta)
    for rounds in (5, 15, 60):
        assert np.mean(mean[:rounds]) <= theory.gap_bound(c, eta, start, rounds)
    assert theory.gap_bound(c, eta, start, 60) / 20 < np.mean(mean)
    assert len({run[-1] for run in runs}) == 3, "all runs had the same draws"
