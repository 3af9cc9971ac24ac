"""A small federation as its users run it: real processes, TLS, keys. `make soak` is the long version, with kills.

All that its devices send is recorded, and every byte of it is accounted for.
"""

import re
import stat
import subprocess

import numpy as np
import pytest
import torch

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedcpsl[federation]'")

from fedcpsl.deployment.endpoints import DIGEST_HEADER, INSTRUCTION_PATH, REPLY_PATH
from fedcpsl.federation.messages import COMMON_FIELDS, END, HELLO, TRAIN, unpack

from .federation_desk import Desk, furthest
from .recorder import Recorder

ENVELOPE = {"host", "accept-encoding", "authorization", "content-length", DIGEST_HEADER}  # the headers of a request
LONGEST_S = 240  # on a machine that is busy
EXPLAINED = {  # what a device says of itself, in the words of `fedcpsl join --explain`
    "labelled": "how many labelled and unlabelled training samples it has",
    "unlabelled": "how many labelled and unlabelled training samples it has",
    "delta": "the change of its copy of the global model",
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
        desk.join("mallory", data="dev0.npz")
        desk.serve()
        desk.wait_for_word("server", "listening on", LONGEST_S)
        desk.wait_for_word("mallory", "does not accept this device", LONGEST_S)
        for name, recorder in recorders.items():
            desk.join(name, address=recorder.address, share=name == "dev0")
        desk.wait(lambda status: status["over"], LONGEST_S)
        assert desk.processes["server"].wait(LONGEST_S) == 0
    finally:
        desk.close()
        for recorder in recorders.values():
            recorder.close()
    return desk, recorders


def test_two_devices_and_a_stranger(federation):
    """The simulator's answer to 1e-6; a device with a key that the server does not have never gets in."""
    desk, _ = federation
    folder = desk.folder
    assert [member.name for member in desk.server_state().roster] in (["dev0", "dev1"], ["dev1", "dev0"])
    assert furthest(desk) < 1e-6
    assert desk.invariant_gap() < 1e-6
    assert "all rounds are done" in (folder / "server.log").read_text()
    assert list((folder / "devices" / "mallory").iterdir()) == []  # no run's state
    assert "as device/mallory: refused: not signed with a known key" in (folder / "server.log").read_text()
    shown = subprocess.run([*desk.fedcpsl, "status", "server"], cwd=folder, capture_output=True, text=True)
    assert "round 2 of 2, over" in shown.stdout
    assert "dev1" in shown.stdout


def test_nobody_else_on_the_machine_can_read_what_is_kept(federation):
    desk, _ = federation
    kept = [*(desk.folder / "server").rglob("*"), *(desk.folder / "devices").rglob("*")]
    assert {path.name for path in kept} >= {"device.safetensors", "server.safetensors", "status.json", "job.toml"}
    closed = [path for path in kept if path.is_dir()] + [desk.folder / "server"]
    closed += list((desk.folder / "devices").iterdir())
    for path in closed:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700, path
    for path in kept:
        assert path.is_dir() or stat.S_IMODE(path.stat().st_mode) == 0o600, path


def explained(desk, *words):
    command = [*desk.fedcpsl, "join", "h:1", "--data", "d", "--name", "n", "--explain", *words]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def sent_by(name, recorders):
    """The messages of one device."""
    return [unpack(request.body, name) for request in recorders[name].requests if request.path == REPLY_PATH]


@pytest.mark.parametrize("name", ["dev0", "dev1"])
def test_nothing_leaves_a_device_but_what_is_explained(federation, name):
    desk, recorders = federation
    for request in recorders[name].requests:
        assert set(request.headers) <= ENVELOPE, request.headers
        assert request.path in (INSTRUCTION_PATH, REPLY_PATH)
        scheme, who, when, _ = request.headers["authorization"].split(" ")
        assert (scheme, who, when.isdigit()) == ("fedcpsl", f"device/{name}", True)
        assert request.body == b"" or request.path == REPLY_PATH
    packets = sent_by(name, recorders)
    assert [packet.message.header["kind"] for packet in packets] == [HELLO, TRAIN, TRAIN, END]  # sizes are told once
    shares, told = name == "dev0", set()
    for (header, tensors), job in packets:
        kind = header["kind"]
        expected = {HELLO: {"labelled", "unlabelled"}, TRAIN: {"steps"}, END: set()}[kind]
        said = set(header) - set(COMMON_FIELDS)
        assert said == expected | ({"accuracy"} if shares and kind != HELLO else set())
        assert set(tensors) == ({"delta"} if kind == TRAIN else set())
        assert job == ""
        told |= said | set(tensors)
    sizes = [packets[0].message.header[key] for key in ("labelled", "unlabelled")]
    assert sizes == [desk.device_state(name).labelled, desk.device_state(name).unlabelled]
    text = explained(desk, *(["--share-accuracy"] if shares else []))
    promised = {key for key, words in EXPLAINED.items() if re.search(rf"(?<!\(){re.escape(words)}", text)}
    assert promised == told
    assert "in every request: its name, the time" in text


@pytest.mark.parametrize("name", ["dev0", "dev1"])
def test_no_sample_label_state_or_path_is_in_what_was_sent(federation, name):
    """Looked for as bytes in everything, whatever it was part of."""
    desk, recorders = federation
    sent = b"|".join(recorders[name].sent)
    deltas = [packet.message.tensors["delta"].numpy().tobytes() for packet in sent_by(name, recorders)[1:3]]
    assert all(delta in sent for delta in deltas)  # what is sent is found so
    kept, data = desk.device_state(name), np.load(desk.folder / f"{name}.npz")
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
    for word in (str(desk.folder), "/tmp/pytest", "/home/", f"{name}.npz", "devices/", "keys/"):
        assert word.encode() not in sent, word


def test_a_server_goes_back(federation):
    """The last test: it changes the server's state."""
    desk, _ = federation
    wrong = [*desk.fedcpsl, "serve", "job.toml", "--keys", "keys", "--folder", "server", "--back-to", "77"]
    refused = subprocess.run([*wrong, "--port", "0"], cwd=desk.folder, capture_output=True, text=True)
    assert refused.returncode == 2
    assert "--back-to 77: server/server has no state of that round; there are: 0, 1, 2" in refused.stderr
    before = desk.server_state()
    desk.serve("--back-to", "1")
    try:
        desk.wait_for_word("server", "back to the state after 1 rounds; control variates are reset to 0", LONGEST_S)
        state = desk.server_state()
        assert (state.round, state.epoch > before.epoch, bool(state.server.c.any())) == (1, True, False)
        assert [m.name for m in state.roster] == [m.name for m in before.roster]
    finally:
        desk.close()


def test_another_algorithm_over_real_processes(tmp_path):
    """Ditto's own model stays on the device and answers; what travels is one vector each way."""
    desk = Desk(tmp_path, devices=2, rounds=2, active=2)
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace('"fedcpsl"', '"ditto"\nlam = 0.5'))
    try:
        desk.serve()
        desk.wait_for_word("server", "listening on", LONGEST_S)
        for name in desk.names:
            desk.join(name)
        desk.wait(lambda status: status["over"], LONGEST_S)
        assert desk.processes["server"].wait(LONGEST_S) == 0
    finally:
        desk.close()
    state = desk.server_state()
    assert list(state.server._fields) == ["theta"]
    for name in desk.names:
        kept = desk.device_state(name)
        assert kept.active_rounds == 2
        assert not torch.equal(kept.committed.v, kept.received.theta)
    asked = subprocess.run(
        [*desk.fedcpsl, "predict", f"devices/{desk.names[0]}", "dev0.npz"], cwd=tmp_path, capture_output=True, text=True
    )
    assert asked.returncode == 0, asked.stderr
    assert "accuracy" in asked.stderr


