"""Devices on their own, personal rounds, two phases, labels from the mixture, warm-up, matched steps."""

from dataclasses import replace

import pytest
import torch
from torch.func import functional_call

from fedcpsl import config
from fedcpsl.errors import InputError
from fedcpsl.evaluation import evaluate
from fedcpsl.problem import Costs, Samples, closed_form_labels, local_cost, mixture
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fedcpsl.simulation import initial_state, prepare, simulate
from fedcpsl.simulation.rounds import draw_plan

from .conftest import needs_fork, small_federation, small_model
from .test_conformance import WORK, assert_equal, final, make

PERSONAL = replace(WORK, personal_rounds=2)
TWO_PHASE = replace(WORK, personal_rounds=2, two_phase=True)


def states(setup):
    """Every state, with its tensors copied: the next round overwrites them."""
    for state in simulate(setup):
        devices = type(state.devices)(*(t.clone() for t in state.devices))
        yield state._replace(devices=devices, targets=state.targets.clone())


def test_a_device_on_its_own_is_fedcpsl_whose_mixture_is_all_its_own():
    """Labels alone, beta = 1: theta_lc never looks at theta. `local` draws the same samples as often."""
    same = {"beta": 1.0, "unlabelled": False}
    work = replace(WORK, matched_steps=True)
    alone, together = final(make("local", work=WORK)), final(make("fedcpsl", work=work, **same))
    assert torch.allclose(alone.devices.theta_lc, together.devices.theta_lc, atol=1e-12)
    assert (alone.uplink_bytes, alone.downlink_bytes) == (0, 0)
    assert alone.steps == together.steps
    assert torch.equal(alone.server.theta, initial_state(alone.setup).server.theta)


def test_a_device_on_its_own_labels_with_its_own_model():
    setup = make("local-pseudo", work=replace(WORK, loss_rate=0.0))
    *_, before, after = states(setup)
    network = setup.terms.method.network
    (task, *_) = [t for t in draw_plan(before) if setup.terms.sizes.unlabelled[t.device]]
    x = setup.data.x(setup.data.unlabelled_rows(task.device))
    hyper = before.hyper(task.device)
    expected = closed_form_labels(
        network.log_probabilities(before.devices.theta_lc[task.device], x), hyper.alpha_p, hyper.alpha_r
    )
    assert torch.allclose(after.nu(task.device), expected, atol=1e-12)


def test_a_device_on_its_own_has_no_global_model_to_show():
    evaluation = evaluate(final(make("local")))
    assert evaluation.general is None
    assert evaluation.union is None
    assert evaluation.personal == evaluation.localized
    assert evaluation.losses["train"] is None
    assert evaluation.losses["train_personal"] > 0


@pytest.mark.parametrize("options", [{}, {"slots": 2}, pytest.param({"processes": 2}, marks=needs_fork)], ids=str)
@pytest.mark.parametrize("work", [PERSONAL, TWO_PHASE], ids=["personal", "two-phase"])
@pytest.mark.parametrize("model", ["plain", "dropout"])
def test_executors_agree_on_personal_rounds(work, model, options):
    def network():
        torch.manual_seed(0)
        layers = [torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Dropout(0.3), torch.nn.Linear(8, 3)]
        return torch.nn.Sequential(*layers) if model == "dropout" else small_model()

    reference = final(make("fedcpsl", work=work, model=network()))
    assert_equal(reference, final(make("fedcpsl", "vectorised", work=work, model=network(), **options)))


def test_personal_rounds_train_every_localized_model_and_nothing_else():
    setup = make("fedcpsl", work=PERSONAL)
    seen = list(states(setup))
    last, personal, end = seen[-3], seen[-2], seen[-1]
    assert [s.round for s in (last, personal, end)] == [4, 5, 6]
    assert torch.equal(last.server.theta, end.server.theta)
    assert torch.equal(last.server.c, end.server.c)
    assert torch.equal(last.devices.c, end.devices.c)
    assert torch.equal(last.targets, end.targets)
    trained = setup.terms.hyper.beta > 0  # at beta = 0 it has no part in the mixture
    moved = (end.devices.theta_lc - last.devices.theta_lc).abs().amax(1) > 0
    assert torch.equal(moved, trained)
    assert last.uplink_bytes == end.uplink_bytes
    size = last.server.theta.numel() * 8
    assert end.downlink_bytes - last.downlink_bytes == 5 * size  # theta^R, once to each


def test_a_personal_round_by_hand():
    """Plain PyTorch on one device: momentum from zero, the mixture with h(theta^R), nu as it was."""
    setup = make("fedcpsl", work=PERSONAL)
    seen = list(states(setup))
    before, after = seen[-3], seen[-2]
    task = draw_plan(before)[0]
    assert task.personal
    i, hyper, network = task.device, before.hyper(task.device), setup.terms.method.network
    start, n = int(setup.data.start[i]), int(setup.data.labelled[i])
    theta_lc, mu = before.devices.theta_lc[i].clone(), torch.zeros_like(before.server.theta)
    for t in range(task.steps):
        rows = torch.cat([torch.from_numpy(task.labelled[t]) + start, torch.from_numpy(task.unlabelled[t]) + start + n])
        labelled = torch.tensor([1 / 3] * 3 + [0] * 4, dtype=torch.float64)
        unlabelled = torch.tensor([0] * 3 + [1 / 4] * 4, dtype=torch.float64)
        x = setup.data.inputs.take(setup.data.source[rows])
        moving = theta_lc.clone().requires_grad_()
        log_h = torch.log_softmax(functional_call(network.module, network.named(moving), (x,)), -1)
        mixed = mixture(log_h, network.log_probabilities(before.server.theta, x), hyper.beta)
        samples = Samples(x, before.targets[rows], labelled, unlabelled)
        cost = local_cost(mixed, samples, hyper.alpha_p, hyper.alpha_r, Costs())
        (gradient,) = torch.autograd.grad(cost, moving)
        mu = hyper.gamma * mu + gradient
        theta_lc = theta_lc - hyper.eta_lc * mu
    assert torch.allclose(after.devices.theta_lc[i], theta_lc, atol=1e-12)


