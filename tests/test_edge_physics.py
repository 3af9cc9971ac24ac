"""Who is there, batteries, measurements, rounding and weights, each by hand or against its definition."""

import re
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl.config import Config, Work, to_toml, with_settings
from fedcpsl.edge.availability import daily_chance, is_there, leaves_after, next_moment
from fedcpsl.edge.cell import Load, edge_terms
from fedcpsl.edge.quantise import quantised, quantised_bits, quantised_uploads, uniform
from fedcpsl.edge.rounds import drawn_devices, play
from fedcpsl.edge.settings import Edge, of_profile
from fedcpsl.edge.state import OUTCOMES, copied, initial_edge_state
from fedcpsl.edge.weights import inverse_weight, staleness_weight
from fedcpsl.errors import InputError
from fedcpsl.runs.edge_files import read_devices, read_rounds
from tests.command import fedcpsl
from tests.small_runs import make_run

MACRO = of_profile("macro")
# 1 Mbit each way, 1e8 cycles a step, nothing random: devices at given places
STILL = replace(MACRO, shadowing_db=0.0, fading="none", clock_sigma=0.0, clock_ghz=[1.0, 1.0], profile="macro")
LOAD = Load(1e6, 1e6, 1e8, 0.0, 0.0)


def terms_of(edge, devices=4, wanted=2, load=LOAD, seed=0):
    names = [f"d{i}" for i in range(devices)]
    return edge_terms(edge, names, seed, (load, load), 1e6, wanted, np.zeros(devices, np.int64))


def a_round(terms, state, number=0, steps=10):
    drawn = drawn_devices(terms, state, np.arange(terms.devices), terms.wanted)
    return play(terms, drawn, number, np.full(len(drawn.devices), steps))


def file_of(folder, text):
    path = folder / "given.csv"
    path.write_text(text)
    return str(path)


# A round by hand, the one of docs/edge.md.


def test_the_worked_example(tmp_path):
    # two devices at 100 m and 400 m: PL = 128.1 + 37.6 log10(0.1) = 90.5 dB and 128.1 + 37.6 log10(0.4) = 113.137 dB
    # N0 = -174 + 5 = -169 dBm/Hz. Down, 20 MHz, 43 dBm: noise -169 + 73.01 = -95.99 dBm; SNR 43 - 90.5 + 95.99 =
    # 48.49 dB and 25.85 dB: 20e6 log2(1 + 70632) = 322.1e6 bit/s and 20e6 log2(1 + 384.9) = 171.8e6: 3.10 ms and 5.82
    # ms for 1 Mbit compute: 10 steps of 1e8 cycles at 1 GHz: 1 s, 1e-28 x 1e9 x 1e18 = 0.1 J up, 5 MHz each, 23 dBm:
    # noise -169 + 66.99 = -102.01 dBm; SNR 34.51 dB and 11.87 dB: 5e6 log2(1 + 2825) = 57.3e6 and 5e6 log2(1 + 15.39)
    # = 20.2e6 bit/s: 17.4 ms and 49.6 ms; at 0.1995 W: 3.48 mJ and 9.89 mJ
    edge = replace(STILL, positions=file_of(tmp_path, "device,distance\nd0,100\nd1,400\n"))
    terms = terms_of(edge, devices=2)
    outcome = a_round(terms, initial_edge_state(terms))
    records = outcome.ended
    assert terms.cell.path_loss_db == pytest.approx([90.5, 113.137], abs=1e-3)
    assert 1e3 * records.download == pytest.approx([3.10, 5.82], abs=0.01)
    assert records.compute == pytest.approx([1.0, 1.0])
    assert 1e3 * records.upload == pytest.approx([17.4, 49.6], abs=0.1)
    assert records.compute_joules == pytest.approx([0.1, 0.1])
    assert 1e3 * records.radio_joules == pytest.approx([3.48, 9.89], abs=0.02)
    assert outcome.state.seconds == pytest.approx(0.00582 + 1 + 0.0496, abs=1e-4)
    assert outcome.state.seconds == (records.download + records.compute + records.upload).max()


