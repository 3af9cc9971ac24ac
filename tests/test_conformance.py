"""What every algorithm must satisfy. A new file under algorithms/ is tested by being there."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl import config
from fedcpsl.algorithm import Roster, optional, predicting
from fedcpsl.algorithms import all_algorithms, family, traits_of
from fedcpsl.problem import Samples
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fedcpsl.schedule import DeviceRound, draw_tasks
from fedcpsl.simulation import initial_state, prepare, simulate
from fedcpsl.simulation.round_request import RoundRequest, broadcasts_to
from fedcpsl.simulation.rounds import next_state
from fedcpsl.trees import leaves, map_tensors, named_leaves

from .conftest import needs_fork, small_federation, small_model

NAMES = sorted(all_algorithms())
SWITCHES = ("unlabelled", "personal", "control_variates", "momentum", "normalised")
WORK = config.Work(rounds=4, active=4, unit="hlu", hlu=[1, 4], batch_labelled=3, batch_unlabelled=4, loss_rate=0.3)


def settings_for(name, **numbers):
    """An algorithm's own settings, some of them given."""
    kind = config.algorithm_settings(name)
    of_family = {"alpha_p": 0.5, "alpha_r": 0.2, "beta": [0.1, 0.9, 0.0, 1.0, 0.5]}
    return kind(**{"name": name, "eta": 0.05} | (of_family if kind is config.Algorithm else {}) | numbers)


def make(
    name,
    executor="sequential",
    *,
    work=WORK,
    federation=None,
    model=None,
    slots=0,
    processes=1,
    dtype="float64",
    **numbers,
):
    federation = federation or small_federation(at_server=7 if traits_of(name).server_data else 0)
    if traits_of(name).everyone:
        work = replace(work, active="auto")
    return prepare(
        federation,
        model or small_model(),
        settings_for(name, **numbers),
        work,
        config.Run(executor=executor, slots=slots, processes=processes, dtype=dtype, seed=3, device="cpu"),
    )


def final(setup, start=None):
    *_, last = simulate(setup, start)
    return last


def tensors(state):
    """Every tensor of every state that lasts."""
    return named_leaves(state.server, "server") | named_leaves(state.devices, "devices") | {"nu": state.targets}


def assert_equal(a, b, tolerance=1e-10):
    for (name, x), y in zip(tensors(a).items(), tensors(b).values(), strict=True):
        if tolerance == 0:
            assert torch.equal(x, y), name
        else:
            assert torch.allclose(x, y, rtol=tolerance, atol=tolerance), (name, (x - y).abs().max().item())


def as_declared(method, samples, labelled=2):
    """A minibatch with what the algorithm's traits ask for: views, places of samples, further minibatches."""
    if method.traits.views:
        samples = samples._replace(strong=samples.x[:, labelled:] + 0.1)
    if method.traits.per_sample:
        places = torch.arange(samples.x.shape[1]).remainder(method.most_unlabelled)
        held = samples.x.new_full(samples.x.shape[:1], method.most_unlabelled)
        samples = samples._replace(which=places.expand(samples.x.shape[:2]), unlabelled_count=held)
    run = Samples(
        samples.x[:, :3], samples.target[:, :3], *(torch.full_like(samples.labelled[:, :3], w) for w in (0, 1 / 3))
    )
    draws = [draw for draw in method.traits.draws if not draw.per_visit]
    return samples._replace(extra={draw.name: run if draw.of == "runs" else samples for draw in draws})


def stacked_broadcast(setup, server, devices):
    """What some devices are sent, as slots side by side are given it."""
    broadcast, rows = broadcasts_to(setup, server, devices)
    return RoundRequest(setup, (), (), broadcast, rows=rows).broadcast_to_each(devices)


@pytest.mark.parametrize("name", NAMES)
def test_executors_agree(name):
    """Unequal step counts and data sizes, empty label sets and lost uploads included."""
    reference = final(make(name))
    assert (reference.lost > 0) != traits_of(name).alone  # who sends nothing loses nothing
    assert_equal(reference, final(make(name, "vectorised")))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("slots", [1, 2, 3])
def test_chunking_changes_nothing(name, slots):
    assert_equal(final(make(name, "vectorised")), final(make(name, "vectorised", slots=slots)))


