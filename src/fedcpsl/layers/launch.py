"""What there is as Triton kernels of our own, as functions of tensors."""

from fedcpsl.layers import launch_linear as few_rows
from fedcpsl.layers import launch_pooled as pooled
from fedcpsl.layers.launch_convolution import add_weight_gradient, convolution, convolve, has_room, x_gradient
from fedcpsl.layers.launch_small import add_up_patches, dropout, patches, pooling, pools

__all__ = [
    "add_up_patches", "add_weight_gradient", "convolution", "convolve", "dropout", "few_rows", "has_room", "patches",
    "pooled", "pooling", "pools", "x_gradient",
]  # fmt: skip
