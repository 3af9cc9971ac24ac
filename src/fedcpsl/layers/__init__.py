"""One network with many sets of parameters at once, forwards and backwards.

What `torch.func.vmap` and autograd do, with less work where it matters. Parameters are [slots, models, *shape],
inputs [slots, models, samples, ...], or [slots, 1, samples, ...] where the models of a slot see the same samples.
A `Sequential` is walked. A linear layer becomes one batched matmul, whose gradient is added to the totals inside the
backward matmul (a training step is bound by memory traffic), and on a CPU those that follow one another are one layer;
so does a convolution on a GPU, or it becomes one kernel of our own, and on a CPU it is the library's, model by model; a
layer without parameters sees everything as one long batch; anything else goes through `vmap`. Every layer hands its
gradient back before it adds to its totals, so that these may be the parameters themselves.
"""

from fedcpsl.layers.forward_backward import Bound, backward, bind, forward
from fedcpsl.layers.layer_kinds import (
    Layer,
    differentiated_by_hand,
    is_convolution,
    is_matmul,
    is_parameter_free,
    pool_before_relu,
    refuse_running_statistics,
    runs_without_vmap,
    walk,
    whole,
)
from fedcpsl.layers.precision import PRECISIONS, Arithmetic

__all__ = [
    "PRECISIONS",
    "Arithmetic",
    "Bound",
    "Layer",
    "backward",
    "bind",
    "differentiated_by_hand",
    "forward",
    "is_convolution",
    "is_matmul",
    "is_parameter_free",
    "pool_before_relu",
    "refuse_running_statistics",
    "runs_without_vmap",
    "walk",
    "whole",
]