@needs_fork
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
@pytest.mark.parametrize("name", NAMES)
def test_the_number_of_processes_changes_nothing(name, executor):
    reference = final(make(name, executor))
    for processes, slots in ((2, 0), (3, 1)):
        shared = final(make(name, executor, processes=processes, slots=slots))
        assert_equal(reference, shared)
        assert shared.costs.keys() == reference.costs.keys()
    assert_equal(shared, final(make(name, executor, processes=3, slots=1)), tolerance=0)


@pytest.mark.parametrize("switch", SWITCHES)
@pytest.mark.parametrize("name", ["fedcpsl", "fedavg"])
def test_every_part_can_be_switched_alone(name, switch):
    parts = family.VARIANTS[name]
    flipped = {switch: not getattr(parts, switch)}
    changed = final(make(name, **flipped))
    assert_equal(changed, final(make(name, "vectorised", **flipped)))
    moved = (changed.server.theta - final(make(name)).server.theta).abs().max()
    # a personal model is trained beside theta and never moves it; alpha_p = alpha_r = 0 is what "unlabelled" off means
    assert (moved > 1e-6) == (switch != "personal")


@pytest.mark.parametrize("name", NAMES)
def test_padding_changes_nothing(name):
    """Rows with no weight, of whatever content, and a device's rows within a wider batch."""
    setup = make(name, "vectorised")
    algorithm, method = setup.terms.algorithm, setup.terms.method
    state = initial_state(setup)
    index = torch.tensor([0, 2])
    hyper = map_tensors(lambda t: t[index], setup.terms.hyper)
    device = map_tensors(lambda t: t[index], state.devices)
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.normal(size=(2, 5, 6)))
    target = torch.softmax(torch.from_numpy(rng.normal(size=(2, 5, 3))), -1)
    labelled = torch.tensor([[0.5, 0.5, 0, 0, 0]] * 2, dtype=torch.float64)
    unlabelled = torch.tensor([[0, 0, 1 / 3, 1 / 3, 1 / 3]] * 2, dtype=torch.float64)
    garbage = torch.full((2, 3, 6), 77.0, dtype=torch.float64)
    padded = Samples(
        torch.cat([x, garbage], 1),
        torch.cat([target, target[:, :3]], 1),
        torch.nn.functional.pad(labelled, (0, 3)),
        torch.nn.functional.pad(unlabelled, (0, 3)),
    )
    plain = Samples(x, target, labelled, unlabelled)
    plain, padded = (as_declared(method, given) for given in (plain, padded))
    sent = stacked_broadcast(setup, state.server, [0, 2])
    ends = []
    for samples in (plain, padded):
        local = algorithm.begin(method, hyper, sent, device)
        for _ in range(3):
            local = algorithm.step(method, hyper, local, samples)
        ends.append(local)
    for a, b in zip(*map(leaves, ends), strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-13)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_round_is_deterministic(name, executor):
    assert_equal(final(make(name, executor)), final(make(name, executor)), tolerance=0)


@pytest.mark.parametrize("name", NAMES)
def test_states_survive_saving(name, tmp_path):
    """Stopping after round 2, saving and loading ends with the same bits as going straight through."""
    setup = make(name, "vectorised")
    rounds = simulate(setup)
    for _ in range(3):
        state = next(rounds)
    save_checkpoint(tmp_path, state)
    loaded = load_checkpoint(checkpoints(tmp_path)[-1], setup)
    assert loaded.round == 2
    assert_equal(final(setup, loaded), final(setup), tolerance=0)
    counters = ("steps", "uplink_bytes", "downlink_bytes", "lost")
    straight, resumed = final(setup), final(setup, load_checkpoint(checkpoints(tmp_path)[-1], setup))
    assert [getattr(straight, c) for c in counters] == [getattr(resumed, c) for c in counters]


@pytest.mark.parametrize("name", ["fedcpsl", "apfsl", "semipfl"])
def test_a_network_of_usual_width_survives_saving(name, tmp_path):
    """Products of wide matrices are rounded by how their memory is aligned, which a file decides otherwise."""
    given = {"features": 64, "classes": 10, "at_server": 12 if name == "semipfl" else 0}
    federation = small_federation(sizes=((9, 40), (7, 50), (8, 30), (9, 20), (6, 40)), **given)
    torch.manual_seed(0)
    layers = [torch.nn.Linear(64, 200), torch.nn.ReLU(), torch.nn.Linear(200, 200), torch.nn.ReLU()]
    model = torch.nn.Sequential(*layers, torch.nn.Linear(200, 10))
    setup = make(name, "vectorised", work=replace(WORK, rounds=5, active=2), federation=federation, model=model)
    state = next(state for state in simulate(setup) if state.round == 3)
    save_checkpoint(tmp_path, state)
    loaded = load_checkpoint(checkpoints(tmp_path)[-1], setup)
    assert_equal(final(setup, loaded), final(setup), tolerance=0)