@pytest.mark.parametrize(
    ("rule", "steps", "outcome", "joules"), [("partial", 5, "counted", 0.05), ("drop", 5, "dropped", 0.0594)]
)
def test_a_deadline_by_hand(rule, steps, outcome, joules, tmp_path):
    # T = 0.7, S = 0.1, t_down = 5.82 ms: 0.5942 s at 1 GHz are 5.94 steps of 1e8 cycles. Who is dropped computes until
    # T - S: 1e-28 x 0.5942e9 x 1e18 = 0.0594 J, and sends nothing; who is not sends for S: 0.1995 x 0.1 J
    positions = file_of(tmp_path, "device,x,y\nd0,0,400\nd1,0,-400\n")
    terms = terms_of(replace(STILL, positions=positions, deadline=0.7, slot=0.1, on_deadline=rule), devices=2)
    found = a_round(terms, initial_edge_state(terms)).ended
    assert found.steps_done.tolist() == [steps] * 2
    assert [OUTCOMES[kind] for kind in found.outcome] == [outcome] * 2
    assert found.compute_joules == pytest.approx([joules] * 2, abs=1e-4)
    assert found.radio_joules == pytest.approx([0.01995 if rule == "partial" else 0.0] * 2, abs=1e-5)


def test_a_round_waits_until_the_deadline_where_an_upload_is_lost(tmp_path):
    positions = file_of(tmp_path, "device,distance\nd0,100\nd1,60000\n")
    terms = terms_of(replace(STILL, positions=positions, download="free", deadline=3.0, slot=0.5), devices=2)
    outcome = a_round(terms, initial_edge_state(terms))
    assert [OUTCOMES[kind] for kind in outcome.ended.outcome] == ["counted", "lost"]
    assert outcome.state.seconds == 3.0
    assert outcome.ended.radio_joules == pytest.approx([0.1995 * 0.5] * 2, abs=1e-3)


# Who is there.


def test_a_trace_says_who_is_there(tmp_path):
    text = "device,start,end\nd1,5,9\nd0,0,4\nd0,4,6\nd0,20,30\n"
    terms = terms_of(replace(STILL, availability="trace", trace=file_of(tmp_path, text)), devices=3)
    everybody, state = np.arange(3), copied(initial_edge_state(terms))
    found = {}
    for now in (0.0, 4.0, 5.0, 6.0, 8.9, 9.0, 20.0, 30.0):
        state = state._replace(seconds=now)
        found[now] = np.flatnonzero(is_there(terms, state, everybody)).tolist()
    assert found == {0.0: [0], 4.0: [0], 5.0: [0, 1], 6.0: [1], 8.9: [1], 9.0: [], 20.0: [0], 30.0: []}
    assert leaves_after(terms, state._replace(seconds=1.0), np.array([0]), 99.0) == 5.0  # two intervals that touch
    assert next_moment(terms, state._replace(seconds=9.0), everybody) == 20.0
    assert next_moment(terms, state._replace(seconds=30.0), everybody) is None


def test_where_nobody_is_the_clock_moves_on_and_then_rounds_are_idle(tmp_path):
    text = "device,start,end\nd1,50,50.5\nd2,70,90\n"
    terms = terms_of(replace(STILL, availability="trace", trace=file_of(tmp_path, text)))
    first = a_round(terms, initial_edge_state(terms))
    assert first.ended.device.tolist() == [1]  # fewer than wanted: those
    assert first.ended.start.tolist() == [50.0]
    assert [OUTCOMES[kind] for kind in first.ended.outcome] == ["left"]
    second = a_round(terms, first.state, 1)
    assert second.ended.start.tolist() == [70.0]
    assert [OUTCOMES[kind] for kind in second.ended.outcome] == ["counted"]
    late = second.state._replace(seconds=95.0)
    third = a_round(terms, late, 2)
    assert len(third.ended.device) == 0
    assert (third.state.seconds, third.state.counts["idle_rounds"]) == (95.0, 1)


