"""FedHAR, and samples in the order of time: recordings, runs of consecutive windows, and who keeps them."""

import json
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcpsl import config
from fedcpsl.algorithms import fedhar
from fedcpsl.averaging import adam_direction, adam_moments
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import from_function
from fedcpsl.data.sources import har, load_federation
from fedcpsl.errors import InputError
from fedcpsl.evaluation import evaluate
from fedcpsl.federation import serve
from fedcpsl.federation.device import load_device_state
from fedcpsl.federation.local_training import local_data_from
from fedcpsl.federation.privacy import Protection, protect
from fedcpsl.federation.robustness import Limits
from fedcpsl.federation.terms import terms_of
from fedcpsl.schedule import Draw, Drawn, Sizes, Work, draw_tasks, run_starts, runs_from
from fedcpsl.simulation import initial_state, prepare
from fedcpsl.simulation.rounds import draw_plan, next_state
from fedcpsl.trees import leaves

from . import faulty
from .conftest import needs_fork, small_federation, small_model
from .small_runs import answers_of, ask
from .test_conformance import WORK, assert_equal, final, make

SHORT = {"T": 3, "s_max": 0.5, "R_s": 2, "clip_u": 0.05}
TUNED = replace(WORK, personal_rounds=2)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


# Runs.


@settings(max_examples=100)
@given(st.lists(st.integers(0, 6), max_size=5), st.integers(2, 4))
def test_runs_stay_within_one_recording(lengths, size):
    recording = np.repeat(np.arange(len(lengths)), lengths)
    expected = [
        first for first in range(len(recording) - size + 1) if len(set(recording[first : first + size].tolist())) == 1
    ]
    assert run_starts(np.array(lengths, np.int64), size).tolist() == expected


def test_every_run_is_drawn_and_no_other():
    sizes, run = Sizes(np.array([3, 0]), np.array([7, 2])), Draw("run", of="runs", size=3)
    work, lengths = Work(2, "steps", 200, (1, 1), 4, 4, 0.0), [np.array([4, 3]), np.array([2])]
    first, second = draw_tasks(
        1, 0, [0, 1], sizes, work, unlabelled=True, dropout=True, extra=[run], recordings=lengths
    )
    assert np.unique(first.extra["run"].rows, axis=0).tolist() == [[0, 1, 2], [1, 2, 3], [4, 5, 6]]
    assert first.extra["run"].keys.shape == (200, 3)
    assert second.extra["run"].rows.shape == (200, 0)  # it has too few
    fewer = draw_tasks(
        1, 0, [0], sizes, work._replace(amount=5), unlabelled=True, dropout=False, extra=[run], recordings=lengths
    )
    assert np.array_equal(fewer[0].extra["run"].rows, first.extra["run"].rows[:5])
    assert runs_from(np.array([2, 5]), 2).tolist() == [[2, 3], [5, 6]]


# Data that keep recordings.


def windows(path=None):
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(60, 2, 5)).astype(np.float32), np.arange(60) % 3
    arrays = {"x": x, "y": y, "device": np.repeat([0, 1], 30), "recording": np.repeat(np.arange(6), 10)}
    if path:
        np.savez(path, **arrays)
    return arrays


def lengths_of(federation):
    return [own.tolist() for own in federation.recordings]


def test_arrays_and_files_keep_recordings(tmp_path):
    arrays = windows(tmp_path / "mine.npz")
    given_in = Federation.from_arrays(**arrays, labelled=0.5, test_fraction=0.0)
    for own, count in zip(lengths_of(given_in), given_in.sizes.unlabelled, strict=True):
        assert len(own) == 3  # each device has three recordings, and labels in all of them
        assert sum(own) == count
    data = config.Data(file=str(tmp_path / "mine.npz"), labelled=0.5, test=0.2)
    assert sum(map(sum, lengths_of(load_federation(data, 0)))) > 10
    without = Federation.from_arrays(**{name: t for name, t in arrays.items() if name != "recording"})
    assert without.recordings is None
    with pytest.raises(InputError, match="recording has shape"):
        Federation.from_arrays(**arrays | {"recording": np.zeros(3)})


