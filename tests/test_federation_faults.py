"""Whatever is lost, late, repeated or killed, c stays the weighted mean of all c_i, and no device loses its state."""

from dataclasses import replace
from functools import partial
from itertools import chain, count, repeat

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fedcpsl.errors import RunError
from fedcpsl.federation import respond, serve, terms_of
from fedcpsl.federation.device import load_device_state, resolve_pending
from fedcpsl.federation.messages import TRAIN, Attempt, instruction_message
from fedcpsl.federation.server_store import load_server_state

from .faulty import FULL, KINDS, NAMES, WORK, Disk, Faulty, Killed, failing_disk, gap, make, participants, rules
from .test_federation import an_instruction

SMALL = replace(WORK, rounds=4, active=3, unit="steps", amount=2)
WITH_CONTROL = [name for name in NAMES if name in ("fedcpsl", "fedcpsl2", "scaffold", "fedshvr")]
PLACES = 3  # where a write can stop: before the new file is synced, before it has its name, before that is synced
SETUPS = {name: make(name, work=SMALL) for name in WITH_CONTROL}


@pytest.fixture
def disk():
    with failing_disk() as disk:
        yield disk


class Mortal(Faulty):
    """And the server dies before it sends, or after it was answered, or at a place of the writes that follow."""

    deaths = repeat(None)

    def send(self, messages, deadline):
        when, place = next(self.deaths) or ("", 0)
        if when == "before":
            raise Killed
        replies = super().send(messages, deadline)
        if when == "after":
            raise Killed
        if when == "writing":
            self.disk.fail(place, Killed())
        return replies


def on_disk(setup, folder):
    return load_server_state(folder, terms_of(setup))


def serve_through(setup, folder, transport, check, leasts, **chosen):
    """The server, started again whenever it dies, until it is over."""
    for start in range(100):
        try:
            least = leasts[start % len(leasts)]
            for state in serve(terms_of(setup), rules(setup, min_devices=least, **chosen), folder, transport):
                check(state)
                assert on_disk(setup, folder).attempt == state.attempt  # whatever the caller has seen is there to stay
            return state
        except Killed:
            transport.disk.left = None
            check(on_disk(setup, folder))
    raise AssertionError("it never ends")


def watch(devices):
    """A check of every state: the invariant, and that no device ever goes back."""
    before = {}

    def check(state):
        assert gap(state, devices) < 1e-12
        for name, device in devices.items():
            kept = load_device_state(device.folder, device.terms)
            progress = (0, Attempt(-1, 0)) if kept is None else (kept.active_rounds, kept.counted or Attempt(-1, 0))
            assert all(a >= b for a, b in zip(progress, before.get(name, progress), strict=True))
            before[name] = progress

    return check


FAULT = st.one_of(st.none(), st.tuples(st.sampled_from(KINDS), st.integers(0, PLACES - 1)))
DEATH = st.one_of(
    st.none(), st.tuples(st.sampled_from(["before", "after", "writing", "writing"]), st.integers(0, PLACES - 1))
)


@pytest.mark.parametrize("name", WITH_CONTROL)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    faults=st.lists(FAULT, max_size=40),
    deaths=st.lists(DEATH, max_size=12),
    joining=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    quorum=st.integers(0, 2),
    leasts=st.lists(st.integers(1, 5), min_size=1, max_size=3),
)
def test_c_is_the_weighted_mean_of_all_c_i_under_any_faults(
    tmp_path_factory, name, faults, deaths, joining, quorum, leasts
):
    setup, folder, calls = SETUPS[name], tmp_path_factory.mktemp("federation"), count()
    devices, drawn = participants(setup, folder), chain(faults, repeat(None))

    def present():
        """Each device from some time on; the first from the start."""
        now = next(calls)
        return [name for name, since in zip(devices, [0, *joining[1:]], strict=True) if now >= since]

    with failing_disk() as disk:
        transport = Mortal(devices, disk, lambda *_: next(drawn), present)
        transport.deaths = chain(deaths, repeat(None))
        last = serve_through(setup, folder / "server", transport, watch(devices), quorum=quorum, leasts=leasts)
    assert last.over
    assert last.round == setup.terms.rounds
    assert all(
        load_device_state(devices[m.name].folder, devices[m.name].terms).counted == m.counted
        for m in last.roster
        if m.name not in last.dropouts
    )
    assert not any(
        word in reason for reason in transport.refusals for word in ("is missing", "older copy", "forgotten")
    )