def test_on_and_off_times_have_their_means_and_depend_on_nothing_else():
    edge = replace(STILL, availability="on-off", on_seconds=30.0, off_seconds=10.0)
    terms, everybody = terms_of(edge, devices=2000), np.arange(2000)
    state = copied(initial_edge_state(terms))
    shares = []
    for now in np.arange(0.0, 400.0, 20.0):
        state = state._replace(seconds=float(now))
        there = is_there(terms, state, everybody)
        shares.append(there.mean())
    assert np.mean(shares) == pytest.approx(0.75, abs=0.01)
    jumped = copied(initial_edge_state(terms))._replace(seconds=380.0)  # at once, and of some alone
    assert np.array_equal(is_there(terms, jumped, everybody[::7]), there[::7])
    assert np.array_equal(jumped.next_switch[::7], state.next_switch[::7])


def test_a_daily_rhythm_has_its_chance():
    edge = replace(STILL, availability="daily", day_seconds=960.0, presence=[0.9, 0.9])
    terms, everybody = terms_of(edge, devices=20_000), np.arange(20_000)
    # p (0.5 + 0.4 sin(2 pi t / day + phase)) by hand: 0.9 (0.5 + 0.4) = 0.81 at the peak, 0.9 x 0.1 = 0.09 at the
    # bottom
    assert daily_chance(np.array([0.9, 0.9, 2.0]), 240.0, 960.0, np.array([0.0, np.pi, 0.0])) == pytest.approx(
        [0.81, 0.09, 1]
    )
    for now in (5.0, 245.0, 725.0):
        state = copied(initial_edge_state(terms))._replace(seconds=now)
        chance = daily_chance(terms.cell.presence, now, 960.0, terms.cell.phase)
        there = is_there(terms, state, everybody)
        for low in (0.1, 0.4, 0.7):
            some = (chance >= low) & (chance < low + 0.1)
            assert there[some].mean() == pytest.approx(chance[some].mean(), abs=0.035)


# Batteries.


def test_a_battery_that_runs_out_by_hand():
    # 10 steps cost 0.1 J in 1 s; with 0.035 J left a device makes 3.5 of them, in 0.35 s, and is lost; then it is not
    # there
    edge = replace(STILL, download="free", battery=0.035)
    terms = terms_of(edge, devices=2)
    outcome = a_round(terms, initial_edge_state(terms))
    assert [OUTCOMES[kind] for kind in outcome.ended.outcome] == ["battery"] * 2
    assert outcome.steps.tolist() == [3, 3]
    assert outcome.ended.compute == pytest.approx([0.35] * 2)
    assert outcome.state.battery.tolist() == [0.0, 0.0]
    assert outcome.state.seconds == pytest.approx(0.35)
    assert not is_there(terms, copied(outcome.state), np.arange(2)).any()
    assert next_moment(terms, outcome.state, np.arange(2)) is None


def test_a_battery_recharges_while_its_device_is_idle_and_there(tmp_path):
    # d0 is there from 0 to 10 and from 20 to 40; empty at 2, with 0.01 W it has 0.08 J at 20 and 0.13 J at 25; full
    # is 0.15
    text = "device,start,end\nd0,0,10\nd0,20,40\n"
    edge = replace(
        STILL, availability="trace", trace=file_of(tmp_path, text), battery=0.15, recharge_w=0.01, battery_minimum=0.1
    )
    terms = terms_of(edge, devices=1, wanted=1)
    state = copied(initial_edge_state(terms))._replace(battery=np.zeros(1), charged_at=np.full(1, 2.0))
    levels = []
    for now in (5.0, 20.0, 25.0, 39.0):
        state = state._replace(seconds=now)
        there = is_there(terms, state, np.arange(1))
        levels.append((round(float(state.battery[0]), 6), bool(there[0])))
    assert levels == [(0.03, False), (0.08, False), (0.13, True), (0.15, True)]


