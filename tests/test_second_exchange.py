"""AFL and DRFA: weights that the server learns, and a second exchange in a round, simulated and over messages."""

from dataclasses import replace
from itertools import chain, count, repeat

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcpsl.algorithms import afl, drfa
from fedcpsl.engine import where_slots
from fedcpsl.errors import InputError
from fedcpsl.federation import respond, serve, terms_of
from fedcpsl.federation.device import LoopbackTransport, load_device_state
from fedcpsl.federation.messages import PROBE, TRAIN, Attempt, instruction_message
from fedcpsl.federation.privacy import Protection
from fedcpsl.federation.robustness import Limits, answers_to_refuse
from fedcpsl.federation.server import forget, make_instruction
from fedcpsl.federation.server_store import go_back, load_server_state
from fedcpsl.schedule import Draw, Sizes, Work, draw_extra, draw_probes
from fedcpsl.simulation import initial_state, simulate, simulate_together
from fedcpsl.simulation.rounds import draw_plan, next_state
from fedcpsl.trees import leaves

from . import faulty
from .test_conformance import WORK, assert_equal, final, make
from .test_federation_faults import DEATH, FAULT, Mortal, serve_through

SERVER_WEIGHTS = ("afl", "drfa")
WITH_JOINERS = replace(WORK, active=3, joiners=2, join_round=2)


def number(value):
    return torch.tensor(value, dtype=torch.float64)


@pytest.fixture
def no_disk():
    with faulty.failing_disk() as disk:
        yield disk


# Numbers worked out by hand.


def test_weights_at_the_start_and_of_joiners():
    """M = 2, then device 3 joins with labels and 4 without: 1/3, and the rest times 2/3; then 0 is forgotten."""
    labelled = number([4.0, 0.0, 12.0])
    assert afl.starting_weights("uniform", labelled).tolist() == [0.5, 0.0, 0.5]
    assert afl.starting_weights("samples", labelled).tolist() == [0.25, 0.0, 0.75]
    joined = afl.weights_after_joining(number([0.25, 0.0, 0.75]), number([4.0, 0, 12, 1, 0]))
    assert joined.tolist() == pytest.approx([0.5 / 3, 0, 0.5, 1 / 3, 0])
    one_by_one = afl.weights_after_joining(
        afl.weights_after_joining(joined, number([4.0, 0, 12, 1, 0, 1])), number([4.0, 0, 12, 1, 0, 1, 1])
    )
    assert torch.allclose(one_by_one, afl.weights_after_joining(joined, number([4.0, 0, 12, 1, 0, 1, 1])))
    forgotten = afl.weights_after_joining(number([0.2, 0.0, 0.6, 0.2]), number([0.0, 0, 12, 1]))
    assert forgotten.tolist() == pytest.approx([0, 0, 0.75, 0.25])
    assert afl.weights_after_joining(number([1.0, 0.0]), number([0.0, 3])).tolist() == [0, 1]


def test_afls_server():
    """N/m = 4/2: theta = 1 + 2 (0.5 * 3 + 0.25 * -1) = 3.5; lambda + 0.1 * 2 (1, 0, 2, 0) = (0.7, 0.25, 0.65, 0):
    its sum is 1.6, so 0.2 is taken from the three that stay positive.
    """
    method = make("afl", eta_lambda=0.1).terms.method
    server = afl.Server(number([1.0]), number([0.5, 0.25, 0.25, 0.0]), number(4.0))
    after = afl.receive(
        method, server, torch.tensor([0, 2]), afl.Upload(number([[3.0], [-1.0]]), number([1.0, 2.0])), None
    )
    assert after.theta.tolist() == [3.5]
    assert after.weights.tolist() == pytest.approx([0.5, 0.05, 0.45, 0.0])


