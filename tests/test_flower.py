"""The federation on Flower's message types, in one process: the same answers, and nothing undeclared leaves."""

import json
import re
import socket
import threading
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedcpsl[flower]'")

from flwr.app import ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage

from fedcpsl.cli import run_command
from fedcpsl.config import Data
from fedcpsl.errors import InputError, RunError
from fedcpsl.federation import Lost, Message, predict, respond, serve, terms_of
from fedcpsl.federation.messages import HELLO, REFUSAL, TRAIN
from fedcpsl.federation.privacy import strictest
from fedcpsl.federation.protection import Protection
from fedcpsl.federation.server_store import load_serving
from fedcpsl.flower import client
from fedcpsl.flower.conditions import Conditions, reluctance
from fedcpsl.flower.frames import Blob, Frame, ask, pack, unpack
from fedcpsl.flower.grid import GridTransport
from fedcpsl.flower.job import read_job, server_terms
from fedcpsl.flower.member import UNFIT, Desk, Owner, listen, predictor
from fedcpsl.flower.records import KIND, content_of, frame_of
from fedcpsl.flower.server import rounds
from fedcpsl.flower.tensors import frame_from, message_from

from .command import fedcpsl
from .faulty import NAMES, failing_disk, make, participants, rules
from .test_federation import assert_same

JOB = """
[federation]
shape = [6]
classes = ["0", "1", "2"]
least = 2
shift = 0.5
scale = 2.0
[model]
name = "mlp"
hidden = [5]
[algorithm]
eta = 0.1
[work]
rounds = 2
active = 2
unit = "steps"
amount = 3
"""


@pytest.fixture(autouse=True)
def identity(monkeypatch):
    """What Flower's processes know of themselves; without it no message can be made."""
    from flwr.supercore.task_identity import TaskIdentity

    for name in ("_task_id", "_run_id", "_node_id"):
        monkeypatch.setattr(TaskIdentity, name, 1)


class FakeGrid:
    """Flower's grid with nodes that answer at once; it keeps what crossed it."""

    def __init__(self, answer, names):
        self.answer, self.names = answer, names
        self.replies, self.seen = {}, []

    def get_node_ids(self):
        return list(self.registered())

    def registered(self):
        return {7 + i: name for i, name in enumerate(self.names)}

    def push_messages(self, messages):
        ids = []
        for message in messages:
            message.metadata.__dict__["_message_id"] = message.object_id
            name = self.names[message.metadata.dst_node_id - 7]
            reply = self.answer(name, message)
            ids.append(message.object_id)
            if reply is not None:
                self.replies[message.object_id] = reply
                self.seen.append((name, reply))
        return ids

    def pull_messages(self, ids):
        return [self.replies.pop(i) for i in ids if i in self.replies]


def through_flower(devices):
    """Answers as Flower's client process gives them, without the process."""

    def answer(name, message):
        frame = unpack(pack(frame_of(message.content, "the server's message")), "it")
        said = respond(devices[name], message_from(frame))
        return FlowerMessage(content_of(unpack(pack(frame_from(said)), "it")), reply_to=message)

    return answer


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_gives_the_simulators_answer_through_flowers_messages(name, tmp_path):
    setup = make(name)
    devices = participants(setup, tmp_path)
    grid = FakeGrid(through_flower(devices), list(devices))
    transport = GridTransport(grid, "", grid.registered)
    with failing_disk():
        *_, last = serve(terms_of(setup), rules(setup, least=5), tmp_path / "server", transport)
    assert_same(setup, last, devices)


def test_nothing_leaves_a_device_but_what_is_declared(tmp_path):
    setup = make("fedcpsl")
    devices = participants(setup, tmp_path)
    grid = FakeGrid(through_flower(devices), list(devices))
    with failing_disk():
        list(
            serve(terms_of(setup), rules(setup, least=5), tmp_path / "server", GridTransport(grid, "", grid.registered))
        )
    common, greeted = {"protocol", "run", "round", "attempt", "kind"}, set()
    for name, reply in grid.seen:
        frame = frame_of(reply.content, "it")
        kind = frame.header["kind"]
        allowed = {HELLO: {"labelled", "unlabelled"}, TRAIN: {"steps"}}.get(kind, set())
        assert set(frame.header) == common | allowed
        assert set(frame.blobs) == ({"delta"} if kind == TRAIN else set())
        assert kind != HELLO or name not in greeted  # sizes are told once
        greeted |= {name} if kind == HELLO else set()
    assert len(greeted) == 5


