"""Where a server is, as users write it, and what it answers to. Imports nothing heavy."""

import socket

from fedcpsl.errors import InputError

LOOPBACK = ("127.0.0.1", "::1", "localhost")
HEALTH, STATUS, ORDER, ANSWER = "/health", "/status", "/v2/order", "/v2/answer"  # its paths
DIGEST = "x-fedcpsl-digest"  # the header with the SHA-256 of a request's body
POLL_S = 25.0  # that a device's question for an order stays open


def address(host: str, port: int) -> str:
    """HOST:PORT, an IPv6 address in brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def split_address(server: str) -> tuple[str, int]:
    """HOST and PORT of HOST:PORT."""
    host, _, port = server.rpartition(":")
    if not host.strip("[]") or not port.isascii() or not port.isdigit() or not 0 < int(port) < 65536:
        raise InputError(f"{server}: give the server as HOST:PORT")
    return host.strip("[]"), int(port)


def free_port() -> int:
    """A port on loopback that nothing listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