def test_a_download_that_outlasts_the_deadline_ends_with_the_round(tmp_path):
    # at 300 km the download takes longer than the deadline: no step, no radio energy, and free for the next round
    where = file_of(tmp_path, "device,distance\nd0,10\nd1,300000\n")
    terms = terms_of(replace(STILL, positions=where, deadline=2.0, slot=0.5), devices=2)
    outcome = a_round(terms, initial_edge_state(terms))
    assert outcome.ended.download[1] > 2.0
    assert [OUTCOMES[kind] for kind in outcome.ended.outcome] == ["counted", "idle"]
    assert outcome.ended.radio_joules[1] == 0
    assert outcome.state.seconds == 2.0
    assert is_there(terms, outcome.state, np.arange(2)).all()


# Measurements.


def test_measured_capacities_take_the_place_of_formulas(tmp_path):
    # training on one sample takes 0.02 s; with 1e6 cycles for that, the clock is 50 MHz, and 10 steps of 1e8 cycles
    # 20 s; 1 Mbit at 4 Mbit/s takes 0.25 s, at 8 Mbit/s 0.125 s
    text = "device,seconds_per_sample,up_mbit,down_mbit\nd0,0.02,4,8\nd1,,,\n"
    terms = terms_of(replace(STILL, capacities=file_of(tmp_path, text)), devices=2)
    found = a_round(terms, initial_edge_state(terms)).ended
    assert (found.download[0], found.compute[0], found.upload[0]) == pytest.approx((0.125, 20.0, 0.25))
    plain = a_round(terms_of(STILL, devices=2), initial_edge_state(terms)).ended
    assert (found.download[1], found.compute[1], found.upload[1]) == (
        plain.download[1],
        plain.compute[1],
        plain.upload[1],
    )


@pytest.mark.parametrize(
    ("setting", "text", "said"),
    [
        ("trace", "device,start,end\nd0,5,3\n", "line 2: end 3 is not after start 5"),
        ("trace", "device,start,end\nd0,0,5\nd1,0,9\nd0,4,7\n", "line 4: overlaps line 2 of the same device, 0 to 5"),
        ("trace", "device,start,end\nd9,0,5\n", "device 'd9' is not among the 4 devices; did you mean"),
        ("trace", "device,start,end\n", "has no interval"),
        ("trace", "device,from,to\nd0,1,2\n", "must name the columns device,start,end"),
        ("trace", "device,start,end\nd0,now,5\n", "line 2: start = 'now' is no number; give one"),
        ("trace", "device,start,end\nd0,0,5,7\n", "line 2: has more cells than the 3 columns"),
        ("positions", "device,x,y\nd0,1,1\nd1,2,2\nd0,3,3\n", "line 4: is of the same device as line 2; leave one"),
        ("positions", "device,x,y\nd0,1,1\n", "has no row for device 'd1'"),
        ("positions", "device,distance\nd0,-5\n", "distance = -5; give a number of at least 0"),
        ("capacities", "device,seconds_per_sample,up_mbit,down_mbit\nd0,0,1,1\n", "seconds_per_sample = 0; give"),
        ("capacities", "device,seconds_per_sample,up_mbit,down_mbit\nd0,1,1,1\nd0,,1,\n", "same device as line 2"),
    ],
)
def test_bad_files_get_one_line(setting, text, said, tmp_path):
    edge = replace(
        STILL, availability="trace" if setting == "trace" else "always", **{setting: file_of(tmp_path, text)}
    )
    with pytest.raises(InputError, match=re.escape(said)) as error:
        terms_of(edge)
    assert "\n" not in str(error.value)
    with pytest.raises(InputError, match="no such file"):
        terms_of(replace(edge, **{setting: str(tmp_path / "none.csv")}))


def test_an_unknown_device_of_many_gets_a_short_line(tmp_path):
    edge = replace(STILL, availability="trace", trace=file_of(tmp_path, "device,start,end\nx,0,5\n"))
    with pytest.raises(InputError, match="device 'x' is not among the 5000 devices; see the names") as error:
        terms_of(edge, devices=5000)
    assert len(str(error.value)) < 300


