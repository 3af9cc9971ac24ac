"""FedCPSL's successor: its formulas by hand, and what it does to devices that share nothing but a server."""

from dataclasses import replace
from math import log

import numpy as np
import pytest
import torch

from fedcpsl import prepare, simulate
from fedcpsl.algorithms import fedcpsl2
from fedcpsl.config import Run, Work
from fedcpsl.data.federation import Federation
from fedcpsl.evaluation import evaluate
from fedcpsl.prior import em_prior, log_evidence, mixed_with_uniform, smoothed, smoothed_by_evidence
from fedcpsl.problem import PriorCosts, prior_costs
from fedcpsl.simulation import initial_state
from fedcpsl.simulation.rounds import draw_plan, next_state
from fedcpsl.trees import map_tensors

from .conftest import small_federation


def test_step_sizes_never_fall_to_zero():
    method = method_of()._replace(rounds=50_000)
    rates = fedcpsl2.decay(method, torch.tensor([0.0, 25_000.0, 49_999.0, 60_000.0]))
    assert rates[:2].tolist() == pytest.approx([1.0, 0.5], abs=1e-6)
    assert rates[2] == rates[3] == pytest.approx((np.pi / 100_000) ** 2, rel=1e-4)  # sin^2 of pi / 2R; not 0 in float32


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_the_frozen_partner_of_the_mixture_is_in_evaluation_mode(executor):
    """With beta = 0 the cost of theta_lc is that of theta_i alone, so no dropout mask changes it."""
    torch.manual_seed(0)
    layers = torch.nn.Linear(6, 12), torch.nn.Dropout(0.5), torch.nn.Tanh(), torch.nn.Linear(12, 3)
    settings = fedcpsl2.Settings(eta=0.1, beta=0.0, independence=0.0)
    run = Run(executor=executor, dtype="float64", processes=1, device="cpu")
    setup = prepare(small_federation(), torch.nn.Sequential(*layers), settings, Work(2, 3, "steps", 1), run)
    rng, found = np.random.default_rng(0), []
    for _ in range(2):
        state = initial_state(setup)
        plan = [task._replace(keys=rng.integers(0, 2**62, task.keys.shape)) for task in draw_plan(state)]
        found.append({device: costs.tolist() for device, costs in next_state(state, plan).costs.items()})
    assert [own for _, own in found[0].values()] == pytest.approx([own for _, own in found[1].values()], abs=1e-12)
    learning = [device for device, (general, _) in found[0].items() if general]  # one has nothing to learn from yet
    assert len(learning) == 2
    for device in learning:
        assert found[0][device][0] != pytest.approx(found[1][device][0], abs=1e-6)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def hyper_of(shape=(), **numbers):
    """Numbers with some set and the others 1."""
    return fedcpsl2.Hyper(
        *(torch.full(shape, numbers.get(name, 1.0), dtype=torch.float64) for name in fedcpsl2.Hyper._fields)
    )


def device_of(theta, **fields):
    """A device that has been visited once, with some fields set."""
    given = {"delta": theta * 0, "c": theta * 0, "pi": number([0.5, 0.5]), "visits": number(1.0), "beta": number(0.5)}
    zeros = {name: number(0.0) for name in ("spacing", "score", "evidence")}
    return fedcpsl2.Device(**(zeros | given | fields))


def method_of(setup=None, **rules):
    given = (setup or make()).terms.method
    return given._replace(rules=given.rules._replace(**rules))


def test_the_prior_of_labels():
    # 3, 1 and 0 labels, each with one more: 4/7, 2/7, 1/7
    assert smoothed(number([3.0, 1, 0]), number(1.0)).tolist() == pytest.approx([4 / 7, 2 / 7, 1 / 7])
    assert smoothed(number([0.0, 0]), number(1.0)).tolist() == [0.5, 0.5]


def test_the_evidence_of_counts():
    # two classes, s = 1: all counts of N samples in order are as likely, 1 / ((N + 1) C(N, n)): n = (2, 1): 1/12
    assert log_evidence(number([2.0, 1]), number([1.0])).exp().tolist() == pytest.approx([1 / 12])
    # s = 0.5: B(2.5, 1.5) / B(0.5, 0.5) = 1/16
    assert log_evidence(number([2.0, 1]), number([1.0, 0.5])).exp().tolist() == pytest.approx([1 / 12, 1 / 16])


