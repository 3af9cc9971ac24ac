"""Which devices are let in, against a stand-in for Flower's command; the real one is asked in test_flower_processes."""

import json
import tomllib

import pytest

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower import registry


class Link:
    """Answers as `flwr supernode ... --format json` does."""

    def __init__(self):
        self.nodes = {}
        self.asked = []

    def __call__(self, home, *arguments):  # noqa: ARG002
        _, action, *rest = arguments
        self.asked.append(action)
        if action == "list":
            return {"success": True, "nodes": [{"node-id": str(node), "status": "online"} for node in self.nodes]}
        if action == "unregister":
            known = self.nodes.pop(int(rest[0]), None) is not None
            return {"success": known} | ({} if known else {"error-message": "no such node"})
        with open(rest[0]) as file:
            key = file.read()
        if key == "broken":
            return {"success": False, "error-message": "Using SuperLink\n\nEC curve is not approved"}
        if key in self.nodes.values():
            return {"success": False, "error-message": "[code: 23] Public key already in use."}
        node = 2**63 + len(self.asked)
        self.nodes[node] = key
        return {"success": True, "node-id": node}


@pytest.fixture
def link(monkeypatch):
    link = Link()
    monkeypatch.setattr(registry, "_flwr", link)
    return link


@pytest.fixture
def keys(tmp_path):
    paths = {name: tmp_path / f"{name}.pub" for name in ("a", "b")}
    for name, path in paths.items():
        path.write_text(f"ecdsa-sha2-nistp384 KEY{name} {name}")
    return paths


def test_only_what_is_missing_is_registered(tmp_path, link, keys):
    nodes = registry.register_missing(tmp_path, keys)
    assert link.asked == ["list", "register", "register"]
    assert registry.register_missing(tmp_path, keys) == nodes
    assert link.asked[3:] == ["list"]
    assert registry.registered(tmp_path) == nodes
    assert registry.online(tmp_path) == ["a", "b"]


def test_a_superlink_that_forgot_is_told_again(tmp_path, link, keys):
    before = registry.register_missing(tmp_path, keys)
    link.nodes.clear()  # another database
    after = registry.register_missing(tmp_path, keys)
    assert set(after.values()) == set(link.nodes)
    assert not set(after.values()) & set(before.values())


def test_a_device_with_a_new_key_is_registered_anew(tmp_path, link, keys):
    before = registry.register_missing(tmp_path, keys)
    keys["a"].write_text("ecdsa-sha2-nistp384 NEW a")
    after = registry.register_missing(tmp_path, keys)
    assert after["a"] != before["a"]
    assert after["b"] == before["b"]
    assert set(link.nodes) == set(after.values())


def test_a_registration_that_was_not_written_down_is_found_again(tmp_path, link, keys):
    nodes = registry.register_missing(tmp_path, keys)
    record = tmp_path / "devices.json"
    record.write_text(json.dumps({"b": json.loads(record.read_text())["b"]}))  # killed in between
    assert registry.register_missing(tmp_path, keys) == nodes
    record.unlink()
    with pytest.raises(RunError, match="device 'a': its key is registered already"):
        registry.register_missing(tmp_path, keys)
    assert set(link.nodes) == set(nodes.values())


def test_a_device_is_shut_out(tmp_path, link, keys):
    nodes = registry.register_missing(tmp_path, keys)
    registry.unregister_device(tmp_path, "a")
    assert set(link.nodes) == {nodes["b"]}
    assert registry.registered(tmp_path) == {"b": nodes["b"]}
    with pytest.raises(InputError, match="device 'a': is not registered; registered are: b"):
        registry.unregister_device(tmp_path, "a")


def test_what_the_superlink_refuses_is_told(tmp_path, link, keys):
    keys["a"].write_text("broken")
    with pytest.raises(RunError, match="device 'a' could not be registered: Using SuperLink EC curve is not approved"):
        registry.register_device(tmp_path, "a", keys["a"])
    assert link.nodes == {}


def test_the_connection_is_written_for_flower(tmp_path):
    registry.write_connection(tmp_path / "home", "127.0.0.1:8443", tmp_path / 'a "b"' / "ca.crt")
    (written,) = [tomllib.loads(path.read_text()) for path in (tmp_path / "home").iterdir()]
    assert written["superlink"] == {
        "default": "fedcpsl",
        "fedcpsl": {"address": "127.0.0.1:8443", "root-certificates": str(tmp_path / 'a "b"' / "ca.crt")},
    }
    registry.write_connection(tmp_path / "home", "127.0.0.1:8443", None)
    assert "insecure = true" in (tmp_path / "home" / "config.toml").read_text()