def test_late_failed_and_foreign_answers_are_losses(tmp_path):
    setup = make("fedcpsl")
    devices = participants(setup, tmp_path)
    good = through_flower(devices)

    def answer(name, message):
        trains = frame_of(message.content, "it").header["kind"] == TRAIN
        if trains and name == "phone-0":
            return None
        if trains and name == "phone-1":
            return FlowerMessage(Error(code=5, reason="Node Unavailable"), reply_to=message)
        if trains and name == "phone-2":
            return FlowerMessage(RecordDict({"weights": ConfigRecord({"a": 1})}), reply_to=message)
        return good(name, message)

    grid = FakeGrid(answer, list(devices))
    transport = GridTransport(grid, "", grid.registered)
    problems = {}
    with failing_disk():
        chosen = rules(setup, least=5, quorum=0, deadline=0.01)
        for state in serve(terms_of(setup), chosen, tmp_path / "server", transport):
            problems |= state.dropouts
    assert "did not answer within" in problems["phone-0"]
    assert "Node Unavailable (Flower's error 5)" in problems["phone-1"]
    assert "has records ['weights']" in problems["phone-2"]


def test_without_keys_nodes_are_asked_for_their_names(tmp_path):
    setup = make("fedcpsl")
    devices = participants(setup, tmp_path)
    good = through_flower(devices)

    def answer(name, message):
        asked = frame_of(message.content, "it").header
        if "question" in asked:
            return FlowerMessage(content_of(Frame({"name": name}, {})), reply_to=message)
        return good(name, message)

    transport = GridTransport(FakeGrid(answer, list(devices)), "", None)
    assert transport.present() == sorted(devices)


def test_a_device_that_is_not_connected_is_a_loss():
    transport = GridTransport(FakeGrid(None, []), "", dict)
    assert list(transport.send({"phone": Message({}, {})}, 1.0)) == [("phone", Lost("it is not connected"))]


def test_messages_that_flower_does_not_take_are_losses():
    grid = FakeGrid(None, ["phone"])
    grid.push_messages = lambda _messages: []
    (loss,) = GridTransport(grid, "", grid.registered).send({"phone": Message({"round": 0}, {})}, 1.0)
    assert loss == ("phone", Lost("Flower did not take the message; its log says why"))


numbers = st.one_of(st.integers(-(2**53), 2**53), st.text(max_size=20), st.floats(allow_nan=False))
blobs = st.builds(
    lambda values, kind: Blob(kind, (len(values),), np.array(values, kind).tobytes()),
    st.lists(st.floats(-1e3, 1e3), max_size=6),
    st.sampled_from(["float32", "float64"]),
)


@given(
    st.dictionaries(st.text(max_size=8), numbers, max_size=5), st.dictionaries(st.text(max_size=5), blobs, max_size=3)
)
def test_a_frame_comes_back(header, tensors):
    frame = Frame(header, tensors, "job")
    assert unpack(pack(frame), "it") == frame


@settings(max_examples=200)
@given(st.binary(max_size=60), st.integers(0, 200))
def test_bytes_that_are_no_frame_are_refused(noise, cut):
    whole = pack(Frame({"round": 1}, {"delta": Blob("float32", (3,), bytes(12))}))
    for content in (noise, whole[: min(cut, len(whole) - 1)]):
        with pytest.raises(RunError):
            unpack(content, "it")