def test_counts_decide_how_much_they_are_smoothed():
    two = smoothed_by_evidence(number([4.0, 3, 0, 0, 0, 0, 0, 0, 0, 0]))
    assert two[:2].sum() > 0.85  # few classes: the others are not there
    many = smoothed_by_evidence(number([2.0, 1, 2, 1, 2, 1]))
    assert many.max() < 1.2 / 6  # few counts of all classes: near uniform
    thousands = smoothed_by_evidence(number([2000.0, 1000, 2000, 1000, 2000, 1000]))
    assert thousands.tolist() == pytest.approx([2 / 9, 1 / 9] * 3, rel=1e-2)  # many counts: their frequencies
    assert smoothed_by_evidence(number([0.0] * 4)).tolist() == pytest.approx([0.25] * 4)
    in_rows = smoothed_by_evidence(torch.stack([many * 9, many * 0]))
    assert in_rows.shape == (2, 6)
    assert torch.allclose(in_rows.sum(-1), number([1.0, 1.0]))


def test_a_step_of_em():
    labels, one = number([1.0, 0]), number([1.0])

    def after_one_step(labels, log_h, there, most=10.0):
        return em_prior(labels, log_h, there, number(1.0), number(most), 1).tolist()

    # n = (1, 0), s = 1: pi = (2/3, 1/3). A sample with h = (0.5, 0.5) has the posterior pi: counts 2 + 2/3 and 1 + 1/3
    log_h = number([[0.5, 0.5]]).log()
    assert after_one_step(labels, log_h, one) == pytest.approx([2 / 3, 1 / 3])
    # h = (0.2, 0.8): (0.2 2/3, 0.8 1/3) / 0.4 = (1/3, 2/3); counts 2 + 1/3 and 1 + 2/3, of 4
    log_h = number([[0.2, 0.8]]).log()
    assert after_one_step(labels, log_h, one) == pytest.approx([7 / 12, 5 / 12])
    # four such samples that count as two: 2 + 2/3 and 1 + 4/3, of 5
    assert after_one_step(labels, log_h.expand(4, 2), one.expand(4), 2.0) == pytest.approx([8 / 15, 7 / 15])
    # rows that fill gaps do not count
    padded = torch.cat([log_h, number([[0.9, 0.1]]).log()])
    assert after_one_step(labels, padded, number([1.0, 0])) == pytest.approx([7 / 12, 5 / 12])
    # without labels EM would feed on itself
    assert after_one_step(number([0.0, 0]), log_h, one) == [0.5, 0.5]


def test_a_prior_that_is_trusted_less():
    # (1 - 0.5) (0.8, 0.2) + 0.5 / 2
    assert mixed_with_uniform(number([0.8, 0.2]), number(0.5)).tolist() == pytest.approx([0.65, 0.35])


def test_step_sizes_fall_along_a_cosine():
    method = method_of()._replace(rounds=4)
    rates = [fedcpsl2.decay(method, number(float(r))).item() for r in range(6)]
    assert rates == pytest.approx([1, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2, *[(1 - 0.5**0.5) / 2] * 2])
    constant = method._replace(rules=method.rules._replace(decay=False))
    assert fedcpsl2.decay(constant, number(3.0)) == 1
    sent = fedcpsl2.Broadcast(None, None, number(0.5))
    sizes = fedcpsl2.step_sizes(method, hyper_of(eta=0.1, eta_lc=0.2), sent.rate)
    assert sizes.tolist() == pytest.approx([0.05, 0.1])
    personal = fedcpsl2.step_sizes(method._replace(personal_round=True), hyper_of(eta=0.1, eta_lc=0.2), sent.rate)
    assert personal.tolist() == pytest.approx([0, 0.2])


def test_control_variates_divide_by_the_rounds_step_size():
    """After a round with half of the step size, c_i is the mean gradient as with the whole."""
    method = method_of()
    theta, delta = number([1.0, 2.0]), number([-0.3, 0.6])
    device = device_of(theta)
    upload = fedcpsl2.Upload(delta, torch.tensor(3))
    hyper = hyper_of(eta=0.1, gamma=0.0)
    sent = fedcpsl2.Broadcast(theta, number([0.0, 0.0]), number(0.5))
    expected = [2, -4]  # 0 - (0 + delta / (0.1 0.5 3))
    assert fedcpsl2.commit(method, hyper, sent, device, upload).c.tolist() == pytest.approx(expected)
    server = fedcpsl2.Server(theta, sent.c, number(1.0), sent.rate)
    added = fedcpsl2.contribution(method, hyper, upload, number(1.0))
    assert fedcpsl2.server_c(server, added).tolist() == pytest.approx(expected)  # the only device: c = c_1


