"""A device's side of a federation, and what both sides send: jobs, messages as bytes, what no instruction can do."""

import json
import re
import socket
import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedcpsl.algorithms.family import Broadcast
from fedcpsl.cli import run_command
from fedcpsl.config import Data
from fedcpsl.deployment import serve
from fedcpsl.deployment.device_process import (
    UNFIT,
    Conditions,
    DeviceConfig,
    Handler,
    make_participant,
    predictor,
    reason_to_decline,
)
from fedcpsl.deployment.job import MAX_PARAMETERS, explicit_job, job_terms, max_message_bytes, parameters_of, read_job
from fedcpsl.deployment.serve import pause_after, run_rounds
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation import Message, predict
from fedcpsl.federation.messages import (
    HELLO,
    MAX_PREFIX_BYTES,
    REFUSAL,
    TRAIN,
    Attempt,
    Instruction,
    instruction_message,
    pack,
    read_prefix,
    unpack,
)
from fedcpsl.federation.privacy import Protection, stricter_protection
from fedcpsl.federation.server_store import load_server_state
from fedcpsl.federation.terms import digest
from fedcpsl.flower.local_socket import send_and_receive, serve_socket

from .command import fedcpsl

JOB = """
[federation]
shape = [6]
classes = ["0", "1", "2"]
min_devices = 2
shift = 0.5
scale = 2.0
[model]
name = "mlp"
hidden = [5]
[algorithm]
name = "fedcpsl"
eta = 0.1
[work]
rounds = 2
active = 2
unit = "steps"
amount = 3
"""


class Handlers:
    """A transport to devices of this process, whose messages travel as bytes."""

    def __init__(self, handlers):
        self.handlers, self.seen = handlers, []

    def present(self):
        return list(self.handlers)

    def send(self, messages, deadline):  # noqa: ARG002
        for name, message in messages.items():
            content = self.handlers[name].handle(pack(message, JOB if self.job is None else self.job))
            self.seen.append((name, unpack(content, "it").message))
            yield self.seen[-1]

    job = None


def owner(folder, name="phone", **chosen):
    rng = np.random.default_rng(len(name))
    y = rng.integers(0, 3, 40)
    x = rng.normal(size=(40, 6)) + np.eye(3, 6)[y]
    np.savez(folder / f"{name}.npz", x=x, y=np.where(rng.random(40) < 0.5, -1, y))
    data = Data(dataset="own", file=str(folder / f"{name}.npz"), partition="iid", devices=1, labelled=1.0)
    return DeviceConfig(name, data, folder / name, **chosen)


def answer_to(handler, header, job=JOB, tensors=None):
    return unpack(handler.handle(pack(Message(header, tensors or {}), job)), "it").message


numbers = st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=20), st.floats(allow_nan=False), st.booleans())
tensors = st.builds(
    lambda values, kind: torch.tensor(values, dtype=kind),
    st.lists(st.floats(-1e3, 1e3, width=32), max_size=6),
    st.sampled_from([torch.float32, torch.float64]),
)


@given(
    st.dictionaries(st.text(max_size=8), numbers, max_size=5), st.dictionaries(st.text(max_size=5), tensors, max_size=3)
)
def test_a_message_comes_back(header, given):
    given = {name: t for name, t in given.items() if name != "__metadata__"}
    again, job = unpack(pack(Message(header, given), "job"), "it")
    assert (again.header, job, set(again.tensors)) == (header, "job", set(given))
    assert all(
        torch.equal(again.tensors[name], t) and again.tensors[name].dtype == t.dtype for name, t in given.items()
    )


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 400))
def test_bytes_that_are_no_message_are_refused(noise, cut):
    whole = pack(Message({"round": 1}, {"delta": torch.zeros(3)}))
    for content in (noise, whole[: min(cut, len(whole) - 1)], whole + b"more"):
        with pytest.raises(RunError):
            unpack(content, "it")


