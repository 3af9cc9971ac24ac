"""Messages as bytes: one safetensors file each, the header and the job in its metadata."""

import json
from collections.abc import Callable
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load, save

from fedcpsl.errors import RunError
from fedcpsl.federation.messages import Message

TYPES = {"F32": 4, "F64": 8}  # what a tensor may be of
LARGEST_ABOUT = 1 << 20  # bytes of a message without its tensors
Read = Callable[[int], bytes]


class Packet(NamedTuple):
    """A message, and the job that it belongs to as the server describes it (nothing in an answer)."""

    message: Message
    job: str = ""


class About(NamedTuple):
    """What stands before the tensors of a message."""

    header: dict[str, Any]
    job: str
    tensor_bytes: int
    raw: bytes


def pack(message: Message, job: str = "") -> bytes:
    tensors = {name: t.detach().cpu().contiguous() for name, t in message.tensors.items()}
    return save(tensors, {"header": json.dumps(message.header), "job": job})


def unpack(content: bytes, who: str) -> Packet:
    """The message in bytes; RunError where there is none."""
    left = memoryview(content)
    position = 0

    def read(count: int) -> bytes:
        nonlocal position
        piece = bytes(left[position : position + count])
        position += count
        return piece

    about = read_about(read, who)
    return finish(about, bytes(left[position:]), who)


def read_about(read: Read, who: str) -> About:
    """What stands before the tensors, by reading no more than that: `read` gives as many bytes as it is asked for."""
    first = read(8)
    length = int.from_bytes(first, "little")
    if len(first) < 8 or not 2 <= length <= LARGEST_ABOUT:
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
        raise RunError(f"{who}: its header has values that are no numbers or words")
    return About(header, job, sum(sizes), first + text)


def finish(about: About, tensors: bytes, who: str) -> Packet:
    """The message, from what stood before its tensors and these."""
    try:
        return Packet(Message(about.header, load(about.raw + tensors)), about.job)
    except (SafetensorError, ValueError, KeyError, OverflowError) as error:
        raise RunError(f"{who}: its tensors are not what it says ({error})") from error


def _size_of(listed: dict[str, Any]) -> int:
    if listed["dtype"] not in TYPES:
        raise ValueError("a tensor of another type")
    begin, end = listed["data_offsets"]
    if not 0 <= begin <= end:
        raise ValueError("a tensor of no size")
    return int(end - begin)
