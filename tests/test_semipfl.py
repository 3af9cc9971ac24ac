"""SemiPFL, and data at the server: who holds it, who is given it, and replies within a round."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedcpsl import config
from fedcpsl.algorithms import semipfl
from fedcpsl.data.federation import Federation
from fedcpsl.data.ondemand import from_function
from fedcpsl.data.split import SERVER, TEST, VALIDATION, Shares, draw_roles
from fedcpsl.errors import InputError
from fedcpsl.evaluation import evaluate
from fedcpsl.federation.terms import terms_of
from fedcpsl.models import mlp
from fedcpsl.problem import Samples
from fedcpsl.schedule import draw_order
from fedcpsl.simulation import initial_state, prepare, simulate
from fedcpsl.simulation.rounds import draw_plan, next_state, simulate_together
from fedcpsl.trees import leaves, map_tensors

from .conftest import small_federation, small_model
from .small_runs import ask
from .test_conformance import WORK, assert_equal, final, make, settings_for

SMALL = {"hyper_width": 4, "hyper_layers": 2}


def number(value):
    return torch.tensor(value, dtype=torch.float64)


def copied(state):
    return state._replace(devices=map_tensors(torch.clone, state.devices))


# Data at the server.


@settings(max_examples=50)
@given(server=st.floats(0, 0.9), test=st.floats(0, 0.5), seed=st.integers(0, 100))
def test_the_servers_share_is_taken_after_tests_and_shifts_nothing(server, test, seed):
    y, device = np.arange(60) % 3, np.arange(60) % 4
    plain = draw_roles(y, device, None, Shares(0.5, test=test, validation=0.1), seed)
    given = draw_roles(y, device, None, Shares(0.5, test=test, validation=0.1, server=server), seed)
    for role in (TEST, VALIDATION):
        assert np.array_equal(plain == role, given == role)
    for i in range(4):
        left = ((plain < TEST) & (device == i)).sum()
        assert ((given == SERVER) & (device == i)).sum() == round(server * left)


def test_only_samples_of_known_class_go_to_the_server():
    y = np.where(np.arange(40) % 2, -1, np.arange(40) % 3)
    made = Federation.from_arrays(np.random.default_rng(0).normal(size=(40, 2)), y, np.arange(40) % 2, server=0.5)
    assert (made.y[made.server_samples] >= 0).all()
    assert len(made.server_samples) == made.role_counts[:, SERVER].sum() == 8  # of 10 known samples each, 2 are tests
    with pytest.raises(InputError, match="the server share is"):
        Federation.from_arrays(np.zeros((4, 2)), [0, 1, 0, 1], [0] * 4, server=1.0)


def test_who_does_not_use_it_is_not_changed_by_it():
    """The same devices with and without samples at the server."""
    with_some = small_federation(at_server=7)
    kept = with_some.role != SERVER
    arrays = {name: getattr(with_some, name)[kept] for name in ("x", "y", "device", "role", "recording")}
    without = replace(with_some, **arrays)
    for name in ("fedavg", "fedcpsl", "fedamp"):
        assert_equal(final(make(name, federation=with_some)), final(make(name, federation=without)), tolerance=0)


def test_what_cannot_run_says_why():
    with pytest.raises(InputError, match=r"give data\.server"):
        make("semipfl", federation=small_federation())
    made = from_function(lambda _: (np.zeros((3, 6)), np.zeros(3, int)), devices=5, classes=3, labelled=1, unlabelled=2)
    with pytest.raises(InputError, match=r"give data\.server"):
        make("semipfl", federation=made)
    for model in (nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))):
        with pytest.raises(InputError, match="chain of layers"):
            make("semipfl", model=model)
    with pytest.raises(InputError, match="simulate it"):
        terms_of(make("semipfl"))
    with pytest.raises(InputError, match="personal_rounds"):
        make("semipfl", work=replace(WORK, personal_rounds=1))


# Parts of a model.


def test_the_papers_model_is_cut_as_in_the_paper():
    setup = make("semipfl", model=mlp(6, 3, [256, 128, 64, 16]))
    parts = semipfl.parts_of(setup.terms.method)
    widths = [tuple(p.shape) for p in parts.autoencoder.module.parameters() if p.dim() == 2]
    assert widths == [(256, 6), (128, 256), (64, 128), (128, 64), (256, 128), (6, 256)]
    assert [tuple(p.shape) for p in parts.classifier.parameters() if p.dim() == 2] == [(16, 64), (3, 16)]
    assert parts.encoder_size + parts.classifier_size == setup.terms.method.network.initial.numel()


@pytest.mark.parametrize(("layers", "start"), [("auto", 2), (1, 4), (2, 2), (3, 0), (4, 0)])
def test_where_the_classifier_begins(layers, start):
    chain = [nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2)]
    assert semipfl.classifier_start(chain, layers) == start
    assert semipfl.classifier_start(chain[2:], "auto") == 2  # nothing would be left to encode with two
    assert semipfl.classifier_start([nn.Linear(2, 2)], "auto") == 0


def test_making_parts_draws_nothing_that_others_see():
    method = make("semipfl").terms.method
    torch.manual_seed(7)
    semipfl.cut(method.network, 1)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))


# Numbers worked out by hand.


def test_the_hypernetwork():
    """e = 1: 2 e + 1 = 3, relu 3, (3, -1) 3 + (0.5, 0) = (9.5, -3); e = -1: relu(-1) = 0, so the last bias alone."""
    phi = number([2.0, 1.0, 3.0, -1.0, 0.5, 0.0])
    found = semipfl.hypernetwork([1, 1, 2], phi, number([[1.0], [-1.0]]))
    assert found.tolist() == [[9.5, -3.0], [0.5, 0.0]]


def test_the_gradient_of_the_hypernetwork(monkeypatch):
    """delta = (1, 2) at e = 1, hidden 3: W_2 gets (3, 6), b_2 (1, 2); the hidden unit 3 1 - 1 2 = 1, so that W_1 gets
    e = 1, b_1 1, and e gets W_1 = 2. With a second device that sends zero all of it is halved.
    """
    method = make("semipfl").terms.method
    monkeypatch.setattr(semipfl, "widths_of", lambda *_: [1, 1, 2])
    phi, e = number([2.0, 1.0, 3.0, -1.0, 0.5, 0.0]), number([[1.0], [1.0]])
    server = semipfl.Server(phi, e, (phi, phi), (e, e), number(0.0), number([0.0, 0.0]), e)
    one = semipfl.hypernetwork_gradients(method, server, torch.tensor([0]), number([[1.0, 2.0]]))
    assert one[0].tolist() == [1.0, 1.0, 3.0, 6.0, 1.0, 2.0]
    assert one[1].tolist() == [[2.0]]
    both = semipfl.hypernetwork_gradients(method, server, torch.tensor([0, 1]), number([[1.0, 2.0], [0.0, 0.0]]))
    assert both[0].tolist() == [0.5, 0.5, 1.5, 3.0, 0.5, 1.0]
    assert both[1].tolist() == [[1.0], [0.0]]


def test_clipping_is_over_phi_and_embeddings_together():
    """|(3, 4)| = 5: to norm 1 that is (0.6, 0.8); 50 leaves it."""
    given = number([3.0]), number([[4.0]])
    assert [g.item() for g in semipfl.clipped(1.0, *given)] == pytest.approx([0.6, 0.8])
    assert [g.item() for g in semipfl.clipped(50.0, *given)] == [3.0, 4.0]


def test_rows_of_both_kinds_count_alike():
    """One labelled row, two unlabelled ones and padding: a third each. Errors 1 and 4, mean over two inputs each."""
    samples = Samples(None, None, number([1.0, 0, 0, 0]), number([0, 0.5, 0.5, 0]))
    shares = semipfl.row_shares(samples)
    assert shares.tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])
    x, outputs = (
        number([[0.0, 0.0], [1.0, 1.0], [0.0, 2.0], [9.0, 9.0]]),
        number([[[1.0, 1.0], [1, 1], [0, 0], [0, 0]]]),
    )
    # row errors 1, 0, (0 + 4) / 2 = 2, and 81 that does not count: (1 + 0 + 2) / 3
    assert semipfl.reconstruction_error(x, shares, outputs).item() == pytest.approx(1.0)


def test_embeddings_have_the_papers_size_and_follow_from_the_start():
    for devices, size in ((3, 1), (4, 2), (20, 6)):
        method = make("semipfl", **SMALL).terms.method
        assert semipfl.init_server(method, devices).embeddings.shape == (devices, size)
    same, other = (make("semipfl", model=small_model(seed=seed), **SMALL).terms.first_server() for seed in (0, 1))
    again = make("semipfl", **SMALL).terms.first_server()
    assert all(map(torch.equal, leaves(same), leaves(again)))
    assert not torch.equal(same.phi, other.phi)


# Against plain PyTorch.


def plain_round(setup, state, task):
    """(E, D)_Q, the new phi and embedding, K at the server and K on the device, by PyTorch's modules and optimisers."""
    data, server, device = setup.data, state.server, task.device
    sent = semipfl.broadcast_each(setup.terms.method, server, torch.tensor([device])).model[0]
    both = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    nn.utils.vector_to_parameters(sent.clone(), both.parameters())
    adam = torch.optim.Adam(both.parameters(), 0.05)
    first = int(data.start[device])
    hidden = first + int(data.labelled[device])
    for t in range(task.steps):
        rows = np.concatenate([first + task.labelled[t], hidden + task.unlabelled[t]])
        x = data.inputs.take(data.source[torch.from_numpy(rows)])
        adam.zero_grad()
        nn.functional.mse_loss(both(x), x).backward()
        adam.step()
    trained = nn.utils.parameters_to_vector(both.parameters()).detach()
    sizes = server.embeddings.shape[1], 4, 4, len(sent)
    layers = [part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())][:-1]
    hyper = nn.Sequential(*layers).double()
    nn.utils.vector_to_parameters(server.phi.clone(), hyper.parameters())
    e = nn.Parameter(server.embeddings[device].clone())
    outer = torch.optim.Adam([*hyper.parameters(), e], 0.001)
    hyper(e).backward(sent - trained)
    nn.utils.clip_grad_norm_([*hyper.parameters(), e], 0.1)
    outer.step()
    own = data.server_samples(draw_order(setup.terms.seed, "server", 7, state.round))
    start = list(setup.terms.method.network.split(setup.terms.method.network.initial))[2:]
    at_server = plain_classifier(both, start, own, 3, 2)
    order = draw_order(setup.terms.seed, "replies", data.labelled[device], state.round, device)
    labelled = data.labelled_samples(device)
    labelled = labelled._replace(x=labelled.x[order], target=labelled.target[order])
    tuned = plain_classifier(both, at_server, labelled, 3, 4)
    phi = nn.utils.parameters_to_vector(hyper.parameters()).detach()
    return trained, phi, e.detach(), *(torch.cat([t.flatten() for t in k]) for k in (at_server, tuned))