def test_drfas_server():
    """Two draws of delta 3 and one of 0: theta = 1 + 6/3; theta' = 1 + 3/3; tau = (2 * 4 + 1)/3 = 3.

    Answers 1 of device 0 and 0.5 of 2, M = 2: lambda + 3 * 0.1 * (4/2) (1, 0, 0.5, 0) = (1.1, 0.25, 0.55, 0), less
    0.3 of each of the three, of which 1 has too little: (0.775, 0, 0.225, 0) with 0.325.
    """
    method = make("drfa", eta_lambda=0.1).terms.method
    server = drfa.Server(number([1.0]), number([0.5, 0.25, 0.25, 0.0]), number(4.0), number([9.0]), number(9.0))
    total = drfa.Sum(number([6.0]), number([3.0]), number(9.0), number(3.0))
    server = drfa.apply(method, server, total, 4)
    assert (server.theta.tolist(), server.snapshot.tolist(), server.steps.item()) == ([3.0], [2.0], 3.0)
    after = drfa.probe_receive(method, server, torch.tensor([0, 2]), drfa.Answer(number([1.0, 0.5])))
    assert after.weights.tolist() == pytest.approx([0.775, 0.0, 0.225, 0.0])


def test_the_snapshot_is_taken_after_its_step():
    """w = 1, 2, 3 after three steps: t' = 2 takes 2; a device that stopped after one step sends where it is."""
    moments = torch.tensor([2, 3, 1])
    kept, steps = (number([0.0, 0.0, 0.0])[:, None, None],), torch.zeros(3, dtype=torch.int64)
    for w in (1.0, 2.0, 3.0):
        steps = steps + 1
        kept = where_slots(steps == moments, (torch.full((3, 1, 1), w, dtype=torch.float64),), kept)
    assert kept[0].flatten().tolist() == [2.0, 3.0, 1.0]