def test_what_stands_before_the_tensors_is_read_alone():
    """As many bytes as that takes, and never more than its limit, whatever length is claimed."""
    content, read = pack(Message({"round": 1}, {"theta": torch.zeros(1000)}), "the job"), []

    def reader(count):
        read.append(count)
        return content[sum(read[:-1]) : sum(read)]

    about = read_prefix(reader, "it")
    assert (about.job, about.tensor_bytes) == ("the job", 4000)
    assert sum(read) == len(content) - 4000
    claimed = []
    with pytest.raises(RunError, match="not a message"):
        read_prefix(lambda count: claimed.append(count) or (1 << 60).to_bytes(8, "little"), "it")
    assert claimed == [8]
    deep = b'{"__metadata__":' + b"[" * 100_000
    assert len(deep) < MAX_PREFIX_BYTES
    with pytest.raises(RunError, match="not a message"):
        unpack(len(deep).to_bytes(8, "little") + deep, "it")


def test_a_job_runs_on_devices_that_know_nothing_but_their_data(tmp_path):
    transport = Handlers({name: Handler(owner(tmp_path, name, share_accuracy=True)) for name in ("ann", "bob")})
    job = read_job(JOB, "job.toml")
    states = list(run_rounds(transport, job, tmp_path))
    assert states[-1].over
    assert states[-1].round == 2
    status = json.loads((tmp_path / "status.json").read_text())
    assert [d["name"] for d in status["devices"]] == ["ann", "bob"]
    assert all(0 <= d["accuracy"] <= 1 for d in status["devices"])
    x = np.load(tmp_path / "ann.npz")["x"]
    np.save(tmp_path / "new.npy", x)
    shown = fedcpsl("predict", "ann", "new.npy", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    guessed = [json.loads(line)["probabilities"] for line in shown.stdout.splitlines()]
    scaled = torch.from_numpy((x - 0.5) / 2).to(torch.float32)
    expected = predict(predictor(tmp_path / "ann"), scaled)
    assert np.allclose([list(p.values()) for p in guessed], expected.numpy(), atol=1e-6)
    wrong = fedcpsl("predict", "bob", "job.toml", cwd=tmp_path)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)
    kept = load_server_state(tmp_path / "server", job_terms(job))
    assert torch.equal(kept.server.theta, states[-1].server.theta)
    assert pause_after(states[-1]) == 0.0
    idle = [pause_after(states[1]._replace(counted=(), attempt=Attempt(0, k))) for k in (0, 4, 8, 1000)]
    assert idle == [1.0, 2.0, 4.0, 60.0]


def test_data_that_does_not_fit_the_job_is_refused_and_only_the_device_is_told_why(tmp_path, caplog):
    for change, words in (
        (("shape = [6]", "shape = [5]"), r"an input has shape \[6\] where the job's is \[5\]"),
        (('["0", "1", "2"]', '["0", "1"]'), "the job has no class '2'"),
    ):
        said = answer_to(Handler(owner(tmp_path)), {"run": "r", "round": 0, "attempt": 0}, JOB.replace(*change)).header
        assert (said["kind"], said["reason"], said["later"]) == (REFUSAL, UNFIT, False)
        assert re.search(words, caplog.messages[-1])


def test_the_same_reason_is_logged_once(tmp_path, caplog):
    handler = Handler(owner(tmp_path))
    for _ in range(3):
        answer_to(handler, {"run": "r", "round": 0, "attempt": 0}, JOB.replace("shape = [6]", "shape = [5]"))
    assert len([text for text in caplog.messages if "an input has shape" in text]) == 1


def good_instruction(job=JOB, **changes):
    terms = job_terms(read_job(job, "job"))
    theta = terms.method.network.initial
    instruction = Instruction(
        "r", Attempt(0, 0), TRAIN, digest(terms), Broadcast(theta, torch.zeros_like(theta)), 0, 0, None, 3, 0.0
    )
    message = instruction_message(instruction)
    return Message(message.header | changes, message.tensors)


