"""Devices behind a transport give the simulator's result; what is wrong is refused and named."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from fedcpsl import config
from fedcpsl.algorithms import family
from fedcpsl.algorithms.family import Broadcast
from fedcpsl.errors import InputError
from fedcpsl.federation import Lost, Message, digest, predict, respond, serve, terms_of
from fedcpsl.federation.device import LoopbackTransport, carry_out, load_device_state, lock_device_folder
from fedcpsl.federation.messages import (
    END,
    HELLO,
    PROBE,
    TRAIN,
    UNSET,
    Attempt,
    Instruction,
    instruction_message,
    read_instruction,
    read_reply,
)
from fedcpsl.federation.privacy import Protection, protect
from fedcpsl.federation.robustness import Limits
from fedcpsl.schedule import stream
from fedcpsl.simulation import prepare, simulate
from fedcpsl.trees import leaves, map_tensors, named_leaves

from .conftest import small_federation, small_model
from .faulty import NAMES, SEED, WORK, Disk, Faulty, failing_disk, gap, make, participants, rules

LOSS_RATE = 0.3


@pytest.fixture(autouse=True)
def fast_disk():
    """No test here needs to wait for a disk."""
    with failing_disk():
        yield


def final(setup):
    *_, last = simulate(setup)
    return last


def served(setup, folder, transport, **chosen):
    return list(serve(terms_of(setup), rules(setup, **chosen), folder / "server", transport))


def lost_as_in_the_simulator(_name, message):
    round, index = message.header["round"], message.header["device"]
    purpose = {TRAIN: "upload", PROBE: "answers"}.get(message.header["kind"])
    return ("lose reply", 0) if purpose and stream(SEED, purpose, round, index).random() < LOSS_RATE else None


def nothing_fails(_name, _message):
    return None


def assert_same(setup, last, devices, tolerance=1e-10):
    """theta, c and what every device keeps, beside the simulator's."""
    reference = final(setup)
    theirs = named_leaves(last.server, "server")
    pairs = {name: (t, theirs[name]) for name, t in named_leaves(reference.server, "server").items()}
    for i, (name, device) in enumerate(devices.items()):
        kept, own = load_device_state(device.folder, device.terms), reference.device(i)
        mine = named_leaves(kept.committed, name)
        pairs |= {field: (t, mine[field]) for field, t in named_leaves(own, name).items()}
        pairs |= {f"nu of {name}": (reference.nu(i), kept.nu)} if setup.terms.method.traits.unlabelled else {}
        assert kept.active_rounds == reference.active_rounds[i]
    for what, (a, b) in pairs.items():
        assert a.shape == b.shape, what
        assert torch.allclose(a, b, rtol=tolerance, atol=tolerance), (what, (a - b).abs().max())


@pytest.mark.parametrize("loss_rate", [0.0, LOSS_RATE])
@pytest.mark.parametrize("name", NAMES)
def test_a_federation_gives_the_simulators_answer(name, loss_rate, tmp_path):
    setup = make(name, work=replace(WORK, loss_rate=loss_rate))
    devices = participants(setup, tmp_path)
    transport = Faulty(devices, Disk(), lost_as_in_the_simulator if loss_rate else nothing_fails)
    states = served(setup, tmp_path, transport, min_devices=5, quorum=0)
    assert [s.attempt for s in states] == [Attempt(r, 0) for r in (0, 0, 1, 2, 3, 4, 5, 5)]
    assert any(s.dropouts for s in states) == bool(loss_rate)
    assert_same(setup, states[-1], devices)
    if "c" in states[-1].server._fields and states[-1].server.c.numel():
        assert gap(states[-1], devices) < 1e-14


@pytest.mark.parametrize(
    "numbers",
    [
        {"warm_up": 2},
        {"labels_from": "mixture", "eta_g": "mean_effective_steps"},
        {"pseudo_labels": "gradient", "alpha_r": 0.3},
        {"model": nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Dropout(0.5), nn.Linear(8, 3))},
        {"name": "semifed", "peers": 0, "agree": 1, "tau": 0.4, "first_stage": 2},
        {"name": "fedmatch", "H": 0, "helper_every": 2, "tau": 0.4},
    ],
)
def test_options_give_the_simulators_answer_too(numbers, tmp_path):
    """Devices without labels, or without other samples, are among them."""
    setup = make(**numbers)
    devices = participants(setup, tmp_path)
    assert_same(setup, served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1], devices)


