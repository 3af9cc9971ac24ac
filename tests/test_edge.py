"""Rounds with an edge network: physics decide, identities hold, and without one nothing changes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcpsl import config
from fedcpsl.algorithm import optional
from fedcpsl.algorithms import all_algorithms, find_algorithm, traits_of
from fedcpsl.edge.rounds import ends_of
from fedcpsl.edge.settings import PROFILES, Edge, of_profile
from fedcpsl.edge.state import ARRAYS, COUNTED, OUTCOMES, copied
from fedcpsl.errors import InputError
from fedcpsl.runs.checkpoint import checkpoints, load_checkpoint, save_checkpoint
from fedcpsl.schedule import omega
from fedcpsl.simulation import prepare, simulate, simulate_together
from fedcpsl.simulation.rounds import draw_plan
from fedcpsl.trees import map_tensors

from .conftest import needs_fork, small_federation, small_model
from .test_conformance import WORK, assert_equal, settings_for

MACRO = of_profile("macro")
# the small model takes milliseconds: a deadline at which some devices are cut short, some uploads lost
TIGHT = replace(MACRO, deadline=0.0315, slot=0.03, flops_per_cycle=0.02, bandwidth_up_mhz=0.05, shadowing_db=10.0)


def make(name, edge, *, work=WORK, executor="sequential", processes=1, slots=0, dtype="float64", seed=3, **numbers):
    if traits_of(name).everyone:
        work = replace(work, active="auto")
    run = config.Run(executor=executor, slots=slots, processes=processes, dtype=dtype, seed=seed, device="cpu")
    federation = small_federation(at_server=7 if traits_of(name).server_data else 0)
    return prepare(federation, small_model(), settings_for(name, **numbers), work, run, edge=edge)


def all_states(setup, start=None):
    found = []
    for state in simulate(setup, start):
        edge = None if state.edge is None else copied(state.edge)
        devices = map_tensors(torch.clone, state.devices)
        found.append(state._replace(devices=devices, targets=state.targets.clone(), edge=edge))
    return found


def assert_same_edge(a, b):
    assert a.edge._replace(records=None, flight=None)[:5] == b.edge._replace(records=None, flight=None)[:5]
    for name in ARRAYS:
        assert np.array_equal(getattr(a.edge, name), getattr(b.edge, name)), name


def assert_invariants(state):
    terms = state.setup.terms
    declared = optional(terms.algorithm, "invariants")
    if declared is None:
        return
    roster = terms.roster(max(state.round - 1, 0))
    weights = torch.from_numpy(omega(terms.sizes, roster, roster)).to(state.targets)
    devices = map_tensors(lambda t: t[torch.from_numpy(roster)], state.devices)
    for name, value in declared(terms.method, state.server, devices, weights).items():
        assert value.abs().max() < 1e-10, name


@pytest.mark.parametrize("name", ["fedcpsl", "fedamp", "feddyn"])
def test_a_channel_that_loses_nothing_changes_no_bit(name):
    work = replace(WORK, loss_rate=0.0)
    with_edge, without = all_states(make(name, MACRO, work=work))[-1], all_states(make(name, None, work=work))[-1]
    assert_equal(with_edge, without, tolerance=0)
    assert (with_edge.uplink_bytes, with_edge.downlink_bytes) == (without.uplink_bytes, without.downlink_bytes)
    assert without.edge is None
    assert with_edge.edge.seconds > 0


@pytest.mark.parametrize("name", sorted(all_algorithms()))
def test_every_algorithm_meets_the_edge(name):
    """Each runs under a deadline with losses and keeps what it declares, or is refused in one line."""
    if name == "drfa" or optional(find_algorithm(name)[0], "reply_each"):
        with pytest.raises(InputError, match="second exchange"):
            make(name, TIGHT)
        return
    states = all_states(make(name, replace(TIGHT, on_deadline="drop" if name == "scaffold" else "partial")))
    for state in states:
        assert_invariants(state)
    counts = states[-1].edge.counts
    drawn = sum(counts[kind] for kind in OUTCOMES)
    assert drawn == states[-1].edge.visits.sum() > 0
    assert counts["steps_done"] <= counts["steps_planned"]
    if not traits_of(name).alone:
        assert states[-1].edge.radio_joules > 0


CHANNELS = st.fixed_dictionaries(
    {
        "shadowing_db": st.floats(0, 25),
        "radius": st.floats(50, 3000),
        "bandwidth_up_mhz": st.floats(0.01, 10),
        "flops_per_cycle": st.floats(0.001, 1),
        "upload_bits": st.sampled_from([0, 1, 4, 8]),
        "availability": st.sampled_from(["always", "on-off"]),
        "on_seconds": st.floats(0.001, 1),
        "off_seconds": st.floats(0.001, 1),
        "battery": st.sampled_from(["none", 0.02, 1.0]),
    }
)
CLOCKS = st.sampled_from(
    [
        {},
        {"extra": 1},
        {"allocation": "equal-time"},
        {"clock": "semi-async", "wait_for": 1},
        {"clock": "semi-async", "wait_for": 2, "staleness": 0.0},
        {"deadline": 0.05, "slot": 0.03},
        {"deadline": 0.05, "slot": 0.03, "on_deadline": "drop", "allocation": "equal-outage"},
        {"deadline": 0.08, "slot": 0.03, "correction": "inverse", "extra": 1},
        {"deadline": 0.08, "slot": 0.03, "error_rule": "waterfall", "correction": "inverse"},
    ]
)


@pytest.mark.parametrize("name", ["fedcpsl", "scaffold", "fedcpsl2", "feddyn"])
@settings(deadline=None, max_examples=20, suppress_health_check=[HealthCheck.too_slow])
@given(CHANNELS, CLOCKS, st.integers(0, 2), st.integers(0, 1000))
def test_what_an_algorithm_declares_holds_whatever_the_channel_does(name, channel, clock, joiners, seed):
    work = replace(WORK, rounds=6, active=3, joiners=joiners, join_round=2)
    edge = replace(MACRO, **(channel | clock))
    try:
        setup = make(name, edge, work=work, seed=seed)
    except InputError as error:
        assert any(word in str(error) for word in ("nobody can", "no device could", "reweighted", "late updates"))  # noqa: PT017
        return
    before = None
    for state in simulate(setup):
        assert_invariants(state)
        if before is not None:
            assert state.edge.seconds >= before
        before = state.edge.seconds
        assert (state.edge.battery >= 0).all()


def test_the_clock_is_the_sum_of_its_parts():
    for edge in (MACRO, replace(MACRO, extra=1), TIGHT):
        clock = 0.0
        for state in simulate(make("fedcpsl", edge)):
            if not state.round:
                continue
            records = state.edge.records
            takes = ends_of(records) - records.start
            counted = records.outcome == COUNTED
            if counted.sum() == min(4, (records.steps_planned > 0).sum()):
                expected = takes[counted].max()
            else:
                expected = edge.deadline if edge.deadline != "none" else takes.max()
            assert state.edge.round_seconds == pytest.approx(expected, rel=1e-12)
            clock += state.edge.round_seconds
            assert state.edge.seconds == pytest.approx(clock, rel=1e-12)
            assert records.start == pytest.approx(np.full(len(records.start), clock - state.edge.round_seconds))
        assert state.edge.joules.sum() == pytest.approx(state.edge.compute_joules + state.edge.radio_joules)


def test_with_spare_devices_the_first_to_arrive_count():
    some_late = 0
    for state in simulate(
        make("fedcpsl", replace(MACRO, extra=1), work=replace(WORK, active=3, loss_rate=0.0, rounds=6))
    ):
        if state.round:
            records, outcome = state.edge.records, state.edge.records.outcome
            late = [OUTCOMES[kind] == "late" for kind in outcome]
            takes = ends_of(records) - records.start
            assert sum(late) == max((records.steps_planned > 0).sum() - 3, 0)
            some_late += sum(late)
            assert takes[outcome == COUNTED].max() <= takes[late].min(initial=np.inf)
    assert some_late > 0


def test_late_devices_are_not_drawn_while_they_compute():
    edge = replace(MACRO, extra=1, flops_per_cycle=1e-4, clock_ghz=[0.05, 5.0])
    busy = {}
    for state in simulate(make("fedavg", edge, work=replace(WORK, active=2, loss_rate=0.0, rounds=12))):
        if state.round:
            records = state.edge.records
            for device, start, end in zip(records.device, records.start, ends_of(records), strict=True):
                assert start >= busy.get(int(device), 0.0)
                busy[int(device)] = end


@pytest.mark.parametrize(
    "edge",
    [
        TIGHT,
        replace(
            MACRO, availability="on-off", on_seconds=0.05, off_seconds=0.05, battery=0.5, recharge_w=0.1, upload_bits=4
        ),
        replace(MACRO, clock="semi-async", wait_for=1, flops_per_cycle=0.01),
        replace(MACRO, clock="semi-async", wait_for=2, flops_per_cycle=1e-3, clock_ghz=[0.05, 5.0]),
    ],
    ids=["deadline", "on-off", "semi-async", "semi-async-2"],
)
@pytest.mark.parametrize(("executor", "small"), [("sequential", 1 << 18), ("vectorised", 1 << 18), ("vectorised", 0)])
def test_resumed_it_is_bit_for_bit_the_same(edge, executor, small, tmp_path, monkeypatch):
    monkeypatch.setattr("fedcpsl.simulation.flight.SMALL", small)  # 0: late uploads one by one, runs of rows as views
    work = replace(WORK, rounds=7)
    setup = make("fedcpsl", edge, work=work, executor=executor)
    states = all_states(setup)
    if edge.clock == "semi-async":
        assert any(state.flight for state in states[1:-1])
    for state in states[1:-1]:
        save_checkpoint(tmp_path, state)
        again = make("fedcpsl", edge, work=work, executor=executor)
        loaded = load_checkpoint(checkpoints(tmp_path)[-1], again)
        assert_same_edge(loaded, state)
        again = all_states(loaded.setup, loaded)
        assert len(again) == 7 - state.round
        assert_equal(again[-1], states[-1], tolerance=0)
        assert_same_edge(again[-1], states[-1])
        assert (again[-1].uplink_bytes, again[-1].lost) == (states[-1].uplink_bytes, states[-1].lost)


@pytest.mark.parametrize("edge", [TIGHT, replace(MACRO, clock="semi-async", wait_for=2, flops_per_cycle=0.01)])
def test_executors_and_processes_agree(edge):
    one = all_states(make("fedcpsl", edge))[-1]
    assert_equal(one, all_states(make("fedcpsl", edge, executor="vectorised"))[-1])
    assert_equal(one, all_states(make("fedcpsl", edge, executor="vectorised", slots=2))[-1])


@needs_fork
@pytest.mark.parametrize("edge", [replace(TIGHT, extra=1), replace(MACRO, clock="semi-async", wait_for=2)])
def test_worker_processes_agree(edge):
    work = replace(WORK, active=3)
    one, two = (all_states(make("fedcpsl", edge, work=work, processes=p))[-1] for p in (1, 2))
    assert_equal(one, two)
    assert_same_edge(one, two)


def test_runs_side_by_side_are_the_runs_alone():
    edges = [TIGHT, None, replace(MACRO, clock="semi-async", wait_for=2), replace(MACRO, upload_bits=8)]
    setups, model = [], small_model()
    for edge in edges:
        run = config.Run(executor="vectorised", processes=1, dtype="float64", seed=3, device="cpu")
        beside = setups[0] if setups else None
        setups.append(prepare(small_federation(), model, settings_for("fedcpsl"), WORK, run, beside=beside, edge=edge))
    *_, together = simulate_together(setups)
    for edge, state in zip(edges[:3], together, strict=False):  # rounding to bits may differ where sums do
        assert_equal(state, all_states(make("fedcpsl", edge, executor="vectorised"))[-1])


def test_compared_algorithms_meet_the_same_channels():
    one, two = (make(name, MACRO) for name in ("fedcpsl", "fedavg"))
    for mine, other in zip(simulate(one), simulate(two), strict=True):
        if mine.round:
            a, b = mine.edge.records, other.edge.records
            assert np.array_equal(a.device, b.device)
            # the fade and the gain are in the rate, bits / seconds, which is the same whatever is sent
            bits, sent = (one.edge.load.bits_up, two.edge.load.bits_up), b.steps_done > 0
            assert bits[0] / a.upload[sent] == pytest.approx(bits[1] / b.upload[sent], rel=1e-9)


def test_fedcpsl_is_sent_two_vectors_and_sends_one():
    load = make("fedcpsl", MACRO, dtype="float32").edge.load
    parameters = sum(p.numel() for p in small_model().parameters())
    assert (load.bits_up, load.bits_down) == (32 * parameters + 64, 64 * parameters)
    assert make("fedavg", MACRO, dtype="float32").edge.load.bits_down == 32 * parameters


def test_what_a_step_costs():
    # the small model is two linear layers, a x b and b x c: 2 (ab + bc) FLOPs a sample; FedCPSL trains two models on 3
    # labelled and 4 unlabelled samples: 3 x 2 x 7 forward passes; pseudo-labels: one pass of each unlabelled sample
    weights = [p for p in small_model().parameters() if p.dim() == 2]
    forward = 2 * sum(w.numel() for w in weights)
    edge = replace(MACRO, flops_per_cycle=1.0)
    load = make("fedcpsl", edge).edge.load
    assert (load.cycles, load.cycles_per_sample, load.cycles_per_visit) == (42 * forward, forward, 0)
    assert make("fedavg", edge).edge.load.cycles == 9 * forward
    assert make("apfl", edge).edge.load.cycles == 18 * forward
    assert make("fedcpsl2", edge).edge.load.cycles_per_sample > 0


def test_without_a_server_a_round_is_what_devices_compute():
    *_, last = simulate(make("local", TIGHT))
    assert last.edge.radio_joules == 0
    assert last.edge.counts["lost"] == 0
    assert 0 < last.edge.round_seconds <= TIGHT.deadline


def test_personal_rounds_have_a_clock_and_no_radio():
    work = replace(WORK, rounds=2, personal_rounds=2)
    states = all_states(make("fedcpsl", MACRO, work=work))
    assert states[-1].edge.radio_joules == states[2].edge.radio_joules
    assert states[-1].edge.seconds > states[2].edge.seconds
    assert states[-1].edge.compute_joules > states[2].edge.compute_joules


def test_batteries_are_recharged_before_personal_rounds_too():
    # with a strong charger, whoever waited for others in the round before is full again
    edge = replace(MACRO, battery=100.0, recharge_w=1e9, kappa=1e-21)
    states = all_states(make("fedcpsl", edge, work=replace(WORK, rounds=2, personal_rounds=2)))
    before, last = states[-2].edge, states[-1].edge
    waited = before.records.device[before.records.compute < 0.999 * before.round_seconds]
    assert len(waited)
    spent = (last.joules - before.joules).sum(0)
    assert spent.min() > 1e-3
    assert last.battery[waited] == pytest.approx(100.0 - spent[waited], abs=1e-6)


def test_more_spare_devices_than_there_are_is_refused():
    with pytest.raises(InputError, match=r"edge.extra = 9: there are \d devices beyond work.active = 4; give at most"):
        make("fedcpsl", replace(MACRO, extra=9), work=replace(WORK, active=4))


@pytest.mark.parametrize("name", sorted(PROFILES))
def test_every_profile_runs(name):
    *_, last = simulate(make("fedavg", of_profile(name), work=replace(WORK, rounds=2)))
    assert (last.edge is None) == (name == "off")


def test_the_fewer_bits_the_shorter():
    seconds = {}
    for bits in (0, 8, 1):
        *_, last = simulate(make("fedcpsl", replace(MACRO, upload_bits=bits), dtype="float32"))
        seconds[bits] = last.edge.seconds
        assert last.uplink_bytes > 0
    assert seconds[1] < seconds[8] < seconds[0]


def test_semi_async_counts_late_updates_later():
    edge = replace(MACRO, clock="semi-async", wait_for=1, flops_per_cycle=1e-3, clock_ghz=[0.05, 5.0])
    stale, busy = [], set()
    for state in simulate(make("fedcpsl", edge, work=replace(WORK, rounds=10, active=3, loss_rate=0.0))):
        if not state.round:
            continue
        records = state.edge.records
        stale += records.staleness.tolist()
        under_way = set(state.edge.flight.device.tolist())
        assert not busy & under_way - busy
        assert len(under_way) + len(records.device) <= 3
        assert (
            sorted(each.task.device for each in state.flight if each.task.steps)
            == sorted(d for d, n in zip(state.edge.flight.device, state.edge.flight.steps_done, strict=True) if n)
            if state.flight
            else not under_way
        )
        busy = under_way
    assert max(stale) >= 1


def test_algorithms_that_allow_no_late_updates_are_refused():
    semi = replace(MACRO, clock="semi-async", wait_for=1)
    for name in ("feddyn", "fedamp", "afl", "fedshvr"):
        with pytest.raises(InputError, match="does not allow late updates"):
            make(name, semi)
    with pytest.raises(InputError, match="cannot weigh updates"):
        make("feddyn", replace(TIGHT, correction="inverse"))
    assert find_algorithm("fedcpsl")[0].late


@pytest.mark.parametrize(("loss_rate", "bias"), [(0.0, 6), (0.3, 4)])
def test_the_correction_makes_the_mean_update_that_without_losses(tmp_path, loss_rate, bias):
    """Over seeds, theta after a round of all devices less theta without losses has mean 0 with it, and not without."""
    names, where = small_federation().names, tmp_path / "where.csv"
    lines = [f"{name},{metres}\n" for name, metres in zip(names, (100, 1500, 1800, 2100, 2400), strict=True)]
    where.write_text("device,distance\n" + "".join(lines))
    work = replace(WORK, rounds=1, active=len(names), unit="steps", amount=2, loss_rate=0.0)
    edge = replace(MACRO, positions=str(where), shadowing_db=0.0, deadline=1000.0, slot=0.1, bandwidth_up_mhz=0.1)
    differences = {"none": [], "inverse": []}
    for seed in range(80):
        without_losses = list(simulate(make("fedcpsl", None, work=work, seed=seed)))[-1].server.theta
        for correction, found in differences.items():
            lossy, corrected = replace(work, loss_rate=loss_rate), replace(edge, correction=correction)
            state = list(simulate(make("fedcpsl", corrected, work=lossy, seed=seed)))[-1]
            found.append((state.server.theta - without_losses).numpy())
    # 83 parameters and a count, 8 bytes each, in 0.1 s of 20 kHz: P_out in closed form
    bits, width, noise, power = 64 * 84, 2e4, 10 ** ((-174 + 5 - 30) / 10), 10 ** ((23 - 30) / 10)
    gains = [10 ** (-(128.1 + 37.6 * np.log10(metres / 1000)) / 10) for metres in (100, 1500, 1800, 2100, 2400)]
    chance = [1 - np.exp(-width * noise / (power * gain) * (2 ** (bits / (width * 0.1)) - 1)) for gain in gains]
    assert state.edge.records.outage == pytest.approx(chance)
    assert chance[1] < 0.2 < 0.6 < chance[4] < 0.9  # unequal, and below where the cap begins

    def in_standard_errors(found):
        return np.abs(np.mean(found, 0) / (np.std(found, 0, ddof=1) / np.sqrt(len(found)))).max()

    # of 83 parameters, the worst
    assert in_standard_errors(differences["inverse"]) < 4
    assert in_standard_errors(differences["none"]) > bias


def test_a_plan_of_the_next_round_leaves_the_state_as_it_is():
    edge = replace(MACRO, availability="on-off", on_seconds=0.05, off_seconds=0.05, battery=0.5, recharge_w=0.1)
    states = simulate(make("fedcpsl", edge, work=replace(WORK, rounds=3)))
    next(states)
    state = next(states)
    before = state._replace(edge=copied(state.edge))
    once, again = draw_plan(state), draw_plan(state)
    assert_same_edge(before, state)
    after = next(states)
    assert [(task.device, task.steps) for task in once] == [(task.device, task.steps) for task in again]
    assert sorted(task.device for task in once) == after.edge.records.device.tolist()


def test_an_edge_that_is_off_is_none():
    assert make("fedavg", Edge()).edge is None
