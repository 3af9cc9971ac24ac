"""Messages over a Unix socket, between Flower's short-lived client process and the device's own process.

Imports nothing heavy.
"""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fedcpsl.errors import InputError, RunError

LOG = logging.getLogger("fedcpsl")
MAX_MESSAGE_BYTES = 1 << 34
SOCKET_TIMEOUT_S = 60.0  # for the client to send its message


def send_bytes(connection: socket.socket, content: bytes) -> None:
    """Send a message, after its length."""
    connection.sendall(len(content).to_bytes(8, "little") + content)


def receive_bytes(connection: socket.socket) -> bytes | None:
    """Return the next message of a connection; None where it was closed."""
    head = _exactly(connection, 8)
    if head is None:
        return None
    length = int.from_bytes(head, "little")
    if length > MAX_MESSAGE_BYTES:
        raise RunError(f"a message of {length} bytes: that is not a message of fedcpsl")
    return _exactly(connection, length)


def _exactly(connection: socket.socket, length: int) -> bytes | None:
    parts, missing = [], length
    while missing:
        part = connection.recv(min(missing, 1 << 20))
        if not part:
            return None
        parts.append(part)
        missing -= len(part)
    return b"".join(parts)


def send_and_receive(address: Path, content: bytes, seconds: float) -> bytes:
    """Send a message to the device's process, which listens at `address`, and return its reply."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(str(address))
            send_bytes(connection, content)
            reply = receive_bytes(connection)
        except OSError as error:
            raise RunError(
                f"{address}: the device's process cannot be reached ({error}); is `fedcpsl join` running?"
            ) from error
    if reply is None:
        raise RunError(f"{address}: the device's process ended before it replied")
    return reply


def serve_socket(address: Path, handle: Callable[[bytes], bytes], ready: Callable[[], None] = lambda: None) -> NoReturn:
    """Reply to messages on a socket that only this account can reach, one after another, until interrupted."""
    if address.exists() and not address.is_socket():
        raise InputError(f"{address}: exists and is not a socket; give --socket another name")
    with socket.socket(socket.AF_UNIX) as listener:
        try:
            address.unlink(missing_ok=True)
            listener.bind(str(address))
            address.chmod(0o600)
            listener.listen()
        except OSError as error:
            raise InputError(f"{address}: a socket cannot be made there: {error}") from error
        ready()
        while True:
            connection, _ = listener.accept()
            with connection:
                _handle_one(connection, handle)


def _handle_one(connection: socket.socket, handle: Callable[[bytes], bytes]) -> None:
    connection.settimeout(SOCKET_TIMEOUT_S)
    try:
        content = receive_bytes(connection)
        if content is not None:
            reply = handle(content)
            connection.settimeout(SOCKET_TIMEOUT_S)
            send_bytes(connection, reply)
    except (OSError, RunError) as error:  # the client is gone, or sent something else
        LOG.warning("%s", error)
