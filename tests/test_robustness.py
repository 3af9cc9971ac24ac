"""What one bad device, one bad server or one bad command can do to a federation: little, and it is named."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl.algorithms.family import Sum, Upload
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation import Message, respond, serve, terms_of
from fedcpsl.federation.device import LoopbackTransport, load_device_state, resolve_pending, save_device_state
from fedcpsl.federation.messages import HELLO, TRAIN, Attempt, Reply, instruction_message
from fedcpsl.federation.privacy import scale_update
from fedcpsl.federation.robustness import (
    Limits,
    check_limits,
    judge,
    lower_median,
    reason_to_exclude,
    robust_mean,
    robust_sum,
    update_rate,
)
from fedcpsl.federation.server import EXCLUDED_ROUNDS, MAX_OFFENCES, draw_instructions
from fedcpsl.federation.server_store import SERVER_FILE, DeviceRecord, earlier_rounds, go_back, load_server_state
from fedcpsl.storage import load_tensors, save_tensors

from .faulty import WORK, Disk, Faulty, failing_disk, gap, make, participants, rules

ALL = replace(WORK, active=5, rounds=6)


@pytest.fixture(autouse=True)
def fast_disk():
    with failing_disk():
        yield


class Hostile:
    """A loopback in which some devices' replies are changed."""

    def __init__(self, devices, change, names=("phone-1",)):
        self.inner, self.change, self.names = LoopbackTransport(devices), change, names
        self.present = self.inner.present

    def send(self, messages, deadline):
        for name, reply in self.inner.send(messages, deadline):
            yield name, self.change(reply) if name in self.names else reply


def times(factor, **header):
    def change(message):
        if message.header["kind"] != TRAIN:
            return message
        return Message(message.header | header, {"delta": message.tensors["delta"] * factor})

    return change


def served(setup, folder, transport, **chosen):
    return list(serve(terms_of(setup), rules(setup, min_devices=5, **chosen), folder / "server", transport))


# The pieces, with numbers worked out by hand.


def test_the_lower_median():
    assert [lower_median(v) for v in ([3.0], [1.0, 9.0], [1.0, 2.0, 9.0], [4.0, 1.0, 3.0, 2.0])] == [3.0, 1.0, 2.0, 2.0]


def test_the_rate_of_an_update():
    """eta = 0.05, gamma = 0.8, Q = 1: Q~ = 5 - 0.8 * 0.2 / 0.04 = 1; a norm of 5 makes 5 / 0.05 = 100."""
    terms = terms_of(make(gamma=0.8))
    assert update_rate(terms, Upload(torch.tensor([3.0, 4.0]), torch.tensor(1)), 1) == pytest.approx(100.0)
    huge = torch.full((4,), 3e38, dtype=torch.float32)  # whose norm is infinite in float32
    assert update_rate(terms, Upload(huge, torch.tensor(1)), 1) == pytest.approx(6e38 / 0.05, rel=1e-6)


def test_the_middle_of_numbers():
    each = torch.tensor([[1.0, -52.0], [2.0, 4.0], [3.0, 5.0], [4.0, 6.0], [100.0, 7.0]])
    assert robust_mean(Limits("median"), each).tolist() == [3.0, 5.0]
    assert robust_mean(Limits("trimmed", trim=0.2), each).tolist() == [3.0, 5.0]  # means of 2, 3, 4 and of 4, 5, 6
    assert robust_mean(Limits("trimmed", trim=0.1), each).tolist() == [22.0, -6.0]  # floor(0.5) = 0: nothing is cut
    assert robust_mean(Limits("trimmed", trim=0.49), each[:2]).tolist() == [1.5, -24.0]  # of two none can be cut
    assert robust_mean(Limits("median"), each[:4]).tolist() == [2.5, 4.5]