@pytest.mark.parametrize("quorum", [0, 2])
def test_a_server_that_dies_says_the_same_again(quorum, tmp_path):
    """Killed at every place of its writes and around every exchange, it ends with the same bits."""
    setup, ends = SETUPS["fedcpsl"], []
    moments = [("before", 0), ("after", 0), *(("writing", place) for place in range(PLACES))]
    for k, moment in enumerate([None, *moments]):
        devices = participants(setup, tmp_path / f"{k}")
        with failing_disk() as disk:
            transport = Mortal(devices, disk, lambda *_: None)
            transport.deaths = chain.from_iterable(repeat((moment, None)))
            last = serve_through(
                setup, tmp_path / f"{k}" / "server", transport, watch(devices), quorum=quorum, leasts=[5]
            )
        kept = [load_device_state(device.folder, device.terms) for device in devices.values()]
        ends.append([*last.server, *(t for each in kept for t in (*each.committed, each.nu))])
        ends[-1] += [torch.tensor([each.active_rounds for each in kept])]
    for other in ends[1:]:
        assert all(torch.equal(a, b) for a, b in zip(ends[0], other, strict=True))


@pytest.mark.parametrize("moment", ["before", "after"])
def test_whoever_comes_while_the_server_is_down_waits_for_the_next_turn(moment, tmp_path):
    """The server dies around its k-th exchange; a fourth device comes just before, or while it is down."""
    setup = SETUPS["scaffold"]
    for k in range(1, 5):
        for since in (k, k + 1):
            folder, calls = tmp_path / f"{k}-{since}", count()
            devices = participants(setup, folder)

            def present(devices=devices, since=since, calls=calls):
                return list(devices)[: 4 if next(calls) >= since else 3]

            with failing_disk() as disk:
                transport = Mortal(devices, disk, lambda *_: None, present)
                transport.deaths = chain(repeat(None, k), [(moment, 0)], repeat(None))
                last = serve_through(setup, folder / "server", transport, watch(devices), [3])
            assert [member.name for member in last.roster] == list(devices)[:4]


def test_a_server_that_wants_more_devices_than_before_still_says_the_same_again(tmp_path):
    """It dies when the only device has answered; started again, four more are there, and it is told to want five."""
    setup = SETUPS["scaffold"]
    for k in range(1, 4):
        folder = tmp_path / f"{k}"
        devices, calls = participants(setup, folder), count()

        def present(devices=devices, calls=calls, k=k):
            return list(devices)[: 5 if next(calls) > k else 1]

        with failing_disk() as disk:
            transport = Mortal(devices, disk, lambda *_: None, present)
            transport.deaths = chain(repeat(None, k), [("after", 0)], repeat(None))
            last = serve_through(setup, folder / "server", transport, watch(devices), [1, 5])
        assert len(last.roster) == 5
        assert last.server.c.any()


@pytest.mark.parametrize("error", [Killed(), FULL], ids=["killed", "full disk"])
@pytest.mark.parametrize("place", range(PLACES))
@pytest.mark.parametrize("counted", [True, False])
def test_a_write_that_stops_anywhere_loses_nothing(place, error, counted, disk, tmp_path):
    """Round 0 is pending, and counted or not; the write of round 1 stops; round 2 finds c_i as it must be."""
    setup = SETUPS["fedcpsl"]
    device, twin = (participants(setup, tmp_path / who)["phone-1"] for who in ("device", "twin"))
    instructions = [an_instruction(setup), an_instruction(setup, (1, 0)), an_instruction(setup, (2, 0))]
    if counted:
        instructions[1:] = [instruction._replace(counted=Attempt(0, 0)) for instruction in instructions[1:]]
    for each in (device, twin):
        respond(each, instruction_message(instructions[0]))
    disk.fail(place, error)
    if error is FULL:
        reply = respond(device, instruction_message(instructions[1]))
        assert reply.header["reason"] == (
            "its folder/device.safetensors: cannot be written: No space left on device; what was there before is intact"
        )
    else:
        with pytest.raises(Killed):
            respond(device, instruction_message(instructions[1]))
    wrote = load_device_state(device.folder, device.terms).last == Attempt(1, 0)
    assert wrote == (place == PLACES - 1)
    if wrote:
        respond(twin, instruction_message(instructions[1]))
    after = [
        respond(each, instruction_message(instructions[2])) for each in (device, twin)
    ]  # round 1 was never counted
    assert torch.equal(after[0].tensors["delta"], after[1].tensors["delta"])
    kept, other = load_device_state(device.folder, device.terms), load_device_state(twin.folder, twin.terms)
    assert kept.counted == (Attempt(0, 0) if counted else None)
    assert kept.committed.c.any() == counted
    assert all(torch.equal(a, b) for a, b in zip(kept.committed, other.committed, strict=True))
    assert kept.active_rounds == 2 + wrote


def test_what_was_not_counted_is_dropped(disk, tmp_path):
    setup = SETUPS["fedcpsl"]
    device = participants(setup, tmp_path)["phone-1"]
    respond(device, instruction_message(an_instruction(setup)))
    kept = load_device_state(device.folder, device.terms)
    assert disk.places > 0
    settled = partial(resolve_pending, device.terms)
    assert settled(kept, None).pending is None
    assert torch.equal(settled(kept, None).committed.c, kept.committed.c)
    assert settled(kept, Attempt(0, 0)).committed.c.any()
    assert settled(settled(kept, Attempt(0, 0)), Attempt(0, 0)).counted == Attempt(0, 0)


