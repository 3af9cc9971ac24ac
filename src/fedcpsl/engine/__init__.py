"""All that exists for speed below the algorithms: many sets of parameters at once, forwards, backwards and updated.

The way in is `Network`: a cost as a function of the networks' outputs goes in, gradients and updates come out.
No algorithm asks how. `torch.func.vmap` and autograd would do the same with more work where it matters:

Parameters are [slots, models, *shape], inputs [slots, models, samples, ...], or [slots, 1, samples, ...] where the
models of a slot see the same samples. A `Sequential` is walked. A linear layer becomes one batched matmul, whose
gradient is added to the totals inside the backward matmul (a training step is bound by memory traffic), and on a CPU
those that follow one another are one layer; so does a convolution on a GPU, or it becomes one kernel of our own, and on
a CPU it is the library's, model by model; a layer without parameters sees everything as one long batch; anything else
goes through `vmap`. Every layer hands its gradient back before it adds to its totals, so that these may be the
parameters themselves.
"""

from fedcpsl.engine.leafwise import Leaves, cache_last_call, differences, scale_and_add, subtract_scaled, where_slots
from fedcpsl.engine.network import Network, counting, forward_flops

__all__ = [
    "Leaves",
    "Network",
    "cache_last_call",
    "counting",
    "differences",
    "forward_flops",
    "scale_and_add",
    "subtract_scaled",
    "where_slots",
]
