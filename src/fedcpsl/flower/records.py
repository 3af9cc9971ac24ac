"""Messages as Flower's records: one of ours as an array of bytes. Imports nothing heavy."""

from flwr.app import Array, ArrayRecord, RecordDict

from fedcpsl.errors import RunError

RECORD, ARRAY = "fedcpsl", "message"
KIND = "fedcpsl.safetensors"


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