def test_everything_said_is_on_disk_first(disk, tmp_path):
    """Two syncs and a replacement for every reply to an instruction, and none to a repeated one."""
    setup = SETUPS["fedcpsl"]
    device = participants(setup, tmp_path)["phone-1"]
    respond(device, instruction_message(an_instruction(setup)))
    before = disk.places
    respond(device, instruction_message(an_instruction(setup, (1, 0), counted=(0, 0))))
    assert disk.places - before == PLACES
    respond(device, instruction_message(an_instruction(setup, (1, 0), counted=(0, 0))))
    assert disk.places - before == PLACES


def test_a_reply_lost_and_three_rounds_of_rest(disk, tmp_path):
    """Active in rounds 0 (counted), 1 (lost) and 4: its instruction names round 0, so the upload of 1 is dropped."""
    setup = SETUPS["fedcpsl"]
    device = participants(setup, tmp_path)["phone-1"]
    assert disk.left is None
    for turn, counted in (((0, 0), None), ((1, 0), (0, 0))):
        respond(device, instruction_message(an_instruction(setup, turn, counted)))
    committed = load_device_state(device.folder, device.terms).committed
    respond(device, instruction_message(an_instruction(setup, (4, 0), (0, 0))))
    kept = load_device_state(device.folder, device.terms)
    assert torch.equal(kept.committed.c, committed.c)
    assert not torch.equal(kept.committed.theta_lc, committed.theta_lc)
    assert kept.pending.reply.attempt == kept.last == Attempt(4, 0)


def test_an_attempt_given_up_is_not_taken_for_the_one_that_was_counted(disk, tmp_path):
    """Attempts 0 and 1 at round 0 differ, for the device's labels and model have moved on in between."""
    setup = SETUPS["fedcpsl"]
    device = participants(setup, tmp_path)["phone-1"]
    assert disk.left is None
    second = an_instruction(setup, (0, 1))
    for instruction in (
        an_instruction(setup),
        second._replace(broadcast=second.broadcast._replace(c=second.broadcast.c + 0.1)),
    ):
        respond(device, instruction_message(instruction))
    pending = resolve_pending(device.terms, load_device_state(device.folder, device.terms), Attempt(0, 1)).committed.c
    reply = respond(device, instruction_message(an_instruction(setup, (1, 0), counted=(0, 0))))
    assert "older copy" in reply.header["reason"]
    respond(device, instruction_message(an_instruction(setup, (1, 0), counted=(0, 1))))
    assert torch.equal(load_device_state(device.folder, device.terms).committed.c, pending)


def test_a_device_that_leaves_keeps_its_weight(tmp_path):
    setup = make(work=replace(SMALL, active=5, rounds=5))
    devices = participants(setup, tmp_path)

    def gone(name, message):
        return ("lose instruction", 0) if name == "phone-2" and message.header["round"] >= 2 else None

    with failing_disk() as disk:
        last = serve_through(setup, tmp_path / "server", Mortal(devices, disk, gone), watch(devices), [5])
    assert [m.name for m in last.roster] == list(devices)
    assert last.roster[2].counted == Attempt(1, 0)
    assert load_device_state(devices["phone-2"].folder, devices["phone-2"].terms).counted == Attempt(
        0, 0
    )  # it has not heard of the other yet


def test_a_server_put_back_to_an_older_copy_is_found_out(tmp_path):
    setup = make(work=replace(SMALL, active=5))
    devices = participants(setup, tmp_path)
    path, copies = tmp_path / "server" / "server.safetensors", []
    with failing_disk() as disk:
        transport = Faulty(devices, disk, lambda *_: None)
        for _ in serve(terms_of(setup), rules(setup, min_devices=5), path.parent, transport):
            copies.append(path.read_bytes())
        path.write_bytes(copies[2])
        states = serve(terms_of(setup), rules(setup, min_devices=5), path.parent, transport)
        next(states)
        state = next(states)
    assert state.counted == ()
    assert all("has already trained in" in reason for reason in state.dropouts.values())


def test_a_spoilt_file_is_said_to_be_so(tmp_path):
    setup = SETUPS["fedcpsl"]
    devices = participants(setup, tmp_path)
    with failing_disk():
        respond(devices["phone-1"], instruction_message(an_instruction(setup)))
    path = devices["phone-1"].folder / "device.safetensors"
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)
    with pytest.raises(RunError, match="checksum"):
        load_device_state(path.parent, devices["phone-1"].terms)
    reply = respond(devices["phone-1"], instruction_message(an_instruction(setup, (1, 0))))
    assert "checksum" in reply.header["reason"]
    assert str(tmp_path) not in reply.header["reason"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    setup = SETUPS["fedcpsl"]
    (tmp_path / "file").write_text("in the way")
    device = participants(setup, tmp_path / "file")["phone-1"]
    reply = respond(device, instruction_message(an_instruction(setup, kind=TRAIN)))
    assert "cannot be made" in reply.header["reason"]
    assert str(tmp_path) not in reply.header["reason"]
    assert Disk().left is None
