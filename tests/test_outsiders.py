"""Outsiders attack a federation of real processes: from another host, from another account, with Flower's own tools.

The federation is started by the commands of docs/federation.md, word for word, each machine in a network namespace.
The outsider has `ca.crt`, which is no secret, and an app that would leave a mark wherever it ran.
"""

import contextlib
import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedcpsl[federation]'")

from fedcpsl.deployment.endpoints import free_port

from .federation_desk import Desk, samples_of
from .hosts import SERVER, address_of, hosts, inside, missing

PAGE = Path(__file__).parents[1] / "docs" / "federation.md"
BIN = Path(sys.executable).parent
LONGEST_S = 240  # on a machine that is busy
NOBODY = ["setpriv", "--reuid", "65534", "--regid", "65534", "--clear-groups"]
JOB = """
[federation]
shape = [64]
classes = ["k0", "k1", "k2", "k3", "k4", "k5", "k6", "k7", "k8", "k9"]
min_devices = 2
deadline = 120
[model]
name = "mlp"
hidden = [16]
[algorithm]
name = "fedcpsl"
eta = 0.05
[work]
rounds = 100000
active = 2
unit = "steps"
amount = 5
"""
APP = {
    "pyproject.toml": """
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"
[project]
name = "evil"
version = "1.0.0"
license = "Apache-2.0"
dependencies = ["flwr>=1.41.0"]
[tool.hatch.build.targets.wheel]
packages = ["."]
[tool.flwr.app]
publisher = "mallory"
[tool.flwr.app.components]
serverapp = "evil.app:server"
clientapp = "evil.app:client"
""",
    "evil/__init__.py": "",
    "evil/app.py": """
from pathlib import Path
from flwr.clientapp import ClientApp
from flwr.serverapp import ServerApp
server = ServerApp()
client = ClientApp()
@server.main()
def main(grid, context):
    Path("{mark}").write_text("the server ran it")
@client.train()
def train(message, context):
    Path("{mark}").write_text("a device ran it")
""",
}


def documented(section):
    """The commands of a step of the page."""
    text = PAGE.read_text(encoding="utf-8").partition(f"\n**{section}")[2]
    return text.partition("```bash\n")[2].partition("```")[0].splitlines()


def can_change_account():
    if os.geteuid() != 0 or shutil.which("setpriv") is None:
        return False
    return subprocess.run([*NOBODY, sys.executable, "-c", "import flwr"], capture_output=True).returncode == 0


needs_hosts = pytest.mark.skipif(missing() is not None, reason=missing() or "")
needs_account = pytest.mark.skipif(not can_change_account(), reason="another account needs root, setpriv and flwr")
needs_flower = pytest.mark.skipif(not (BIN / "flwr").exists(), reason="flwr is not installed")


