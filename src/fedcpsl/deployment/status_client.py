"""Asking a server for its status, from anywhere that reaches it. Imports nothing heavy."""

import json
import ssl
import time
from http.client import HTTPConnection, HTTPException, HTTPSConnection
from pathlib import Path
from typing import Any

from fedcpsl.deployment.addresses import LOOPBACK, STATUS, split_address
from fedcpsl.deployment.status import SHOWN
from fedcpsl.errors import InputError, RunError

WAIT_S = 10.0
LARGEST = 1 << 24


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


def tls_problem(error: ssl.SSLError) -> str:
    """What is wrong with a server's certificate, in words that tell what to do."""
    text = str(error).lower()
    if "hostname mismatch" in text or "ip address mismatch" in text:
        return (
            "server.crt is not for the host that was given; make one that is, with 'fedcpsl keys FOLDER --server HOST'"
        )
    if "certificate has expired" in text:
        return "server.crt has expired, or the clock here is wrong"
    if "certificate_verify_failed" in text:
        return "the server's certificate is not from the authority in ca.crt; take ca.crt from the server's keys again"
    return "it speaks no TLS that is understood here"


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