# Rounding, and weights.


@settings(deadline=None, max_examples=50)
@given(st.lists(st.floats(-5, 5), min_size=2, max_size=20), st.integers(1, 12), st.integers(0, 99))
def test_rounded_numbers_lie_on_the_grid_within_a_step(values, bits, seed):
    x = torch.tensor(values, dtype=torch.float64)
    u = torch.rand(len(x), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    found, step = quantised(x, bits, u), (x.max() - x.min()) / (2**bits - 1)
    assert (found - x).abs().max() <= step * (1 + 1e-9) + 1e-15
    assert found.min() >= x.min() - 1e-12
    assert found.max() <= x.max() + 1e-9
    if step > 1e-9:
        grid = (found - x.min()) / step
        assert (grid - grid.round()).abs().max() < 1e-5


def test_a_tensor_that_is_flat_or_not_finite_is_sent_as_it_is():
    """One of each beside tensors that are rounded, which are rounded as without it."""
    inf, nan = float("inf"), float("nan")
    kept = torch.tensor([[1.0, inf], [-inf, 2.0], [-inf, inf], [nan, 1.0], [3.0, 3.0], [inf, inf]])
    rounded = torch.tensor([[0.1, 7.0]])
    u = torch.full((7, 2), 0.4)
    found = quantised(torch.cat([kept, rounded]), 4, u)
    assert torch.equal(found[:-1].nan_to_num(nan=9.0), kept.nan_to_num(nan=9.0))
    assert torch.equal(found[-1:], quantised(rounded, 4, u[:1]))


def test_rounding_is_that_of_each_device_however_many_are_rounded_at_once(monkeypatch):
    upload = torch.randn(5, 7, 4).transpose(1, 2), torch.arange(5)  # one that does not lie in a row, and counts
    before = quantised_uploads(upload, 8, [28], 0, 3, range(5))
    assert torch.equal(before[1], upload[1])
    step = (upload[0].amax((1, 2)) - upload[0].amin((1, 2))) / 255
    assert ((before[0] - upload[0]).abs().amax((1, 2)) <= 1.001 * step).all()
    monkeypatch.setattr("fedcpsl.edge.quantise.AT_ONCE", 60)  # two devices
    assert torch.equal(quantised_uploads(upload, 8, [28], 0, 3, range(5))[0], before[0])


def test_what_lies_on_the_grid_stays():
    x = torch.arange(256.0).expand(200, 256)
    assert torch.equal(quantised_uploads((x,), 8, [256], 0, 0, range(200))[0], x)


def test_rounding_is_unbiased_and_keyed():
    x = torch.tensor([[0.0, 0.3, 0.55, 1.0]], dtype=torch.float64)
    many = torch.cat([quantised_uploads(x, 2, [4], 0, r, [5]) for r in range(4000)])
    assert many.mean(0).tolist() == pytest.approx(x[0].tolist(), abs=0.01)
    assert sorted(set(many[:, 1].tolist())) == pytest.approx([0.0, 1 / 3])
    both = quantised_uploads(torch.cat([x, x]), 2, [4], 0, 9, [5, 6])
    assert torch.equal(both[:1], quantised_uploads(x, 2, [4], 0, 9, [5]))  # whoever else sends
    # B bits an entry and two float32 per tensor: tensors of 3 and 1, and a count of 8 bytes
    assert quantised_bits((x[0], torch.tensor(7)), 2, [3, 1]) == 2 * 4 + 2 * 64 + 64


def test_inverse_weights_are_unbiased():
    # over outages, sum over the drawn of the counted ones' w_i x_i / m_counted is the mean of x over the drawn
    chance, x = np.array([0.1, 0.5, 0.8]), np.array([1.0, -2.0, 7.0])
    lost = np.random.default_rng(0).random((200_000, 3)) < chance
    found = []
    for row in lost:
        here = ~row
        weight = inverse_weight(chance, int(here.sum()), 3, 10.0)
        found.append((weight * x)[here].sum() / max(here.sum(), 1))
    assert np.mean(found) == pytest.approx(x.mean(), abs=0.03)
    assert inverse_weight(np.array([0.99]), 1, 1, 10.0) == 10.0  # the cap
    assert staleness_weight(np.array([0, 1, 3]), 0.5) == pytest.approx([1, 2**-0.5, 0.5])


# Settings.


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"bandwidth_up_mhz": -1.0}, "edge.bandwidth_up_mhz = -1.0: give a number from 1e-06 to 1e+06"),
        ({"bandwidth_up_mhz": float("inf")}, "edge.bandwidth_up_mhz = inf: give a number from 1e-06 to 1e+06"),
        ({"flops_per_cycle": 1e-300}, "edge.flops_per_cycle = 1e-300: give a number from 1e-09 to 1e+09"),
        ({"kappa": 1e300}, "edge.kappa = 1e+300: give a number from 0 to 1"),
        ({"on_seconds": 1e-9}, "edge.on_seconds = 1e-09: give a number from 0.001"),
        ({"clock_ghz": [float("nan"), 1.0]}, "edge.clock_ghz = [nan, 1.0]: give two numbers from 1e-06 to 1000"),
        ({"profile": "mars"}, "edge.profile = 'mars': no such profile"),
        ({"profile": []}, "edge.profile = []: no such profile; known: ideal, macro"),
        ({"deadline": 5.0}, "edge.deadline: needs an upload slot; give edge.slot"),
        ({"slot": 5.0}, "edge.slot: is part of a deadline"),
        ({"deadline": 5.0, "slot": 5.0}, "leaves no time to compute"),
        ({"deadline": 5.0, "slot": 1.0, "allocation": "equal-time"}, "works without a deadline only"),
        ({"allocation": "equal-outage"}, "nothing is lost without a deadline"),
        ({"correction": "inverse"}, "is for uploads that the channel loses in the slots of a deadline"),
        ({"availability": "trace"}, "give the file, edge.trace"),
        ({"battery": 1.0, "battery_minimum": 2.0}, "never lets a device start"),
        ({"recharge_w": 2.0}, "are about batteries"),
        ({"clock": "semi-async"}, "give edge.wait_for"),
        ({"clock": "semi-async", "wait_for": 1, "deadline": 5.0, "slot": 1.0}, "has no deadline"),
        ({"upload_bits": 17}, "a whole number from 0 to 16"),
        ({"clock_ghz": [2.0, 1.0]}, "the smaller first"),
        ({"radios": 3}, "edge.radios: no such setting; did you mean 'radius'?"),
    ],
)
def test_settings_that_make_no_sense_get_one_line(given, said):
    with pytest.raises(InputError, match=re.escape(said)) as error:
        with_settings(Config(), {f"edge.{key}": value for key, value in given.items()})
    assert "\n" not in str(error.value)


