"""What Flower's client process does with a message: hand it to the device's own process. Imports nothing heavy."""

from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from fedcpsl.errors import RunError
from fedcpsl.flower.local_socket import ask

RECORD, ARRAY = "fedcpsl", "message"
KIND = "fedcpsl.safetensors"
LONGEST = 24 * 3600.0  # seconds; the message's own time to live is what ends it


def content_of(message: bytes) -> RecordDict:
    """A message as the content of a Flower message."""
    return RecordDict({RECORD: ArrayRecord({ARRAY: Array("uint8", (len(message),), KIND, message)})})


def message_of(content: RecordDict, who: str) -> bytes:
    """The message in a Flower message's content."""
    record = content.get(RECORD)
    if set(content) != {RECORD} or not isinstance(record, ArrayRecord) or set(record) != {ARRAY}:
        raise RunError(f"{who}: has records {sorted(content)} where {RECORD} is needed")
    if record[ARRAY].stype != KIND:
        raise RunError(f"{who}: has tensors that fedcpsl did not write")
    return record[ARRAY].data


def answer(message: Message, context: Context) -> Message:
    """The device's answer. Its process says no where it must; only where it cannot be asked is this an error."""
    address = Path(str(context.node_config["socket"]))
    seconds = min(message.metadata.ttl, LONGEST)
    asked = message_of(message.content, "the server's message")
    try:
        said = ask(address, asked, seconds)
    except RunError as error:  # its text names a file, and Flower tells the server what is raised here
        raise RunError("the device's own process could not be asked; is `fedcpsl join` up?") from error
    return Message(content_of(said), reply_to=message)


def name(message: Message, context: Context) -> Message:
    """What the device calls itself."""
    return Message(content_of(str(context.node_config["name"]).encode()), reply_to=message)
