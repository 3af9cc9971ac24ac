"""The server's only door: who is not asked is not listened to, and nobody can make it hold what it did not ask for."""

import http.client
import json
import socket
import ssl
import threading
import time
from hashlib import sha256

import pytest
import torch

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedcpsl[federation]'")

from fedcpsl.deployment import http_server, keys
from fedcpsl.deployment.endpoints import DIGEST_HEADER, HEALTH_PATH, INSTRUCTION_PATH, REPLY_PATH, free_port
from fedcpsl.deployment.http_server import GRACE_S, MAX_PLAIN_REPLY_BYTES, HttpContext, Mailbox, listening
from fedcpsl.deployment.signing import KeyRing, SignedContent, sign_request
from fedcpsl.federation.messages import HELLO, PROBE, TRAIN, Lost, Message, pack, unpack

UPDATE = 4000  # bytes


class Place:
    """A server with keys for ann and bob, and a client that signs."""

    def __init__(self, folder):
        self.keys, self.said = folder / "keys", []
        keys.make_authority(self.keys)
        keys.make_server_certificate(self.keys, ["127.0.0.1"])
        for name in ("ann", "bob"):
            keys.make_device_key(self.keys, name)
        self.ring = KeyRing(self.keys, folder, self.said.append)
        self.mailbox = Mailbox(UPDATE, self.ring.revoked)
        self.mailbox.use_job("the job")
        self.port = free_port()
        self.front = HttpContext(folder, self.mailbox, self.ring, self.said.append)

    def ask(self, path, body=b"", name="ann", headers=None, method="POST", digest=None, signed=True):
        connection = self.connect()
        digest = sha256(body).hexdigest() if digest is None else digest
        request = SignedContent(method, path, digest) if body else SignedContent(method, path)
        key = self.keys / "devices" / name
        line = sign_request(f"device/{name}", key, self.keys / "ca.crt", time.time(), request) if signed else "nobody"
        about = {"Authorization": line} | ({DIGEST_HEADER: digest} if body else {}) | (headers or {})
        try:
            connection.request(method, path, body, about)
            answer = connection.getresponse()
            return answer.status, answer.read()
        finally:
            connection.close()

    def connect(self):
        trusting = ssl.create_default_context(cafile=self.keys / "ca.crt")
        return http.client.HTTPSConnection("127.0.0.1", self.port, timeout=30, context=trusting)

    def offer(self, kind=TRAIN, names=("ann",), deadline=20.0):
        """Orders for some devices, in a thread; what comes of them is in the list that is given back."""
        instructions = {name: Message({"run": "r", "round": 1, "attempt": 0, "kind": kind}, {}) for name in names}
        found = []
        thread = threading.Thread(target=lambda: found.extend(self.mailbox.send(instructions, deadline)), daemon=True)
        thread.start()
        return thread, found


@pytest.fixture
def place(tmp_path):
    place = Place(tmp_path)
    with listening(place.front, place.keys, "127.0.0.1", place.port):
        yield place


def answer_of(size=1000, **header):
    about = {"run": "r", "round": 1, "attempt": 0, "kind": TRAIN} | header
    return pack(Message(about, {"delta": torch.zeros(size)}))


def test_an_instruction_and_its_reply(place):
    thread, found = place.offer()
    code, instruction = place.ask(INSTRUCTION_PATH)
    assert (code, unpack(instruction, "it").job) == (200, "the job")
    again = unpack(place.ask(INSTRUCTION_PATH)[1], "it")  # as often as it is asked for
    assert again == unpack(instruction, "it")
    assert place.ask(REPLY_PATH, answer_of())[0] == 204
    thread.join(10)
    ((name, message),) = found
    assert (name, message.header["kind"], len(message.tensors["delta"])) == ("ann", TRAIN, 1000)
    assert place.mailbox.present() == ["ann"]
    assert place.ask(REPLY_PATH, answer_of())[0] == 409  # it is not awaited any more


def test_an_instruction_is_given_as_soon_as_it_is_there(place):
    found = []
    asking = threading.Thread(target=lambda: found.append((place.ask(INSTRUCTION_PATH), time.monotonic())))
    asking.start()
    while place.mailbox.present() != ["ann"]:
        time.sleep(0.05)
    time.sleep(0.3)
    began = time.monotonic()
    thread, _ = place.offer()
    asking.join(10)
    (answer, at), *_ = found
    assert answer[0] == 200
    assert at - began < 2
    place.ask(REPLY_PATH, answer_of())
    thread.join(10)