def plain_classifier(both, start, samples, batch, epochs):
    classifier = nn.Linear(8, 3).double()
    with torch.no_grad():
        for p, value in zip(classifier.parameters(), start, strict=True):
            p.copy_(value)
    adam = torch.optim.Adam(classifier.parameters(), 0.01)
    features = both[1](both[0](samples.x)).detach()
    for _ in range(epochs):
        for begin in range(0, len(features), batch):
            rows = slice(begin, begin + batch)
            adam.zero_grad()
            nn.functional.cross_entropy(classifier(features[rows]), samples.target[rows].argmax(-1)).backward()
            adam.step()
    return [p.detach() for p in classifier.parameters()]


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_round_of_one_device_is_plain_pytorchs(executor):
    """Where phi's gradient is clipped, and where a device has no labels."""
    numbers = {"clip": 0.1, "eta_classifier": 0.01, "base_epochs": 2, "tune_epochs": 4, "batch_server": 3, **SMALL}
    setup = make("semipfl", executor, work=replace(WORK, active=1, loss_rate=0.0, rounds=6), **numbers)
    seen = set()
    state = initial_state(setup)
    for _ in range(3):
        (task,) = draw_plan(state)
        seen.add(int(setup.terms.sizes.labelled[task.device]) > 0)
        before = copied(state)
        after = next_state(state, [task])
        trained, phi, e, at_server, tuned = plain_round(setup, before, task)
        kept, i = after.device(task.device), task.device
        assert torch.allclose(kept.encoder, trained[:56], atol=1e-10)
        if not before.server.updates:  # PyTorch's optimisers start afresh
            assert torch.allclose(after.server.phi, phi, atol=1e-10)
            assert torch.allclose(after.server.embeddings[i], e, atol=1e-10)
        assert torch.allclose(after.server.classifiers[i], at_server, atol=1e-10)
        assert torch.allclose(kept.classifier, tuned, atol=1e-10)
        state = after
    assert True in seen