@pytest.mark.parametrize("name", NAMES)
def test_inputs_are_not_modified(name):
    """All functions leave what they are given alone; only a device's own working state may be reused."""
    setup = make(name, "vectorised")
    algorithm, method, hyper = setup.terms.algorithm, setup.terms.method, setup.terms.hyper
    state = initial_state(setup)
    rng = np.random.default_rng(1)
    server = map_tensors(lambda t: t + 0.1, state.server)
    device = map_tensors(lambda t: t + 0.2 if t.is_floating_point() else t.clone(), state.devices)
    sent = stacked_broadcast(setup, server, range(5))
    x = torch.from_numpy(rng.normal(size=(5, 4, 6)))
    nu = torch.softmax(torch.from_numpy(rng.normal(size=(5, 4, 3))), -1)
    weights = torch.full((5, 4), 0.25, dtype=torch.float64)
    samples = as_declared(method, Samples(x, nu, weights, weights))
    given_in = [server, device, sent, hyper, samples[:4]]
    before = [map_tensors(lambda t: t.clone(), tuple(s)) for s in given_in]
    if relabel := optional(algorithm, "relabel"):
        relabel(method, hyper, sent, device, x, nu, torch.full((5,), 4))
    local = algorithm.step(method, hyper, algorithm.begin(method, hyper, sent, device), samples)
    steps = torch.ones(5, dtype=torch.int64)
    kept, upload = algorithm.finish(method, hyper, sent, device, local, steps)
    upload_before = map_tensors(lambda t: t.clone(), upload)
    algorithm.commit(method, hyper, sent, kept, upload)
    own = (Samples(x[0], nu[0], weights[0], weights[0]),) if method.traits.server_data else ()
    if receive := optional(algorithm, "receive"):
        receive(method, server, torch.arange(5), upload, weights[:, 0], *own)
    else:
        added = algorithm.contribution(method, hyper, upload, weights[:, 0])
        algorithm.apply(method, server, map_tensors(lambda t: t.sum(0), added), 5)
    if weights_of := optional(algorithm, "draw_weights"):
        assert weights_of(method, server).shape == (5,)
    if method.traits.probe:
        asked = algorithm.probe_broadcast(method, server)
        answers = algorithm.probe_upload(method, hyper, asked, samples)
        algorithm.probe_receive(method, server, torch.arange(5), answers)
    algorithm.admit(method, server, Roster(5, 10, [1] * 5), Roster(6, 20, [1] * 6))
    log_h = torch.log_softmax(x[..., :3], -1)
    algorithm.predict(method, predicting(algorithm, method, hyper, device), log_h, log_h)
    for state_before, state_after in zip(before, given_in, strict=True):
        for a, b in zip(leaves(state_before), leaves(tuple(state_after)), strict=True):
            assert torch.equal(a, b)
    assert all(torch.equal(a, b) for a, b in zip(leaves(upload_before), leaves(upload), strict=True))


def broken(state):
    """The largest gap in what the algorithm says always holds, over the roster."""
    setup = state.setup
    roster = setup.terms.roster(max(state.round - 1, 0))
    sizes = setup.terms.sizes.labelled[roster] + setup.terms.sizes.unlabelled[roster]
    devices = map_tensors(lambda t: t[torch.from_numpy(roster)], state.devices)
    declared = optional(setup.terms.algorithm, "invariants")
    gaps = declared(setup.terms.method, state.server, devices, torch.from_numpy(sizes / sizes.sum()))
    return max((gap.abs().max().item() for gap in gaps.values() if gap.numel()), default=0.0)


WITH_INVARIANTS = [name for name, (file, _) in all_algorithms().items() if optional(file, "invariants")]