def test_what_a_device_keeps_and_its_pseudo_labels_change_in_the_simulators_order(tmp_path, monkeypatch):
    """Pseudo-labels are made with the state that a visit finds, not with what `prepare_visit` makes of it."""

    def prepare_visit(_method, _hyper, _broadcast, device, _visit):
        return device._replace(theta_lc=1.5 * device.theta_lc)

    monkeypatch.setattr(family, "prepare_visit", prepare_visit, raising=False)
    setup = make(labels_from="mixture", beta=0.9)
    devices = participants(setup, tmp_path)
    assert_same(setup, served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1], devices)


@pytest.mark.parametrize("name", ["fedcpsl", "scaffold"])
def test_joiners_give_the_simulators_answer(name, tmp_path):
    """But for a joiner's theta_lc: it starts at the theta that it was greeted with, a round before it takes part."""
    setup = make(name, work=replace(WORK, joiners=2, join_round=2, active=3))
    devices = participants(setup, tmp_path)
    seen = []

    def present():
        return list(devices)[: 5 if seen[-1].round >= 1 else 3]

    transport = Faulty(devices, Disk(), nothing_fails, present)
    for state in serve(terms_of(setup), rules(setup, min_devices=3), tmp_path / "server", transport):
        seen.append(state)
        assert gap(state, devices) < 1e-14
        assert len(state.roster) == (0 if len(seen) == 1 else 5 if state.round >= 2 else 3)
        if state.round == 2 and setup.terms.method.rules.parts.personal:
            assert torch.equal(
                load_device_state(devices["phone-4"].folder, devices["phone-4"].terms).committed.theta_lc,
                seen[-2].server.theta,
            )
    first = dict(list(devices.items())[:3])
    assert_same(setup, state, first if name == "fedcpsl" else devices)


def test_in_float32_it_agrees_to_rounding(tmp_path):
    setup = make(dtype="float32")
    devices = participants(setup, tmp_path)
    assert_same(setup, served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1], devices, tolerance=1e-6)


def test_a_run_that_is_over_can_be_given_more_rounds(tmp_path):
    setup = make()
    devices = participants(setup, tmp_path)
    served(setup, tmp_path, LoopbackTransport(devices), min_devices=5, rounds=3)
    assert_same(setup, served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1], devices)


class Tampering:
    """A loopback in which the training replies of phone-1 are replaced by what `change` makes of them."""

    def __init__(self, devices, change):
        self.inner, self.change = LoopbackTransport(devices), change
        self.present = self.inner.present

    def send(self, messages, deadline):
        for name, reply in self.inner.send(messages, deadline):
            spoilt = name == "phone-1" and reply.header["kind"] == TRAIN
            yield name, self.change(reply) if spoilt else reply


def with_delta(change):
    return lambda m: Message(m.header, {"delta": change(m.tensors["delta"])})


def with_header(**changes):
    return lambda m: Message(m.header | changes, m.tensors)