def test_the_server_uses_minibatches_that_are_rebuilt_well():
    """The decoder gives its bias, 0: samples of small numbers are rebuilt well, and they alone train K."""
    setup = make("semipfl", batch_server=2, base_epochs=1, threshold=0.05, **SMALL)
    method, parts = setup.terms.method, semipfl.parts_of(setup.terms.method)
    model = torch.zeros(parts.size, dtype=torch.float64)
    model[: parts.encoder_size] = method.network.initial[: parts.encoder_size]
    x = torch.cat([torch.full((2, 6), 0.1), torch.full((2, 6), 3.0)]).double()  # errors 0.01 and 9
    target = torch.eye(3, dtype=torch.float64)[[0, 1, 2, 2]]
    weights = torch.full((4,), 0.25, dtype=torch.float64)
    every, good = (Samples(x[:k], target[:k], weights[:k], weights[:k] * 0) for k in (4, 2))
    assert torch.equal(semipfl.base_classifier(method, model, every), semipfl.base_classifier(method, model, good))
    strict = method._replace(rules=replace(method.rules, threshold=0.0))  # none is: all of them
    assert not torch.equal(semipfl.base_classifier(strict, model, every), semipfl.base_classifier(method, model, every))


# What a round changes.


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_after_a_lost_upload_the_device_keeps_its_encoder_and_its_old_classifier(executor):
    setup = make("semipfl", executor, work=replace(WORK, loss_rate=1.0), **SMALL)
    start, end = initial_state(setup), final(setup)
    assert all(map(torch.equal, leaves(start.server), leaves(end.server)))
    assert torch.equal(start.devices.classifier, end.devices.classifier)
    active = torch.from_numpy(end.active_rounds > 0)
    changed = (start.devices.encoder != end.devices.encoder).any(-1)
    assert torch.equal(changed, active)


