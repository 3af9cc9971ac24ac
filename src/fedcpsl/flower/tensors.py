"""Frames as the federation's messages, whose tensors are PyTorch's."""

import numpy as np
import torch

from fedcpsl.federation.messages import Message
from fedcpsl.flower.frames import Blob, Frame

TYPES = {torch.float32: "float32", torch.float64: "float64"}


def frame_from(message: Message, job: str = "") -> Frame:
    blobs = {}
    for name, t in message.tensors.items():
        array = t.detach().cpu().contiguous().numpy()
        blobs[name] = Blob(TYPES[t.dtype], tuple(t.shape), array.astype(array.dtype.newbyteorder("<")).tobytes())
    return Frame(dict(message.header), blobs, job)


def message_from(frame: Frame) -> Message:
    tensors = {}
    for name, (dtype, shape, data) in frame.blobs.items():
        array = np.frombuffer(data, np.dtype(dtype).newbyteorder("<")).astype(dtype).reshape(shape)
        tensors[name] = torch.from_numpy(array)
    return Message(dict(frame.header), tensors)