def test_teachers_and_weights_of_pseudo_labels():
    """theta says class 0 with 0.9, theta_lc class 1 with 0.6: the mixture says class 0 with 0.65."""
    log_h = number([[[0.9, 0.1]], [[0.4, 0.6]]]).log()

    class Fixed:
        def outputs_at(self, *_):
            return log_h

    method = method_of()._replace(network=Fixed())
    local = fedcpsl2.Local((), (), (), None, number([0.5, 0.5]).log(), None, number(0.5), None, None)

    def answer(tau, **rules):
        given = method._replace(rules=method.rules._replace(**rules))
        labels, weights = fedcpsl2.pseudo_labels(given, hyper_of(tau=tau), local, torch.zeros(1, 1))
        return labels.argmax().item(), weights.item()

    assert answer(0.6) == (0, 1)
    assert answer(0.7) == (0, 0)
    assert answer(0.8, teacher="global") == (0, 1)
    assert answer(0.5, teacher="localized") == (1, 1)
    assert answer(0.7, soft_weights=True) == (0, pytest.approx(0.65))


def test_personal_rounds_keep_theta_and_train_the_rest():
    settings = fedcpsl2.Settings(eta=0.05)
    states = [
        map_tensors(torch.clone, (s.server, s.devices)) for s in simulate(make(settings, rounds=3, personal_rounds=2))
    ]
    (server, before), (same, after) = states[3], states[5]
    assert torch.equal(server.theta, same.theta)
    assert torch.equal(before.c, after.c)
    assert (before.delta != after.delta).any(1).all()


def test_devices_alone_never_hear_of_a_server():
    settings = fedcpsl2.Settings(name="fedcpsl2-alone", eta=0.05)
    *_, last = simulate(make(settings))
    assert torch.equal(last.server.theta, last.setup.terms.method.network.initial)
    assert last.uplink_bytes == last.downlink_bytes == 0
    assert evaluate(last).personal.mean > 0.5
    assert evaluate(last).general is None


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
    personal_rounds = run.pop("personal_rounds", 0)
    rounds = run.pop("rounds", 12)
    work = Work(rounds, 3, "steps", 8, batch_labelled=8, batch_unlabelled=8, personal_rounds=personal_rounds)
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
    assert torch.allclose(state.devices.pi, smoothed_by_evidence(counts))
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
    visit = setup.data.visit(0)._replace(labels=number([2.0, 1, 0, 0, 0, 0]))
    first = fedcpsl2.prepare_visit(method, hyper, sent, state.device(0), visit)
    assert torch.allclose(first.pi, smoothed_by_evidence(visit.labels))
    second = fedcpsl2.prepare_visit(method, hyper, sent, first, visit)
    assert not torch.allclose(second.pi, first.pi)
    assert (first.visits.item(), second.visits.item()) == (1, 2)
    off = fedcpsl2.prepare_visit(method_of(setup, prior="off"), hyper, sent, first, visit)
    assert torch.allclose(off.pi, number([1 / 6] * 6))


def test_the_prior_and_the_unlabelled_samples_pay():
    """On devices of two classes, which one of the other four never belongs to."""
    best = fedcpsl2.Settings(eta=0.15)
    found = {}
    for name, settings in {"all": best, "no prior": replace(best, prior="off", beta=0.0)}.items():
        *_, last = simulate(make(settings, executor="vectorised", rounds=30))
        found[name] = evaluate(last).personal.mean
    assert found["all"] > 0.85
    assert found["all"] > found["no prior"] + 0.1


def test_what_a_device_predicts_follows_the_general_model():
    """Its own model is theta plus its change: new with every theta, also where the device was not active."""
    states = [map_tensors(torch.clone, (state.server, state.devices)) for state in simulate(make())]
    for server, devices in states[1:]:
        own = fedcpsl2.own_model(method_of(), hyper_of(kappa=0.5), devices, server.theta)
        assert torch.allclose(own, server.theta + 0.5 * devices.delta)
