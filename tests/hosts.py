"""Hosts on one machine: network namespaces that see each other over virtual links alone. As root, with iproute2."""

import os
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

SPACE, BRIDGE = "fedcpsl-", "net0"
SERVER = "10.213.77.1"
NAMES = Path("/etc/netns")  # where `ip netns exec` finds a host's own /etc/hosts


def missing() -> str | None:
    """What stands against it, or None."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    if shutil.which("ip") is None:
        return "ip is not installed (Debian: apt-get install iproute2)"
    tried = subprocess.run(["unshare", "--net", "true"], capture_output=True)
    return "this machine makes no network namespaces" if tried.returncode else None


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True)


def inside(host: str) -> list[str]:
    """What goes before a command to run it on a host."""
    return ["ip", "netns", "exec", f"{SPACE}{host}"]


@contextmanager
def hosts(*names: str, known: Mapping[str, str] | None = None) -> Iterator[None]:
    """A host named server with a bridge, and others with a link to it; all gone afterwards. `known` is their DNS."""
    made = []
    lines = "".join(f"{address} {name}\n" for name, address in ({"localhost": "127.0.0.1"} | dict(known or {})).items())
    try:
        for host in ("server", *names):
            ip("netns", "add", f"{SPACE}{host}")
            made.append(host)
            (NAMES / f"{SPACE}{host}").mkdir(parents=True, exist_ok=True)
            (NAMES / f"{SPACE}{host}" / "hosts").write_text(lines)
            subprocess.run([*inside(host), "ip", "link", "set", "lo", "up"], check=True)
        server = ["-n", f"{SPACE}server"]
        ip(*server, "link", "add", BRIDGE, "type", "bridge")
        ip(*server, "address", "add", f"{SERVER}/24", "dev", BRIDGE)
        ip(*server, "link", "set", BRIDGE, "up")
        for i, name in enumerate(names):
            there = ["-n", f"{SPACE}{name}"]
            ip(*server, "link", "add", f"to{i}", "type", "veth", "peer", "name", "eth0", "netns", f"{SPACE}{name}")
            ip(*server, "link", "set", f"to{i}", "master", BRIDGE, "up")
            ip(*there, "address", "add", f"{address_of(i)}/24", "dev", "eth0")
            ip(*there, "link", "set", "eth0", "up")
        yield
    finally:
        for host in made:
            ip("netns", "delete", f"{SPACE}{host}")
            shutil.rmtree(NAMES / f"{SPACE}{host}", ignore_errors=True)


def address_of(number: int) -> str:
    """The address of a host, by its place among those that were named."""
    return f"10.213.77.{10 + number}"