BAD = {
    "numbers that are not finite": with_delta(lambda t: t.index_fill(0, torch.tensor([1]), torch.nan)),
    "has shape [3] where": with_delta(lambda t: t[:3]),
    "has shape [1, 83]": with_delta(lambda t: t[None]),
    "has dtype torch.float32 where the model has torch.float64": with_delta(torch.Tensor.float),
    "its norm is": with_delta(lambda t: t * 1e6),
    "belongs to another run": with_header(run="other"),
    "is for round 0, which is over": with_header(round=0),
    "is for round 1, attempt 2": with_header(attempt=1),
    "speaks protocol 99": with_header(protocol=99),
    "delta is missing": lambda m: Message(m.header, {}),
    "extra is not expected": lambda m: Message(m.header, m.tensors | {"extra": m.tensors["delta"]}),
    "location is not expected": with_header(location="here"),
    "steps = many where int is needed": with_header(steps="many"),
    "steps = True where int is needed": with_header(steps=True),
    "has 0 steps where 1 to": with_header(steps=0),
    "has 1000000 steps where 1 to": with_header(steps=1000000),
    "an invalid accuracy": with_header(accuracy=7.0),
    "has the kind hello": lambda m: Message(
        {k: v for k, v in m.header.items() if k != "steps"} | {"kind": "hello", "labelled": 1, "unlabelled": 1}, {}
    ),
    "kind is missing": lambda m: Message({k: v for k, v in m.header.items() if k != "kind"}, m.tensors),
    "refused: no time": lambda m: Message(
        {k: v for k, v in m.header.items() if k != "steps"} | {"kind": "refusal", "reason": "no time", "later": False},
        {},
    ),
    "out of reach": lambda _: Lost("out of reach"),
}


@pytest.mark.parametrize("reason", BAD)
def test_a_bad_answer_is_a_dropout_with_a_name_and_a_reason(reason, tmp_path):
    setup = make(work=replace(WORK, active=5, rounds=2))
    devices = participants(setup, tmp_path)
    states = []
    for state in serve(
        terms_of(setup),
        rules(setup, min_devices=5, limits=Limits(largest_norm=1e3)),
        tmp_path / "server",
        Tampering(devices, BAD[reason]),
    ):
        states.append(state)
        assert gap(state, devices) < 1e-14
    last = states[-2]
    assert last.dropouts.keys() == {"phone-1"}
    assert reason in last.dropouts["phone-1"]
    assert "phone-1" in last.dropouts["phone-1"]
    assert last.counted == ("phone-0", "phone-2", "phone-3", "phone-4")
    assert (
        load_device_state(devices["phone-1"].folder, devices["phone-1"].terms).active_rounds == 2
    )  # what it learnt for itself is kept


def test_what_a_device_says_cannot_forge_a_log():
    setup = make(work=replace(WORK, active=5, rounds=1))
    instruction = an_instruction(setup)
    header = {"protocol": 2, "run": "r", "round": 0, "attempt": 0, "kind": "refusal", "reason": "no\nERROR " * 200}
    said = read_reply(Message(header | {"later": False}, {}), "phone-1", instruction, terms_of(setup)).reason
    assert "\n" not in said
    assert len(said) <= 300


def an_instruction(setup, attempt=(0, 0), counted=None, kind=TRAIN, steps=4, run="r", budget=0.0):
    theta = setup.terms.method.network.initial
    device = UNSET if kind == HELLO else 1
    c = torch.zeros_like(theta) if kind == TRAIN else theta[:0]
    return Instruction(
        run,
        Attempt(*attempt),
        kind,
        digest(terms_of(setup)),
        Broadcast(theta, c),
        device,
        SEED,
        counted and Attempt(*counted),
        steps,
        budget,
    )


def refusal(device, instruction, **changes):
    message = instruction_message(instruction)
    reply = respond(device, Message(message.header | changes, message.tensors))
    assert reply.header["kind"] == "refusal"
    return reply.header["reason"]