def test_recordings_follow_their_samples_into_other_splits(tmp_path):
    """By classes, where some samples have no device, and with a saved split."""
    from fedcpsl.data.federation import federate
    from fedcpsl.data.sources import assign_devices, load_source, reuse_split, shares, split_bytes

    windows(tmp_path / "mine.npz")
    data = config.Data(
        file=str(tmp_path / "mine.npz"),
        dataset="own",
        partition="classes",
        devices=2,
        classes_per_device=1,
        labelled=0.5,
    )
    source = assign_devices(load_source(data), data, 0)
    made = federate(source, shares(data), normalise=False, seed=0)
    held = source.device >= 0
    assert not held.all()
    assert np.array_equal(made.recording, source.recording[held])
    (tmp_path / "split.npz").write_bytes(split_bytes(source, made))
    again = reuse_split(tmp_path / "split.npz", load_source(data), normalise=False)
    assert lengths_of(again) == lengths_of(made)


def test_the_data_set_har_has_recordings(tmp_path):
    rng = np.random.default_rng(0)
    arrays = {
        "x": rng.integers(-9, 9, (12, 8, 6)).astype(np.int16),
        "y": np.arange(12) % 2,
        "user": np.repeat([1, 2], 6),
        "exp": np.repeat([1, 2, 3, 4], 3),
        "scale": np.ones(6),
        "classes": np.array(["WALKING", "SITTING"]),
    }
    (tmp_path / "har").mkdir()
    np.savez(tmp_path / "har" / "har_windows.npz", **arrays)
    assert har([tmp_path]).recording.tolist() == arrays["exp"].tolist()


def test_without_recordings_it_says_what_is_missing():
    federation = replace(small_federation(), recording=None)
    with pytest.raises(InputError, match="give an array `recording`"):
        make("fedhar", federation=federation)
    made = from_function(lambda _: (np.zeros((3, 6)), np.zeros(3, int)), devices=5, classes=3, labelled=1, unlabelled=2)
    with pytest.raises(InputError, match="give an array `recording`"):
        make("fedhar", federation=made)


# Numbers worked out by hand.


def test_temporal_variation():
    """Outputs (1, 0), (3, 0), (3, 4): squared differences 4, 0, 0, 16, mean 5; zero where there is no run."""
    outputs = number([[[[1.0, 0.0], [3.0, 0.0], [3.0, 4.0]]]] * 2)
    assert fedhar.temporal_variation(number([1.0, 0.0]), outputs).tolist() == [[5.0], [0.0]]


def test_clipping_is_over_all_leaves_of_a_slot():
    """|(3, 4)| = 5: to norm 1 that is (0.6, 0.8); norm 10 leaves it; zero stays zero."""
    leaves = number([[3.0], [3.0], [0.0]]), number([[[4.0]], [[4.0]], [[0.0]]])
    one, other = fedhar.clip(leaves, number([1.0, 10.0, 1.0]))
    assert one.flatten().tolist() == pytest.approx([0.6, 3.0, 0.0])
    assert other.flatten().tolist() == pytest.approx([0.8, 4.0, 0.0])


def test_two_steps_of_adam():
    """g = 1, then 3: m = 0.1, 0.39; v = 0.01, 0.0999; 0.39 / 0.19 over sqrt(0.0999 / 0.0199) = 2.052632 / 2.240558."""
    m, v = adam_moments(number(0.0), number(0.0), number(1.0), fedhar.BETAS)
    assert adam_direction(m, v, number(1.0), fedhar.BETAS).item() == pytest.approx(1.0, abs=1e-7)
    m, v = adam_moments(m, v, number(3.0), fedhar.BETAS)
    assert (m.item(), v.item()) == pytest.approx((0.39, 0.0999))
    assert adam_direction(m, v, number(2.0), fedhar.BETAS).item() == pytest.approx(0.916125, abs=1e-6)


def test_the_weight_of_the_temporal_gradient_grows():
    chosen = fedhar.Settings(s_max=0.3, R_s=3)
    found = [fedhar.temporal_weight(chosen, number(float(r))).item() for r in (0, 1, 3, 9)]
    assert found == pytest.approx([0.0, 0.1, 0.3, 0.3])