def test_a_device_that_died_while_it_waited_is_not_waited_for(place, monkeypatch):
    """Its connection is closed: the next instruction is lost at once, not at its deadline."""
    monkeypatch.setattr(http_server, "GRACE_S", 0.0)
    connection = place.connect()
    key = place.keys / "devices" / "ann"
    line = sign_request("device/ann", key, place.keys / "ca.crt", time.time(), SignedContent("POST", INSTRUCTION_PATH))
    connection.request("POST", INSTRUCTION_PATH, b"", {"Authorization": line})
    wait_until(lambda: place.mailbox.present() == ["ann"])
    connection.close()
    wait_until(lambda: place.mailbox.present() == [])
    began = time.monotonic()
    thread, found = place.offer(deadline=60)
    thread.join(10)
    assert found == [("ann", Lost("it is not connected"))]
    assert time.monotonic() - began < 10
    asking = threading.Thread(target=place.ask, args=[INSTRUCTION_PATH])  # and it may come back
    asking.start()
    wait_until(lambda: place.mailbox.present() == ["ann"])
    thread, found = place.offer()
    asking.join(10)
    assert place.ask(REPLY_PATH, answer_of())[0] == 204
    thread.join(10)
    assert [name for name, _ in found] == ["ann"]


def wait_until(true, seconds=10):
    end = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


def test_requests_that_wait_are_told_when_the_server_stops(place):
    found = []
    asking = threading.Thread(target=lambda: found.append(place.ask(INSTRUCTION_PATH)))
    asking.start()
    while place.mailbox.present() != ["ann"]:
        time.sleep(0.05)
    place.mailbox.close()
    asking.join(10)
    for code, content in (*found, place.ask(INSTRUCTION_PATH)):
        assert (code, json.loads(content)) == (503, {"problem": "the server stops"})


def test_a_request_without_a_key_is_refused_before_its_body_is_read(place):
    thread, found = place.offer(deadline=8)
    for signed, name in ((False, "ann"), (True, "bob")):  # nobody, and somebody who was not asked
        connection = place.connect()
        request = SignedContent("POST", REPLY_PATH, "ab" * 32)
        line = sign_request(
            f"device/{name}", place.keys / "devices" / name, place.keys / "ca.crt", time.time(), request
        )
        connection.putrequest("POST", REPLY_PATH)
        connection.putheader("Authorization", line if signed else "x")
        connection.putheader(DIGEST_HEADER, "ab" * 32)
        connection.putheader("Content-Length", str(1 << 40))
        connection.endheaders()
        answer = connection.getresponse()  # not a byte of the body was sent
        assert answer.status == (409 if signed else 401)
        assert answer.getheader("Connection") == "close"
        connection.close()
    assert place.ask(REPLY_PATH, answer_of())[0] == 204
    thread.join(10)
    assert len(found) == 1


@pytest.mark.parametrize(("kind", "most"), [(TRAIN, UPDATE + MAX_PLAIN_REPLY_BYTES), (HELLO, MAX_PLAIN_REPLY_BYTES)])
def test_a_reply_larger_than_what_was_asked_for_is_refused_before_it_is_read(place, kind, most):
    thread, found = place.offer(kind)
    connection = place.connect()
    request = SignedContent("POST", REPLY_PATH, "ab" * 32)
    line = sign_request("device/ann", place.keys / "devices" / "ann", place.keys / "ca.crt", time.time(), request)
    connection.putrequest("POST", REPLY_PATH)
    for name, value in {"Authorization": line, DIGEST_HEADER: "ab" * 32, "Content-Length": str(most + 1)}.items():
        connection.putheader(name, value)
    connection.endheaders()
    assert connection.getresponse().status == 413
    connection.close()
    thread.join(10)
    assert found == [("ann", Lost(f"its reply has {most + 1} bytes where at most {most} are accepted", fault=True))]


def test_a_body_without_a_length_is_refused(place):
    thread, _ = place.offer(deadline=3)
    connection = place.connect()
    request = SignedContent("POST", REPLY_PATH, "ab" * 32)
    line = sign_request("device/ann", place.keys / "devices" / "ann", place.keys / "ca.crt", time.time(), request)
    connection.request(
        "POST", REPLY_PATH, iter([b"x"] * 3), {"Authorization": line, DIGEST_HEADER: "ab" * 32}, encode_chunked=True
    )
    assert connection.getresponse().status == 411
    connection.close()
    thread.join(10)


@pytest.mark.parametrize(
    ("body", "digest", "words"),
    [
        (answer_of(), "ab" * 32, "is not what was signed"),
        (b"not a message", None, "not a message of fedcpsl"),
        (pack(Message({}, {}))[:-1] + b"\0", None, "not"),
    ],
    ids=["another digest", "no message", "a broken message"],
)
def test_a_reply_that_is_none_is_a_fault(place, body, digest, words):
    thread, found = place.offer()
    code, said = place.ask(REPLY_PATH, body, digest=digest)
    assert (code, words in json.loads(said)["problem"]) == (400, True)
    thread.join(10)
    ((_, lost),) = found
    assert lost.fault


def test_a_reply_to_an_earlier_instruction_is_late_and_the_new_instruction_stays(place):
    thread, found = place.offer()
    assert place.ask(REPLY_PATH, answer_of(round=0))[0] == 409
    assert place.ask(REPLY_PATH, answer_of())[0] == 204
    thread.join(10)
    assert found[0][1].header["round"] == 1


