"""What an operator installs: the units are sound, and nginx lets devices through to their paths and to nothing else."""

import http.client
import http.server
import re
import shutil
import ssl
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from fedcpsl.deployment.endpoints import free_port

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
    command = [arguments.split()[0]]
    path = Path(sys.executable).with_name(program)
    known = subprocess.run([path, *command, "--help"], capture_output=True, text=True).stdout
    used = re.findall(r"(?<!\S)--[a-z-]+", arguments)
    assert used
    assert [option for option in used if not re.search(rf"{option}\b", known)] == []


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.stem)
def test_units_keep_keys_and_state_to_themselves(unit):
    text = unit.read_text()
    assert "--insecure" not in text
    for line in ("UMask=0077", "StateDirectoryMode=0700", "NoNewPrivileges=yes", "ProtectSystem=strict"):
        assert f"\n{line}\n" in text


class Upstream(http.server.BaseHTTPRequestHandler):
    """Stands for the server: answers everything, and says how much it was sent."""

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


def configuration(folder, keys, front, back):
    site = (DEPLOY / "nginx.conf").read_text()
    for told, here in {
        "listen 443 ssl": f"listen 127.0.0.1:{front} ssl",
        "127.0.0.1:8443": f"127.0.0.1:{back}",
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
    """A port where a real nginx listens, before a stand-in for the server with the same certificate."""
    pytest.importorskip("cryptography", reason="cryptography is not installed: pip install 'fedcpsl[federation]'")
    from fedcpsl.deployment import keys

    folder = tmp_path_factory.mktemp("nginx")
    keys.make_authority(folder)
    keys.make_server_certificate(folder, ["fl.example.org"])
    upstream = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Upstream)
    secured = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    secured.load_cert_chain(folder / "server.crt", folder / "server.key")
    upstream.socket = secured.wrap_socket(upstream.socket, server_side=True)
    thread = threading.Thread(target=upstream.serve_forever)
    thread.start()
    port = free_port()
    main = configuration(folder, folder, port, upstream.server_port)
    checked = subprocess.run([nginx, "-t", "-q", "-p", folder, "-c", main], capture_output=True, text=True)
    assert (checked.returncode, checked.stderr) == (0, "")
    process = subprocess.Popen([nginx, "-p", str(folder), "-c", str(main)])
    try:
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
        process.terminate()
        process.wait()
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
@pytest.mark.parametrize(("method", "path"), [("POST", "/v2/order"), ("POST", "/v2/answer"), ("GET", "/status")])
def test_devices_reach_their_paths(front, method, path):
    sent = b"12345" if method == "POST" else None
    assert ask(*front, method, path, sent) == (200, b"5" if sent else b"well")


@needs_nginx
@pytest.mark.parametrize("method", ["POST", "GET", "PUT", "DELETE", "OPTIONS"])
@pytest.mark.parametrize(
    "path",
    [
        "/v1/control/start-run",
        "/v1/fleet/pull-messages",
        "/v2/../v1/control/start-run",
        "/v2/%2e%2e/status",
        "/v2/order/",
        "/v2/order/../answer",
        "/v2/order?x=1",
        "/status?x=1",
        "/x/../status",
        "//v2/order",
        "/V2/ORDER",
        "/v2%2forder",
        "/docs",
        "/",
    ],
)
def test_everything_else_is_refused_and_never_reaches_the_server(front, method, path):
    Upstream.seen.clear()
    status, _ = ask(*front, method, path, b"" if method in ("POST", "PUT") else None)
    assert status in (400, 403, 405)
    assert Upstream.seen == []


@needs_nginx
def test_a_large_body_streams_through(front):
    pieces = (bytes(MIB) for _ in range(64))
    assert ask(*front, "POST", "/v2/answer", pieces, chunked=True) == (200, str(64 * MIB).encode())
    _, folder = front
    assert not any(path.is_file() for path in (folder / "client_body").rglob("*"))


@needs_nginx
def test_a_body_beyond_two_gibibytes_is_refused(front):
    port, folder = front
    trusting = ssl.create_default_context(cafile=folder / "ca.crt")
    connection = http.client.HTTPSConnection("127.0.0.1", port, timeout=60, context=trusting)
    try:
        connection.putrequest("POST", "/v2/answer")
        connection.putheader("Content-Length", str((2 << 30) + 1))
        connection.endheaders()
        assert connection.getresponse().status == 413
    finally:
        connection.close()


@needs_nginx
def test_only_what_was_refused_is_logged(front):
    _, folder = front
    ask(*front, "POST", "/v2/order", b"")
    assert ask(*front, "POST", "/v1/control/list-runs", b"")[0] == 403
    refused, until = '"POST /v1/control/list-runs HTTP/1.1" 403', time.monotonic() + 10
    while refused not in (lines := (folder / "fedcpsl.log").read_text()):  # written after the answer is sent
        assert time.monotonic() < until, lines
        time.sleep(0.05)
    assert '"POST /v2/order HTTP/1.1"' not in lines


@needs_nginx
def test_plain_http_is_refused(front):
    port, _ = front
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    connection.request("POST", "/v2/order", b"")
    assert connection.getresponse().status == 400
    connection.close()