def test_a_robust_sum_adds_numbers_and_takes_the_middle_of_the_rest():
    def one(update):
        scalar = torch.tensor(2.0)
        return Sum(torch.tensor(update), torch.zeros(0), scalar, scalar, scalar, scalar)

    total = robust_sum(Limits("median"), [one([1.0, 9.0]), one([2.0, 8.0]), one([60.0, -70.0])])
    assert total.update.tolist() == [6.0, 24.0]
    assert (total.steps, total.control.shape) == (6.0, (0,))


@given(st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=12), st.floats(0.05, 0.45), st.data())
def test_what_is_trimmed_stays_within_the_honest(values, trim, data):
    """With no more hostile numbers than are cut at each end, the result lies between the honest ones."""
    cut = min(int(trim * len(values)), (len(values) - 1) // 2)
    bad = data.draw(st.lists(st.floats(-1e30, 1e30), max_size=cut))
    each = torch.tensor([*bad, *values[len(bad) :]], dtype=torch.float64)[:, None]
    honest = values[len(bad) :]
    low, high = min(honest), max(honest)
    result = float(robust_mean(Limits("trimmed", trim=trim), each))
    assert low - 1e-9 <= result <= high + 1e-9


def member(name, samples, **more):
    return DeviceRecord(name, samples, 0, **more)


def test_sample_counts_that_are_not_believed():
    others = [member("a", 100), member("b", 120), member("c", 90)]
    assert reason_to_exclude(Limits(), member("d", 2000), others) is None  # 20 times the lower median of 100
    assert "'d' reports 2400 samples, more than 20 times" in reason_to_exclude(Limits(), member("d", 2400), others)
    many = [member(f"m{i}", 100) for i in range(99)]  # a third of 9,900 + x is x = 4,950
    assert reason_to_exclude(Limits(), member("d", 4950), many) is None
    assert "33% of all" in reason_to_exclude(Limits(), member("d", 4951), many)
    assert reason_to_exclude(Limits(largest_samples=10**6), member("d", 10**6), others) is None
    assert "largest_samples is 50" in reason_to_exclude(Limits(largest_samples=50), member("d", 51), others)
    assert reason_to_exclude(Limits(), member("a", 1 << 52), []) is None  # nobody to compare with


@pytest.mark.parametrize(
    "limits",
    [
        Limits("best"),
        Limits(bound=1.0),
        Limits(trim=0.5),
        Limits(trim=0.0),
        Limits(largest_norm=-1.0),
        Limits(bound=float("nan")),
    ],
)
def test_limits_that_are_none(limits):
    with pytest.raises(InputError, match="give"):
        check_limits(limits)


def reply(delta, steps=1):
    return Reply("r", Attempt(0, 0), TRAIN, steps=steps, upload=Upload(delta, torch.tensor(steps)))


@pytest.mark.parametrize("active", [1, 2, 5])
def test_an_update_is_judged_by_the_round_and_by_what_was_before(active):
    """Everybody else's rate is 1: one active device is judged by those of earlier rounds."""
    terms = terms_of(make())
    unit = torch.zeros(terms.parameters, dtype=terms.dtype)
    unit[0] = 0.05  # eta, at one step
    before = [member(f"p{i}", 10, rate=1.0) for i in range(5)]
    updates = {f"p{i}": reply(unit) for i in range(active - 1)} | {"p4": reply(31 * unit)}
    judged = judge(terms, Limits(), before, updates)
    assert set(judged.refused) == {"p4"}
    assert (
        "'p4' is refused: its rate ||update|| / (eta Q~) is 31, more than 30 times the median of 1"
        in judged.refused["p4"]
    )
    assert judge(terms, Limits(), before, updates | {"p4": reply(29 * unit)}).refused == {}
    assert set(judge(terms, Limits("clipped"), before, updates).refused) == {"p4"}
    clipped = judge(terms, Limits("clipped"), before, updates | {"p4": reply(20 * unit)})
    assert clipped.refused == {}
    assert clipped.factors["p4"] == pytest.approx(1 / 20)
    assert judge(terms, Limits("none"), before, {"p4": reply(1e30 * unit)}).refused == {}


def test_the_very_first_update_is_bounded_too():
    terms = terms_of(make())
    ones = torch.ones(terms.parameters, dtype=terms.dtype)
    assert "changes the parameters by 11 (root" in judge(terms, Limits(), [], {"a": reply(11 * ones)}).refused["a"]
    assert judge(terms, Limits(), [], {"a": reply(9 * ones)}).refused == {}
    two = judge(terms, Limits(), [], {"a": reply(0.01 * ones), "b": reply(9 * ones)})
    assert set(two.refused) == {"b"}


# Whole federations.


@pytest.mark.parametrize("factor", [1e30, 1e200])
@pytest.mark.parametrize("active", [1, 2, 5])
def test_one_huge_update_is_refused_by_name_and_the_job_goes_on(factor, active, tmp_path):
    rounds = 8 if active == 5 else 24
    setup = make(work=replace(WORK, active=active, rounds=rounds))
    devices = participants(setup, tmp_path)
    reasons, events = {}, []
    for state in serve(
        terms_of(setup), rules(setup, min_devices=5), tmp_path / "server", Hostile(devices, times(factor))
    ):
        reasons |= state.dropouts
        events += state.events
        assert gap(state, devices) < 1e-10
    assert state.over
    assert state.round == rounds
    assert set(reasons) == {"phone-1"}
    assert "the update of device 'phone-1' is refused" in reasons["phone-1"]
    assert state.server.theta.abs().max() < 100
    assert next(m for m in state.roster if m.name == "phone-1").counted is None
    if active == 5:
        assert f"device 'phone-1' is not asked before round {MAX_OFFENCES + EXCLUDED_ROUNDS + 1}" in events[0]
        assert [m.asked for m in state.roster] == [8, MAX_OFFENCES, 8, 8, 8]


def test_who_was_excluded_has_another_chance(tmp_path):
    setup = make(work=replace(WORK, active=5, rounds=20))
    devices, sent = participants(setup, tmp_path), []

    def first_three(message):
        if message.header["kind"] == TRAIN:
            sent.append(message)
        return times(1e9)(message) if len(sent) <= 3 else message

    last = served(setup, tmp_path, Hostile(devices, first_three))[-1]
    assert last.roster[1].asked == 20 - EXCLUDED_ROUNDS
    assert last.roster[1].counted == Attempt(19, 0)
    assert last.roster[1].offences == 0


def test_without_a_bound_an_infinite_model_is_never_kept(tmp_path):
    """float64 holds 1e200 twice, not 1e308 times weights: the round is not counted, and the device is named."""
    setup = make(work=ALL)
    devices = participants(setup, tmp_path)
    states = served(setup, tmp_path, Hostile(devices, times(1e308)), limits=Limits("none"), quorum=1)
    assert all(t.isfinite().all() for state in states for t in state.server)
    assert states[-1].round == 6
    said = " ".join(reason for state in states for reason in state.dropouts.values())
    assert "'phone-1'" in said


def test_a_late_joiner_cannot_take_all_the_weight(tmp_path):
    setup = make(work=ALL)
    devices = participants(setup, tmp_path)

    def many(message):
        return Message(message.header | {"labelled": 1 << 50}, {}) if message.header["kind"] == HELLO else message

    for names in (("phone-0",), ("phone-4",)):  # whoever is first
        folder = tmp_path / names[0]
        fresh = participants(setup, folder)
        transport = Hostile(fresh, many, names)
        states = list(serve(terms_of(setup), rules(setup, min_devices=4), folder / "server", transport))
        assert [m.name for m in states[-1].roster] == [name for name in devices if name not in names]
        assert "it would outweigh the others" in states[2].dropouts[names[0]]
    late = participants(setup, tmp_path / "late")
    present, transport = [], Hostile(late, many, ("phone-4",))
    transport.present = lambda: list(late)[: 5 if len(present) > 2 else 4]
    for state in serve(terms_of(setup), rules(setup, min_devices=4), tmp_path / "late" / "server", transport):
        present.append(state)
    assert len(state.roster) == 4


@pytest.mark.parametrize("aggregation", ["none", "bounded", "clipped"])
@settings(max_examples=15)
@given(factor=st.floats(-20, 20), claim=st.booleans())
def test_c_is_the_mean_of_what_was_counted(tmp_path_factory, aggregation, factor, claim):
    """Honest devices compute c_i from their update times the factor that comes back; so does the server compute c."""
    setup, folder = make(work=ALL), tmp_path_factory.mktemp("federation")
    devices = participants(setup, folder)

    def change(device, message):
        """A device that sends another update than it computed, and keeps what it sent: as if it had computed it."""
        if message.header["kind"] != TRAIN:
            return message
        sent = times(factor, **({"steps": 1} if claim else {}))(message)
        kept = load_device_state(device.folder, device.terms)
        steps = sent.header["steps"]
        upload = Upload(sent.tensors["delta"], torch.tensor(steps))
        reply = kept.pending.reply._replace(upload=upload, steps=steps)
        save_device_state(device.folder, kept._replace(pending=kept.pending._replace(reply=reply)))
        return sent

    transport = Hostile(devices, lambda message: change(devices["phone-1"], message))
    with failing_disk():
        for state in serve(
            terms_of(setup), rules(setup, min_devices=5, limits=Limits(aggregation)), folder / "server", transport
        ):
            scale = 1 + float(state.server.c.abs().max())
            assert gap(state, devices) < 1e-12 * scale
    assert all(0 < m.factor <= 1 for m in state.roster)


def test_a_clipped_update_counts_for_as_much_as_the_median(tmp_path):
    """And c_i follows: c_i = c_i - (c + f u), here from 0: c_i = -f u."""
    setup = make(work=replace(ALL, rounds=1))
    devices = participants(setup, tmp_path)
    states = served(setup, tmp_path, Hostile(devices, times(1.0)), limits=Limits("clipped"))
    terms, rates = terms_of(setup), {m.name: m.rate for m in states[-1].roster}
    middle = lower_median(list(rates.values()))
    for m in states[-1].roster:
        kept = load_device_state(devices[m.name].folder, devices[m.name].terms)
        assert m.factor == pytest.approx(min(1.0, middle / rates[m.name]))
        assert float(kept.committed.c.norm()) == pytest.approx(m.factor * rates[m.name], rel=1e-9)
    assert any(m.factor < 1 for m in states[-1].roster)
    assert terms.method.rules.parts.control_variates


@pytest.mark.parametrize("aggregation", ["trimmed", "median"])
def test_what_is_robust_number_by_number(aggregation, tmp_path):
    """Without hostile devices the first step is that of the definition; with one, it stays near it."""
    setup = make(work=replace(ALL, rounds=1), control_variates=False)
    limits = Limits(aggregation)
    thetas = []
    for who, change in (("honest", times(1.0)), ("hostile", times(-1e6))):
        devices = participants(setup, tmp_path / who)
        loose = limits._replace(largest_norm=1e300)  # so that nothing but the aggregation protects
        thetas.append(served(setup, tmp_path / who, Hostile(devices, change), limits=loose)[-1].server.theta)
    start = setup.terms.method.network.initial
    assert (thetas[1] - start).norm() < 5 * (thetas[0] - start).norm()
    with pytest.raises(InputError, match="keeps a sum of device states"):
        served(make(work=ALL), tmp_path / "with", LoopbackTransport({}), limits=limits)


def test_a_round_is_not_repeated_for_ever(tmp_path):
    """Everybody's update is over a bound that the operator set: control variates start again, then it is an error."""
    setup = make(work=ALL)
    devices = participants(setup, tmp_path)
    chosen = rules(setup, min_devices=5, attempts=4, limits=Limits(largest_norm=1e-9))
    states = []
    turns = serve(terms_of(setup), chosen, tmp_path / "server", LoopbackTransport(devices))
    with pytest.raises(RunError, match=r"round 0 was tried 8 times.*largest_norm.*--back-to ROUND") as raised:
        states.extend(turns)
    assert "'phone-2'" in str(raised.value)
    (event,) = [text for state in states for text in state.events if "attempts failed" in text]
    assert "4 attempts failed" in event
    assert "control variates are reset to 0" in event


def test_one_device_that_always_refuses_does_not_end_a_federation(tmp_path):
    """Not even where the quorum is everybody: after some attempts it is not asked for a while."""
    setup = make(work=ALL)
    devices = participants(setup, tmp_path)

    def refuse(message):
        if message.header["kind"] != TRAIN:
            return message
        kept = {key: value for key, value in message.header.items() if key != "steps"}
        return Message(kept | {"kind": "refusal", "reason": "no", "later": False}, {})

    last = served(setup, tmp_path, Hostile(devices, refuse), quorum=5)[-1]
    assert last.over
    assert last.round == 6
    assert last.roster[1].counted is None


def test_an_inflated_c_does_not_stop_the_honest(tmp_path):
    """A device claims one step for large updates: the others' rates grow with c, and the bound with them."""
    setup = make(work=replace(ALL, rounds=12))
    devices = participants(setup, tmp_path)
    last = served(setup, tmp_path, Hostile(devices, times(20.0, steps=1)))[-1]
    assert last.over
    assert last.round == 12
    assert sum(m.counted is not None for m in last.roster) >= 4


def test_a_device_is_forgotten_with_its_weight(tmp_path):
    setup = make(work=replace(ALL, rounds=8))
    devices, gone = participants(setup, tmp_path), []
    states = []
    for state in serve(
        terms_of(setup),
        rules(setup, min_devices=5),
        tmp_path / "server",
        LoopbackTransport(devices),
        lambda: tuple(gone),
    ):
        states.append(state)
        assert gap(state, devices) < 1e-13
        if state.round == 3 and not gone:
            assert state.server.c.any()
            gone.append("phone-2")
    first = next(s for s in states if s.roster and s.roster[2].forgotten)
    assert first.events == ("forgotten: phone-2; control variates are reset to 0",)
    assert first.device_count == 4
    assert first.samples == states[-3].samples == sum(m.labelled + m.unlabelled for m in state.roster) - 6
    assert state.roster[2].counted is None
    assert load_device_state(devices["phone-2"].folder, devices["phone-2"].terms).epoch == 0
    assert all(
        load_device_state(d.folder, d.terms).epoch == state.epoch > 0
        for name, d in devices.items()
        if name != "phone-2"
    )
    assert sum(bool(s.events) for s in states) == 1
    assert state.server.c.any()
    with pytest.raises(RunError, match="no other device has a weight"):
        list(
            serve(
                terms_of(setup),
                rules(setup, rounds=9),
                tmp_path / "server",
                LoopbackTransport(devices),
                lambda: devices,
            )
        )


def test_going_back_to_an_earlier_state(tmp_path):
    setup = make(work=replace(ALL, rounds=8))
    devices, thetas, folder = participants(setup, tmp_path), {}, tmp_path / "server"
    for state in serve(terms_of(setup), rules(setup, min_devices=5), folder, LoopbackTransport(devices)):
        thetas[state.round] = state.server.theta
    assert earlier_rounds(folder) == [4, 5, 6, 7, 8]
    with pytest.raises(InputError, match=r"--back-to 3: .* there are: 4, 5, 6, 7, 8"):
        go_back(folder, terms_of(setup), 3)
    back = go_back(folder, terms_of(setup), 5)
    assert torch.equal(back.server.theta, thetas[5])
    assert not back.server.c.any()
    assert back.attempt == Attempt(5, 0)
    for state in serve(terms_of(setup), rules(setup, min_devices=5), folder, LoopbackTransport(devices)):
        assert gap(state, devices) < 1e-13
        assert not state.dropouts
    assert state.round == 8
    assert all(m.counted == Attempt(7, 0) for m in state.roster)


def test_a_damaged_state_can_be_left_behind(tmp_path):
    setup = make(work=ALL)
    devices, folder = participants(setup, tmp_path), tmp_path / "server"
    list(serve(terms_of(setup), rules(setup, min_devices=5), folder, LoopbackTransport(devices)))
    raw = bytearray((folder / SERVER_FILE).read_bytes())
    raw[-1] ^= 1
    (folder / SERVER_FILE).unlink()  # the newest kept state is the same file, so it is not written through
    (folder / SERVER_FILE).write_bytes(raw)
    with pytest.raises(RunError, match=r"checksum.*go back .*--back-to ROUND: 2, 3, 4, 5, 6"):
        load_server_state(folder, terms_of(setup))
    assert go_back(folder, terms_of(setup), 6).round == 6
    assert load_server_state(folder, terms_of(setup)).round == 6


def test_states_of_the_version_before_are_gone_on_with(tmp_path):
    """Rosters had five fields, and devices kept what c_i becomes in place of the server's c."""
    setup = make(work=ALL)
    devices, folder = participants(setup, tmp_path), tmp_path / "server"
    list(serve(terms_of(setup), rules(setup, min_devices=5, rounds=3), folder, LoopbackTransport(devices)))
    tensors, header = load_tensors(folder / SERVER_FILE)
    header["roster"] = [each[:5] for each in json.loads(json.dumps(header["roster"]))]
    old = {name: header[name] for name in ("run", "settings", "turn", "begun", "roster")}
    save_tensors(folder / SERVER_FILE, tensors, old)
    kept = load_device_state(devices["phone-1"].folder, devices["phone-1"].terms)
    state = load_server_state(folder, terms_of(setup))
    instruction = draw_instructions(terms_of(setup), rules(setup), state)["phone-1"]
    respond(devices["phone-1"], instruction_message(instruction))
    pending = load_device_state(devices["phone-1"].folder, devices["phone-1"].terms)
    pending_of = devices["phone-1"]
    after = resolve_pending(pending_of.terms, pending, Attempt(3, 0)).committed.c
    save_device_state(devices["phone-1"].folder, pending._replace(pending=pending.pending._replace(c=after)))
    assert torch.equal(
        resolve_pending(
            pending_of.terms, load_device_state(pending_of.folder, pending_of.terms), Attempt(3, 0)
        ).committed.c,
        after,
    )
    assert not torch.equal(after, kept.committed.c)
    *_, last = serve(terms_of(setup), rules(setup, min_devices=5), folder, LoopbackTransport(devices))
    assert last.round == 6
    assert gap(last, devices) < 1e-13


def test_a_factor_of_one_changes_no_bit():
    t = torch.randn(9)
    assert scale_update(t, 1.0) is t
    assert torch.equal(scale_update(t, 0.5), t * 0.5)


def test_late_answers_are_no_offence(tmp_path):
    setup = make(work=ALL)
    devices = participants(setup, tmp_path)
    transport = Faulty(
        devices, Disk(), lambda name, m: ("late reply", 0) if name == "phone-1" and m.header["kind"] == TRAIN else None
    )
    last = served(setup, tmp_path, transport)[-1]
    assert last.round == 6
    assert last.roster[1].offences == 0
    assert last.roster[1].asked == 6


def test_what_was_counted_of_a_device_that_is_excluded_leaves_c(tmp_path):
    """Its first two updates are honest; then it offends three times, and control variates are reset to 0."""
    setup = make(work=replace(ALL, rounds=8))
    devices, sent = participants(setup, tmp_path), []

    def later(message):
        if message.header["kind"] == TRAIN:
            sent.append(message)
        return times(1e9)(message) if len(sent) > 2 else message

    states = served(setup, tmp_path, Hostile(devices, later))
    (first,) = [state for state in states if state.events]
    assert "'phone-1' is not asked before round 16; control variates are reset to 0" in first.events[0]
    assert not first.server.c.any()
    assert first.epoch > 0
    assert first.round == 5
    assert gap(states[-1], devices) < 1e-13
    assert states[-1].server.c.any()