def test_tensors_of_another_kind_are_refused():
    good = content_of(Frame({"round": 1}, {"delta": Blob("float32", (2,), bytes(8))}))
    assert frame_of(good, "it").blobs["delta"].shape == (2,)
    for array in (np.zeros(2, np.float32), np.zeros(2, np.int64)):
        foreign = RecordDict({"header": ConfigRecord({}), "tensors": ArrayRecord([array])})
        with pytest.raises(RunError, match="fedcpsl did not write"):
            frame_of(foreign, "it")
    from flwr.app import Array

    lying = ArrayRecord({"delta": Array("float32", (3,), KIND, bytes(8))})
    with pytest.raises(RunError, match="8 bytes where shape"):
        frame_of(RecordDict({"header": ConfigRecord({}), "tensors": lying}), "it")


def owner(folder, name="phone", **chosen):
    rng = np.random.default_rng(len(name))
    y = rng.integers(0, 3, 40)
    x = rng.normal(size=(40, 6)) + np.eye(3, 6)[y]
    np.savez(folder / f"{name}.npz", x=x, y=np.where(rng.random(40) < 0.5, -1, y))
    data = Data(dataset="own", file=str(folder / f"{name}.npz"), partition="iid", devices=1, labelled=1.0)
    return Owner(name, data, folder / name, **chosen)


def test_a_job_runs_on_devices_that_know_nothing_but_their_data(tmp_path):
    desks = {name: Desk(owner(tmp_path, name, share_accuracy=True)) for name in ("ann", "bob")}

    def answer(name, message):
        content = pack(frame_of(message.content, "it"))
        return FlowerMessage(content_of(unpack(desks[name].answer(content), "it")), reply_to=message)

    job = read_job(JOB, "job.toml")
    grid = FakeGrid(answer, list(desks))
    states = list(rounds(grid, job, tmp_path, grid.registered))
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
    kept = load_serving(tmp_path / "server", states[-1].settings, server_terms(job).method.network.initial)
    assert torch.equal(kept.server.theta, states[-1].server.theta)


def test_data_that_does_not_fit_the_job_is_refused_and_only_the_device_is_told_why(tmp_path, caplog):
    for change, words in (
        (("shape = [6]", "shape = [5]"), r"an input has shape \[6\] where the job's is \[5\]"),
        (('["0", "1", "2"]', '["0", "1"]'), "the job has no class '2'"),
    ):
        frame = Frame({"run": "r", "round": 0, "attempt": 0}, {}, JOB.replace(*change))
        answer = unpack(Desk(owner(tmp_path)).answer(pack(frame)), "it")
        assert (answer.header["kind"], answer.header["reason"]) == (REFUSAL, UNFIT)
        assert re.search(words, caplog.messages[-1])


def test_a_job_that_is_wrong_is_refused_by_name(tmp_path):
    text = JOB.replace('name = "mlp"', 'name = "os:system"')
    frame = Frame({"run": "r", "round": 0, "attempt": 0}, {}, text)
    answer = unpack(Desk(owner(tmp_path)).answer(pack(frame)), "it")
    assert answer.header["kind"] == REFUSAL
    assert "name a model of fedcpsl" in answer.header["reason"]


def test_noise_has_its_price_told(tmp_path):
    """One update with noise z is a Gaussian mechanism of multiplier z/2; Balle and Wang's exact curve is below ours."""
    from scipy.stats import norm

    desks = {name: Desk(owner(tmp_path, name)) for name in ("ann", "bob")}

    def answer(name, message):
        content = pack(frame_of(message.content, "it"))
        return FlowerMessage(content_of(unpack(desks[name].answer(content), "it")), reply_to=message)

    job = read_job(JOB.replace("least = 2", "least = 2\nclip = 0.5\nnoise = 4.0\ndelta = 1e-4"), "job.toml")
    grid = FakeGrid(answer, list(desks))
    states = list(rounds(grid, job, tmp_path, grid.registered))
    assert [member.asked for member in states[-1].roster] == [2, 2]
    told = json.loads((tmp_path / "status.json").read_text())["privacy"]
    assert told["updates"] == 2
    z = 4.0 / 2 / 2**0.5  # two updates are one of a smaller multiplier
    epsilon = told["epsilon"]
    exact = norm.cdf(1 / (2 * z) - epsilon * z) - np.exp(epsilon) * norm.cdf(-1 / (2 * z) - epsilon * z)
    assert exact <= 1e-4
    assert epsilon < 4.5
    deltas = [frame_of(reply.content, "it") for _, reply in grid.seen]
    sent = [message_from(frame).tensors["delta"] for frame in deltas if frame.header["kind"] == TRAIN]
    for delta in sent:  # 0.5 * 4 of noise on each number
        assert float(delta.std()) == pytest.approx(2.0, rel=0.5)