def test_a_device_refuses_what_it_cannot_follow(tmp_path):
    setup = make()
    device = participants(setup, tmp_path)["phone-1"]
    assert "speaks protocol 1" in refusal(device, an_instruction(setup), protocol=1)
    assert "settings are not this device's" in refusal(device, an_instruction(setup), settings="0123")
    assert "unknown kind" in refusal(device, an_instruction(setup), kind="dance")
    assert "asks for 0 steps" in refusal(device, an_instruction(setup, steps=0))
    assert "state is missing" in refusal(device, an_instruction(setup, (4, 0), counted=(3, 0)))
    nan = an_instruction(setup)
    assert "not finite" in refusal(device, nan._replace(broadcast=map_tensors(lambda t: t * torch.nan, nan.broadcast)))
    assert load_device_state(device.folder, device.terms) is None

    carry_out(device, an_instruction(setup, (4, 0)))
    assert "holds the state of run r" in refusal(device, an_instruction(setup, (5, 0), run="s"))
    assert "has already trained in" in refusal(device, an_instruction(setup, (3, 0)))
    assert "has already trained in" in refusal(device, an_instruction(setup, (4, 0), kind=END))
    assert "older copy" in refusal(device, an_instruction(setup, (5, 0), counted=(3, 0)))
    fewer = device._replace(local_data=device.local_data._replace(x_labelled=device.local_data.x_labelled[:0]))
    assert "joined with 1 labelled" in refusal(fewer, an_instruction(setup, (5, 0)))
    carry_out(device, an_instruction(setup, (5, 0), counted=(4, 0)))
    carry_out(device, an_instruction(setup, (6, 0), counted=(5, 0)))
    assert "forgotten" in refusal(device, an_instruction(setup, (6, 0), kind=HELLO))
    assert load_device_state(device.folder, device.terms).counted == Attempt(5, 0)


def test_settings_that_must_agree_do(tmp_path):
    setup = make()
    same = digest(terms_of(setup))
    assert same == digest(terms_of(setup, 3))  # beta is a device's own
    for other in (make("apfsl"), make(eta=0.04), make(gamma=0.5), make(dtype="float32"), make(warm_up=1)):
        assert digest(terms_of(other)) != same
    assert digest(terms_of(make(model=small_model(seed=1)))) == same
    with pytest.raises(InputError, match="has no server"):
        terms_of(prepare(small_federation(), small_model(), config.Algorithm(name="local"), WORK))
    devices = participants(make(eta=0.04), tmp_path)
    state = next(
        s for s in serve(terms_of(setup), rules(setup), tmp_path / "server", LoopbackTransport(devices)) if s.dropouts
    )
    assert state.roster == ()
    assert "settings are not" in state.dropouts["phone-2"]


def test_a_repeated_instruction_gets_the_same_reply_and_changes_nothing(tmp_path):
    setup = make()
    device = participants(setup, tmp_path, protection=Protection(clip=0.1, noise=1.0), share_accuracy=True)["phone-1"]
    instruction = an_instruction(setup)
    said, kept = carry_out(device, instruction), (device.folder / "device.safetensors").read_bytes()
    again = carry_out(device, instruction)
    assert torch.equal(said.upload.delta, again.upload.delta)
    assert said._replace(upload=None) == again._replace(upload=None)
    assert (device.folder / "device.safetensors").read_bytes() == kept


def test_instructions_at_the_same_time_wait_for_each_other(tmp_path):
    setup = make()
    device = participants(setup, tmp_path)["phone-1"]
    said = []
    with lock_device_folder(device.folder):
        both = [
            threading.Thread(target=lambda: said.append(carry_out(device, an_instruction(setup)))) for _ in range(2)
        ]
        for thread in both:
            thread.start()
        both[0].join(0.2)
        assert said == []
    for thread in both:
        thread.join()
    assert torch.equal(said[0].upload.delta, said[1].upload.delta)
    assert load_device_state(device.folder, device.terms).active_rounds == 1


def test_only_the_update_leaves_a_device(tmp_path):
    """And the sizes once, and the accuracy where its owner shares it."""
    setup = make()
    seen = []

    class Listening(LoopbackTransport):
        def send(self, messages, deadline):
            for name, reply in LoopbackTransport.send(self, messages, deadline):
                seen.append((name, reply))
                yield name, reply

    devices = participants(setup, tmp_path)
    devices["phone-2"] = devices["phone-2"]._replace(share_accuracy=True)
    last = served(setup, tmp_path, Listening(devices), min_devices=5)[-1]
    always = {"protocol", "run", "round", "attempt", "kind"}
    for name, reply in seen:
        own = {HELLO: {"labelled", "unlabelled"}, TRAIN: {"steps"}, END: set()}[reply.header["kind"]]
        shared = {"accuracy"} if name == "phone-2" and reply.header["kind"] != HELLO else set()
        assert reply.header.keys() == always | own | shared
        assert reply.tensors.keys() == ({"delta"} if reply.header["kind"] == TRAIN else set())
    assert sum(reply.header["kind"] == HELLO for _, reply in seen) == 5
    assert last.accuracy.keys() == {"phone-2"}


