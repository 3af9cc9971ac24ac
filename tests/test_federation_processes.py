"""A small federation as its users run it: real processes, TLS, keys. `make soak` is the long version, with kills.

All that its devices send is recorded, and every byte of it is accounted for.
"""

import json
import re
import subprocess

import numpy as np
import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedcpsl[flower]'")

from flwr.app import ArrayRecord

from fedcpsl.federation.messages import COMMON, END, HELLO, TRAIN
from fedcpsl.flower.records import KIND, frame_of

from .federation_desk import Desk, furthest
from .recorder import Recorder, messages_in, parsed

ENVELOPE_HEADERS = {  # HTTP's, and by which Flower knows the device and its own version
    *("host", "accept", "accept-encoding", "connection", "user-agent", "content-length", "content-type"),
    *("flwr-public-key", "flwr-timestamp", "flwr-signature"),
    *("flwr-package-name", "flwr-package-version", "flwr-component-name"),
}
ENVELOPE_FIELDS = {  # of Flower's requests: which node, which run, which message, when, how long
    "activate-node": {"public_key", "heartbeat_interval"},
    "deactivate-node": {"node_id"},
    "send-node-heartbeat": {"node", "heartbeat_interval"},
    "pull-messages": {"node"},
    "pull-object": {"node", "run_id", "object_id"},
    "push-messages": {"node", "messages_list", "message_object_trees", "clientapp_runtime_list"},
    "push-object": {"node", "run_id", "object_id", "object_content", "session_id"},
    "confirm-message-received": {"node", "run_id", "message_object_id"},
    "get-run": {"node", "run_id"},
    "get-fab": {"node", "hash_str", "run_id"},
}
LONGEST_S = 240  # on a machine that is busy
EXPLAINED = {  # what a device says of itself, in the words of `fedcpsl join --explain`
    "labelled": "how many labelled and unlabelled training samples it has",
    "unlabelled": "how many labelled and unlabelled training samples it has",
    "delta": "theta_i - theta, the change of its copy of the global model",
    "steps": "how many steps it took",
    "accuracy": "its test accuracy",
}


@pytest.fixture(scope="module")
def federation(tmp_path_factory):
    """Two devices that are recorded, one of which shares its accuracy, and a stranger; the desk and the recorders."""
    folder = tmp_path_factory.mktemp("federation")
    desk = Desk(folder, devices=2, rounds=2, active=2, deadline=LONGEST_S)
    other = folder / "elsewhere"
    made = [*desk.fedcpsl, "keys", str(other), "--server", "127.0.0.1", "--devices", "mallory"]
    subprocess.run(made, check=True, capture_output=True)
    (folder / "keys" / "mallory").write_bytes((other / "devices" / "mallory").read_bytes())
    recorders = {name: Recorder(folder / "keys", desk.address) for name in desk.names}
    try:
        desk.serve()
        desk.wait_for_word("server", "devices that may join", LONGEST_S)
        for name, recorder in recorders.items():
            desk.join(name, address=recorder.address, share=name == "dev0")
        desk.join("mallory", data="dev0.npz")
        desk.wait(lambda status: len(status["devices"]) == 2, LONGEST_S)
        from_elsewhere = [*desk.fedcpsl, "status", desk.address, "--keys", "keys", "--json"]
        asked = subprocess.run(from_elsewhere, cwd=folder, capture_output=True, text=True)
        desk.wait(lambda status: status["over"], LONGEST_S)
        assert desk.processes["server"].wait(LONGEST_S) == 0
    finally:
        desk.close()
        for recorder in recorders.values():
            recorder.close()
    return desk, recorders, asked


def test_two_devices_and_a_stranger(federation):
    """The simulator's answer to 1e-6; a device with a key that nobody registered never gets in."""
    desk, _, asked = federation
    folder = desk.folder
    assert [member.name for member in desk.serving().roster] in (["dev0", "dev1"], ["dev1", "dev0"])
    assert furthest(desk) < 1e-6
    assert desk.invariant_gap() < 1e-6
    assert "round 2 of 2" in (folder / "server.log").read_text()
    assert {path.name for path in (folder / "devices" / "mallory").iterdir()} == {"flwr", "logs"}  # no run's state
    shown = subprocess.run([*desk.fedcpsl, "status", "server"], cwd=folder, capture_output=True, text=True)
    assert "round 2 of 2, over" in shown.stdout
    assert "dev1" in shown.stdout
    assert asked.returncode == 0, asked.stderr
    assert {device["name"] for device in json.loads(asked.stdout)["devices"]} == {"dev0", "dev1"}


