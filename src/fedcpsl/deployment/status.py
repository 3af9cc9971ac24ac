"""A server's status: its file, the part of it that others may read, and asking for it. Imports nothing heavy."""

import json
import ssl
import time
from collections.abc import Mapping
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedcpsl.deployment.endpoints import LOOPBACK, STATUS, split_address, tls_problem
from fedcpsl.errors import InputError, RunError

SHOWN = ("round", "rounds", "over", "updated", "waiting_for")
SHOWN_OF_DEVICES = ("name", "labelled", "unlabelled", "online", "last_counted", "accuracy")
WAIT_S = 10.0  # for the server to answer
LARGEST = 1 << 24  # bytes of a status
LATE = "late, or its answer was refused"


def read_status(folder: Path) -> dict[str, Any]:
    """The last status of a server's folder."""
    path = folder / "status.json"
    try:
        status: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise InputError(f"{path}: no such file; is a server running in that folder?") from None
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: cannot be read ({error})") from error
    return status


def shown_part(status: Mapping[str, Any], device: str | None) -> dict[str, Any]:
    """The rounds, and of every device (or of one alone) its name, counts, lateness and the accuracy that it shares."""
    devices = [each for each in status["devices"] if device in (None, each["name"])]
    return {name: status[name] for name in SHOWN} | {
        "privacy": None,
        "devices": [
            {name: each[name] for name in SHOWN_OF_DEVICES} | {"problem": LATE if each["problem"] else None}
            for each in devices
        ],
        "strangers": {name: LATE for name in status["strangers"] if device in (None, name)},
    }


def ask_status(server: str, ca: Path | None, key: Path | None, who: str) -> dict[str, Any]:
    """The status of the server at HOST:PORT."""
    host, port = split_address(server)
    if ca is None and host not in LOOPBACK:
        raise InputError(f"{server}: without TLS only a server on this machine can be asked; give --keys")
    try:
        code, answer = _get(host, port, ca, _line(who, key, ca))
    except ssl.SSLError as error:
        raise RunError(f"{server}: {tls_problem(error)} ({error})") from error
    except (HTTPException, ValueError) as error:
        raise RunError(f"{server}: gives no status; does it want TLS and --keys?") from error
    except OSError as error:
        raise RunError(f"{server}: cannot be reached ({error.strerror or error}); is `fedcpsl serve` up?") from error
    if code == 200 and all(name in answer for name in SHOWN):
        return answer
    if code == 401:
        raise RunError(f"{server}: does not tell its status: {answer.get('problem')}")
    raise RunError(f"{server}: gives no status: {answer.get('problem') or f'HTTP {code}; is it a server of fedcpsl?'}")


def _line(who: str, key: Path | None, ca: Path | None) -> str:
    if key is None or ca is None:
        return who
    from fedcpsl.deployment.signing import Request, signed_line

    return signed_line(who, key, ca, time.time(), Request("GET", STATUS))


def _get(host: str, port: int, ca: Path | None, line: str) -> tuple[int, dict[str, Any]]:
    """The code and the answer; {} where that is no JSON object of a failed request."""
    connection = (
        HTTPConnection(host, port, timeout=WAIT_S)
        if ca is None
        else HTTPSConnection(host, port, timeout=WAIT_S, context=ssl.create_default_context(cafile=ca))
    )
    try:
        connection.request("GET", STATUS, headers={"Authorization": line} if line else {})
        response = connection.getresponse()
        content = response.read(LARGEST)
        if response.getheader("Content-Type") != "application/json":
            return response.status, {}
        answer = json.loads(content)
        return response.status, answer if isinstance(answer, dict) else {}
    finally:
        connection.close()