INSTRUCTIONS = {  # what once ended a device's process, or could: the instruction, and what is said of it
    "seed -1": ({"seed": -1}, "seed = -1"),
    "huge seed": ({"seed": 1 << 70}, "seed = "),
    "device 10^9": ({"device": 1 << 40}, "device = "),
    "steps 10^9": ({"steps": 10**9}, "asks for 1000000000 steps"),
    "endless budget": ({"budget": float("inf")}, "asks for 3 steps in inf s"),
    "budget nan": ({"budget": float("nan")}, "asks for 3 steps in nan s"),
    "round 10^12": ({"round": 10**12}, "round = "),
    "attempt -1": ({"attempt": -1}, "attempt = -1"),
    "epoch -1": ({"epoch": -1}, "epoch = -1"),
    "factor 7": ({"counted_factor": 7.0}, "counted_factor = 7"),
    "a run with a path": ({"run": "../../etc"}, "not a valid folder name"),
    "a run without a name": ({"run": ""}, "not a valid folder name"),
}
JOBS = {
    "deep TOML": ("a = " + "[" * 50_000, "nested too deeply"),
    "a long text": ("#" * (1 << 19), "the maximum is"),
    "a shift of another length": (JOB.replace("shift = 0.5", "shift = [0.5, 1.0]"), "shift has shape [2]"),
    "a scale with more dimensions": (JOB.replace("scale = 2.0", "scale = [[2.0]]"), "scale has shape [1, 1]"),
    "a huge hidden layer": (JOB.replace("hidden = [5]", "hidden = [1000000000]"), "parameters"),
    "a hidden layer of 10^30": (JOB.replace("hidden = [5]", f"hidden = [{10**30}]"), "parameters"),
    "two large layers": (JOB.replace("hidden = [5]", "hidden = [100000, 100000]"), "parameters"),
    "very many layers": (JOB.replace("hidden = [5]", f"hidden = {[5] * 5000}"), "parameters"),
    "a huge input": (JOB.replace("shape = [6]", "shape = [1000000, 1000000]"), "parameters"),
    "an infinite deadline": (JOB.replace("min_devices = 2", "min_devices = 2\nbudget = inf"), "give a finite number"),
    "a clip that is none": (JOB.replace("min_devices = 2", "min_devices = 2\nclip = nan"), "finite"),
    "a huge seed": (JOB + f"[run]\nseed = {1 << 70}\n", "run.seed"),
    "another aggregation": (
        JOB.replace("min_devices = 2", 'min_devices = 2\naggregation = "best"'),
        "give one of none, bounded",
    ),
    "a model to import": (JOB.replace('name = "mlp"', 'name = "os:system"'), "name a model of fedcpsl"),
}


@pytest.mark.parametrize("case", INSTRUCTIONS)
def test_an_instruction_that_cannot_be_carried_out_is_refused_and_the_device_goes_on(case, tmp_path):
    changes, words = INSTRUCTIONS[case]
    handler, instruction = Handler(owner(tmp_path)), good_instruction(**changes)
    said = answer_to(handler, instruction.header, JOB, instruction.tensors).header
    assert said["kind"] == REFUSAL
    assert words in said["reason"]
    assert not (tmp_path.parent / "etc").exists()
    assert answer_to(handler, good_instruction().header, JOB, good_instruction().tensors).header["kind"] == TRAIN


@pytest.mark.parametrize("case", JOBS)
def test_a_job_that_cannot_be_done_is_refused_by_name_and_the_device_goes_on(case, tmp_path):
    text, words = JOBS[case]
    handler = Handler(owner(tmp_path))
    said = answer_to(handler, {"run": "r", "round": 0, "attempt": 0}, text).header
    assert said["kind"] == REFUSAL
    assert words in said["reason"]
    assert handler.refusal_before_tensors(read_about_of(good_instruction(), text)) is not None
    assert answer_to(handler, good_instruction().header, JOB, good_instruction().tensors).header["kind"] == TRAIN


def read_about_of(message, job):
    content, at = pack(message, job), [0]

    def read(count):
        at[0] += count
        return content[at[0] - count : at[0]]

    return read_prefix(read, "it")


def test_whatever_fails_while_an_instruction_is_carried_out_is_logged_and_refused(tmp_path, monkeypatch, caplog):
    def out_of_memory(*_):
        raise MemoryError

    handler = Handler(owner(tmp_path))
    with monkeypatch.context() as patched:
        patched.setattr("fedcpsl.deployment.device_process.respond", out_of_memory)
        said = answer_to(handler, good_instruction().header, JOB, good_instruction().tensors).header
    assert (said["kind"], said["reason"]) == (REFUSAL, "it failed there (MemoryError); its log has the details")
    assert "MemoryError" in caplog.text
    assert answer_to(handler, good_instruction().header, JOB, good_instruction().tensors).header["kind"] == TRAIN