def explained(desk, *words):
    command = [*desk.fedcpsl, "join", "h:1", "--data", "d", "--name", "n", "--explain", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sent_by(name, recorders):
    """Flower's messages of one device."""
    known = {}
    for recorder in recorders.values():
        known |= recorder.known_to_server()
    return messages_in(recorders[name].requests, known)


def fields(message):
    return {descriptor.name for descriptor, _ in message.ListFields()}


@pytest.mark.parametrize("name", ["dev0", "dev1"])
def test_nothing_leaves_a_device_but_what_is_explained(federation, name):
    desk, recorders, _ = federation
    requests = recorders[name].requests
    for request in requests:
        assert set(request.headers) <= ENVELOPE_HEADERS, request.headers
        what = request.path.removeprefix("/v1/fleet/")
        assert fields(parsed(request)) <= ENVELOPE_FIELDS[what], parsed(request)
    frames = [frame_of(message.content, name) for message in sent_by(name, recorders)]
    assert [frame.header["kind"] for frame in frames] == [HELLO, TRAIN, TRAIN, END]  # sizes are told once
    shares, told = name == "dev0", set()
    for frame in frames:
        kind = frame.header["kind"]
        expected = {HELLO: {"labelled", "unlabelled"}, TRAIN: {"steps"}, END: set()}[kind]
        said = set(frame.header) - set(COMMON)
        assert said == expected | ({"accuracy"} if shares and kind != HELLO else set())
        assert set(frame.blobs) == ({"delta"} if kind == TRAIN else set())
        assert frame.job == ""
        told |= said | set(frame.blobs)
    sizes = [frames[0].header[key] for key in ("labelled", "unlabelled")]
    assert sizes == [desk.kept(name).labelled, desk.kept(name).unlabelled]
    text = explained(desk, *(["--share-accuracy"] if shares else []))
    promised = {key for key, words in EXPLAINED.items() if re.search(rf"(?<!\(){re.escape(words)}", text)}
    assert promised == told
    assert "Flower's envelope" in text


def test_what_the_server_had_already_is_found_elsewhere(federation):
    """Both devices send the record of no tensors, or one of them: it depends on who is first."""
    _, recorders, _ = federation
    nothing = ArrayRecord()
    empty, known = nothing.object_id, recorders["dev1"].known_to_server() | {nothing.object_id: nothing.deflate()}
    asked_for_less = [
        each
        for each in recorders["dev0"].requests
        if not (each.path.endswith("/push-object") and parsed(each).object_id == empty)
    ]
    frames = [frame_of(message.content, "dev0") for message in messages_in(asked_for_less, known)]
    assert frames == [frame_of(message.content, "dev0") for message in sent_by("dev0", recorders)]


@pytest.mark.parametrize("name", ["dev0", "dev1"])
def test_no_sample_label_state_or_path_is_in_what_was_sent(federation, name):
    """Looked for as bytes in everything, whatever it was part of."""
    desk, recorders, _ = federation
    sent = b"|".join(recorders[name].sent)
    deltas = [frame_of(m.content, name).blobs["delta"].data for m in sent_by(name, recorders)[1:3]]
    assert all(delta in sent for delta in deltas)  # what is sent is found so
    kept, data = desk.kept(name), np.load(desk.folder / f"{name}.npz")
    private = {"theta_lc": kept.committed.theta_lc, "c_i": kept.committed.c, "pseudo-labels": kept.nu.reshape(-1)}
    for what, numbers in private.items():
        assert len(numbers) >= 8
        for dtype in (np.float32, np.float64):
            raw = numbers.numpy().astype(dtype)
            assert not any(
                raw[i : i + 8].tobytes() in sent for i in range(0, len(raw) - 8, 8) if raw[i : i + 8].any()
            ), what
    for sample in data["x"]:
        pixels = sample[20:36]  # the middle, where digits differ
        assert not any(pixels.astype(dtype).tobytes() in sent for dtype in (np.float32, np.float64))
    for dtype in (np.int64, np.int32, np.int8):
        assert data["y"][:12].astype(dtype).tobytes() not in sent
    for word in (str(desk.folder), "/tmp/", "/home/", f"{name}.npz", "devices/", "keys/"):
        assert word.encode() not in sent, word
    assert KIND.encode() in sent