def test_an_update_that_comes_late_is_no_answer_in_the_second_exchange_of_its_round(place):
    thread, found = place.offer(PROBE)
    assert place.ask(REPLY_PATH, answer_of(kind=TRAIN))[0] == 409
    assert place.ask(REPLY_PATH, answer_of(1, kind=PROBE))[0] == 204
    thread.join(10)
    assert [message.header["kind"] for _, message in found] == [PROBE]


def test_who_is_revoked_is_shut_out_at_once(place):
    """Also where it waits for an instruction at that moment, and where the server waits for its answer."""
    waiting = []
    asking = threading.Thread(target=lambda: waiting.append(place.ask(INSTRUCTION_PATH)))
    asking.start()
    while place.mailbox.present() != ["ann"]:
        time.sleep(0.05)
    keys.revoke_device(place.keys, "ann")
    thread, found = place.offer(deadline=30)
    thread.join(10)
    asking.join(10)
    assert found == [("ann", Lost("its key was revoked"))]
    assert waiting[0][0] == 401
    assert place.ask(INSTRUCTION_PATH)[0] == 401
    assert place.mailbox.present() == []
    assert any("its key is revoked; it is rejected" in text for text in place.said)
    assert any("as device/ann: refused: this key was revoked" in text for text in place.said)


def test_there_is_nothing_else(place):
    for method, path in (
        ("GET", "/"),
        ("POST", "/"),
        ("POST", "/v2/order/"),
        ("POST", "/v2/orders"),
        ("POST", "/v2/order?x=1"),
        ("POST", "/v2/../v2/answer"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    ):
        assert place.ask(path, method=method)[0] == 404, path
    assert place.ask(INSTRUCTION_PATH, method="GET")[0] == 405
    for path in ("/v1/control/start-run", "/v1/fleet/activate-node", "/v1/runtime/acquire-task", "/v1/x"):
        code, said = place.ask(path)
        assert code == 426
        assert "runs no Flower app" in json.loads(said)["problem"]
    assert place.ask(HEALTH_PATH, method="GET", signed=False) == (200, b'{"protocol": 2}')


def test_silent_connections_are_closed(place, monkeypatch):
    monkeypatch.setattr(http_server, "FIRST_REQUEST_TIMEOUT_S", 0.5)
    trusting = ssl.create_default_context(cafile=place.keys / "ca.crt")
    with (
        socket.create_connection(("127.0.0.1", place.port), timeout=10) as plain,
        trusting.wrap_socket(plain, server_hostname="127.0.0.1") as silent,
    ):
        silent.sendall(b"POST /v2/order HT")
        silent.settimeout(10)
        assert silent.recv(1) == b""


class Clock:
    now = 0.0

    def __call__(self):
        return self.now


def test_after_a_start_devices_have_time_to_connect():
    clock = Clock()
    mailbox = Mailbox(0, clock=clock)
    found, instruction = [], {"ann": Message({"kind": HELLO}, {})}
    thread = threading.Thread(target=lambda: found.extend(mailbox.send(instruction, 1000)), daemon=True)
    thread.start()
    thread.join(1)
    assert found == []
    clock.now = GRACE_S + 1
    thread.join(10)
    assert found == [("ann", Lost("it is not connected"))]
    clock.now = 0.0
    late = list(mailbox.send(instruction, 0.0))
    assert late == []  # time was up: the loop says that it did not answer


def test_a_fault_of_ours_is_said_and_not_told(place, monkeypatch):
    def fail(*_):
        raise ZeroDivisionError("in /srv/secret")

    monkeypatch.setattr(place.mailbox, "next_instruction", fail)
    code, said = place.ask(INSTRUCTION_PATH)
    assert (code, json.loads(said)) == (500, {"problem": "the server failed; its log says how"})
    assert any("POST /v2/order failed: ZeroDivisionError: in /srv/secret" in text for text in place.said)


def test_tls_is_of_this_day(place):
    for version, name in ((ssl.TLSVersion.TLSv1_2, "TLSv1.2"), (ssl.TLSVersion.TLSv1_3, "TLSv1.3")):
        trusting = ssl.create_default_context(cafile=place.keys / "ca.crt")
        trusting.minimum_version = trusting.maximum_version = version
        with (
            socket.create_connection(("127.0.0.1", place.port), timeout=10) as plain,
            trusting.wrap_socket(plain, server_hostname="127.0.0.1") as secured,
        ):
            assert secured.version() == name
            assert "GCM" in secured.cipher()[0] or "CHACHA20" in secured.cipher()[0]
    weak = ssl.create_default_context(cafile=place.keys / "ca.crt")
    weak.maximum_version = ssl.TLSVersion.TLSv1_2
    weak.set_ciphers("AES128-SHA:ECDHE-ECDSA-AES128-SHA")
    with socket.create_connection(("127.0.0.1", place.port), timeout=10) as plain, pytest.raises(ssl.SSLError):
        weak.wrap_socket(plain, server_hostname="127.0.0.1")