def test_an_instruction_larger_than_the_model_is_refused_before_it_is_read(tmp_path):
    job = read_job(JOB, "job")
    assert parameters_of(job) == 6 * 5 + 5 + 5 * 3 + 3 == 53
    assert max_message_bytes(job) == (2 * 53 * 4, 53 * 4)
    handler = Handler(owner(tmp_path))
    assert handler.refusal_before_tensors(read_about_of(good_instruction(), JOB)) is None
    large = Message(good_instruction().header, {"theta": torch.zeros(107)})
    said = unpack(handler.refusal_before_tensors(read_about_of(large, JOB)), "it").message.header
    assert said["reason"] == "the instruction's tensors have 428 bytes; the job's model needs 424"
    assert MAX_PARAMETERS * 4 == 1 << 30


def test_robust_aggregation_turns_control_variates_off_on_both_sides():
    text = JOB.replace("min_devices = 2", 'min_devices = 2\naggregation = "trimmed"')
    terms = job_terms(read_job(text, "job"))
    assert not terms.method.rules.parts.control_variates
    assert job_terms(read_job(JOB, "job")).method.rules.parts.control_variates
    with pytest.raises(InputError, match="works with no such aggregation"):
        read_job(text.replace("eta = 0.1", "eta = 0.1\ncontrol_variates = true"), "job")


def test_noise_has_its_price_told(tmp_path):
    """One update with noise z is a Gaussian mechanism of multiplier z/2; Balle and Wang's exact curve is below ours."""
    from scipy.stats import norm

    transport = Handlers({name: Handler(owner(tmp_path, name)) for name in ("ann", "bob")})
    text = JOB.replace(
        "min_devices = 2", 'min_devices = 2\nclip = 0.5\nnoise = 4.0\ndelta = 1e-4\naggregation = "none"'
    )
    transport.job = text
    states = list(run_rounds(transport, read_job(text, "job.toml"), tmp_path))
    assert [member.asked for member in states[-1].roster] == [2, 2]
    told = json.loads((tmp_path / "status.json").read_text())["privacy"]
    assert told["updates"] == 2
    z = 4.0 / 2 / 2**0.5  # two updates are one of a smaller multiplier
    epsilon = told["epsilon"]
    exact = norm.cdf(1 / (2 * z) - epsilon * z) - np.exp(epsilon) * norm.cdf(-1 / (2 * z) - epsilon * z)
    assert exact <= 1e-4
    assert epsilon < 4.5
    for delta in [m.tensors["delta"] for _, m in transport.seen if m.header["kind"] == TRAIN]:
        assert float(delta.std()) == pytest.approx(2.0, rel=0.5)  # 0.5 * 4 of noise on each number


def test_a_device_sits_out_as_its_owner_wants(tmp_path, monkeypatch):
    supplies = tmp_path / "supplies"
    for name, facts in {
        "BAT0": {"type": "Battery", "status": "Discharging"},
        "AC": {"type": "Mains", "online": "0"},
    }.items():
        (supplies / name).mkdir(parents=True)
        for fact, word in facts.items():
            (supplies / name / fact).write_text(word + "\n")
    assert reason_to_decline(Conditions(), supplies) is None
    assert reason_to_decline(Conditions(on_battery=False), supplies) == "not now: it runs on its battery"
    (supplies / "AC" / "online").write_text("1\n")
    assert reason_to_decline(Conditions(on_battery=False), supplies) is None
    assert reason_to_decline(Conditions(on_battery=False), tmp_path / "none") is None
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    handler = Handler(owner(tmp_path, conditions=Conditions(max_load=2.0)))
    said = answer_to(handler, {"run": "r", "round": 0, "attempt": 0, "kind": TRAIN}).header
    assert (said["kind"], said["reason"], said["later"]) == (REFUSAL, "not now: it is busy with other work", True)


def test_the_stricter_protection_holds():
    assert stricter_protection(Protection(), Protection(1.0, 2.0)) == Protection(1.0, 2.0)
    assert stricter_protection(Protection(0.5, 1.0), Protection(1.0, 2.0)) == Protection(0.5, 4.0)
    assert stricter_protection(Protection(0.5), Protection()) == Protection(0.5, 0.0)


def test_a_job_of_version_0_1_names_the_minimum_of_devices_otherwise():
    old, new = (explicit_job(JOB.replace("min_devices", name), "job.toml") for name in ("least", "min_devices"))
    assert old == new
    assert read_job(new, "job.toml").rules.min_devices == 2
    with pytest.raises(InputError, match="least: no such setting"):
        read_job(JOB.replace("min_devices = 2", "min_devices = 2\nleast = 3"), "job.toml")