def test_a_device_without_labels_keeps_the_classifier_as_it_was_sent():
    setup = make("semipfl", work=replace(WORK, active=5, loss_rate=0.0, rounds=1), **SMALL)
    last = final(setup)
    for device, labelled in enumerate(setup.terms.sizes.labelled):
        same = torch.equal(last.devices.classifier[device], last.server.classifiers[device])
        assert same == (labelled == 0)


def test_embeddings_of_idle_devices_stay():
    setup = make("semipfl", work=replace(WORK, active=1, loss_rate=0.0, rounds=3), **SMALL)
    start, last = setup.terms.first_server(), final(setup)
    moved = (start.embeddings != last.server.embeddings).any(-1).numpy()
    assert np.array_equal(moved, last.active_rounds > 0)
    assert last.server.counted.tolist() == last.active_rounds.tolist()


def test_replies_are_counted_as_traffic():
    setup = make("semipfl", work=replace(WORK, active=2, loss_rate=0.0, rounds=1), **SMALL)
    last, parts = final(setup), semipfl.parts_of(setup.terms.method)
    assert last.downlink_bytes == 2 * 8 * (parts.size + parts.classifier_size)
    assert last.uplink_bytes == 5 * 16 + 2 * 8 * parts.size


def test_runs_side_by_side_end_where_they_end_alone():
    federation = small_federation(at_server=7)
    setups = [make("semipfl", "vectorised", federation=federation, **SMALL)]
    for seed in (1, 2):
        run = config.Run(executor="vectorised", dtype="float64", seed=seed, device="cpu", processes=1)
        chosen = settings_for("semipfl", eta_server=0.01 * seed, **SMALL)
        setups.append(prepare(federation, small_model(seed=seed), chosen, WORK, run, beside=setups[0]))
    *_, together = simulate_together(setups)
    for setup, state in zip(setups, together, strict=True):
        assert_equal(state, final(setup))