def test_any_setting_turns_the_edge_on_and_a_profile_keeps_what_was_given():
    assert "[edge]" not in to_toml(Config())
    assert not with_settings(Config(), {"work.rounds": 3}).edge.on
    on = with_settings(Config(), {"edge.radius": 200.0})
    assert (on.edge.profile, on.edge.radius, on.edge.device_dbm) == ("macro", 200.0, 23.0)
    wifi = with_settings(on, {"edge.profile": "wifi"})
    assert (wifi.edge.radius, wifi.edge.device_dbm, wifi.edge.shadowing_db) == (200.0, 15.0, 5.0)
    assert with_settings(wifi, {"edge.profile": "off"}).edge.on is False
    import tomllib

    from fedcpsl.config import flat_settings

    assert with_settings(Config(), flat_settings(tomllib.loads(to_toml(wifi)), "")) == wifi


QUICK = {"work__rounds": 5, "data__devices": 6, "run__checkpoint_seconds": 0.0}


def test_a_run_writes_its_rounds_and_devices_and_resumes_them(tmp_path, monkeypatch):
    from fedcpsl.runs import experiment

    edge = {"edge__deadline": 0.2, "edge__slot": 0.15, "edge__shadowing_db": 20.0}
    whole = make_run(tmp_path / "whole", **QUICK, **edge)
    rows, devices = read_rounds(whole), read_devices(whole)
    assert rows["round"].tolist() == sorted([1, 2, 3, 4, 5] * 2)
    assert set(rows["outcome"]) <= set(OUTCOMES)
    assert devices["visits"].sum() == 10
    assert devices["compute_joules"].sum() == pytest.approx(rows["compute_joules"].sum(), rel=1e-6)
    stops = iter([False] * 3 + [True])
    monkeypatch.setattr(experiment, "_stop_requests", lambda: nullcontext(lambda: next(stops)))
    part = make_run(tmp_path / "part", **QUICK, **edge)
    with (part / "edge_rounds.csv").open("a") as file:
        file.write("9,1,0,")  # as a crash would leave it
    monkeypatch.undo()
    experiment.resume(part, lambda *_: None)
    for name in ("edge_rounds.csv", "edge_devices.csv", "devices.csv"):
        assert (part / name).read_text() == (whole / name).read_text()
    assert (part / "models.safetensors").read_bytes() == (whole / "models.safetensors").read_bytes()


