"""Asking a server for its status, from anywhere that reaches it. Imports nothing heavy."""

import json
import ssl
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedcpsl.errors import InputError, RunError
from fedcpsl.flower.processes import LOOPBACK, address, split_address
from fedcpsl.flower.status import PATH, SHOWN
from fedcpsl.flower.supervisor import explanation

WAIT_S = 10.0
LARGEST = 1 << 24
ABSENT = (403, 404)  # what a SuperLink says of the path, and what nginx says of paths that it does not pass
HINT = "is `fedcpsl serve` up, and may its status be asked for from here? See its --status-host, and deploy/nginx.conf"


def ask_status(server: str, ca: Path | None, key: Path | None, who: str) -> dict[str, Any]:
    """The status of the server at HOST:PORT: from that port where a proxy passes it on, else from the next one."""
    host, port = split_address(server)
    if ca is None and host not in LOOPBACK:
        raise InputError(f"{server}: without TLS only a server on this machine can be asked; give --keys")
    line = _line(who, key, ca)
    problems = []
    for each in (port, port + 1):
        try:
            code, answer = _get(host, each, ca, line)
        except ssl.SSLError as error:
            why = explanation(str(error)) or "it speaks no TLS that is understood here"
            raise RunError(f"{address(host, each)}: {why} ({error})") from error
        except (HTTPException, ValueError) as error:
            raise RunError(f"{address(host, each)}: gives no status; does it want TLS and --keys?") from error
        except OSError as error:
            problems.append(f"{address(host, each)}: cannot be reached ({error.strerror or error})")
            continue
        if code == 200 and all(name in answer for name in SHOWN):
            return answer
        if code == 401:
            raise RunError(f"{address(host, each)}: does not tell its status: {answer.get('problem')}")
        if code not in ABSENT:
            raise RunError(f"{address(host, each)}: gives no status: {answer.get('problem') or f'HTTP {code}'}")
        problems.append(f"{address(host, each)}: gives no status")
    raise RunError("; ".join([*problems, HINT]))


def _line(who: str, key: Path | None, ca: Path | None) -> str:
    if key is None or ca is None:
        return ""
    try:
        from fedcpsl.flower.signing import signed_line
    except ImportError as error:
        raise InputError("keys need the package 'cryptography'; run: pip install 'fedcpsl[flower]'") from error
    return signed_line(who, key, ca, time.time())


def _get(host: str, port: int, ca: Path | None, line: str) -> tuple[int, dict[str, Any]]:
    """The code and the answer; {} where that is no JSON object of a failed request."""
    connection = (
        HTTPConnection(host, port, timeout=WAIT_S)
        if ca is None
        else HTTPSConnection(host, port, timeout=WAIT_S, context=ssl.create_default_context(cafile=ca))
    )
    try:
        connection.request("GET", PATH, headers={"Authorization": line} if line else {})
        response = connection.getresponse()
        content = response.read(LARGEST)
        if response.getheader("Content-Type") != "application/json":
            return response.status, {}
        answer = json.loads(content)
        return response.status, answer if isinstance(answer, dict) else {}
    finally:
        connection.close()
