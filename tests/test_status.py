"""The status of a server from elsewhere: over real TLS, to who has a key, and no more than it should tell."""

import http.client
import json
import socket
import ssl
import time

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedcpsl[federation]'")

from fedcpsl.deployment import keys, signing
from fedcpsl.deployment.endpoints import LATE, OPERATOR, fetch_status, free_port, public_status, split_address
from fedcpsl.deployment.endpoints import STATUS_PATH as PATH
from fedcpsl.deployment.http_server import HttpContext, Mailbox, listening
from fedcpsl.deployment.signing import KeyRing, SignedContent, verify_request
from fedcpsl.errors import InputError, RunError

from .command import fedcpsl

SECRET = "/srv/ward/data.csv"


def device(name, **more):
    told = {"labelled": 3, "unlabelled": 9, "online": True, "last_counted": 1, "accuracy": None, "problem": None}
    return {"name": name, **told, **more}


STATUS = {
    "run": "0123456789abcdef",
    "round": 2,
    "rounds": 5,
    "attempt": 0,
    "over": False,
    "began": 1.0,
    "updated": 2.0,
    "privacy": {"epsilon": 1.0, "delta": 1e-5, "updates": 2},
    "waiting_for": 0,
    "devices": [device("ann", accuracy=0.5), device("bob", online=False, problem=f"device 'bob' refused: {SECRET}")],
    "strangers": {"cid": f"device 'cid': {SECRET}"},
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    """A folder with keys and a status, and the port of a server that tells it."""
    folder = tmp_path_factory.mktemp("status")
    keys.make_authority(folder / "keys")
    keys.make_server_certificate(folder / "keys", ["127.0.0.1"])
    keys.make_operator_key(folder / "keys")
    for name in ("ann", "bob"):
        keys.make_device_key(folder / "keys", name)
    (folder / "status.json").write_text(json.dumps(STATUS))
    port = free_port()
    with answering(folder, folder / "keys", port):
        yield folder, port


def answering(folder, keys_folder, port):
    ring = None if keys_folder is None else KeyRing(keys_folder, folder, print)
    return listening(HttpContext(folder, Mailbox(0), ring, print), keys_folder, "127.0.0.1", port)


def ask(place, *words):
    folder, port = place
    return fedcpsl("status", f"127.0.0.1:{port}", *words, cwd=folder)


def test_the_operator_sees_everybody_and_nothing_else(place):
    shown = ask(place, "--keys", "keys", "--json")
    assert (shown.returncode, shown.stderr) == (0, "")
    assert json.loads(shown.stdout) == {
        "round": 2,
        "rounds": 5,
        "over": False,
        "updated": 2.0,
        "waiting_for": 0,
        "trying": None,
        "privacy": None,
        "devices": [device("ann", accuracy=0.5), device("bob", online=False, problem=LATE)],
        "strangers": {"cid": LATE},
    }
    table = ask(place, "--keys", "keys").stdout
    assert "round 2 of 5" in table
    assert "50.0 %" in table
    assert LATE in table


def test_a_device_sees_the_round_and_itself(place, tmp_path):
    folder, port = place
    for name in ("ca.crt", "devices/ann"):  # what a device has
        (tmp_path / name.removeprefix("devices/")).write_bytes((folder / "keys" / name).read_bytes())
    shown = fedcpsl("status", f"127.0.0.1:{port}", "--keys", ".", "--name", "ann", "--json", cwd=tmp_path)
    told = json.loads(shown.stdout)
    assert told["round"] == 2
    assert told["devices"] == [device("ann", accuracy=0.5)]
    assert told["strangers"] == {}


def test_a_key_that_the_server_does_not_know_is_refused(place, tmp_path):
    folder, port = place
    (tmp_path / "ca.crt").write_bytes((folder / "keys" / "ca.crt").read_bytes())
    keys.make_device_key(tmp_path, "ann")  # another key of that name
    keys.make_device_key(tmp_path, "mallory")
    keys.make_operator_key(tmp_path)
    for words in (["--name", "ann"], ["--name", "mallory"], []):
        shown = fedcpsl("status", f"127.0.0.1:{port}", "--keys", ".", *words, cwd=tmp_path)
        assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (1, "", 1)
        assert "refuses to give its status: not signed with a known key" in shown.stderr


def test_without_a_key_nothing_is_told(place):
    shown = ask(place)
    assert (shown.returncode, shown.stdout) == (2, "")
    assert "--keys: give the folder" in shown.stderr
    without = ask(place, "--keys", "keys/devices")
    assert (without.returncode, "operator.key: cannot be read" in without.stderr) == (2, True)
    shown = ask(place, "--insecure")
    assert (shown.returncode, shown.stdout) == (1, "")
    assert "does it need TLS and --keys" in shown.stderr


def get(place, method, path, line=None):
    folder, port = place
    trusting = ssl.create_default_context(cafile=folder / "keys" / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=10, context=trusting)
    try:
        connection.request(method, path, headers={} if line is None else {"Authorization": line})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def operator_line(place, **changed):
    given = {"who": OPERATOR, "key": place[0] / "keys" / "operator.key", "ca": place[0] / "keys" / "ca.crt"}
    return signing.sign_request(**given | {"now": time.time(), "request": SignedContent("GET", PATH)} | changed)


def test_nothing_but_reading_the_status_is_answered(place):
    good = operator_line(place)
    assert get(place, "GET", PATH, good)[0] == 200
    for method, path, line, code in (
        ("GET", PATH, None, 401),
        ("GET", PATH, "Basic b3BlcmF0b3I6", 401),
        ("GET", PATH, good[:-8] + "AAAAAAA=", 401),
        ("GET", PATH, good.replace("operator", "device/../operator", 1), 401),
        ("GET", PATH, good.replace("operator", "device/ann", 1), 401),
        ("POST", PATH, good, 405),
        ("HEAD", PATH, good, 405),
        ("GET", "/", good, 404),
        ("GET", "/status/../../keys/server.key", good, 404),
        ("GET", "/status.json", good, 404),
        ("GET", f"{PATH}?x=1", good, 404),
        ("POST", "/v1/control/start-run", good, 426),
        ("POST", "/v1/fleet/activate-node", good, 426),
    ):
        found, body = get(place, method, path, line)
        assert (found, b"ann" in body, SECRET.encode() in body) == (code, False, False), (method, path, line)


def test_a_signature_is_good_for_some_minutes_and_one_federation(place, tmp_path):
    now, folder = time.time(), place[0] / "keys"
    for apart in (-250, 250):
        assert (
            verify_request(operator_line(place, now=now + apart), folder, now, SignedContent("GET", PATH)).who
            == "operator"
        )
    for apart in (-400, 400):
        with pytest.raises(RunError, match="clocks of the two machines"):
            verify_request(operator_line(place, now=now + apart), folder, now, SignedContent("GET", PATH))
    elsewhere = keys.make_authority(tmp_path)
    with pytest.raises(RunError, match="not signed with a known key"):
        verify_request(operator_line(place, ca=elsewhere), folder, now, SignedContent("GET", PATH))
    for other in (
        SignedContent("POST", PATH),
        SignedContent("GET", "/v2/order"),
        SignedContent("GET", PATH, "ab" * 32),
    ):
        with pytest.raises(RunError, match="not signed with a known key"):
            verify_request(operator_line(place), folder, now, other)


def test_a_server_that_somebody_else_runs_is_not_believed(place, tmp_path):
    (tmp_path / "operator.key").write_bytes((place[0] / "keys" / "operator.key").read_bytes())
    keys.make_authority(tmp_path)
    shown = fedcpsl("status", f"127.0.0.1:{place[1]}", "--keys", tmp_path, cwd=tmp_path)
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (1, "", 1)
    assert "the server's certificate is not from the authority in ca.crt" in shown.stderr


def test_a_dead_server_is_said_to_be(place):
    port = free_port()
    shown = fedcpsl("status", f"127.0.0.1:{port}", "--keys", "keys", cwd=place[0])
    assert (shown.returncode, shown.stdout, shown.stderr.count("\n")) == (1, "", 1)
    assert f"127.0.0.1:{port}: cannot be reached (Connection refused)" in shown.stderr
    assert "is `fedcpsl serve` up" in shown.stderr


def test_on_loopback_without_tls(tmp_path):
    port = free_port()
    with answering(tmp_path, None, port):
        with pytest.raises(RunError, match="its job has not started yet"):
            fetch_status(f"127.0.0.1:{port}", None, None, "")
        (tmp_path / "status.json").write_text(json.dumps(STATUS))
        shown = fedcpsl("status", f"localhost:{port}", "--insecure", "--json", cwd=tmp_path)
        assert json.loads(shown.stdout) == public_status(STATUS, None)
        keys.make_authority(tmp_path)
        keys.make_operator_key(tmp_path)
        with pytest.raises(RunError, match="TLS is not supported"):
            fetch_status(f"127.0.0.1:{port}", tmp_path / "ca.crt", tmp_path / "operator.key", "operator")
    with pytest.raises(InputError, match="only a server on this machine"):
        fetch_status("192.0.2.1:8443", None, None, "")


def test_a_silent_client_keeps_nobody_waiting(place):
    held = [socket.create_connection(("127.0.0.1", place[1])) for _ in range(5)]
    try:
        assert get(place, "GET", PATH, operator_line(place))[0] == 200
    finally:
        for each in held:
            each.close()


def test_a_port_that_is_taken_is_an_error(place):
    taken = pytest.raises(InputError, match=r"cannot listen there: .*in use.*; give another --port")
    with taken, answering(place[0], None, place[1]):
        raise AssertionError("it listens")
    assert get(place, "GET", PATH)[0] == 401  # the other one still answers


def test_a_status_that_is_not_there_does_not_name_the_folder(tmp_path):
    port = free_port()
    with answering(tmp_path, None, port):
        connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
        connection.request("GET", PATH)
        answer = connection.getresponse()
        assert answer.status == 503
        assert str(tmp_path).encode() not in answer.read()
        connection.close()


@pytest.mark.parametrize("server", ["", "host", "host:", ":8443", "host:port", "host:0", "host:65536", "host:٨"])
def test_addresses_that_are_none(server):
    with pytest.raises(InputError, match="HOST:PORT"):
        split_address(server)
    assert split_address("[::1]:8443") == ("::1", 8443)


def test_a_folder_is_read_as_before(place):
    folder, _ = place
    shown = fedcpsl("status", ".", "--json", cwd=folder)
    assert json.loads(shown.stdout) == STATUS
    assert "leave them out for a folder" in fedcpsl("status", ".", "--keys", "keys", cwd=folder).stderr
    assert "no such file" in fedcpsl("status", "nowhere", cwd=folder).stderr
