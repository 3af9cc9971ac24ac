"""Numbers from the host to where they are computed with."""

from typing import Any

import torch
from torch import Tensor


def to_device(values: Any, where: torch.device) -> Tensor:
    """A list or array as a tensor on a device.

    To a GPU it goes from pinned memory: else the host would wait until the GPU has done all that it was given before.
    """
    tensor = torch.as_tensor(values)
    return tensor.pin_memory().to(where, non_blocking=True) if where.type == "cuda" else tensor.to(where)
