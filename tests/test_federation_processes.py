"""A small federation as its users run it: real processes, TLS, keys. `make soak` is the long version, with kills."""

import subprocess

import pytest

pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedcpsl[flower]'")

from .federation_desk import Desk, furthest


def test_two_devices_and_a_stranger(tmp_path):
    """The simulator's answer to 1e-6; a device with a key that nobody registered never gets in."""
    desk = Desk(tmp_path, devices=2, rounds=2, active=2)
    other = tmp_path / "elsewhere"
    made = [*desk.fedcpsl, "keys", str(other), "--server", "127.0.0.1", "--devices", "mallory"]
    subprocess.run(made, check=True, capture_output=True)
    (tmp_path / "keys" / "mallory").write_bytes((other / "devices" / "mallory").read_bytes())
    try:
        desk.serve()
        for name in desk.names:
            desk.join(name)
        desk.join("mallory", data="dev0.npz")
        desk.wait(lambda status: status["over"], 100)
        assert desk.processes["server"].wait(30) == 0
    finally:
        desk.close()
    assert [member.name for member in desk.serving().roster] in (["dev0", "dev1"], ["dev1", "dev0"])
    assert furthest(desk) < 1e-6
    assert desk.invariant_gap() < 1e-6
    assert "round 2 of 2" in (tmp_path / "server.log").read_text()
    assert {path.name for path in (tmp_path / "devices" / "mallory").iterdir()} == {"flwr", "logs"}  # no run's state
    shown = subprocess.run([*desk.fedcpsl, "status", "server"], cwd=tmp_path, capture_output=True, text=True)
    assert "round 2 of 2, over" in shown.stdout
    assert "dev1" in shown.stdout