def test_a_budget_bounds_the_steps(tmp_path):
    """A step takes one tick, and so does what comes before them: k steps end at 1 + k."""
    setup = make()

    def ticking():
        now[0] += 1.0
        return now[0]

    for budget, asked, done in ((0.0, 6, 6), (1.0, 6, 1), (5.0, 6, 4), (100.0, 6, 6), (5.0, 2, 2)):
        now = [0.0]
        device = participants(setup, tmp_path / f"{budget}-{asked}", budget=budget)["phone-1"]
        assert carry_out(device, an_instruction(setup, steps=asked), ticking).steps == done
        now = [0.0]
        told = participants(setup, tmp_path / f"told-{budget}-{asked}", budget=1e6)["phone-1"]
        short = carry_out(told, an_instruction(setup, steps=asked, budget=budget), ticking)
        assert short.steps == done
    # fewer steps are the first ones of the same draw
    alone = participants(setup, tmp_path / "alone")["phone-1"]
    assert torch.equal(carry_out(alone, an_instruction(setup, steps=2)).upload.delta, short.upload.delta)


def test_c_i_is_made_from_what_was_sent(tmp_path):
    """c_i = -(c + delta / (eta Q~)) with the clipped and noised delta; one step: Q~ = 1."""
    setup = make()
    for chosen in (Protection(clip=0.01), Protection(clip=0.01, noise=2.0)):
        device = participants(setup, tmp_path / f"{chosen}", protection=chosen)["phone-1"]
        theta = setup.terms.method.network.initial
        instruction = an_instruction(setup, steps=1)._replace(broadcast=Broadcast(theta, torch.full_like(theta, 0.5)))
        sent = carry_out(device, instruction).upload.delta
        assert (sent.norm() < 0.01 + 1e-12) == (chosen.noise == 0)
        carry_out(device, an_instruction(setup, (1, 0), counted=(0, 0)))
        assert torch.allclose(
            load_device_state(device.folder, device.terms).committed.c, -(0.5 + sent / 0.05), rtol=1e-12
        )


def test_protection_clips_and_adds_noise_of_the_size_asked_for():
    delta = torch.ones(10000, dtype=torch.float64)
    assert torch.equal(protect(delta, Protection()), delta)
    assert torch.equal(protect(delta, Protection(clip=1000.0)), delta)
    assert protect(delta, Protection(clip=2.0)).norm() == pytest.approx(2.0)
    noise = protect(delta, Protection(clip=2.0, noise=0.5)) - protect(delta, Protection(clip=2.0))
    assert noise.std() == pytest.approx(1.0, rel=0.1)
    assert not torch.equal(
        noise, protect(delta, Protection(clip=2.0, noise=0.5)) - protect(delta, Protection(clip=2.0))
    )


def test_protection_that_means_nothing_is_refused(tmp_path):
    setup = make()
    device = participants(setup, tmp_path, protection=Protection(noise=1.0))["phone-1"]
    with pytest.raises(InputError, match="give clip too"):
        carry_out(device, an_instruction(setup))


def test_noise_keeps_the_invariant(tmp_path):
    setup = make()
    devices = participants(setup, tmp_path, protection=Protection(clip=0.05, noise=0.3))
    for state in serve(terms_of(setup), rules(setup, min_devices=5), tmp_path / "server", LoopbackTransport(devices)):
        assert gap(state, devices) < 1e-12
    assert state.server.c.abs().max() > 1e-3


def test_a_device_predicts_with_its_personal_model(tmp_path):
    from fedcpsl.evaluation import evaluate

    setup = make()
    devices = participants(setup, tmp_path, share_accuracy=True)
    with pytest.raises(InputError, match="no model yet"):
        predict(devices["phone-0"], devices["phone-0"].local_data.x_test)
    last = served(setup, tmp_path, LoopbackTransport(devices), min_devices=5)[-1]
    expected = evaluate(final(setup))
    together = [predict(d, d.local_data.x_test) for d in devices.values()]
    assert torch.allclose(torch.cat(together), expected.predictions.personal.exp(), atol=1e-10)
    assert list(last.accuracy.values()) == pytest.approx(list(expected.personal.devices.values()))