@pytest.mark.parametrize(
    ("sent", "share", "expected", "came"),
    [
        ([2.0, 1.0], 0.25, [0.75 * 2 + 0.25 * 8], True),  # gL = 4/2, gU = 8/1
        ([2.0, 0.0], 0.25, [2.0], True),
        ([0.0, 1.0], 0.25, [8.0], True),
        ([0.0, 1.0], 0.0, None, False),
        ([0.0, 0.0], 0.25, None, False),
    ],
)
def test_what_came_is_joined(sent, share, expected, came):
    sums = tuple(number([value]) if n else number([0.0]) for value, n in zip((4.0, 8.0), sent, strict=True))
    gradient, found = fedhar.joint_gradient(fedhar.Sum(sums, number(sent)), number(share))
    assert found.item() == came
    if came:
        assert gradient.tolist() == pytest.approx(expected)


def linear(weight_decay=0.0):
    """theta = 0; one sample x = 2 of class 0, and two windows in a recording, x = 0 and 1."""
    model = nn.Linear(1, 2).double()
    with torch.no_grad():
        model.weight.zero_()
        model.bias.zero_()
    x, role = np.array([[2.0], [0.0], [1.0]]), np.array([0, 1, 1], np.int8)
    federation = Federation(
        x, np.array([0, -1, -1]), np.zeros(3, int), role, 2, ("phone",), recording=np.zeros(3, np.int64)
    )
    chosen = fedhar.Settings(eta=0.5, T=2, s_max=1.0, R_s=1, weight_decay=weight_decay, eta_lc=0.25)
    work = config.Work(rounds=1, active=1, unit="steps", amount=1, personal_rounds=1)
    return prepare(federation, model, chosen, work, config.Run(dtype="float64", device="cpu"))


def test_a_first_round_and_a_first_personal_step_move_against_the_sign():
    """h = (1/2, 1/2): gL = ((-1, 1), (-1/2, 1/2)); s_0 = 0. Adam's first step is its step size against the sign.

    So theta = 0.5 (1, -1, 1, -1). Then o = theta_w x + theta_b at x = 0 and 1: o_1 - o_0 = (1/2, -1/2), whose V has
    the gradient (1/2, -1/2) in the weights and none in the biases. gL at theta: softmax(1.5, -1.5) = (0.952574,
    0.047426), (h - y) x = (-0.094852, 0.094852), and the biases' half of that; gL + 0.1 gU = (-0.044852, 0.044852,
    -0.047426, 0.047426): p = theta + 0.25 (1, -1, 1, -1).
    """
    *_, before = (state for state in states_of(linear()) if state.round == 1)
    assert before.server.theta.tolist() == pytest.approx([0.5, -0.5, 0.5, -0.5], abs=1e-7)
    last = final(linear())
    assert last.devices.p[0].tolist() == pytest.approx([0.75, -0.75, 0.75, -0.75], abs=1e-6)
    expected = [-0.0044852, 0.0044852, -0.0047426, 0.0047426]  # 0.1 of the gradient
    assert last.devices.m[0].tolist() == pytest.approx(expected, abs=1e-6)
    assert torch.equal(last.server.theta, before.server.theta)
    own = evaluate(last).predictions
    assert own.localized is not None


def states_of(setup):
    from fedcpsl.simulation import simulate

    yield from simulate(setup)


def test_personal_rounds_are_those_of_pytorchs_adam():
    """On the drawn minibatches and runs, with weight decay; a device without labels has its runs alone."""
    setup = make("fedhar", work=replace(TUNED, loss_rate=0.0), eta_lc=0.01, **SHORT)
    for state in states_of(setup):
        if state.round >= WORK.rounds and state.round < WORK.rounds + 2:
            plan = draw_plan(state)
            theta = state.server.theta.clone()
            before = [state.device(i) for i in range(5)]
            after = next_state(copied(state), plan)
            for task in plan:
                start = theta if state.round == WORK.rounds else before[task.device].p
                if state.round == WORK.rounds:  # a fresh Adam
                    expected = tuned_by_pytorch(setup, task, start)
                    assert torch.allclose(after.device(task.device).p, expected, atol=1e-10)
                assert after.device(task.device).updates == before[task.device].updates + task.steps


def copied(state):
    from fedcpsl.trees import map_tensors

    return state._replace(devices=map_tensors(torch.clone, state.devices))