def test_a_device_sits_out_as_its_owner_wants(tmp_path, monkeypatch):
    supplies = tmp_path / "supplies"
    for name, facts in {
        "BAT0": {"type": "Battery", "status": "Discharging"},
        "AC": {"type": "Mains", "online": "0"},
    }.items():
        (supplies / name).mkdir(parents=True)
        for fact, word in facts.items():
            (supplies / name / fact).write_text(word + "\n")
    assert reluctance(Conditions(), supplies) is None
    assert reluctance(Conditions(on_battery=False), supplies) == "not now: it runs on its battery"
    (supplies / "AC" / "online").write_text("1\n")
    assert reluctance(Conditions(on_battery=False), supplies) is None
    assert reluctance(Conditions(on_battery=False), tmp_path / "none") is None
    monkeypatch.setattr("os.getloadavg", lambda: (1000.0, 0.0, 0.0))
    desk = Desk(owner(tmp_path, conditions=Conditions(most_load=2.0)))
    header = {"run": "r", "round": 0, "attempt": 0, "kind": TRAIN}
    said = unpack(desk.answer(pack(Frame(header, {}, JOB))), "it").header
    assert (said["kind"], said["reason"]) == (REFUSAL, "not now: it is busy with other work")


def test_the_stricter_protection_holds():
    assert strictest(Protection(), Protection(1.0, 2.0)) == Protection(1.0, 2.0)
    assert strictest(Protection(0.5, 1.0), Protection(1.0, 2.0)) == Protection(0.5, 4.0)
    assert strictest(Protection(0.5), Protection()) == Protection(0.5, 0.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (("least = 2", "noise = 1.0"), "give clip too"),
        (("[federation]", "[federaton]"), "needs a section"),
        (("least = 2", "leest = 2"), "did you mean 'least'"),
        (("least = 2", 'least = "2"'), "give a number"),
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
    threading.Thread(target=listen, args=(owner(tmp_path), address, ready.set), daemon=True).start()
    assert ready.wait(20)
    assert address.stat().st_mode & 0o077 == 0
    with socket.socket(socket.AF_UNIX) as rude:
        rude.connect(str(address))
        rude.sendall(b"12")
    with socket.socket(socket.AF_UNIX) as foreign:
        foreign.connect(str(address))
        foreign.sendall((5).to_bytes(8, "little") + b"hello")
        assert foreign.recv(1) == b""
    said = unpack(ask(address, pack(Frame({"run": "r", "round": 0, "attempt": 0}, {}, "")), 20), "it")
    assert said.header["kind"] == REFUSAL
    with pytest.raises(RunError, match="is `fedcpsl join` up"):
        ask(tmp_path / "nobody", b"", 1)


def test_a_device_whose_process_is_gone_names_no_file(tmp_path):
    """Flower tells the server what its client app raises."""
    message = FlowerMessage(content_of(Frame({"round": 1}, {})), 7, "train", ttl=5.0)
    with pytest.raises(RunError) as raised:
        client.answer(message, SimpleNamespace(node_config={"socket": str(tmp_path / "door")}))
    assert str(raised.value) == "the device's own process could not be asked; is `fedcpsl join` up?"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["h:1", "--socket", "s"], "give no server, --keys or --insecure beside it"),
        (["--socket", "s", "--insecure"], "give no server, --keys or --insecure beside it"),
        ([], "HOST:PORT: give the server"),
        (["h", "--insecure"], "give the server as HOST:PORT"),
        (["--socket", "a.npz"], "a.npz: is a file of another kind"),
        (["--socket", "no/such/folder"], "no socket can be made there"),
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


def test_where_the_app_is_said(capsys):
    assert run_command(["federation", "app"]) == 0
    assert (Path(capsys.readouterr().out.strip()) / "pyproject.toml").is_file()
