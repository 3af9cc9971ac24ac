"""The radio, the processor and the division of bandwidth: against vectors, definitions and simulated fades."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl.edge import allocation, compute, radio
from fedcpsl.edge.timeline import channel_numbers
from fedcpsl.edge.vectors import compared, read_formula_vector
from fedcpsl.errors import InputError
from fedcpsl.schedule import PURPOSES, normal, philox, uniforms
from tests.command import fedcpsl

VECTORS = sorted((Path(__file__).parent / "vectors" / "edge").glob("*.json"))


@pytest.mark.parametrize("path", VECTORS, ids=lambda path: path.stem)
def test_vector(path):
    differences = list(compared(read_formula_vector(path)))
    assert len(differences) >= 9
    assert [str(d) for d in differences if d.error > 1] == []


def test_verify_reads_formulas_and_names_what_differs(tmp_path):
    vector = json.loads(VECTORS[0].read_text())
    vector["expected"]["t_up"][0] *= 1 + 1e-8
    vector["expected"]["colour"] = [1.0]
    (tmp_path / "wrong.json").write_text(json.dumps(vector))
    right = fedcpsl("verify", *map(str, VECTORS), cwd=tmp_path)
    assert right.returncode == 0
    assert "all 5 vectors replayed" in right.stdout
    wrong = fedcpsl("verify", "--json", str(tmp_path / "wrong.json"), cwd=tmp_path)
    assert wrong.returncode == 1
    (replay,) = json.loads(wrong.stdout)["replays"]
    assert replay["first_difference"].startswith("t_up differs by")
    assert [d.quantity for d in compared(vector) if d.error > 1] == ["t_up", "colour"]


def test_what_is_no_formula_vector_is_refused(tmp_path):
    (tmp_path / "a.json").write_text("[]")
    with pytest.raises(InputError, match="needs `inputs` and `expected`"):
        read_formula_vector(tmp_path / "a.json")
    with pytest.raises(InputError, match="distance_m"):
        list(compared({"inputs": {}, "expected": {}}))


def test_the_cnn_of_cifar10_at_300_m():
    # EDGE numbers: 128.1 + 37.6 log10(0.3) = 128.1 - 19.66 = 108.44 dB; noise -174 + 5 + 10 log10(2.5e6) = -105.02 dBm;
    # signal 23 - 108.44 = -85.44 dBm; ratio 19.58 dB = 90.8; rate 2.5e6 log2(91.8) = 16.3e6; 28.1e6 / 16.3e6 = 1.72 s
    loss = radio.macro_path_loss(np.array([300.0]), np.zeros(1))
    assert loss == pytest.approx(108.44, abs=0.01)
    rate = radio.rate(np.array([2.5e6]), radio.watts(23), radio.gain(loss), np.ones(1), radio.noise_density(5))
    assert rate == pytest.approx(16.3e6, rel=0.005)
    assert radio.transmission_seconds(np.array([28.1e6]), rate) == pytest.approx(1.72, abs=0.01)


def test_other_laws_of_path_loss():
    # free space, 100 m at 2.4 GHz: 20 log10(4 pi 100 2.4e9 / 299792458) = 20 log10(10060) = 80.05 dB; an exponent of 2
    # is free space, and one of 3.5 adds 15 dB per decade: 15 x log10(100) = 30 dB
    d, none = np.array([100.0]), np.zeros(1)
    free = radio.free_space_path_loss(d, 2.4e9, none)
    assert free == pytest.approx(80.05, abs=0.01)
    assert radio.log_distance_path_loss(d, 2.0, 2.4e9, none) == pytest.approx(free)
    assert radio.log_distance_path_loss(d, 3.5, 2.4e9, none) == pytest.approx(free + 30)


@pytest.mark.parametrize("interference", [0.0, 3e-13])
def test_outage_in_closed_form_is_that_of_a_million_fades(interference):
    devices = np.arange(1_000_000)
    fades = radio.rayleigh(uniforms(7, "channel", 3, devices)[0])
    for gain, bandwidth, bits, slot in ((5e-12, 2e6, 8e6, 2.0), (3e-11, 5e5, 8e6, 3.0), (2e-12, 1e7, 6.4e6, 1.0)):
        given = np.full(1, bandwidth), 0.2, np.full(1, gain)
        expected = radio.outage(*given, radio.noise_density(5), interference, np.full(1, bits), slot)[0]
        rate = radio.rate(*given, fades, radio.noise_density(5), interference)
        share = radio.is_lost(rate, np.full(1, bits), slot).mean()
        assert 0.003 < expected < 0.99
        assert abs(share - expected) < 5 * np.sqrt(expected * (1 - expected) / len(devices))


def test_a_waterfall_error_by_hand():
    # m (I + W N0) / (p g a) with m = 2, I = 1e-13, W N0 = 3e-13, p g a = 1 x 1e-12 x 0.8: 2 x 4e-13 / 8e-13 = 1
    one = np.ones(1)
    found = radio.packet_error(2.0, 3e6 * one, 1.0, 1e-12 * one, 0.8 * one, 1e-19, 1e-13)
    assert found == pytest.approx(1 - np.exp(-1))


CELLS = st.integers(1, 12).flatmap(
    lambda n: st.fixed_dictionaries(
        {
            "loss": st.lists(st.floats(50, 145), min_size=n, max_size=n),
            "fade": st.lists(st.floats(1e-4, 6), min_size=n, max_size=n),
            "bits": st.lists(st.floats(1e4, 1e8), min_size=n, max_size=n),
            "before": st.lists(st.floats(0, 60), min_size=n, max_size=n),
            "figure": st.floats(0, 12),
            "interference": st.sampled_from([0.0, 1e-15, 2e-13, 1e-11]),
            "slot": st.floats(0.2, 20),
        }
    )
)


@settings(deadline=None, max_examples=150)
@given(CELLS)
def test_allocations_are_what_they_are_defined_as(cell):
    gain, fade, bits, before = (
        radio.gain(np.array(cell["loss"])),
        *(np.array(cell[k]) for k in ("fade", "bits", "before")),
    )
    noise, interference, slot, power, total = (
        radio.noise_density(cell["figure"]),
        cell["interference"],
        cell["slot"],
        0.2,
        1e7,
    )
    assert allocation.equal(total, len(gain)).sum() == pytest.approx(total)

    timed = allocation.equal_time(total, before, bits, power, gain * fade, noise, interference)
    rate = radio.rate(timed.bandwidth, power, gain, fade, noise, interference)
    finish = before + radio.transmission_seconds(bits, rate)
    assert timed.bandwidth.sum() == pytest.approx(total, rel=1e-9)
    assert (timed.bandwidth > 0).all()
    assert finish == pytest.approx(np.full(len(gain), timed.level), rel=1e-7)

    even = allocation.equal_outage(total, bits, slot, power, gain, noise, interference)
    lost = radio.outage(even.bandwidth, power, gain, noise, interference, bits, slot)
    assert even.bandwidth.sum() == pytest.approx(total, rel=1e-9)
    assert lost == pytest.approx(np.full(len(gain), even.level), rel=1e-6, abs=1e-12)


@pytest.mark.filterwarnings("error")
def test_bandwidth_is_divided_also_where_every_upload_is_lost():
    gain, bits = radio.gain(np.array([90.0, 110.0, 130.0])), np.full(3, 1e9)
    even = allocation.equal_outage(1e5, bits, 1.0, 0.2, gain, radio.noise_density(5), 0.0)
    assert even.level == 1.0
    assert even.bandwidth.sum() == pytest.approx(1e5, rel=1e-9)
    assert (np.diff(even.bandwidth) > 0).all()


def test_a_channel_without_power_divides_the_bandwidth_without_a_warning(recwarn):
    received = np.array([1e-40, 1e-42])  # so little that the rate is the same for every bandwidth
    found = allocation.equal_time(1e7, np.zeros(2), np.full(2, 1e6), 0.2, received, 1e-20, 0.0)
    assert np.isfinite(found.bandwidth).all()
    assert found.bandwidth.sum() == pytest.approx(1e7)
    assert not recwarn.list


def test_bisection_finds_what_newton_finds():
    gain, bits = radio.gain(np.array([70.0, 100.0, 118.0])), np.array([1e6, 4e6, 2e6])
    noise = radio.noise_density(5)
    found = {}
    for solver in ("divided", "bisected"):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(allocation, "divided", getattr(allocation, solver))
            found[solver] = [
                allocation.equal_time(1e7, np.array([0.0, 2.0, 1.0]), bits, 0.2, gain, noise, 1e-14),
                allocation.equal_outage(1e7, bits, 2.0, 0.2, gain, noise, 1e-14),
            ]
    for newton, bisection in zip(found["divided"], found["bisected"], strict=True):
        assert newton.bandwidth == pytest.approx(bisection.bandwidth, rel=1e-9)
        assert newton.level == pytest.approx(bisection.level, rel=1e-9)


def test_steps_in_time_by_hand():
    # (T - t_down - S) f / C = (10 - 1 - 2) x 1e9 / 2e9 = 3.5, so 3 of 5 steps; with 2e9 cycles once a visit 2.5, so 2;
    # (10 - 9 - 2) < 0: none
    def steps(down, once):
        return compute.steps_in_time(np.array([5]), 10.0, np.array([down]), 2.0, 2e9, np.array([1e9]), once).tolist()

    assert (steps(1.0, 0.0), steps(1.0, 2e9), steps(9.0, 0.0)) == ([3], [2], [0])


def test_joules_by_hand():
    # 3 steps of 2e9 cycles at 1 GHz and 1e9 once: 7e9 cycles, 7 s; 1e-28 x 7e9 x 1e18 = 0.7 J; none without steps
    cycles = compute.visit_cycles(np.array([3, 0]), 2e9, np.array([1e9, 1e9]))
    assert compute.compute_seconds(cycles, np.full(2, 1e9)).tolist() == [7.0, 0.0]
    assert compute.compute_joules(cycles, np.full(2, 1e9), 1e-28) == pytest.approx([0.7, 0.0])


def test_philox_gives_the_known_answers():
    """Those that its authors publish for Philox4x32-10."""
    known = [
        ([0] * 4, (0, 0), [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, (0xFFFFFFFF, 0xFFFFFFFF), [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            (0xA4093822, 0x299F31D0),
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ]
    for counter, key, words in known:
        assert [int(w[0]) for w in philox([np.array([c], np.uint64) for c in counter], key)] == words


def test_numbers_of_a_channel_are_the_same_in_blocks_of_rounds():
    which = np.array([3, 17, 1])
    for round in (0, 7, 8, 1234):
        for devices in (20, 1000):  # few, in blocks of rounds; many, one round at a time
            assert np.array_equal(channel_numbers(5, round, which, devices), uniforms(5, "channel", round, which, 4))


def test_numbers_of_devices_depend_on_nothing_but_their_key():
    devices = np.array([5, 0, 99_999])
    whole = uniforms(3, "channel", 8, np.arange(100_000))
    assert np.array_equal(uniforms(3, "channel", 8, devices), whole[:, devices])
    assert np.array_equal(uniforms(3, "channel", np.array([8, 2, 8]), devices)[:, [0, 2]], whole[:, [5, 99_999]])
    others = [
        uniforms(4, "channel", 8, devices),
        uniforms(3, "presence", 8, devices),
        uniforms(3, "channel", 9, devices),
    ]
    assert all(not np.isclose(other, whole[:, devices]).any() for other in others)
    assert whole.min() > 0
    assert whole.max() < 1
    assert abs(whole.mean() - 0.5) < 0.003
    assert abs(np.corrcoef(whole)[0, 1]) < 0.02
    z = normal(*uniforms(3, "shadowing", 1, np.arange(100_000)))
    assert abs(z.mean()) < 0.02
    assert abs(z.std() - 1) < 0.01


def test_purposes_are_only_added_at_the_end():
    """A purpose is a number in the key: its place must never change."""
    assert PURPOSES[:15] == (
        *("split", "init", "participation", "epochs", "labelled", "unlabelled", "upload", "dropout", "labels"),
        *("views", "step_size", "extra", "weights", "probed", "answers"),
    )
