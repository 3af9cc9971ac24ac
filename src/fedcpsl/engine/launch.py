"""What there is as Triton kernels of our own, as functions of tensors."""

from fedcpsl.engine import launch_linear as few_rows
from fedcpsl.engine import launch_pooled as pooled
from fedcpsl.engine.launch_convolution import (
    add_up_patches,
    add_weight_gradient,
    convolution,
    convolve,
    dropout,
    has_room,
    patches,
    pooling,
    pools,
    x_gradient,
)

__all__ = [
    "add_up_patches", "add_weight_gradient", "convolution", "convolve", "dropout", "few_rows", "has_room", "patches",
    "pooled", "pooling", "pools", "x_gradient",
]  # fmt: skip
