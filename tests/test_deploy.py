"""What an operator installs: the units are sound, and nginx lets devices through to their paths and to nothing else."""

import http.client
import http.server
import json
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from fedcpsl.flower.processes import environment, free_port
from fedcpsl.flower.supervisor import Supervisor

DEPLOY = Path(__file__).parents[1] / "deploy"
UNITS = sorted(DEPLOY.glob("*.service"))
nginx = shutil.which("nginx", path="/usr/sbin:/usr/local/sbin:/usr/bin:/usr/local/bin")
needs_nginx = pytest.mark.skipif(nginx is None, reason="nginx is not installed")
needs_systemd = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
MIB = 1 << 20


@needs_systemd
@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_are_sound(tmp_path, unit):
    """With programs that are here, for systemd looks whether they are there, and a template with a device's name."""
    for each in UNITS:
        text = re.sub(r"/opt/fedcpsl/bin/[a-z-]+", sys.executable, each.read_text())
        (tmp_path / each.name.replace("@", "@phone-1")).write_text(text)
    name = unit.name.replace("@", "@phone-1")
    done = subprocess.run(["systemd-analyze", "verify", tmp_path / name], capture_output=True, text=True)
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_call_their_programs_with_options_that_these_have(unit):
    text = unit.read_text().replace("\\\n", " ")
    ((program, arguments),) = re.findall(r"^ExecStart=/opt/fedcpsl/bin/(\S+) (.*)$", text, re.M)
    if program != "fedcpsl":
        pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedcpsl[flower]'")
    command = [arguments.split()[0]] if program == "fedcpsl" else []
    path = Path(sys.executable).with_name(program)
    known = subprocess.run([path, *command, "--help"], capture_output=True, text=True).stdout
    used = re.findall(r"(?<!\S)--[a-z-]+", arguments)
    assert used
    assert [option for option in used if not re.search(rf"{option}\b", known)] == []


def test_units_keep_flower_to_itself_as_the_command_does(tmp_path):
    for name in ("fedcpsl-superlink.service", "fedcpsl-superexec.service"):
        text = (DEPLOY / name).read_text()
        for variable, value in environment(tmp_path).items():
            if variable.startswith("FLWR_") and variable != "FLWR_HOME":
                assert f"Environment={variable}={value}\n" in text


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_servers_listen_on_loopback_only(unit):
    text = unit.read_text()
    assert "0.0.0.0" not in text
    assert "--insecure" not in text
    if "device" not in unit.name:
        assert "127.0.0.1" in text
        assert "\nIPAddressDeny=any\nIPAddressAllow=localhost\n" in text


def can_make_a_network():
    return (
        bool(shutil.which("unshare"))
        and subprocess.run(["unshare", "--net", "true"], capture_output=True).returncode == 0
    )


@pytest.mark.skipif(shutil.which("nft", path="/usr/sbin:/usr/bin") is None, reason="nft is not installed")
@pytest.mark.skipif(not can_make_a_network(), reason="a network of its own needs root")
def test_other_accounts_do_not_reach_the_superlink(tmp_path):
    """In a network of its own, with the account 'nobody' in place of the server's own programs."""
    rules = tmp_path / "rules.nft"
    rules.write_text((DEPLOY / "fedcpsl.nft").read_text().replace("fedcpsl, www-data", "nobody"))
    script = f"""
import os, socket, subprocess
subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
subprocess.run(["nft", "-f", "{rules}"], check=True)
listener = socket.create_server(("127.0.0.1", 8443))
for account in (0, 65534, 1):
    if os.fork() == 0:
        os.setuid(account)
        os._exit(socket.socket().connect_ex(("127.0.0.1", 8443)))
    print(account, os.strerror(os.waitstatus_to_exitcode(os.wait()[1])), flush=True)
"""
    done = subprocess.run(
        ["unshare", "--net", sys.executable, "-c", script],
        env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
        capture_output=True,
        text=True,
    )
    assert (done.stdout.split("\n"), done.stderr) == (["0 Success", "65534 Success", "1 Connection refused", ""], "")


class Upstream(http.server.BaseHTTPRequestHandler):
    """Stands for the SuperLink: answers everything, and says how much it was sent."""

    protocol_version = "HTTP/1.1"
    seen: list[str] = []  # noqa: RUF012

    def do_POST(self):
        self.seen.append(self.path)
        received = 0
        if "Content-Length" in self.headers:
            left = int(self.headers["Content-Length"])
            while left and (piece := self.rfile.read(min(left, MIB))):
                left -= len(piece)
                received += len(piece)
        else:
            while size := int(self.rfile.readline(), 16):
                received += len(self.rfile.read(size))
                self.rfile.readline()
            self.rfile.readline()
        self.answer(str(received).encode())

    def do_GET(self):
        self.seen.append(self.path)
        self.answer(b"well")

    def answer(self, body):
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