def test_a_server_continues_with_the_job_of_version_0_1_in_its_folder(tmp_path):
    given, kept = tmp_path / "given.toml", tmp_path / "job.toml"
    given.write_text(JOB)
    old = explicit_job(JOB, "job.toml").replace("min_devices", "least")
    kept.write_text(old)
    job = serve._keep_job(given, read_job(explicit_job(JOB, "job.toml"), "job.toml"), tmp_path)
    assert (job.rules.min_devices, kept.read_text()) == (2, old)
    other = read_job(explicit_job(JOB.replace("min_devices = 2", "min_devices = 1"), "job.toml"), "job.toml")
    with pytest.raises(InputError, match="is another job than"):
        serve._keep_job(given, other, tmp_path)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("min_devices = 2", "noise = 1.0"), "give clip too"),
        (("[federation]", "[federaton]"), "needs a section"),
        (("min_devices = 2", "min_device = 2"), "did you mean 'min_devices'"),
        (("min_devices = 2", 'min_devices = "2"'), "give a number"),
        (("shape = [6]", "shape = 6"), "give the sizes of one input"),
        (('["0", "1", "2"]', '["0", "0"]'), "give the names of at least two"),
        (("scale = 2.0", "scale = 0.0"), "scale above 0"),
        (("eta = 0.1", "etta = 0.1"), "did you mean 'eta'"),
        (("hidden = [5]", "hidden = ["), "not valid TOML"),
    ],
)
def test_a_wrong_job_is_named(change, words):
    with pytest.raises(InputError, match=words):
        read_job(JOB.replace(*change), "job.toml")


def test_a_devices_process_answers_over_its_socket(tmp_path):
    address = tmp_path / "s"
    ready = threading.Event()
    arguments = address, Handler(owner(tmp_path)).handle, ready.set
    threading.Thread(target=serve_socket, args=arguments, daemon=True).start()
    assert ready.wait(20)
    assert address.stat().st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(address))
        rude.sendall(b"12")
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.connect(str(address))
        foreign.sendall((5).to_bytes(8, "little") + b"hello")
        assert foreign.recv(1) == b""
    said = unpack(
        send_and_receive(address, pack(Message({"run": "r", "round": 0, "attempt": 0}, {})), 20), "it"
    ).message
    assert said.header["kind"] == REFUSAL
    with pytest.raises(RunError, match="is `fedcpsl join` running"):
        send_and_receive(tmp_path / "nobody", b"", 1)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["h:1", "--socket", "s"], "give no server, --keys or --insecure beside it"),
        (["--socket", "s", "--insecure"], "give no server, --keys or --insecure beside it"),
        ([], "HOST:PORT: give the server"),
        (["h", "--insecure"], "give the server as HOST:PORT"),
        (["--socket", "a.npz"], "a.npz: exists and is not a socket"),
        (["--socket", "no/such/folder"], "a socket cannot be made there"),
        (["h:1", "--keys", "a.npz"], "a.npz/a: "),
    ],
)
def test_joining_that_is_refused(tmp_path, monkeypatch, capsys, words, says):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", x=np.zeros((4, 2)), y=np.array([0, 1, 0, 1]))
    assert run_command(["join", *words, "--data", "a.npz", "--name", "a"]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--label", "knd"], "a.csv: has no column 'knd' (--label); did you mean 'kind'?"),
        (["--test-column", "tst"], "a.csv: has no column 'tst' (--test-column)"),
    ],
)
def test_wrong_columns_are_named_before_a_server_is_asked(tmp_path, monkeypatch, capsys, words, says):
    pytest.importorskip("pyarrow")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.csv").write_text("height,kind\n1,cat\n2,dog\n")
    assert run_command(["join", "127.0.0.1:1", "--insecure", "--data", "a.csv", "--name", "a", *words]) == 2
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert says in said


def test_where_the_app_is_said_and_that_it_is_unprotected(capsys):
    assert run_command(["federation", "app"]) == 0
    said = capsys.readouterr()
    assert (Path(said.out.strip()) / "pyproject.toml").is_file()
    assert "can run code there: keep them on loopback" in said.err


def test_hello_tells_sizes_once(tmp_path):
    transport = Handlers({name: Handler(owner(tmp_path, name)) for name in ("ann", "bob")})
    list(run_rounds(transport, read_job(JOB, "job.toml"), tmp_path))
    kinds = [message.header["kind"] for name, message in transport.seen if name == "ann"]
    assert kinds == [HELLO, TRAIN, TRAIN, "end"]


