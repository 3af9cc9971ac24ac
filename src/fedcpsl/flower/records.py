"""Frames as Flower's records: the header as a ConfigRecord, tensors as bytes that nothing but us reads."""

from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict

from fedcpsl.errors import RunError
from fedcpsl.flower.frames import Blob, Frame, check_blobs

HEADER, JOB, TENSORS = "header", "job", "tensors"
KIND = "fedcpsl.raw"  # how tensors are written, in place of NumPy's own files


def content_of(frame: Frame) -> RecordDict:
    """A frame as the content of a Flower message."""
    arrays = {name: Array(blob.dtype, blob.shape, KIND, blob.data) for name, blob in frame.blobs.items()}
    records = RecordDict({HEADER: ConfigRecord(dict(frame.header)), TENSORS: ArrayRecord(arrays)})
    if frame.job:
        records[JOB] = ConfigRecord({"text": frame.job})
    return records


def frame_of(content: RecordDict, who: str) -> Frame:
    """The frame in a Flower message, checked."""
    if set(content) - {JOB} != {HEADER, TENSORS}:
        raise RunError(f"{who}: has records {sorted(content)} where {HEADER} and {TENSORS} are needed")
    header, arrays, job = content[HEADER], content[TENSORS], content.get(JOB)
    if not isinstance(header, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise RunError(f"{who}: its records are not of the kinds that they should be")
    if any(array.stype != KIND for array in arrays.values()):
        raise RunError(f"{who}: has tensors that fedcpsl did not write")
    blobs = {name: Blob(a.dtype, tuple(a.shape), a.data) for name, a in arrays.items()}
    check_blobs(blobs, who)
    scalars = {name: v for name, v in header.items() if isinstance(v, int | float | str)}
    if len(scalars) < len(header):
        raise RunError(f"{who}: its header has values that are no numbers or words")
    text = str(job["text"]) if isinstance(job, ConfigRecord) and "text" in job else ""
    return Frame(scalars, blobs, text)
