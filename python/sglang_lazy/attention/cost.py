"""Device time of a batch, estimated from the FLOPs of one dense layer. A wrong estimate costs only time."""

import math

FASTEST_GPU = 8e11
"""Floating-point operations per millisecond: bf16 matrix products on an H200."""
LAUNCH_TIME = 0.5
"""Milliseconds that the host takes to launch a layer; sometimes almost twice as long."""


def layer_time(num_tokens: int, hidden_size: int, tp_size: int, on_gpu: bool) -> float:
    """A lower bound of the device time for one layer, in milliseconds. Infinite on a CPU, where nothing is launched."""
    if not on_gpu:
        return math.inf
    weights = 12 * hidden_size**2 / tp_size
    return 2 * weights * num_tokens / FASTEST_GPU


def second_kernel_pays(layer_time: float) -> bool:
    """Whether a second attention kernel in each layer saves the device more than its launch costs the host.

    It adds a fifth to the launch time; the saving grows with the batch.
    """
    return layer_time > 3 * LAUNCH_TIME


def padding_pays(unpadded: float, padded: float) -> bool:
    """Whether a CUDA graph is worth padding a prefill batch to its size, by up to 511 tokens.

    unpadded, padded: `layer_time` of both. If the host launches faster than the device computes, a graph saves nothing.
    """
    # Layers take some 1.3 times their lower bound: at 1.6 launch times the device is slower than even a slow host.
    return padded < max(unpadded, 1.6 * LAUNCH_TIME)
