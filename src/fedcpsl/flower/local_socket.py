"""Messages over a socket of this machine, between Flower's short-lived client process and the device's own.

Imports nothing heavy.
"""

import logging
import socket
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from fedcpsl.errors import InputError, RunError

LOG = logging.getLogger("fedcpsl")
LARGEST = 1 << 34  # bytes of a message
PATIENCE_S = 60.0  # for a process of this machine to say what it wants


def send(connection: socket.socket, content: bytes) -> None:
    connection.sendall(len(content).to_bytes(8, "little") + content)


def receive(connection: socket.socket) -> bytes | None:
    """The next message of a connection; None where it was closed."""
    head = _exactly(connection, 8)
    if head is None:
        return None
    length = int.from_bytes(head, "little")
    if length > LARGEST:
        raise RunError(f"a message of {length} bytes: that is no message of fedcpsl")
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


def ask(address: Path, content: bytes, seconds: float) -> bytes:
    """What the device's own process, which listens at `address`, says to a message."""
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(str(address))
            send(connection, content)
            answer = receive(connection)
        except OSError as error:
            raise RunError(
                f"{address}: the device's process cannot be asked ({error}); is `fedcpsl join` up?"
            ) from error
    if answer is None:
        raise RunError(f"{address}: the device's process ended before it answered")
    return answer


def answer_at(address: Path, answer: Callable[[bytes], bytes], ready: Callable[[], None] = lambda: None) -> NoReturn:
    """Answer whoever connects to a socket that this account alone can reach, one after another, until interrupted."""
    if address.exists() and not address.is_socket():
        raise InputError(f"{address}: is a file of another kind; give --socket a name that is free")
    with socket.socket(socket.AF_UNIX) as door:
        try:
            address.unlink(missing_ok=True)
            door.bind(str(address))
            address.chmod(0o600)
            door.listen()
        except OSError as error:
            raise InputError(f"{address}: no socket can be made there: {error}") from error
        ready()
        while True:
            connection, _ = door.accept()
            with connection:
                _answer_one(connection, answer)


def _answer_one(connection: socket.socket, answer: Callable[[bytes], bytes]) -> None:
    connection.settimeout(PATIENCE_S)
    try:
        content = receive(connection)
        if content is not None:
            said = answer(content)
            connection.settimeout(PATIENCE_S)
            send(connection, said)
    except (OSError, RunError) as error:  # whoever asked is gone, or speaks another language
        LOG.warning("%s", error)