def test_the_moment_is_at_the_same_share_of_all_devices_work():
    """t'_i = ceil(s Q_i): one s for all; uniform in 1 .. Q over the rounds."""
    draw, sizes, work = (
        Draw("snapshot", of="step", per_visit=True),
        Sizes(*np.ones((2, 9), np.int64)),
        make("drfa").terms.work,
    )
    found = [
        [int(draw_extra(draw, 3, r, i, q, sizes, work).rows) for i, q in ((0, 4), (5, 4), (1, 8))] for r in range(400)
    ]
    assert all(a == b and a == -(-c // 2) for a, b, c in found)
    counts = np.bincount([a for a, _, _ in found], minlength=5)
    assert counts[0] == 0
    assert all(70 < c < 130 for c in counts[1:])


def test_who_is_probed():
    draw, sizes = Draw("probe", size=2, per_visit=True), Sizes(np.array([3, 0, 2, 5, 1]), np.zeros(5, np.int64))
    work = Work(3, "steps", 1, (1, 1), 2, 2, loss_rate=0.5)
    rounds = [draw_probes(draw, 0, r, range(5), sizes, work) for r in range(60)]
    for probes in rounds:
        assert len({p.device for p in probes}) == 3
        for p in probes:
            assert p.drawn.rows.shape == ((2,) if sizes.labelled[p.device] else (0,))
            assert (p.drawn.rows < sizes.labelled[p.device]).all()
    lost = [p.lost for probes in rounds for p in probes]
    assert 0.35 < np.mean(lost) < 0.65
    again = draw_probes(draw, 0, 7, range(5), sizes, work._replace(loss_rate=0.0, active=2))
    assert {p.device for p in again} <= {p.device for p in rounds[7]}  # a larger m adds devices to the same ones


# In the simulator.


@pytest.mark.parametrize("name", SERVER_WEIGHTS)
@settings(max_examples=15, deadline=None)
@given(
    eta_lambda=st.floats(0, 5),
    loss_rate=st.sampled_from([0.0, 0.3, 0.9]),
    rule=st.sampled_from(["uniform", "samples"]),
    joiners=st.booleans(),
)
def test_weights_are_probabilities_and_zero_without_labels(name, eta_lambda, loss_rate, rule, joiners):
    work = replace(WITH_JOINERS if joiners else WORK, loss_rate=loss_rate)
    for state in simulate(make(name, work=work, eta_lambda=eta_lambda, lambda_init=rule)):
        weights, devices = state.server.weights, len(state.setup.terms.roster(max(state.round - 1, 0)))
        assert weights.shape == (devices,)
        assert weights.sum().item() == pytest.approx(1)
        assert (weights >= 0).all()
        assert not weights[3:4].any()  # device 3 has no labels


@pytest.mark.parametrize("name", SERVER_WEIGHTS)
def test_weights_move_towards_the_devices_that_do_worse(name):
    state = final(make(name, work=replace(WORK, active=5, loss_rate=0.0, rounds=1), eta_lambda=0.3))
    assert state.server.weights.max() > 0.25 > state.server.weights[[0, 1, 2, 4]].min()


@pytest.mark.parametrize("name", SERVER_WEIGHTS)
@pytest.mark.parametrize("work", [WORK, WITH_JOINERS], ids=["", "joiners"])
def test_executors_agree(name, work):
    reference = final(make(name, work=work))
    assert_equal(reference, final(make(name, "vectorised", work=work)))
    assert_equal(reference, final(make(name, "vectorised", work=work, slots=1)))


@pytest.mark.parametrize("name", SERVER_WEIGHTS)
def test_runs_side_by_side_agree(name):
    def setups():
        return [make(name, "vectorised", eta_lambda=size) for size in (0.01, 0.5)]

    alone = [final(setup) for setup in setups()]
    assert not torch.equal(alone[0].server.weights, alone[1].server.weights)
    *_, together = simulate_together(setups())
    for one, other in zip(alone, together, strict=True):
        assert_equal(one, other)


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_a_round_without_counted_uploads_has_no_second_exchange(executor):
    before = initial_state(make("drfa", executor))
    plan = [task._replace(lost=True) for task in draw_plan(before)]
    after = next_state(before, plan)
    assert_equal(before, after, tolerance=0)
    assert after.downlink_bytes - before.downlink_bytes == len(plan) * before.server.theta.numel() * 8


@pytest.mark.parametrize("executor", ["sequential", "vectorised"])
def test_lost_answers_leave_the_weights_as_they_are(executor):
    before = initial_state(make("drfa", executor))
    terms = before.setup.terms
    plan = [task._replace(lost=False) for task in draw_plan(before)]
    probes = draw_probes(terms.method.traits.probe, 3, 0, range(5), terms.sizes, terms.work._replace(loss_rate=0.0))
    ends = [next_state(before, plan, probes=[p._replace(lost=lost) for p in probes]) for lost in (False, True)]
    assert torch.equal(ends[0].server.theta, ends[1].server.theta)
    assert torch.equal(ends[1].server.weights, before.server.weights)
    assert not torch.equal(ends[0].server.weights, before.server.weights)
    asked = sum(terms.sizes.labelled[p.device] > 0 for p in probes)
    model = before.server.theta.numel() * 8
    assert ends[0].downlink_bytes - before.downlink_bytes == (len(plan) + asked) * model
    assert ends[0].uplink_bytes - before.uplink_bytes == len(plan) * (2 * model + 8) + asked * 8


def test_an_algorithm_without_it_draws_nothing_more():
    assert make("fedavg").terms.method.traits.probe is None
    assert all(task.extra == {} and task.copies == 1 for task in draw_plan(initial_state(make("fedavg"))))


# Over messages.


def federation(name, folder, transport=LoopbackTransport, work=faulty.WORK, **chosen):
    setup = faulty.make(name, work=replace(work, loss_rate=0.0))
    devices = faulty.participants(setup, folder, **chosen)
    return setup, devices, transport(devices)


@pytest.mark.usefixtures("no_disk")
@pytest.mark.parametrize("name", SERVER_WEIGHTS)
def test_joiners_get_the_simulators_weights(name, tmp_path):
    work = replace(faulty.WORK, joiners=2, join_round=2, active=3)
    setup, devices, _ = federation(name, tmp_path, work=work)
    seen = []

    def present():
        return list(devices)[: 5 if seen[-1].round >= 1 else 3]

    transport = faulty.Faulty(devices, faulty.Disk(), lambda *_: None, present)
    for state in serve(terms_of(setup), faulty.rules(setup, min_devices=3), tmp_path / "server", transport):
        seen.append(state)
    reference = final(setup).server
    assert all(torch.allclose(a, b, rtol=1e-10, atol=1e-12) for a, b in zip(state.server, reference, strict=True))


@pytest.mark.usefixtures("no_disk")
def test_the_order_of_joining_does_not_matter_before_the_first_round(tmp_path):
    setup, devices, _ = federation("afl", tmp_path)
    calls = count()
    transport = faulty.Faulty(devices, faulty.Disk(), lambda *_: None, lambda: list(devices)[: 1 + next(calls)])
    for state in serve(terms_of(setup), faulty.rules(setup, min_devices=5), tmp_path / "server", transport):
        if state.begun:
            break
    assert state.server.weights.tolist() == [0.25, 0.25, 0.25, 0.0, 0.25]


@pytest.mark.usefixtures("no_disk")
def test_a_forgotten_device_has_no_weight(tmp_path):
    setup, _, transport = federation("afl", tmp_path)
    *_, state = serve(terms_of(setup), faulty.rules(setup, min_devices=5), tmp_path / "server", transport)
    after = forget(state, terms_of(setup), ["phone-2"])
    assert after.server.weights[2] == 0
    assert after.server.weights.sum().item() == pytest.approx(1)
    assert after.server.devices == 4


def test_a_server_that_must_know_who_sent_what_takes_no_coordinate_wise_sum(tmp_path):
    setup, _, transport = federation("afl", tmp_path)
    rules = faulty.rules(setup, limits=Limits("median"))
    with pytest.raises(InputError, match="must know which device sent which update"):
        next(serve(terms_of(setup), rules, tmp_path / "server", transport))


def asked(setup, folder):
    """The instruction of a second exchange in round 0 for phone-1."""
    terms, rules = terms_of(setup), faulty.rules(setup)
    transport = LoopbackTransport(faulty.participants(setup, folder / "others"))
    states = serve(terms, faulty.rules(setup, min_devices=5), folder / "server", transport)
    state = [next(states) for _ in range(3)][-1]._replace(probing=Attempt(0, 0))
    return make_instruction(terms, rules, state._replace(run="a"), PROBE, 1)


@pytest.mark.usefixtures("no_disk")
def test_an_answer_is_the_same_again_and_changes_nothing_else(tmp_path):
    setup, devices, _ = federation("drfa", tmp_path, protection=Protection(clip=1.0, noise=0.1))
    device, instruction = devices["phone-1"], asked(setup, tmp_path)
    reply = respond(device, instruction_message(instruction))
    assert "was not asked to join" in reply.header["reason"]
    terms = terms_of(setup)
    hello = make_instruction(
        terms, faulty.rules(setup), load_server_state(tmp_path / "server", terms)._replace(run="a"), "hello"
    )
    respond(device, instruction_message(hello))
    before = load_device_state(device.folder, device.terms)
    first, again = (respond(device, instruction_message(instruction)) for _ in range(2))
    assert torch.equal(first.tensors["loss"], again.tensors["loss"])  # noise is drawn once
    after = load_device_state(device.folder, device.terms)
    assert after.answer.attempt == Attempt(0, 0)
    for kept, had in zip(after._replace(answer=None), before, strict=True):
        assert (
            all(map(torch.equal, leaves(kept), leaves(had))) if isinstance(had, tuple | torch.Tensor) else kept == had
        )
    respond(device, instruction_message(instruction._replace(attempt=Attempt(2, 0))))
    late = respond(device, instruction_message(instruction))
    assert "already asked in round 2" in late.header["reason"]


@pytest.mark.usefixtures("no_disk")
def test_a_message_of_a_second_exchange_is_checked(tmp_path):
    setup, devices, _ = federation("drfa", tmp_path)
    message = instruction_message(asked(setup, tmp_path))
    for change, words in (
        ({"device": -1}, "does not say which device"),
        ({"kind": "question"}, "unknown kind"),
        ({"seed": -1}, "seed = -1"),
    ):
        reply = respond(devices["phone-1"], message._replace(header=message.header | change))
        assert words in reply.header["reason"]
    reply = respond(devices["phone-1"], message._replace(tensors={}))
    assert "theta is missing" in reply.header["reason"]
    other, theirs, _ = federation("afl", tmp_path / "afl")
    header = message.header | {"settings": ""}
    assert other is not None
    assert "unknown kind" in respond(theirs["phone-1"], message._replace(header=header)).header["reason"]


def test_answers_that_are_far_too_large_are_refused():
    """The median of 1, 1.2, 0.9 and 90 (the lower one) is 1: 90 is more than 30 times that."""
    answers = {name: drfa.Answer(number(loss)) for name, loss in (("a", 1.0), ("b", 1.2), ("c", 0.9), ("d", 90.0))}
    assert list(answers_to_refuse(Limits(), answers)) == ["d"]
    assert answers_to_refuse(Limits("none"), answers) == {}
    assert answers_to_refuse(Limits(), {name: answers[name] for name in ("c", "d")}) == {}


@pytest.mark.usefixtures("no_disk")
def test_a_server_goes_back_to_a_round_with_its_weights(tmp_path):
    setup, _, transport = federation("drfa", tmp_path)
    states = list(serve(terms_of(setup), faulty.rules(setup, min_devices=5), tmp_path / "server", transport))
    before = next(state for state in states if state.round == 3)
    back = go_back(tmp_path / "server", terms_of(setup), 3)
    assert back.probing is None
    assert all(map(torch.equal, leaves(back.server), leaves(before.server)))
    *_, again = serve(terms_of(setup), faulty.rules(setup, min_devices=5), tmp_path / "server", transport)
    assert all(map(torch.equal, leaves(again.server), leaves(states[-1].server)))


SMALL = replace(faulty.WORK, rounds=3, active=3, unit="steps", amount=2)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(faults=st.lists(FAULT, max_size=40), deaths=st.lists(DEATH, max_size=12), quorum=st.integers(0, 2))
def test_weights_stay_probabilities_under_any_faults(tmp_path_factory, faults, deaths, quorum):
    """Whatever is lost, late, repeated or killed, in either exchange: every round ends, each counted once."""
    setup, folder = faulty.make("drfa", work=SMALL), tmp_path_factory.mktemp("federation")
    devices, drawn = faulty.participants(setup, folder), chain(faults, repeat(None))
    rounds = []

    def check(state):
        rounds.append(state.attempt)
        weights = state.server.weights
        assert weights.sum().item() == pytest.approx(float(any(r.labelled for r in state.roster)))
        assert (weights >= 0).all()
        assert all(record.labelled or not weight for record, weight in zip(state.roster, weights, strict=False))

    with faulty.failing_disk() as disk:
        transport = Mortal(devices, disk, lambda *_: next(drawn))
        transport.deaths = chain(deaths, repeat(None))
        last = serve_through(setup, folder / "server", transport, check, [3], quorum=quorum)
    assert rounds == sorted(rounds)
    assert last.probing is None


def test_a_server_killed_between_the_exchanges_ends_as_one_that_was_not(tmp_path):
    """At every message of the run, and at every write: the answers are the same again, so all numbers are."""
    ends = []
    for k in (None, *range(1, 9)):
        folder = tmp_path / f"{k}"
        setup, devices, _ = federation("drfa", folder, work=SMALL)
        with faulty.failing_disk() as disk:
            transport = Mortal(devices, disk, lambda *_: None)
            transport.deaths = chain(repeat(None, k or 0), [None if k is None else ("after", 0)], repeat(None))
            last = serve_through(setup, folder / "server", transport, lambda _: None, [5])
        ends.append(last.server)
    for other in ends[1:]:
        assert all(map(torch.equal, leaves(ends[0]), leaves(other)))


@pytest.mark.usefixtures("no_disk")
def test_a_lost_answer_is_left_out(tmp_path):
    """As the simulator does with the same answers lost."""
    setup, devices, _ = federation("drfa", tmp_path, work=SMALL)

    def lose_one(name, message):
        return ("lose reply", 0) if (message.header["kind"], name) == (PROBE, "phone-1") else None

    transport = faulty.Faulty(devices, faulty.Disk(), lose_one)
    *_, last = serve(terms_of(setup), faulty.rules(setup, min_devices=5), tmp_path / "server", transport)
    state = initial_state(setup)
    terms = setup.terms
    while state.round < terms.rounds:
        probes = draw_probes(terms.method.traits.probe, faulty.SEED, state.round, range(5), terms.sizes, terms.work)
        state = next_state(state, draw_plan(state), probes=[p._replace(lost=p.device == 1) for p in probes])
    assert torch.allclose(last.server.weights, state.server.weights, rtol=1e-10, atol=1e-12)


def test_a_late_update_is_not_taken_for_an_answer(tmp_path):
    """Replies to training that come while answers are waited for are dropped, and no fault."""
    setup, devices, _ = federation("drfa", tmp_path, work=SMALL)

    def late(_name, message):
        return ("late reply", 0) if message.header["kind"] == TRAIN and message.header["device"] == 2 else None

    with faulty.failing_disk():
        transport = faulty.Faulty(devices, faulty.Disk(), late)
        states = list(serve(terms_of(setup), faulty.rules(setup, min_devices=5), tmp_path / "server", transport))
    assert all(record.offences == 0 for record in states[-1].roster)
    assert states[-1].roster[2].counted is None


# A broadcast for each device, over messages.


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.lists(FAULT, max_size=40),
    deaths=st.lists(DEATH, max_size=12),
    joining=st.lists(st.integers(0, 4), min_size=5, max_size=5),
)
def test_the_server_has_the_model_that_a_device_had_when_it_was_counted(tmp_path_factory, faults, deaths, joining):
    """W_i = u_i + what was sent, and u_i is what the device was sent, whatever fails and whoever joins late."""
    setup, folder, calls = faulty.make("fedamp", work=SMALL), tmp_path_factory.mktemp("federation"), count()
    devices, drawn = faulty.participants(setup, folder), chain(faults, repeat(None))

    def present():
        now = next(calls)
        return [name for name, since in zip(devices, [0, *joining[1:]], strict=True) if now >= since]

    def check(state):
        assert len(state.server.models) == len(state.roster)
        for record, model in zip(state.roster, state.server.models, strict=True):
            kept = load_device_state(devices[record.name].folder, devices[record.name].terms)
            if record.counted is not None and kept.last == record.counted:
                assert torch.allclose(model, kept.committed.w, rtol=1e-12, atol=1e-14)

    with faulty.failing_disk() as disk:
        transport = Mortal(devices, disk, lambda *_: next(drawn), present)
        transport.deaths = chain(deaths, repeat(None))
        serve_through(setup, folder / "server", transport, check, [1, 3])


@pytest.mark.usefixtures("no_disk")
def test_each_device_is_sent_its_own_model(tmp_path):
    """After some rounds of all, u_i differ; a newcomer is greeted with theta^0, pulled to those who were counted."""
    setup, _, transport = federation("fedamp", tmp_path, work=replace(faulty.WORK, active=5))
    terms, rules = terms_of(setup), faulty.rules(setup, min_devices=5)
    *_, state = serve(terms, rules, tmp_path / "server", transport)
    sent = [make_instruction(terms, rules, state, TRAIN, i, 1).broadcast.u for i in range(5)]
    assert all(not torch.equal(sent[i], sent[j]) for i in range(5) for j in range(i))
    greeted = make_instruction(terms, rules, state, "hello").broadcast.u
    start = terms.method.network.initial
    away = state.server.models[[0, 1, 2, 4]] - start  # device 3 has no labels; N = 6 with the newcomer, sigma = 100
    expected = start + ((-away.square().sum(1) / 100).exp() / 6) @ away
    assert torch.allclose(greeted, expected, rtol=1e-10, atol=1e-12)
    after = forget(state, terms, ["phone-2"])
    assert after.server.counted.tolist() == [1, 1, 0, 0, 1]
