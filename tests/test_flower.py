"""The federation on Flower's message types, in one process: the same answers, and nothing undeclared leaves."""

from types import SimpleNamespace

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedcpsl[flower]'")

from flwr.app import Array, ArrayRecord, ConfigRecord, Error, RecordDict
from flwr.app import Message as FlowerMessage

from fedcpsl.errors import RunError
from fedcpsl.federation import Lost, Message, respond, serve, terms_of
from fedcpsl.federation.messages import TRAIN, pack, unpack
from fedcpsl.flower import client
from fedcpsl.flower.client import ARRAY, KIND, RECORD, from_record, to_record
from fedcpsl.flower.server import GridTransport

from .faulty import NAMES, failing_disk, make, participants, rules
from .test_federation import assert_same


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
        content = from_record(message.content, "the server's message")
        if content == b"name":
            return FlowerMessage(to_record(name.encode()), reply_to=message)
        said = respond(devices[name], unpack(content, "it").message)
        return FlowerMessage(to_record(pack(said)), reply_to=message)

    return answer


@pytest.mark.parametrize("name", NAMES)
def test_every_algorithm_gives_the_simulators_answer_through_flowers_messages(name, tmp_path):
    setup = make(name)
    devices = participants(setup, tmp_path)
    transport = GridTransport(FakeGrid(through_flower(devices), list(devices)))
    with failing_disk():
        *_, last = serve(terms_of(setup), rules(setup, min_devices=5), tmp_path / "server", transport)
    assert_same(setup, last, devices)


def test_late_failed_and_foreign_answers_are_losses(tmp_path):
    setup = make("fedcpsl")
    devices = participants(setup, tmp_path)
    good = through_flower(devices)

    def answer(name, message):
        content = from_record(message.content, "it")
        trains = content != b"name" and unpack(content, "it").message.header["kind"] == TRAIN
        if trains and name == "phone-0":
            return None
        if trains and name == "phone-1":
            return FlowerMessage(Error(code=5, reason="Node Unavailable"), reply_to=message)
        if trains and name == "phone-2":
            return FlowerMessage(RecordDict({"weights": ConfigRecord({"a": 1})}), reply_to=message)
        return good(name, message)

    transport = GridTransport(FakeGrid(answer, list(devices)))
    problems = {}
    with failing_disk():
        chosen = rules(setup, min_devices=5, quorum=0, deadline=0.01)
        for state in serve(terms_of(setup), chosen, tmp_path / "server", transport):
            problems |= state.dropouts
    assert "did not reply within" in problems["phone-0"]
    assert "Node Unavailable (Flower's error 5)" in problems["phone-1"]
    assert "has records ['weights']" in problems["phone-2"]


def test_nodes_are_asked_for_their_names(tmp_path):
    devices = participants(make("fedcpsl"), tmp_path)
    transport = GridTransport(FakeGrid(through_flower(devices), list(devices)))
    assert transport.present() == sorted(devices)


def test_a_device_that_is_not_connected_is_a_loss():
    transport = GridTransport(FakeGrid(None, []))
    assert list(transport.send({"phone": Message({}, {})}, 1.0)) == [("phone", Lost("it is not connected"))]


def test_messages_that_flower_does_not_take_are_losses():
    grid = FakeGrid(through_flower({}), ["phone"])
    transport = GridTransport(grid)
    transport.present()
    grid.push_messages = lambda _messages: []
    (loss,) = transport.send({"phone": Message({"round": 0}, {})}, 1.0)
    assert loss == ("phone", Lost("Flower did not accept the message; its log has the reason"))


def test_arrays_of_another_kind_are_refused():
    assert from_record(to_record(b"bytes"), "it") == b"bytes"
    foreign = RecordDict({RECORD: ArrayRecord({ARRAY: Array(np.zeros(2, np.float32))})})
    with pytest.raises(RunError, match="fedcpsl did not write"):
        from_record(foreign, "it")
    assert Array(np.zeros(2)).stype != KIND


def test_a_device_whose_process_is_gone_names_no_file(tmp_path):
    """Flower tells the server what its client app raises."""
    message = FlowerMessage(to_record(b"instruction"), 7, "train", ttl=5.0)
    with pytest.raises(RunError) as raised:
        client.handle_message(message, SimpleNamespace(node_config={"socket": str(tmp_path / "door")}))
    assert str(raised.value) == "the device's own process could not be reached; is `fedcpsl join` running?"
