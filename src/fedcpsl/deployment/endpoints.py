"""The server's address, paths and header names, which both sides use. Imports nothing heavy."""

import socket
import ssl
from collections.abc import Callable

from fedcpsl.errors import InputError

LOOPBACK = ("localhost", "127.0.0.1", "::1")  # by which a server can always be reached on its own machine
OPERATOR, DEVICE = "operator", "device/"  # who signs; the latter is followed by the device's name
HEALTH_PATH, STATUS_PATH, INSTRUCTION_PATH, REPLY_PATH = "/health", "/status", "/v2/order", "/v2/answer"
DIGEST_HEADER = "x-fedcpsl-digest"  # has the SHA-256 of a request's body
LONG_POLL_S = 25.0  # that a device's request for an instruction stays open
Notify = Callable[[str], None]  # shows a line of text to the operator


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
