"""Messages as bytes, between Flower's short-lived client process and the device's own. Imports nothing heavy."""

import json
import socket
from collections.abc import Mapping
from math import prod
from pathlib import Path
from typing import NamedTuple

from fedcpsl.errors import RunError

SIZES = {"float32": 4, "float64": 8}  # what a tensor may be of
LARGEST = 1 << 34  # bytes of a frame
Header = dict[str, int | float | str]


class Blob(NamedTuple):
    """A tensor's numbers, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: bytes


class Frame(NamedTuple):
    """A message, and the job that it belongs to as the server describes it (nothing in an answer)."""

    header: Header
    blobs: dict[str, Blob]
    job: str = ""


def check_blobs(blobs: Mapping[str, Blob], who: str) -> None:
    """Refuse a tensor that is not what it says."""
    for name, (dtype, shape, data) in blobs.items():
        if dtype not in SIZES or any(n < 0 for n in shape):
            raise RunError(f"{who}: {name} is of {dtype} and shape {list(shape)}; give float32 or float64")
        if len(data) != SIZES[dtype] * prod(shape):
            raise RunError(f"{who}: {name} has {len(data)} bytes where shape {list(shape)} of {dtype} needs others")


def pack(frame: Frame) -> bytes:
    """A frame as bytes: the length of its description, the description as JSON, the tensors."""
    listed = [(name, blob.dtype, blob.shape, len(blob.data)) for name, blob in frame.blobs.items()]
    about = json.dumps({"header": frame.header, "job": frame.job, "blobs": listed}).encode()
    return b"".join([len(about).to_bytes(8, "little"), about, *(blob.data for blob in frame.blobs.values())])


def unpack(content: bytes, who: str) -> Frame:
    """The frame that `pack` made bytes of."""
    try:
        first = 8 + int.from_bytes(content[:8], "little")
        about = json.loads(content[8:first])
        blobs = {}
        for name, dtype, shape, length in about["blobs"]:
            blobs[str(name)] = Blob(str(dtype), tuple(map(int, shape)), content[first : first + length])
            first += length
        frame = Frame(dict(about["header"]), blobs, str(about["job"]))
    except (ValueError, KeyError, TypeError) as error:
        raise RunError(f"{who}: not a message of fedcpsl ({error})") from error
    check_blobs(frame.blobs, who)
    return frame


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