def tuned_by_pytorch(setup, task, theta):
    network, data = setup.terms.method.network, setup.data
    model = small_model().double()
    model.load_state_dict({name: t.clone() for name, t in network.named(theta).items()})
    adam = torch.optim.Adam(model.parameters(), 0.01, (0.9, 0.99), 1e-8, weight_decay=0.0005)
    first = int(data.start[task.device])
    hidden = first + int(data.labelled[task.device])
    for t in range(task.steps):
        total = [torch.zeros_like(p) for p in model.parameters()]
        has_labels = task.labelled.shape[1] > 0
        if has_labels:
            rows = torch.from_numpy(first + task.labelled[t])
            loss = nn.functional.cross_entropy(model(data.inputs.take(data.source[rows])), data.truth[rows])
            total = clipped(torch.autograd.grad(loss, list(model.parameters())), 100.0)
        run = task.extra["run"].rows[t]
        if len(run):
            outputs = model(data.inputs.take(data.source[torch.from_numpy(hidden + run)]))
            variation = (outputs[1:] - outputs[:-1]).square().mean()
            more = clipped(torch.autograd.grad(variation, list(model.parameters())), 0.05)
            total = [a + (0.1 if has_labels else 1.0) * b for a, b in zip(total, more, strict=True)]
        for p, g in zip(model.parameters(), total, strict=True):
            p.grad = g
        adam.step()
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def clipped(gradient, most):
    norm = torch.sqrt(sum(g.square().sum() for g in gradient))
    return [g * min(1.0, most / float(norm)) for g in gradient]


# Everywhere.


@pytest.mark.parametrize("given", [{}, {"model": nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))}])
def test_executors_agree_with_runs_and_personal_rounds(given):
    reference = final(make("fedhar", work=TUNED, **SHORT, **given))
    assert (reference.server.updates > 0).all()
    assert_equal(reference, final(make("fedhar", "vectorised", work=TUNED, **SHORT, **given)))
    assert_equal(reference, final(make("fedhar", "vectorised", work=TUNED, slots=2, **SHORT, **given)))


@needs_fork
def test_processes_agree():
    reference = final(make("fedhar", work=TUNED, **SHORT))
    assert_equal(reference, final(make("fedhar", "vectorised", work=TUNED, processes=2, **SHORT)))


def test_runs_matter():
    setup = make("fedhar", **SHORT)
    state = initial_state(setup)
    state = state._replace(server=state.server._replace(rounds=number(2.0)))
    plan = draw_plan(state)
    none = [task._replace(extra={"run": Drawn(task.extra["run"].rows[:, :0])}) for task in plan]
    assert any(task.extra["run"].rows.size for task in plan)
    ours, theirs = next_state(copied(state), plan), next_state(copied(state), none)
    assert not torch.allclose(ours.server.theta, theirs.server.theta)


def test_without_personal_rounds_devices_keep_nothing():
    last = final(make("fedhar", **SHORT))
    assert last.devices.p.numel() == 0
    assert torch.equal(evaluate(last).predictions.personal, evaluate(last).predictions.general)


def test_a_run_on_a_file_is_exported_and_adapted_to_a_new_device(tmp_path, capsys):
    windows(tmp_path / "mine.npz")
    few = ["--rounds", "3", "--labelled", "0.5", "--set", "run.processes=1", "--set", "algorithm.T=3"]
    words = ["run", "--data", tmp_path / "mine.npz", "--algorithm", "fedhar", "--model", "mlp", *few]
    code, _, complained = ask(capsys, *words, "--set", "work.personal_rounds=1", "--out", tmp_path / "run")
    assert code == 0, complained
    for who in ("0", "global"):
        path = tmp_path / f"{who}.pt2"
        assert ask(capsys, "export", tmp_path / "run", "--device", who, "--format", "torch", "--out", path)[0] == 0
        ours, theirs = (
            ask(capsys, "predict", *given, tmp_path / "mine.npz")[1]
            for given in ((tmp_path / "run", "--device", who), (path,))
        )
        assert np.allclose(answers_of(ours), answers_of(theirs), atol=1e-5)
    code, said, complained = ask(
        capsys, "adapt", tmp_path / "run", "--data", tmp_path / "mine.npz", "--out", tmp_path / "new", "--json"
    )
    assert code == 0, complained
    assert json.loads(said)["rounds"] > 0
    arrays = {name: t for name, t in windows().items() if name != "recording"}
    np.savez(tmp_path / "without.npz", **arrays)
    code, _, complained = ask(capsys, "adapt", tmp_path / "run", "--data", tmp_path / "without.npz", "--out", "x")
    assert (code, "give an array `recording`" in complained) == (2, True)


