"""Several machines, as near as one comes to them: a server and two devices in network namespaces of their own.

The server is `fedcpsl serve` on loopback behind the nginx of deploy/, as deploy/README.md has it. The devices have
a link to it, their own keys and nobody else's, and reach port 443. `make soak-hosts` runs it, as
root; it needs iproute2 and nginx, and takes a minute or two.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.federation_desk import Desk, furthest
from tests.hosts import SERVER, hosts, inside, missing

DEPLOY = Path(__file__).parents[1] / "deploy"
NAMES = ("ward-3", "ward-7")
FEDCPSL = [sys.executable, "-m", "fedcpsl"]
ROUNDS, LONGEST_S = 60, 240


def say_what_is_missing() -> str | None:
    if shutil.which("nginx") is None:
        return "make soak-hosts: needs nginx; apt-get install nginx-light"
    problem = missing()
    return f"make soak-hosts: {problem}" if problem else None


@contextmanager
def running(host: str, folder: Path, called: str, *command: str) -> Iterator[subprocess.Popen[bytes]]:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "COLUMNS": "100"}
    with (folder / f"{called}.log").open("ab") as log:
        process = subprocess.Popen(
            [*inside(host), *command], cwd=folder, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment
        )
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(60)


def ask(host: str, folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*inside(host), *command], cwd=folder, capture_output=True, text=True, timeout=60)


def nginx_of(deploy: Path, folder: Path, keys: Path) -> list[str]:
    """The nginx of deploy/ as it is, but for where the keys and its own files are."""
    site = (deploy / "nginx.conf").read_text()
    site = site.replace("/etc/fedcpsl/keys", str(keys)).replace("/var/log/nginx", str(folder))
    (folder / "site.conf").write_text(site)
    kinds = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    places = "".join(f"{kind}_temp_path {folder}/{kind};" for kind in kinds)
    (folder / "nginx.conf").write_text(
        f"daemon off; user root; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ {places} include {folder}/site.conf; }}\n"
    )
    return ["nginx", "-p", str(folder), "-c", str(folder / "nginx.conf")]


def device_of(desk: Desk, name: str) -> Path:
    """A device's machine: its data, its key and ca.crt."""
    folder = desk.folder / "machines" / name
    folder.mkdir(parents=True)
    shutil.move(desk.folder / "keys" / "devices" / name, folder / name)
    shutil.copy(desk.folder / "keys" / "ca.crt", folder)
    shutil.copy(desk.folder / f"{name}.npz", folder / "data.npz")
    return folder


def until(condition, seconds: float, desk: Desk) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, desk.logs()
        time.sleep(0.3)


def try_it(folder: Path) -> None:
    desk = Desk(folder, devices=2, rounds=ROUNDS, active=2, names=NAMES, host=SERVER)
    machines = {name: device_of(desk, name) for name in NAMES}
    (folder / "nginx").mkdir()
    began = time.monotonic()
    with ExitStack() as up:
        up.enter_context(hosts(*NAMES))
        up.enter_context(running("server", folder, "nginx", *nginx_of(DEPLOY, folder / "nginx", folder / "keys")))
        serve = [*FEDCPSL, "serve", "job.toml", "--keys", "keys", "--port", "8443", "--folder", "server"]
        server = up.enter_context(running("server", folder, "server", *serve))
        for name, machine in machines.items():
            join = ["join", f"{SERVER}:443", "--data", "data.npz", "--name", name, "--keys", ".", "--folder", "state"]
            up.enter_context(running(name, machine, "device", *FEDCPSL, *join, "--share-accuracy"))
        until(lambda: (desk.status() or {"round": 0})["round"] >= 1, LONGEST_S, desk)
        look_from_outside(folder, machines)
        until(lambda: (desk.status() or {"over": False})["over"], LONGEST_S, desk)
        assert server.wait(60) == 0, desk.logs()
    took = time.monotonic() - began
    for name, machine in machines.items():
        (folder / "devices").mkdir(exist_ok=True)
        shutil.copytree(machine / "state", folder / "devices" / name)
    print((folder / "server.log").read_text().partition("all rounds are done")[2].partition("\n")[2].rstrip())
    print(f"{ROUNDS} rounds over 3 namespaces in {took:.0f} s; as the simulator's to {furthest(desk):.1e}")
    assert furthest(desk) < 1e-6
    assert desk.invariant_gap() < 1e-6


def look_from_outside(folder: Path, machines: dict[str, Path]) -> None:
    """What a device's machine can and cannot reach while the federation runs."""
    name, machine = next(iter(machines.items()))
    mine = ask(name, machine, *FEDCPSL, "status", f"{SERVER}:443", "--keys", ".", "--name", name, "--json")
    assert mine.returncode == 0, mine.stderr
    assert [device["name"] for device in json.loads(mine.stdout)["devices"]] == [name]
    everybody = ask(name, folder, *FEDCPSL, "status", f"{SERVER}:443", "--keys", "keys", "--json")
    assert sorted(d["name"] for d in json.loads(everybody.stdout)["devices"]) == sorted(NAMES), everybody.stderr
    print(f"status from {name}'s namespace: itself with its key, all {len(NAMES)} with the operator's")
    reach = f"import socket; socket.create_connection(({SERVER!r}, 8443), 3)"
    assert "ConnectionRefusedError" in ask(name, machine, sys.executable, "-c", reach).stderr
    print("from there, the server's own port is closed")


def main() -> None:
    problem = say_what_is_missing()
    if problem:
        sys.exit(problem)
    with tempfile.TemporaryDirectory() as folder:
        try_it(Path(folder))


if __name__ == "__main__":
    main()