def test_a_round_without_its_quorum_is_repeated_with_others(tmp_path):
    setup = make(work=replace(WORK, active=2, rounds=2))
    devices = participants(setup, tmp_path)
    asked = []

    def silent_at_first(name, message):
        kind, round, attempt = (message.header[key] for key in ("kind", "round", "attempt"))
        if kind == TRAIN:
            asked.append((round, attempt, name))
        return ("lose reply", 0) if kind == TRAIN and round == 0 and attempt < 2 and name != "phone-0" else None

    transport, seen = Faulty(devices, Disk(), silent_at_first), []
    for state in serve(terms_of(setup), rules(setup, min_devices=5, quorum=2), tmp_path / "server", transport):
        seen.append(state)
        assert gap(state, devices) < 1e-14
    assert [s.attempt for s in seen] == [Attempt(*t) for t in ((0, 0), (0, 0), (0, 1), (0, 2), (1, 0), (2, 0), (2, 0))]
    assert torch.equal(seen[0].server.theta, seen[3].server.theta)
    assert not seen[3].counted
    assert "did not reply within 9 s" in next(iter(seen[2].dropouts.values()))
    groups = [{name for *turn, name in asked if turn == [0, attempt]} for attempt in range(3)]
    assert len(groups[0]) == len(groups[2]) == 2
    assert len(groups[0] | groups[1] | groups[2]) > 2


def test_more_are_asked_than_wanted(tmp_path):
    setup = make(work=replace(WORK, active=2, rounds=1))
    devices = participants(setup, tmp_path)
    states = served(setup, tmp_path, LoopbackTransport(devices), min_devices=5, over_sampling=1.5, quorum=3)
    assert len(states[2].counted) == 3


def test_rules_that_cannot_be_met_are_refused(tmp_path):
    setup = make()
    for chosen, message in (
        ({"quorum": 5}, "quorum = 5"),
        ({"over_sampling": 0.5}, "over_sampling"),
        ({"min_devices": 0}, "min_devices = 0: give at least 1"),
    ):
        with pytest.raises(InputError, match=message):
            served(setup, tmp_path, LoopbackTransport({}), **chosen)


def test_a_server_goes_on_only_with_the_settings_it_began_with(tmp_path):
    setup = make()
    next(serve(terms_of(setup), rules(setup), tmp_path / "server", LoopbackTransport({})))
    with pytest.raises(InputError, match="started with other settings"):
        next(serve(terms_of(make(eta=0.01)), rules(setup), tmp_path / "server", LoopbackTransport({})))


def test_a_second_server_keeps_off(tmp_path):
    setup = make()
    first = serve(terms_of(setup), rules(setup), tmp_path / "server", LoopbackTransport({}))
    next(first)
    with pytest.raises(InputError, match="another process"):
        next(serve(terms_of(setup), rules(setup), tmp_path / "server", LoopbackTransport({})))


def test_a_model_that_blows_up_is_refused_on_the_device_and_its_state_stays(tmp_path):
    setup = make(eta=1e308)
    device = participants(setup, tmp_path)["phone-1"]
    carry_out(device, an_instruction(setup, kind=HELLO))
    before = (device.folder / "device.safetensors").read_bytes()
    assert "no longer a finite number" in refusal(device, an_instruction(setup, steps=40))
    assert (device.folder / "device.safetensors").read_bytes() == before


def test_instructions_survive_their_message():
    setup = make()
    for instruction in (
        an_instruction(setup, (2, 1), counted=(1, 0)),
        an_instruction(setup, kind=HELLO),
        an_instruction(setup, kind=END),
    ):
        again = read_instruction(instruction_message(instruction), terms_of(setup))
        assert all(map(torch.equal, leaves(instruction.broadcast), leaves(again.broadcast)))
        assert instruction._replace(broadcast=None) == again._replace(broadcast=None)