def test_a_second_exchange_over_real_processes(tmp_path):
    """DRFA: devices that were drawn train, others are asked for a loss; the weights have moved and add up to 1."""
    desk = Desk(tmp_path, devices=2, rounds=2, active=2)
    job = tmp_path / "job.toml"
    job.write_text(job.read_text().replace('"fedcpsl"', '"drfa"\neta_lambda = 0.1'))
    try:
        desk.serve()
        desk.wait_for_word("server", "listening on", LONGEST_S)
        for name in desk.names:
            desk.join(name)
        desk.wait(lambda status: status["over"], LONGEST_S)
        assert desk.processes["server"].wait(LONGEST_S) == 0
    finally:
        desk.close()
    state = desk.server_state()
    assert state.probing is None
    assert state.server.weights.sum().item() == pytest.approx(1)
    assert state.server.weights[0] != 0.5
    assert [desk.device_state(name).answer.attempt.round for name in desk.names] == [1, 1]


def test_fedhar_over_real_processes(tmp_path):
    """Devices know their recordings, messages say who has which gradients, and the server's Adam makes its updates."""
    desk = Desk(tmp_path, devices=2, rounds=2, active=2)
    job = tmp_path / "job.toml"
    own = 'name = "fedhar"\nT = 3\nR_s = 1'
    job.write_text(job.read_text().replace('name = "fedcpsl"', own).replace("eta = 0.05", "eta = 0.01"))
    for name in desk.names:
        with np.load(tmp_path / f"{name}.npz") as held:
            arrays = dict(held)
        np.savez(tmp_path / f"{name}.npz", **arrays, recording=np.arange(len(arrays["y"])) // 20)
    try:
        desk.serve()
        desk.wait_for_word("server", "listening on", LONGEST_S)
        for name in desk.names:
            desk.join(name)
        desk.wait(lambda status: status["over"], LONGEST_S)
        assert desk.processes["server"].wait(LONGEST_S) == 0
    finally:
        desk.close()
    state = desk.server_state()
    assert (state.server.rounds.item(), state.server.updates.item()) == (2, 2)
    for name in desk.names:
        assert desk.device_state(name).active_rounds == 2