def test_without_the_section_a_run_is_as_it_was(tmp_path):
    """No file, no section and no metric of an edge network."""
    run = make_run(tmp_path / "run", **QUICK)
    assert not list(run.glob("edge*"))
    assert "edge" not in (run / "config.toml").read_text()
    assert "edge" not in (run / "metrics.jsonl").read_text()


def test_from_the_command_line(tmp_path):
    common = ["--rounds", 2, "--devices", 4, "--active", 2, "--set", "model.hidden=[8]"]
    ran = fedcpsl("run", "--edge", "small-cell", *common, "--out", "r", cwd=tmp_path)
    assert ran.returncode == 0, ran.stderr
    assert "of virtual time" in ran.stdout
    assert "4 of 4 uploads counted" in ran.stdout
    late = fedcpsl("run", *common, "--set", "edge.deadline=1e-5", "--set", "edge.slot=1e-6", cwd=tmp_path)
    assert late.returncode == 2
    assert re.fullmatch(r"fedcpsl: edge.deadline = 1e-05: nobody can meet it, .* s more; give .*\n", late.stderr)
    dry = fedcpsl("run", "--dry-run", "--edge", "wifi", *common, cwd=tmp_path)
    assert "a step takes" in dry.stdout
    swept = fedcpsl(
        "sweep", "--grid", "upload_bits=0,8", "--edge", "ideal", "--seeds", 1, *common, "--out", "s", cwd=tmp_path
    )
    assert swept.returncode == 0, swept.stderr
    assert "energy" in swept.stdout


def test_the_classifier_and_jobs_have_no_edge():
    from fedcpsl.deployment.job import read_job
    from fedcpsl.sklearn import FedCPSLClassifier

    with pytest.raises(InputError, match="is for simulations"):
        read_job("[federation]\nshape = [4]\nclasses = ['a', 'b']\n[edge]\nprofile = 'wifi'\n", "job.toml")
    with pytest.raises(ValueError, match=r"edge\.profile"):
        FedCPSLClassifier(settings={"edge.profile": "wifi"}).fit(np.zeros((4, 2)), [0, 1, 0, 1])


def test_edge_is_in_the_public_interface():
    import fedcpsl as package

    assert package.Edge is Edge
    assert Work is package.Work


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_random_numbers_for_rounding_are_evenly_spaced_within_0_and_1(dtype):
    """The smallest v is half of 2^-23, the largest as much below 2^-8; bytes are 2^-8 apart."""
    drawn = np.array([[0, 255, 7, 0, 0], [0, 255, 7, 255, 255]], np.uint8)
    least, most = uniform(drawn, torch.zeros(1, dtype=dtype)).double().tolist()
    half = 2.0**-24
    assert least == [half, 255 / 256 + half, 7 / 256 + half]
    assert most == [1 / 256 - half, 1 - half, 8 / 256 - half]