@pytest.mark.parametrize("store", ["accelerator", "host", "disk"])
def test_stores_agree_with_joiners(store):
    work = replace(WORK, joiners=2, join_round=2, active=3)
    setup = make("semipfl", work=work, **SMALL)
    reference = final(setup)
    other = final(setup._replace(machine=setup.machine._replace(store=store)))
    for device in np.flatnonzero(reference.active_rounds).tolist():
        assert all(map(torch.equal, leaves(reference.device(device)), leaves(other.device(device))))


def test_a_run_exports_devices_models_and_has_no_global_one(tmp_path, capsys):
    few = ["--rounds", "2", "--set", "data.devices=5", "--set", "run.processes=1", "--set", "data.server=0.2"]
    small = ["--set", "algorithm.hyper_width=16", "--set", "algorithm.hyper_layers=2", "--model", "mlp"]
    words = ["run", "--algorithm", "semipfl", *few, *small, "--set", "algorithm.eta_classifier=0.01"]
    code, _, complained = ask(capsys, *words, "--out", tmp_path / "run")
    assert code == 0, complained
    for path in ("one.onnx", "one.safetensors"):
        assert ask(capsys, "export", tmp_path / "run", "--device", "0", "--out", tmp_path / path)[0] == 0
    code, _, complained = ask(capsys, "export", tmp_path / "run", "--device", "global", "--out", tmp_path / "a.onnx")
    assert (code, "no global model" in complained) == (2, True)
    np.savez(tmp_path / "new.npz", x=np.zeros((9, 64)), y=np.arange(9) % 3)
    code, _, complained = ask(
        capsys, "adapt", tmp_path / "run", "--data", tmp_path / "new.npz", "--out", tmp_path / "x"
    )
    assert (code, "no global model" in complained) == (2, True)


def test_accuracy_grows():
    rng = np.random.default_rng(0)
    y = np.arange(400) % 3
    x = rng.normal(size=(400, 6)) * 0.3 + 2 * np.eye(3, 6)[y]
    made = Federation.from_arrays(x, y, np.arange(400) % 4, labelled=0.05, server=0.3)
    chosen = semipfl.Settings(eta=0.01, eta_classifier=0.02, base_epochs=20, hyper_width=16, hyper_layers=1)
    torch.manual_seed(0)
    model, run = mlp(6, 3, [32, 16]), config.Run(seed=1, device="cpu", processes=1)
    setup = prepare(made, model, chosen, config.Work(rounds=6), run)
    first, *_, last = (evaluate(state) for state in simulate(setup))
    assert last.general is None
    assert last.personal.mean > 0.9 > first.personal.mean