@pytest.mark.parametrize("name", WITH_INVARIANTS)
@settings(max_examples=15, deadline=None)
@given(
    lost=st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=3, max_size=3),
    steps=st.lists(st.lists(st.integers(0, 4), min_size=5, max_size=5), min_size=3, max_size=3),
    joiners=st.integers(0, 2),
    executor=st.sampled_from(["sequential", "vectorised"]),
)
def test_what_an_algorithm_declares_always_holds(name, lost, steps, joiners, executor):
    """Whatever uploads are lost, whoever does nothing, whoever joins late."""
    setup = make(name, executor, work=replace(WORK, active="auto", joiners=joiners, join_round=2))
    state = initial_state(setup)
    rng = np.random.default_rng(5)
    for r in range(3):
        plan = [
            DeviceRound(
                int(i),
                steps[r][i],
                rng.integers(0, setup.terms.sizes.labelled[i], (steps[r][i], 3))
                if setup.terms.sizes.labelled[i]
                else np.empty((steps[r][i], 0), np.int64),
                rng.integers(0, setup.terms.sizes.unlabelled[i], (steps[r][i], 4))
                if setup.terms.sizes.unlabelled[i]
                else np.empty((steps[r][i], 0), np.int64),
                lost=lost[r][i],
            )
            for i in setup.terms.roster(r)
        ]
        state = next_state(state, plan)
        assert broken(state) < 1e-12


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_round_whose_uploads_are_all_lost_moves_no_server(executor):
    setup = make("fedcpsl", executor, work=replace(WORK, loss_rate=1.0))
    start, end = initial_state(setup), final(setup)
    assert torch.equal(start.server.theta, end.server.theta)
    assert not end.devices.c.any()
    assert not torch.equal(start.devices.theta_lc, end.devices.theta_lc)  # its own, kept either way
    assert end.lost == end.active_rounds.sum()


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_device_without_time_changes_nothing_and_is_not_counted(executor):
    setup = make("fedcpsl", executor, work=replace(WORK, loss_rate=0.0))
    sizes = setup.terms.sizes
    plan = draw_tasks(3, 0, [0, 1, 2, 4], sizes, setup.terms.work, unlabelled=True, dropout=False)
    idle = [task._replace(steps=0) if task.device == 1 else task for task in plan]
    without = [task for task in plan if task.device != 1]
    a, b = next_state(initial_state(setup), idle), next_state(initial_state(setup), without)
    assert_equal(a, b, tolerance=0)
    assert a.active_rounds[1] == 0
    assert a.uplink_bytes == b.uplink_bytes


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_round_in_which_nobody_can_work_changes_nothing(executor):
    """Labels alone, and the only active device has none."""
    setup = make("fedavg", executor)
    plan = draw_tasks(3, 0, [3], setup.terms.sizes, setup.terms.work, unlabelled=False, dropout=False)
    assert plan[0].steps == 0
    before, after = initial_state(setup), next_state(initial_state(setup), plan)
    assert_equal(before, after, tolerance=0)
    assert after.round == 1


def test_joiners_start_at_the_theta_they_are_sent():
    work = replace(WORK, joiners=2, join_round=2, active=3, loss_rate=0.0)
    setup = make("fedcpsl", work=work)
    states = []
    for state in simulate(setup):
        states.append((state.round, state.server.theta.clone(), state.devices.theta_lc.clone(), state.active_rounds))
    _, theta, _, _ = states[2]
    _, _, theta_lc, active = states[3]
    for joiner in (3, 4):
        if active[joiner] == 0:
            assert torch.equal(theta_lc[joiner], theta)
    assert states[2][3][3:].sum() == 0
    assert states[-1][3][3:].sum() > 0


def test_fedshvr_refuses_partial_participation():
    from fedcpsl.errors import InputError

    with pytest.raises(InputError, match="needs every device"):
        prepare(small_federation(), small_model(), config.Algorithm(name="fedshvr"), config.Work(active=2))


def test_float32_executors_agree_to_rounding():
    a, b = final(make("fedcpsl", dtype="float32")), final(make("fedcpsl", "vectorised", dtype="float32"))
    assert_equal(a, b, tolerance=1e-4)
    assert a.server.theta.dtype == torch.float32


def test_replaced_costs_need_the_gradient_form():
    from fedcpsl.errors import InputError
    from fedcpsl.problem import Costs, cross_entropy

    costs = Costs(cross_entropy, lambda log_h, nu: (log_h.exp() - nu).square().sum(-1))
    with pytest.raises(InputError, match="gradient"):
        prepare(small_federation(), small_model(), config.Algorithm(), WORK, costs=costs)
    ends = [
        final(
            prepare(
                small_federation(),
                small_model(),
                config.Algorithm(pseudo_labels="gradient", eta=0.05, alpha_r=0.3),
                WORK,
                config.Run(executor=executor, dtype="float64"),
                costs=costs,
            )
        )
        for executor in ("sequential", "vectorised")
    ]
    assert_equal(*ends)