def test_two_phases():
    """theta as without personal models; then every device labels at theta^R and starts from theta^0."""
    setup = make("fedcpsl", work=TWO_PHASE)
    seen = list(states(setup))
    without = final(make("fedcpsl", work=WORK, personal=False))
    theta_0, last, first, end = seen[0].server.theta, seen[4], seen[5], seen[6]
    assert torch.allclose(last.server.theta, without.server.theta, atol=1e-12)
    assert (last.devices.theta_lc == theta_0).all()
    assert evaluate(last).localized is None
    assert evaluate(end).localized is not None
    network = setup.terms.method.network
    for i in range(5):
        x = setup.data.x(setup.data.unlabelled_rows(i))
        if len(x):
            log_h = network.log_probabilities(last.server.theta, x)
            expected = closed_form_labels(log_h, setup.terms.hyper.alpha_p[i], setup.terms.hyper.alpha_r[i])
            assert torch.allclose(first.nu(i), expected, atol=1e-12)
    assert torch.equal(first.targets, end.targets)


def test_labels_from_the_mixture():
    setup = make("fedcpsl", labels_from="mixture", work=replace(WORK, loss_rate=0.0))
    *_, before, after = states(setup)
    network = setup.terms.method.network
    for task in draw_plan(before):
        x = setup.data.x(setup.data.unlabelled_rows(task.device))
        if len(x):
            hyper = before.hyper(task.device)
            own = network.log_probabilities(before.devices.theta_lc[task.device], x)
            mixed = mixture(own, network.log_probabilities(before.server.theta, x), hyper.beta)
            expected = closed_form_labels(mixed, hyper.alpha_p, hyper.alpha_r)
            assert torch.allclose(after.nu(task.device), expected, atol=1e-12)
    assert_equal(after, final(make("fedcpsl", "vectorised", labels_from="mixture", work=replace(WORK, loss_rate=0.0))))


def test_while_a_device_warms_up_it_uses_no_unlabelled_terms():
    never = final(make("fedcpsl", warm_up=99))
    assert_equal(never, final(make("fedcpsl", alpha_p=0.0, alpha_r=0.0))._replace(targets=never.targets))
    uniform = never.targets[never.setup.data.unlabelled_rows(0)]
    assert torch.allclose(uniform, torch.full_like(uniform, 1 / 3))
    assert evaluate(never).pseudo_label_accuracy is None
    some = final(make("fedcpsl", warm_up=2))
    assert_equal(some, final(make("fedcpsl", "vectorised", warm_up=2)))
    for i in range(5):
        relabelled = not torch.equal(some.nu(i), some.setup.data.one_hot[some.setup.data.unlabelled_rows(i)])
        assert relabelled == (some.active_rounds[i] > 2 and len(some.nu(i)) > 0)
    assert any(some.active_rounds > 2)


def test_matched_steps_count_all_samples():
    plain, matched = (final(make("apfl", work=replace(WORK, matched_steps=m))) for m in (False, True))
    fedcpsl = final(make("fedcpsl"))
    assert plain.steps < matched.steps
    without_labels = 3  # works in FedCPSL, and has nothing for APFL
    assert matched.active_rounds[without_labels] == 0
    assert matched.steps <= fedcpsl.steps


@pytest.mark.parametrize("kept", [2, 5])
def test_modes_resume_bit_identical(kept, tmp_path):
    setup = make("fedcpsl", "vectorised", work=TWO_PHASE, warm_up=1)
    rounds = simulate(setup)
    for _ in range(kept + 1):
        state = next(rounds)
    save_checkpoint(tmp_path, state)
    assert_equal(final(setup, load_checkpoint(checkpoints(tmp_path)[-1], setup)), final(setup), tolerance=0)


@pytest.mark.parametrize(
    ("algorithm", "work", "words"),
    [
        ({}, {"two_phase": True}, "give work.personal_rounds too"),
        ({"name": "fedavg"}, {"personal_rounds": 1}, "fedavg has no personal model"),
        ({"name": "local"}, {"personal_rounds": 1}, "local has no server"),
        ({"labels_from": "mixture"}, {"two_phase": True, "personal_rounds": 1}, "label with the global model"),
        ({"name": "local", "control_variates": True}, {}, "leave its parts"),
    ],
)
def test_modes_that_mean_nothing_are_refused(algorithm, work, words):
    with pytest.raises(InputError, match=words):
        prepare(small_federation(), small_model(), config.Algorithm(**algorithm), config.Work(**work))