def test_rounds_without_an_upload_count_too():
    """s_r and the stages of other algorithms go by the round, whatever was lost."""
    for name in ("fedhar", "semifed", "fedmatch"):
        last = final(make(name, work=replace(WORK, loss_rate=1.0)))
        assert last.server.rounds == 4
        start = make(name).terms.first_server()
        assert all(map(torch.equal, leaves(last.server._replace(rounds=start.rounds)), leaves(start)))
    assert final(make("fedhar", work=TUNED)).server.rounds == 4  # personal rounds are not the server's


# On real devices.


def federation(folder, **chosen):
    setup = faulty.make("fedhar")
    devices = faulty.participants(setup, folder, **chosen)
    return setup, devices, faulty.Faulty(devices, faulty.Disk(), lambda *_: None)


def test_what_a_device_has_is_said_in_the_message_and_not_protected(tmp_path):
    """Noise is added to both gradients, but the one that a device did not send still counts as none."""
    setup, _, _ = federation(tmp_path)
    upload = fedhar.Upload((number([3.0, 0.0]), number([0.0, 4.0])), torch.tensor([True, False]))
    sent = protect(upload, Protection(clip=1.0, noise=0.1))
    assert torch.equal(sent.sent, upload.sent)
    assert not torch.equal(sent.gradients[1], upload.gradients[1])
    counted = fedhar.contribution(setup.terms.method, None, sent, None)
    assert counted.sent.tolist() == [1.0, 0.0]
    assert counted.gradients[1].tolist() == [0.0, 0.0]
    assert torch.equal(counted.gradients[0], sent.gradients[0])


def test_messages_carry_flags(tmp_path):
    setup, devices, transport = federation(tmp_path)
    with faulty.failing_disk():
        *_, last = serve(terms_of(setup), faulty.rules(setup, min_devices=5), tmp_path / "server", transport)
    assert last.server.rounds == 5
    for i, participant in enumerate(devices.values()):
        state = load_device_state(participant.folder, participant.terms)
        found = state.pending or state.counted
        assert found is not None
        if state.pending:
            labels, runs = state.pending.reply.upload.sent.tolist()
            assert labels == (setup.terms.sizes.labelled[i] > 0)
            assert runs == (setup.data.recordings[i].max(initial=0) >= 3)


def test_the_rate_of_an_update_is_that_of_what_devices_clip_to():
    """|gL| = 5 of 10 and |gU| = 0: 1; a gU of 6 where 2 is allowed: 3; a median of honest devices is always 1."""
    hyper = fedhar.Hyper(number(10.0), number(2.0), *[number(0.0)] * 3)
    sent = torch.tensor([True, True])
    honest = fedhar.Upload((number([3.0, 4.0]), number([0.0, 0.0])), sent)
    hostile = fedhar.Upload((number([3.0, 4.0]), number([0.0, 6.0])), sent)
    assert fedhar.update_rate(hyper, honest).item() == 1.0
    assert fedhar.update_rate(hyper, hostile).item() == 3.0


@pytest.mark.parametrize("aggregation", ["trimmed", "median"])
def test_means_by_coordinate_are_refused(aggregation, tmp_path):
    setup, _, transport = federation(tmp_path)
    chosen = faulty.rules(setup, min_devices=5, limits=Limits(aggregation=aggregation))
    with pytest.raises(InputError, match="different kinds of updates"):
        next(iter(serve(terms_of(setup), chosen, tmp_path / "server", transport)))


def test_a_device_without_recordings_says_what_is_missing():
    setup = faulty.make("fedhar")
    one = replace(small_federation(sizes=((3, 5),)), recording=None)
    with pytest.raises(InputError, match="give an array `recording`"):
        local_data_from(one, terms_of(setup))