def test_a_device_keeps_the_states_of_some_runs_only(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr("fedcpsl.deployment.device_process.MAX_RUNS_STORED", 2)
    handler = Handler(owner(tmp_path))
    kinds = []
    for run in ("r1", "r2", "r3", "r1"):
        instruction = good_instruction(run=run)
        kinds.append(answer_to(handler, instruction.header, JOB, instruction.tensors).header["kind"])
    assert kinds[:3] == [TRAIN, TRAIN, REFUSAL]
    assert "holds the states of 2 runs" in caplog.text


def test_what_the_server_writes_cannot_steer_a_terminal(tmp_path, caplog):
    text = JOB.replace("min_devices = 2", 'min_devices = 2\n"lea\\u001B[2Jst" = 3')
    said = answer_to(Handler(owner(tmp_path)), {"run": "r", "round": 0, "attempt": 0}, text).header
    assert said["kind"] == REFUSAL
    assert "\x1b" not in caplog.text
    assert "no such setting" in caplog.text


def words_owner(folder, name, rows, header="size,kind,weight,label"):
    (folder / f"{name}.csv").write_text("\n".join([header, *rows]) + "\n")
    data = Data(
        dataset="own", file=str(folder / f"{name}.csv"), label="label", partition="iid", devices=1, labelled=1.0
    )
    return DeviceConfig(name, data, folder / name)


NAMED = JOB.replace("shape = [6]", 'shape = [4]\nfeatures = ["size", "weight", "kind=cat", "kind=owl"]').replace(
    "shift = 0.5\nscale = 2.0\n", ""
)


def test_words_have_the_same_numbers_on_every_device(tmp_path):
    """Named features: columns in any order, a word that no row has is 0, another one does not fit."""
    job = read_job(NAMED, "job.toml")
    ann = words_owner(tmp_path, "ann", ["1,cat,5,0", "2,owl,6,1", "3,cat,7,0", "4,owl,8,1"])
    bob = words_owner(tmp_path, "bob", ["0,5,owl,1", "1,6,owl,2", "0,7,owl,3"], "label,weight,kind,size")
    taken = make_participant(ann, job, "r").local_data
    both = torch.cat([taken.x_labelled, taken.x_test]).tolist()
    assert sorted(both) == [[1, 5, 1, 0], [2, 6, 0, 1], [3, 7, 1, 0], [4, 8, 0, 1]]
    taken = make_participant(bob, job, "r").local_data
    assert sorted(torch.cat([taken.x_labelled, taken.x_test]).tolist()) == [[1, 5, 0, 1], [2, 6, 0, 1], [3, 7, 0, 1]]
    for rows, header, words in (
        (
            ["1,dog,5,0", "2,owl,6,1"],
            "size,kind,weight,label",
            "column 'kind' has 'dog', which is no feature of the job",
        ),
        (["1,cat,0", "2,owl,1"], "size,kind,label", "has no column 'weight', which is a feature of the job"),
        (
            ["1,owl,5,7,0", "2,owl,6,7,1"],
            "size,kind,weight,age,label",
            "there is a column 'age', which is no feature of the job",
        ),
    ):
        with pytest.raises(InputError, match=words):
            make_participant(words_owner(tmp_path, "cid", rows, header), job, "r")


def test_a_device_without_labels_takes_part(tmp_path):
    """With an empty column of labels, or without the column."""
    job = read_job(NAMED, "job.toml")
    empty = words_owner(tmp_path, "ann", ["1,cat,5,", "2,owl,6,"])
    without = words_owner(tmp_path, "bob", ["1,cat,5", "2,owl,6"], "size,kind,weight")
    without = without._replace(data=replace(without.data, label=""))
    for device in (empty, without):
        taken = make_participant(device, job, "r").local_data
        assert (len(taken.x_labelled), len(taken.x_test)) == (0, 0)
        assert sorted(taken.x_unlabelled.tolist()) == [[1, 5, 1, 0], [2, 6, 0, 1]]


def test_channels_may_be_normalised_one_by_one():
    image = JOB.replace("shape = [6]", "shape = [3, 16, 16]").replace('"mlp"', '"cnn"')
    job = read_job(image.replace("shift = 0.5\nscale = 2.0", "shift = [1, 2, 3]\nscale = 2.0"), "job.toml")
    assert job.scaling.shift.tolist() == [[[1]], [[2]], [[3]]]
    with pytest.raises(InputError, match="one number, or one per feature or channel"):
        read_job(image.replace("shift = 0.5", "shift = [1, 2]"), "job.toml")


@pytest.mark.parametrize(
    ("rule", "words"),
    [
        ("deadline = 0.0", r"given.toml: \[federation\] deadline = 0: give more than 0 seconds"),
        ("attempts = 0", r"\[federation\] attempts = 0: give at least 1"),
        ("quorum = 9", r"\[federation\] quorum = 9: \d devices are asked"),
    ],
)
def test_rules_that_no_round_can_follow_leave_no_folder(rule, words, tmp_path):
    (tmp_path / "given.toml").write_text(JOB.replace("min_devices = 2", f"min_devices = 2\n{rule}"))
    config = serve.ServerConfig(folder=tmp_path / "server", keys=None, host="127.0.0.1", port=0)
    with pytest.raises(InputError, match=words):
        serve.serve_job(tmp_path / "given.toml", config, print, print)
    assert not (tmp_path / "server").exists()


def test_true_and_false_are_one_feature_also_where_a_device_has_only_one_of_them(tmp_path):
    text = NAMED.replace('["size", "weight", "kind=cat", "kind=owl"]', '["size", "wild"]').replace("[4]", "[2]")
    rows = {"ann": ["1,true,0", "2,false,1"], "bob": ["1,true,0", "2,TRUE,1"], "cid": ["1,no,0", "2,no,1"]}
    found = {}
    for name, lines in rows.items():
        data = make_participant(words_owner(tmp_path, name, lines, "size,wild,label"), read_job(text, "job"), "r")
        found[name] = sorted(torch.cat([data.local_data.x_labelled, data.local_data.x_test]).tolist())
    assert found == {"ann": [[1, 1], [2, 0]], "bob": [[1, 1], [2, 1]], "cid": [[1, 0], [2, 0]]}


def test_words_need_names_in_the_job(tmp_path):
    job = read_job(JOB.replace("shape = [6]", "shape = [4]"), "job.toml")
    ann = words_owner(tmp_path, "ann", ["1,cat,5,0", "2,owl,6,1", "3,cat,7,0"])
    with pytest.raises(InputError, match="column 'kind' has words, which every device would number in its own way"):
        make_participant(ann, job, "r")


@pytest.mark.parametrize("features", ['["a"]', '["a", "a", "b", "c"]', '["a", "b", "c", 4]', '"a"'])
def test_names_of_features_are_checked(features):
    text = NAMED.replace('["size", "weight", "kind=cat", "kind=owl"]', features)
    with pytest.raises(InputError, match="features: give the names of all 4 features of a table, each once"):
        read_job(text, "job.toml")


def test_a_device_predicts_for_a_table_by_the_names_of_its_columns(tmp_path):
    rows = [f"{i},{('cat', 'owl')[i % 2]},{i % 3},{i % 2}" for i in range(20)]
    transport = Handlers({name: Handler(words_owner(tmp_path, name, rows)) for name in ("ann", "bob")})
    transport.job = NAMED
    list(run_rounds(transport, read_job(NAMED, "job.toml"), tmp_path))
    (tmp_path / "new.csv").write_text("kind,weight,size\nowl,1,3\ncat,2,4\n")
    shown = fedcpsl("predict", "ann", "new.csv", "--json", cwd=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert len(shown.stdout.splitlines()) == 2
    assert "accuracy" not in shown.stderr
    own = fedcpsl("predict", "ann", "ann.csv", "--json", cwd=tmp_path)  # the table that it joined with, label and all
    assert own.returncode == 0, own.stderr
    assert len(own.stdout.splitlines()) == 20
    assert re.search(r"of 20\b", own.stderr), own.stderr
    damaged = next((tmp_path / "ann").glob("*/columns.json"))
    damaged.write_text("{")
    said = fedcpsl("predict", "ann", "ann.csv", cwd=tmp_path)
    assert said.returncode == 2
    assert "columns.json: cannot be read; let the device join again" in said.stderr
    damaged.unlink()  # as an older version left it
    assert (
        "has the column 'label', which the model was not trained on"
        in fedcpsl("predict", "ann", "ann.csv", cwd=tmp_path).stderr
    )
