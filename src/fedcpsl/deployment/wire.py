"""Messages as bytes: one safetensors file each, the header and the job in its metadata."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedcpsl.errors import RunError
from fedcpsl.federation.messages import Message

DTYPES = ("F32", "F64", "BOOL")  # that a tensor may have
MAX_PREFIX_BYTES = 1 << 20
Read = Callable[[int], bytes]


class Packet(NamedTuple):
    """A message, and the text of the job that it belongs to (empty in a reply)."""

    message: Message
    job: str = ""


class MessagePrefix(NamedTuple):
    """Everything that comes before the tensors of a message."""

    header: dict[str, Any]
    job: str
    tensor_bytes: int
    raw: bytes


def pack(message: Message, job: str = "") -> bytes:
    """Return a message as bytes."""
    tensors = {name: t.detach().cpu().contiguous() for name, t in message.tensors.items()}
    return save(tensors, {"header": json.dumps(message.header), "job": job})


def unpack(content: bytes, who: str) -> Packet:
    """Return the message in bytes; RunError where they are not one."""
    left = memoryview(content)
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        piece = bytes(left[position : position + count])
        position += count
        return piece

    prefix = read_prefix(read, who)
    return read_message(prefix, bytes(left[position:]), who)


def read_prefix(read: Read, who: str) -> MessagePrefix:
    """Read only what comes before the tensors; `read(n)` returns the next n bytes."""
    first = read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= MAX_PREFIX_BYTES:
        raise RunError(f"{who}: not a message of fedcpsl")
    text = read(length)
    try:
        listed = json.loads(text)
        metadata = listed.pop("__metadata__")
        header = json.loads(metadata["header"])
        job = metadata["job"]
        sizes = [_size_of(each) for each in listed.values()]
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise RunError(f"{who}: not a message of fedcpsl") from error
    if not isinstance(header, dict) or not isinstance(job, str):
        raise RunError(f"{who}: not a message of fedcpsl")
    if any(not isinstance(value, bool | int | float | str) for value in header.values()):
        raise RunError(f"{who}: its header has values that are neither numbers nor strings")
    return MessagePrefix(header, job, sum(sizes), first + text)


def read_message(prefix: MessagePrefix, tensors: bytes, who: str) -> Packet:
    """Return the message, from its prefix and the bytes of its tensors."""
    try:
        return Packet(Message(prefix.header, load(prefix.raw + tensors)), prefix.job)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise RunError(f"{who}: its tensors do not match its header ({error})") from error


def _size_of(listed: dict[str, Any]) -> int:
    if listed["dtype"] not in DTYPES:
        raise ValueError("a tensor of another dtype")
    begin, end = listed["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError("a tensor of negative size")
    return int(end - begin)
