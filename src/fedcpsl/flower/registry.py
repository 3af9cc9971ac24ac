"""Which devices the SuperLink lets in: registered by their public keys, through Flower's own command.

The SuperLink lists node ids, neither names nor keys, so the names are kept in devices.json in Flower's home.
"""

import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower.processes import environment, program
from fedcpsl.runs.files import make_folder, write_whole

CONNECTION = "fedcpsl"
COMMAND_S = 60


def write_connection(home: Path, server: str, ca: Path | None) -> None:
    """Tell Flower's command, by config.toml in its home, where the SuperLink (HOST:PORT) is and whom to trust."""
    secured = "insecure = true" if ca is None else f"root-certificates = {json.dumps(str(ca.absolute()))}"
    make_folder(home)
    write_whole(
        home / "config.toml",
        f'[superlink]\ndefault = "{CONNECTION}"\n\n[superlink.{CONNECTION}]\naddress = "{server}"\n{secured}\n',
    )


def register_missing(home: Path, public_keys: Mapping[str, Path]) -> dict[str, int]:
    """Register the devices that the SuperLink does not know; return every device's node id.

    A device that has a new key since is registered anew. One call of Flower's command, and one more for each change.
    """
    listed = _listed(home)
    for name, path in public_keys.items():
        known = _recorded(home).get(name)
        if known is not None and known["node"] in listed and known["key"] == _key(path):
            continue
        if known is not None and known["node"] in listed:
            unregister_device(home, name)
        register_device(home, name, path)
    return {name: int(_recorded(home)[name]["node"]) for name in public_keys}


def register_device(home: Path, name: str, public_key: Path) -> int:
    """Let a device in by its public key; return its node id."""
    answer = _flwr(home, "supernode", "register", str(public_key.absolute()), CONNECTION, "--name", name)
    if answer.get("success"):
        node = int(answer["node-id"])
    elif "already in use" in str(answer.get("error-message")):
        node = _unrecorded(home, name)
    else:
        raise RunError(f"device {name!r} could not be registered: {_message(answer)}")
    _record(home, _recorded(home) | {name: {"node": node, "key": _key(public_key)}})
    return node


def unregister_device(home: Path, name: str) -> None:
    """Shut a device out; its SuperNode stops."""
    devices = _recorded(home)
    if name not in devices:
        raise InputError(f"device {name!r}: is not registered; registered are: {', '.join(sorted(devices)) or 'none'}")
    node = devices.pop(name)["node"]
    answer = _flwr(home, "supernode", "unregister", str(node), CONNECTION)
    if not answer.get("success") and node in _listed(home):
        raise RunError(f"device {name!r} could not be unregistered: {_message(answer)}")
    _record(home, devices)


def registered(home: Path) -> dict[str, int]:
    """The node ids of the devices that the SuperLink lets in, by name."""
    listed = _listed(home)
    return {name: each["node"] for name, each in _recorded(home).items() if each["node"] in listed}


def names_by_node(home: Path) -> dict[int, str]:
    """The names that nodes were registered under, without asking the SuperLink."""
    return {int(each["node"]): name for name, each in _recorded(home).items()}


def online(home: Path) -> list[str]:
    """The devices that are connected now. It costs a second of computing: do not ask often."""
    listed = _listed(home)
    return [name for name, each in _recorded(home).items() if listed.get(each["node"]) == "online"]


def _listed(home: Path) -> dict[int, str]:
    answer = _flwr(home, "supernode", "list", CONNECTION)
    if not answer.get("success"):
        raise RunError(f"the SuperLink did not list its devices: {_message(answer)}")
    return {int(node["node-id"]): str(node["status"]) for node in answer["nodes"]}


def _unrecorded(home: Path, name: str) -> int:
    """The node of a device that was registered just before this program was killed."""
    recorded = {each["node"] for each in _recorded(home).values()}
    candidates = [node for node in _listed(home) if node not in recorded]
    if len(candidates) != 1:
        raise RunError(f"device {name!r}: its key is registered already, but not by {home}; use another key")
    return candidates[0]


def _flwr(home: Path, *arguments: str) -> dict[str, Any]:
    try:
        done = subprocess.run(
            [program("flwr"), *arguments, "--format", "json"],
            env=environment(home),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"flwr {' '.join(arguments)}: no answer in {COMMAND_S} s; is the SuperLink up?") from error
    try:
        return dict(json.loads(done.stdout))  # also a failure is told so, with exit code 0
    except ValueError as error:
        said = (done.stderr or done.stdout).strip()[-500:]
        raise RunError(f"flwr {' '.join(arguments)}: exit code {done.returncode}: {said}") from error


def _message(answer: Mapping[str, Any]) -> str:
    return " ".join(str(answer.get("error-message", answer)).split())


def _key(public_key: Path) -> str:
    try:
        return " ".join(public_key.read_text().split()[:2])
    except OSError as error:
        raise InputError(f"{public_key}: cannot be read: {error.strerror}") from error


def _recorded(home: Path) -> dict[str, dict[str, Any]]:
    path = home / "devices.json"
    try:
        return dict(json.loads(path.read_text()))
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise RunError(f"{path}: is damaged; restore it, or remove it with the SuperLink's database") from error


def _record(home: Path, devices: Mapping[str, Mapping[str, Any]]) -> None:
    write_whole(home / "devices.json", json.dumps(devices, indent=1))