class Machines:
    """The hosts' folders and processes."""

    def __init__(self, folder):
        self.folder, self.processes = folder, []
        self.environment = os.environ | {"PATH": f"{BIN}:{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def start(self, host, command):
        with (self.folder / f"{host}.log").open("ab") as log:
            words = [*inside(host), *shlex.split(command)]
            process = subprocess.Popen(words, cwd=self.folder / host, stdout=log, stderr=log, env=self.environment)
        self.processes.append(process)
        return process

    def run(self, host, *words, account=(), environment=None, cwd=None):
        command = [*inside(host), *account, *words]
        given = self.environment | (environment or {})
        return subprocess.run(
            command, cwd=cwd or self.folder / host, env=given, capture_output=True, text=True, timeout=120
        )

    def log(self, host):
        return (self.folder / f"{host}.log").read_text()

    def status(self):
        path = self.folder / "server" / "federation" / "status.json"
        return json.loads(path.read_text()) if path.exists() else {"round": 0, "devices": []}

    def wait(self, condition):
        end = time.monotonic() + LONGEST_S
        while not condition():
            logs = "\n".join(f"--- {path}\n{path.read_text()[-2000:]}" for path in self.folder.glob("*.log"))
            assert time.monotonic() < end, f"{self.status()}\n{logs}"
            time.sleep(0.2)

    def close(self):
        for process in self.processes:
            process.send_signal(signal.SIGTERM)
        for process in self.processes:
            process.wait(60)


def table(path, i):
    data = samples_of(i, 2)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow([*(f"f{j}" for j in range(64)), "kind"])
        for x, y in zip(data["x"], data["y"], strict=True):
            rows.writerow([*x, "" if y < 0 else f"k{y}"])


@pytest.fixture(scope="module")
def machines(tmp_path_factory):
    """A server and two devices as the page starts them, up to their third round, and an outsider's host."""
    folder = tmp_path_factory.mktemp("machines")
    folder.chmod(0o755)  # what protects the machines is not the folder of this test
    for above in folder.parents:
        if above.stat().st_mode & 0o001 == 0:
            above.chmod(above.stat().st_mode | 0o011)
    names = ("ward-3", "ward-7", "outsider")
    for name in ("server", *names):
        (folder / name).mkdir(mode=0o755)
    machines = Machines(folder)
    (keys,), (serve, *_), (join, *_) = documented("1."), documented("3."), documented("4.")
    (folder / "server" / "job.toml").write_text(JOB)
    with hosts(*names, known={"fed.example.org": SERVER}):
        try:
            made = machines.run("server", *shlex.split(keys))
            assert made.returncode == 0, made.stderr
            for i, name in enumerate(names[:2]):
                (folder / name / "keys").mkdir()
                shutil.copy(folder / "server" / "keys" / "ca.crt", folder / name / "keys")
                shutil.move(folder / "server" / "keys" / "devices" / name, folder / name / "keys" / name)
                table(folder / name / "ward.csv", i)
            shutil.copy(folder / "server" / "keys" / "ca.crt", folder / "outsider")
            machines.start("server", serve)
            for name in names[:2]:
                machines.start(name, join.replace("ward-3", name))
            machines.wait(lambda: machines.status()["round"] >= 3)
            yield machines
        finally:
            machines.close()


def evil_app(folder, mark, address, ca):
    """An app that leaves a mark, and Flower's configuration to run it there."""
    for name, text in APP.items():
        path = folder / "evil" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text.replace("{mark}", str(mark)))
    (folder / "home").mkdir(exist_ok=True)
    (folder / "home" / "config.toml").write_text(f'[superlink.it]\naddress = "{address}"\nroot-certificates = "{ca}"\n')
    return {"FLWR_HOME": str(folder / "home"), "FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}


ATTACKS = [["run", "evil", "it"], ["supernode", "list", "it"], ["list", "it"]]


@needs_hosts
@needs_flower
@pytest.mark.parametrize("attack", ATTACKS, ids=lambda words: " ".join(words[:2]))
def test_an_outsider_on_another_host_runs_nothing(machines, attack):
    outsider = machines.folder / "outsider"
    mark = machines.folder / "mark"
    environment = evil_app(outsider, mark, "fed.example.org:8443", outsider / "ca.crt")
    before = machines.status()["round"]
    done = machines.run("outsider", "flwr", *attack, environment=environment)
    assert done.returncode != 0 or "error" in (done.stdout + done.stderr).lower(), (done.stdout, done.stderr)
    assert "Successfully started run" not in done.stdout + done.stderr
    machines.wait(lambda: machines.status()["round"] >= before + 2)  # it goes on
    assert not mark.exists()
    assert f"{address_of(2)}, as anonymous: refused: it uses Flower's protocol" in machines.log("server")


PROBE = """
import socket, sys
host, ports = sys.argv[1], range(1, 10000)
found = []
for port in [*ports, 39091]:
    with socket.socket() as probe:
        probe.settimeout(1)
        if probe.connect_ex((host, port)) == 0:
            found.append(port)
print(found)
"""


@needs_hosts
def test_an_outsider_finds_one_port_on_the_server_and_none_on_devices(machines):
    for host, expected in ((SERVER, "[8443]"), (address_of(0), "[]"), (address_of(1), "[]")):
        done = machines.run("outsider", sys.executable, "-c", PROBE, host)
        assert done.stdout.strip() == expected, (host, done.stdout, done.stderr)
    for device in ("ward-3", "ward-7"):  # not even for its own machine
        listening = machines.run(device, "ss", "-Hltnxu").stdout
        assert "127.0.0.1" not in listening, listening


@needs_hosts
def test_the_operator_sees_how_it_goes(machines):
    """By the page's own commands, from the folder and over the network; a device's key shows that device."""
    for command in documented("3.")[1:]:
        shown = machines.run("server", *shlex.split(command))
        assert shown.returncode == 0, shown.stderr
        assert all(name in shown.stdout for name in ("ward-3", "ward-7")), command
    words = ["fedcpsl", "status", "fed.example.org:8443", "--keys", "keys", "--name", "ward-3", "--json"]
    own = machines.run("ward-3", *words)
    assert [device["name"] for device in json.loads(own.stdout)["devices"]] == ["ward-3"]


@needs_hosts
def test_an_outsider_with_a_key_of_its_own_is_refused(machines):
    outsider = machines.folder / "outsider"
    made = machines.run("outsider", "fedcpsl", "keys", "own", "--server", "x", "--devices", "ward-3")
    assert made.returncode == 0, made.stderr
    (outsider / "stolen").mkdir(exist_ok=True)
    shutil.copy(outsider / "ca.crt", outsider / "stolen")
    shutil.copy(outsider / "own" / "devices" / "ward-3", outsider / "stolen" / "ward-3")
    shutil.copy(outsider / "own" / "operator.key", outsider / "stolen" / "operator.key")
    for words in (["--name", "ward-3"], []):
        asked = machines.run("outsider", "fedcpsl", "status", "fed.example.org:8443", "--keys", "stolen", *words)
        assert (asked.returncode, asked.stdout) == (1, "")
        assert "not signed with a known key" in asked.stderr


@needs_hosts
@needs_account
def test_another_account_of_the_servers_machine_is_an_outsider_too(machines):
    """It cannot read what is kept, nor serve or run anything; on loopback it finds what an outsider finds."""
    server = machines.folder / "server"
    shared = machines.folder / "another"
    shared.mkdir(exist_ok=True)
    shared.chmod(0o777)
    shutil.copy(server / "keys" / "ca.crt", shared)
    private = [server / "federation" / "status.json", server / "federation" / "server" / "server.safetensors"]
    private += [server / "federation" / "job.toml", server / "keys" / "server.key", server / "keys" / "operator.key"]
    for path in private:
        assert path.exists()
        read = machines.run("server", "cat", str(path), account=NOBODY)
        assert (read.returncode, "Permission denied" in read.stderr) == (1, True), path
    mark = shared / "mark"
    environment = evil_app(shared, mark, "127.0.0.1:8443", shared / "ca.crt")
    for path in shared.rglob("*"):
        path.chmod(0o777)
    for attack in ATTACKS:
        done = machines.run("server", str(BIN / "flwr"), *attack, account=NOBODY, environment=environment, cwd=shared)
        assert done.returncode != 0 or "error" in (done.stdout + done.stderr).lower(), done
    words = ["serve", str(server / "job.toml"), "--keys", str(server / "keys"), "--folder", str(shared / "mine")]
    own = machines.run("server", str(BIN / "fedcpsl"), *words, "--port", "9443", account=NOBODY, cwd=shared)
    assert own.returncode != 0
    assert "cannot be used" in own.stderr or "Permission denied" in own.stderr, own.stderr
    assert not mark.exists()


@needs_hosts
@needs_account
def test_another_account_of_a_devices_machine_reads_nothing(machines):
    (state,) = (machines.folder / "ward-3" / "devices" / "ward-3").glob("*/device.safetensors")
    for path in (state, state.parent / "job.toml", machines.folder / "ward-3" / "keys" / "ward-3"):
        read = machines.run("ward-3", "cat", str(path), account=NOBODY)
        assert (read.returncode, "Permission denied" in read.stderr) == (1, True), path


@needs_hosts
def test_a_second_server_touches_nothing(machines):
    """On the same folder, and on the same port: refused, and the first goes on as it was."""
    server = machines.folder / "server"
    before = (server / "federation" / "job.toml").read_text()
    (server / "other.toml").write_text(JOB.replace("eta = 0.05", "eta = 0.01"))
    words = ["fedcpsl", "serve", "other.toml", "--keys", "keys", "--host", "0.0.0.0"]
    same_folder = machines.run("server", *words, "--port", "9443", "--folder", "federation")
    assert (same_folder.returncode, same_folder.stderr.count("\n")) == (2, 1)
    assert "another process is working on this run" in same_folder.stderr
    same_port = machines.run("server", *words, "--port", "8443", "--folder", "elsewhere")
    assert same_port.returncode == 2
    assert "cannot listen there" in same_port.stderr
    assert "listening on" not in same_port.stderr
    assert (server / "federation" / "job.toml").read_text() == before
    at = machines.status()["round"]
    machines.wait(lambda: machines.status()["round"] > at)


@needs_hosts
def test_keys_are_renewed_while_all_runs(machines):
    """A device's key, and the server's certificate: nobody is started again."""
    server, device = machines.folder / "server", machines.folder / "ward-3"
    done = machines.run("server", "fedcpsl", "keys", "keys", "--renew", "ward-3")
    assert done.returncode == 0, done.stderr
    old = (device / "keys" / "ward-3").read_bytes()
    (device / "keys" / "ward-3").write_bytes(old[:40])  # as while it is being copied
    machines.wait(lambda: "is not a private key that `fedcpsl keys` made" in machines.log("ward-3"))
    (server / "keys" / "devices" / "ward-3.new").replace(device / "keys" / "ward-3")
    machines.wait(lambda: "device 'ward-3': its new key is in use" in machines.log("server"))
    (device / "old").write_bytes(old)
    (device / "old").chmod(0o600)
    (device / "stale").mkdir()
    shutil.copy(device / "keys" / "ca.crt", device / "stale")
    shutil.move(device / "old", device / "stale" / "ward-3")
    asked = machines.run("ward-3", "fedcpsl", "status", "fed.example.org:8443", "--keys", "stale", "--name", "ward-3")
    assert (asked.returncode, "this key was renewed" in asked.stderr) == (1, True)
    for name in ("server.crt", "server.key"):
        (server / "keys" / name).rename(server / f"old-{name}")
    made = machines.run("server", "fedcpsl", "keys", "keys", "--server", "fed.example.org")
    assert made.returncode == 0, made.stderr
    machines.wait(lambda: "server.crt was renewed, and is in use" in machines.log("server"))
    at = machines.status()["round"]
    machines.wait(lambda: machines.status()["round"] >= at + 3)
    assert all(d["problem"] is None for d in machines.status()["devices"])


@needs_hosts
def test_a_device_is_revoked_while_all_runs(machines):
    """By the page's own command: shut out at once, its weight stays, and so after a restart."""
    revoke, *_ = PAGE.read_text().partition("## Keys that change")[2].partition("```bash\n")[2].splitlines()
    assert revoke == "fedcpsl keys keys --revoke ward-7"
    before = {d["name"]: d for d in machines.status()["devices"]}
    done = machines.run("server", *shlex.split(revoke))
    assert done.returncode == 0, done.stderr
    machines.wait(lambda: "device 'ward-7': its key is revoked; it is rejected" in machines.log("server"))
    machines.wait(lambda: "does not accept this device" in machines.log("ward-7"))
    at = machines.status()["round"]
    machines.wait(lambda: machines.status()["round"] >= at + 3)
    devices = {d["name"]: d for d in machines.status()["devices"]}
    assert devices["ward-7"]["problem"] == "device 'ward-7': its key was revoked"
    assert [devices["ward-7"][key] for key in ("labelled", "unlabelled")] == [
        before["ward-7"][key] for key in ("labelled", "unlabelled")
    ]
    counted = devices["ward-7"]["last_counted"]
    (serve, *_) = documented("3.")
    process = machines.processes.pop(0)
    process.kill()
    process.wait()
    machines.start("server", serve)
    machines.wait(lambda: machines.status()["round"] >= at + 8)
    again = {d["name"]: d for d in machines.status()["devices"]}
    assert again["ward-7"]["last_counted"] == counted
    machines.wait(lambda: machines.log("server").count("its key is revoked; it is rejected") == 2)
    forget = machines.run("server", "fedcpsl", "keys", "keys", "--revoke", "ward-7", "--forget")
    assert forget.returncode == 0, forget.stderr
    machines.wait(lambda: any(d["forgotten"] for d in machines.status()["devices"]))
    machines.wait(lambda: "forgotten: ward-7; control variates are reset to 0" in machines.log("server"))
    shown = machines.run("server", "fedcpsl", "status", "federation", environment={"COLUMNS": "200"})
    assert "forgotten: it has no weight any more" in shown.stdout
    at = machines.status()["round"]
    machines.wait(lambda: machines.status()["round"] >= at + 3)


# Versions that do not match.


@needs_flower
def test_an_older_device_is_refused_clearly(tmp_path):
    """Devices of version 0.1 are Flower's nodes."""
    desk = Desk(tmp_path, devices=1, rounds=1, active=1)
    try:
        desk.serve()
        desk.wait_for_word("server", "listening on", LONGEST_S)
        words = ["--root-certificates", "keys/ca.crt", "--auth-supernode-private-key", "keys/devices/dev0"]
        words += ["--superlink", desk.address, "--host", "127.0.0.1", "--port", str(free_port())]
        environment = os.environ | {"FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
        environment["PATH"] = f"{BIN}:{os.environ['PATH']}"
        with (tmp_path / "node.log").open("w") as log:
            node = subprocess.Popen(
                [BIN / "flower-supernode", *words], cwd=tmp_path, stdout=log, stderr=log, env=environment
            )
        try:
            desk.wait_for_word("server", "it uses Flower's protocol: an older fedcpsl", LONGEST_S)
            desk.wait_for_word("node", "426", LONGEST_S)
        finally:
            node.terminate()
            node.wait(30)
        assert desk.status()["devices"] == []
    finally:
        desk.close()


@needs_flower
def test_an_older_server_is_refused_clearly(tmp_path):
    """A server of version 0.1 is Flower's SuperLink."""
    desk = Desk(tmp_path, devices=1, rounds=1, active=1)
    host, port = desk.address.split(":")
    words = [
        "--ssl-certfile",
        "keys/server.crt",
        "--ssl-keyfile",
        "keys/server.key",
        "--ssl-ca-certfile",
        "keys/ca.crt",
    ]
    environment = os.environ | {"FLWR_HOME": str(tmp_path / "home"), "FLWR_TELEMETRY_ENABLED": "0"}
    with (tmp_path / "link.log").open("w") as log:
        link = subprocess.Popen(
            [BIN / "flower-superlink", "--host", host, "--port", port, *words],
            cwd=tmp_path,
            stdout=log,
            stderr=log,
            env=environment | {"PATH": f"{BIN}:{os.environ['PATH']}"},
            start_new_session=True,
        )
    try:
        desk.join("dev0")
        desk.wait_for_word("dev0", "is not a server of this fedcpsl (version 0.1", LONGEST_S)
        assert list((tmp_path / "devices" / "dev0").iterdir()) == []
        assert desk.processes["dev0"].poll() is None  # it tries on: the server may be upgraded meanwhile
    finally:
        desk.close()
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(link.pid, number)
            time.sleep(1)
        link.wait()


def test_a_server_that_talks_too_much_is_cut_off(tmp_path):
    """It has the right certificate, and claims an order of an exabyte; the device reads none of it, and goes on."""
    desk = Desk(tmp_path, devices=1, rounds=1, active=1)
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(tmp_path / "keys" / "server.crt", tmp_path / "keys" / "server.key")
    head = b'{"__metadata__":{"header":"{}","job":""},"theta":{"dtype":"F32","shape":[1],"data_offsets":[0,' + b"9" * 18
    head += b"]}}"
    order = len(head).to_bytes(8, "little") + head
    with socket.create_server(("127.0.0.1", int(desk.address.split(":")[1]))) as listener:
        listener.settimeout(LONGEST_S)
        desk.join("dev0")
        try:
            answers = []
            while len(answers) < 2:
                plain, _ = listener.accept()
                with secured.wrap_socket(plain, server_side=True) as device:
                    asked = device.recv(1 << 16)
                    if asked.startswith(b"POST /v2/order"):
                        about = f"HTTP/1.1 200 OK\r\nContent-Length: {10**18}\r\n\r\n".encode()
                        with contextlib.suppress(ssl.SSLEOFError, ConnectionError):  # it may hang up before the end
                            device.sendall(about + order + bytes(1 << 16))
                    else:
                        while b"refusal" not in asked:
                            asked += device.recv(1 << 16)
                        answers.append(asked)
                        device.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
            assert all(re.search(rb"needs a section \[federation\]", answer) for answer in answers)
            assert desk.processes["dev0"].poll() is None
        finally:
            desk.close()


def test_numbers_of_the_page_are_those_of_the_code():
    from fedcpsl.federation.robustness import BOUND, SAMPLES_BOUND, Limits
    from fedcpsl.federation.server import RoundRules
    from fedcpsl.federation.server_store import KEPT_STATES

    text = PAGE.read_text()
    assert f"more than {BOUND:g} times the median is refused" in text
    assert f"more than {SAMPLES_BOUND:g} times the median of all, and a third of all weight" in text
    assert f"`trimmed` cuts at each end ({Limits().trim:g})" in text
    assert f"too few updates can be counted ({RoundRules(1, 0, 1.0).attempts})" in text
    assert KEPT_STATES == 5
    assert "one of the last five states" in text
