"""Flower's client process: pass messages to the device's own process, as Flower's records. Imports nothing heavy."""

from pathlib import Path

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict

from fedcpsl.errors import RunError
from fedcpsl.flower.local_socket import send_and_receive

RECORD, ARRAY = "fedcpsl", "message"
KIND = "fedcpsl.safetensors"
MAX_WAIT_S = 24 * 3600.0  # seconds; the message's time to live is usually shorter


def to_record(message: bytes) -> RecordDict:
    """Return a message, as bytes, as the content of a Flower message."""
    return RecordDict({RECORD: ArrayRecord({ARRAY: Array("uint8", (len(message),), KIND, message)})})


def from_record(content: RecordDict, who: str) -> bytes:
    """Return the message, as bytes, in the content of a Flower message."""
    record = content.get(RECORD)
    if set(content) != {RECORD} or not isinstance(record, ArrayRecord) or set(record) != {ARRAY}:
        raise RunError(f"{who}: has records {sorted(content)} where {RECORD} is needed")
    if record[ARRAY].stype != KIND:
        raise RunError(f"{who}: has tensors that fedcpsl did not write")
    return record[ARRAY].data


def handle_message(message: Message, context: Context) -> Message:
    """Return the device's reply, which may be a refusal; RunError only where its process cannot be reached."""
    address = Path(str(context.node_config["socket"]))
    seconds = min(message.metadata.ttl, MAX_WAIT_S)
    request = from_record(message.content, "the server's message")
    try:
        reply = send_and_receive(address, request, seconds)
    except RunError as error:  # its text names a file, and Flower sends the server what is raised here
        raise RunError("the device's own process could not be reached; is `fedcpsl join` running?") from error
    return Message(to_record(reply), reply_to=message)


def device_name(message: Message, context: Context) -> Message:
    """Return the device's name."""
    return Message(to_record(str(context.node_config["name"]).encode()), reply_to=message)