def configuration(folder, keys, front, back, status):
    site = (DEPLOY / "nginx.conf").read_text()
    for told, here in {
        "listen 443 ssl": f"listen 127.0.0.1:{front} ssl",
        "127.0.0.1:8443": f"127.0.0.1:{back}",
        "127.0.0.1:8444": f"127.0.0.1:{status}",
        "/etc/fedcpsl/keys": str(keys),
        "/var/log/nginx": str(folder),
    }.items():
        assert told in site
        site = site.replace(told, here)
    (folder / "site.conf").write_text(site)
    places = "".join(
        f"{kind}_temp_path {folder}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    main = folder / "nginx.conf"
    main.write_text(
        f"daemon off; pid {folder}/pid; error_log {folder}/error.log; events {{}}\n"
        f"http {{ {places} include {folder}/site.conf; }}\n"
    )
    return main


@pytest.fixture(scope="module")
def front(tmp_path_factory):
    """A port where a real nginx listens, before a stand-in for the SuperLink with the same certificate."""
    pytest.importorskip("flwr", reason="flwr is not installed: pip install 'fedcpsl[flower]'")
    from fedcpsl.flower.status_server import answering

    from fedcpsl.flower import keys

    folder = tmp_path_factory.mktemp("nginx")
    keys.make_authority(folder)
    keys.make_server_certificate(folder, ["fl.example.org"])
    keys.make_operator_key(folder)
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(folder / "server.crt", folder / "server.key")
    upstream.socket = secured.wrap_socket(upstream.socket, server_side=True)
    thread = threading.Thread(target=upstream.serve_forever)
    thread.start()
    port, status_port = free_port(), free_port()
    main = configuration(folder, folder, port, upstream.server_port, status_port)
    checked = subprocess.run([nginx, "-t", "-q", "-p", folder, "-c", main], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    try:
        with (
            Supervisor({"PATH": "/usr/sbin:/usr/bin"}, folder / "logs") as programs,
            answering(folder, folder, "127.0.0.1", status_port, print),
        ):
            programs.start("nginx", [nginx, "-p", str(folder), "-c", str(main)])
            end = time.monotonic() + 20
            while True:
                try:
                    assert ask(port, folder, "GET", "/health") == (200, b"well")
                    break
                except OSError:
                    assert time.monotonic() < end, (folder / "error.log").read_text()
                    time.sleep(0.1)
            yield port, folder
    finally:
        upstream.shutdown()
        upstream.server_close()
        thread.join()


def ask(port, folder, method, path, body=None, chunked=False):
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trusting)
    try:
        connection.request(method, path, body, encode_chunked=chunked)
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


@needs_nginx
@pytest.mark.parametrize("path", ["pull-messages", "push-messages", "activate-node", "send-node-heartbeat", "get-fab"])
def test_devices_reach_their_paths(front, path):
    assert ask(*front, "POST", f"/v1/fleet/{path}", b"12345") == (200, b"5")


@needs_nginx
@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/control/register-node",
        "/v1/runtime/acquire-task",
        "/v1/fleet/../control/start-run",
        "/v1/fleet/%2e%2e/control/start-run",
        "/v1/fleet/..%2fcontrol/start-run",
        "/v1/fleet//../control/start-run",
        "/v1/control/../fleet/pull-messages",
        "/v1/fleet/pull-messages/../../control/start-run",
        "/v1/fleet/%2e%2e%2fcontrol/start-run",
        "/v1/fleet/pull-messages?x=1",
        "/v1/fleet/",
        "/v1/fleet",
        "//v1/control/start-run",
        "/V1/CONTROL/start-run",
        "/v1%2fcontrol/start-run",
        "/docs",
        "/openapi.json",
        "/",
    ],
)
def test_everything_else_is_refused_and_never_reaches_the_superlink(front, method, path):
    Upstream.seen.clear()
    status, _ = ask(*front, method, path, b"" if method in ("POST", "PUT") else None)
    assert status in (400, 403, 405)
    assert Upstream.seen == []


@needs_nginx
@pytest.mark.parametrize(("method", "path"), [("GET", "/v1/fleet/pull-messages"), ("POST", "/health")])
def test_each_path_has_its_method(front, method, path):
    assert ask(*front, method, path)[0] == 403


@needs_nginx
def test_the_status_is_read_through_it_with_a_key(front):
    from fedcpsl.flower.status_client import ask_status

    port, folder = front
    told = {"round": 3, "rounds": 5, "over": False, "updated": 1.0, "waiting_for": 0, "devices": [], "strangers": {}}
    (folder / "status.json").write_text(json.dumps(told))
    asked = ask_status(f"127.0.0.1:{port}", folder / "ca.crt", folder / "operator.key", "operator")
    assert asked == told | {"privacy": None}
    Upstream.seen.clear()
    assert ask(*front, "GET", "/status")[0] == 401
    for method, path in (
        ("POST", "/status"),
        ("GET", "/status?x=1"),
        ("GET", "/status/"),
        ("GET", "/x/../status"),
    ):
        assert ask(*front, method, path)[0] == 403, path
    assert Upstream.seen == []


@needs_nginx
def test_a_large_body_streams_through(front):
    pieces = (bytes(MIB) for _ in range(64))
    assert ask(*front, "POST", "/v1/fleet/push-object", pieces, chunked=True) == (200, str(64 * MIB).encode())
    _, folder = front
    assert not any(path.is_file() for path in (folder / "client_body").rglob("*"))


@needs_nginx
def test_a_body_beyond_a_gibibyte_is_refused(front):
    port, folder = front
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trusting)
    try:
        connection.putrequest("POST", "/v1/fleet/push-object")
        connection.putheader("Content-Length", str((1 << 30) + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413
    finally:
        connection.close()


@needs_nginx
def test_only_what_was_refused_is_logged(front):
    _, folder = front
    ask(*front, "POST", "/v1/fleet/pull-run", b"")
    assert ask(*front, "POST", "/v1/control/list-runs", b"")[0] == 403
    refused, until = '"POST /v1/control/list-runs HTTP/1.1" 403', time.monotonic() + 10
    while refused not in (lines := (folder / "fedcpsl.log").read_text()):  # written after the answer is sent
        assert time.monotonic() < until, lines
        time.sleep(0.05)
    assert "pull-run" not in lines


@needs_nginx
def test_plain_http_is_refused(front):
    port, _ = front
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v1/fleet/pull-messages", b"")
    assert connection.getresponse().status == 400
    connection.close()
