"""A server's status: its file, the part of it that others may read, and a client for it. Imports nothing heavy."""

import json
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedcpsl.deployment.endpoints import LOOPBACK, STATUS_PATH, split_address, tls_problem
from fedcpsl.errors import InputError, RunError

PUBLIC_FIELDS = ("round", "rounds", "over", "updated", "waiting_for")
PUBLIC_DEVICE_FIELDS = ("name", "labelled", "unlabelled", "online", "last_counted", "accuracy")
STATUS_TIMEOUT_S = 10.0  # for the server's answer
MAX_STATUS_BYTES = 1 << 24
LATE = "late, or its reply was refused"


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
