"""What both sides know of a server: its address, paths and header names, and its status: the file, the part of it that
others may read, and a client for it. Imports nothing heavy."""

import json
import socket
import ssl
import time
from collections.abc import Callable, Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError, RunError

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # by which a server can always be reached on its own machine
OPERATOR, DEVICE = "operator", "device/"  # who signs; the latter is followed by the device's name
HEALTH_PATH, STATUS_PATH, INSTRUCTION_PATH, REPLY_PATH = "/health", "/status", "/v2/order", "/v2/answer"
DIGEST_HEADER = "x-fedcpsl-digest"  # has the SHA-256 of a request's body
LONG_POLL_S = 25.0  # that a device's request for an instruction stays open
Notify = Callable[[str], None]  # shows a line of text to the operator
PUBLIC_FIELDS = ("round", "rounds", "over", "updated", "waiting_for")
PUBLIC_DEVICE_FIELDS = ("name", "labelled", "unlabelled", "online", "last_counted", "accuracy")
STATUS_TIMEOUT_S = 10.0  # for the server's answer
MAX_STATUS_BYTES = 1 << 24
LATE = "late, or its reply was refused"


def format_address(host: str, port: int) -> str:
    """Return HOST:PORT, with an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(server: str) -> tuple[str, int]:
    """Return HOST and PORT of HOST:PORT."""
    host, _, port = server.rpartition(":")
    if not host.strip("[]") or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{server}: give the server as HOST:PORT")
    return host.strip("[]"), int(port)


def free_port() -> int:
    """Return a port on loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def tls_problem(error: ssl.SSLError) -> str:
    """Return what is wrong with a server's certificate, and what to do."""
    text = str(error).lower()
    if "hostname mismatch" in text or "ip address mismatch" in text:
        return (
            "server.crt is not for the host that was given; make one that is, with 'fedcpsl keys FOLDER --server HOST'"
        )
    if "certificate has expired" in text:
        return "server.crt has expired, or the clock here is wrong"
    if "certificate_verify_failed" in text:
        return "the server's certificate is not from the authority in ca.crt; take ca.crt from the server's keys again"
    return "its TLS is not supported here"


def read_status(folder: Path) -> dict[str, Any]:
    """Return the last status in a server's folder."""
    path = folder / "status.json"
    try:
        status: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is a server running in that folder?") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return status


def public_status(status: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """Return the rounds, and each device's (or one device's) name, counts, lateness and shared accuracy."""
    devices = [each for each in status["devices"] if device in (None, each["name"])]
    return {name: status[name] for name in PUBLIC_FIELDS} | {
        "trying": status.get("trying"),
        "privacy": None,
        "devices": [
            {name: each[name] for name in PUBLIC_DEVICE_FIELDS} | {"problem": LATE if each["problem"] else None}
            for each in devices
        ],
        "strangers": {name: LATE for name in status["strangers"] if device in (None, name)},
    }


def fetch_status(server: str, ca: Path | None, key: Path | None, who: str) -> dict[str, Any]:
    """Return the status of the server at HOST:PORT."""
    host, port = split_address(server)
    if ca is None and host not in LOOPBACK:
        raise InputError(f"{server}: without TLS only a server on this machine can be asked; give --keys")
    try:
        code, answer = _get(host, port, ca, _authorization(who, key, ca))
    except ssl.SSLError as error:
        raise RunError(f"{server}: {tls_problem(error)} ({error})") from error
    except (HTTPException, ValueError) as error:
        raise RunError(f"{server}: gives no status; does it need TLS and --keys?") from error
    except OSError as error:
        raise RunError(f"{server}: cannot be reached ({error.strerror or error}); is `fedcpsl serve` up?") from error
    if code == 200 and all(name in answer for name in PUBLIC_FIELDS):
        return answer
    if code == 401:
        raise RunError(f"{server}: refuses to give its status: {answer.get('problem')}")
    raise RunError(f"{server}: gives no status: {answer.get('problem') or f'HTTP {code}; is it a server of fedcpsl?'}")


def _authorization(who: str, key: Path | None, ca: Path | None) -> str:
    if key is None or ca is None:
        return who
    from fedcpsl.deployment.signing import SignedContent, sign_request

    return sign_request(who, key, ca, time.time(), SignedContent("GET", STATUS_PATH))


def _get(host: str, port: int, ca: Path | None, line: str) -> tuple[int, dict[str, Any]]:
    """Return the status code and the JSON object of the answer, {} where it is none."""
    connection = (
        HTTPConnection(host, port, timeout=STATUS_TIMEOUT_S)
        if ca is None
        else HTTPSConnection(host, port, timeout=STATUS_TIMEOUT_S, context=ssl.create_default_context(cafile=ca))
    )
    try:
        connection.request("GET", STATUS_PATH, headers={"Authorization": line} if line else {})
        response = connection.getresponse()
        content = response.read(MAX_STATUS_BYTES)
        if response.getheader("Content-Type") != "application/json":
            return response.status, {}
        answer = json.loads(content)
        return response.status, answer if isinstance(answer, dict) else {}
    finally:
        connection.close()
