"""The time of copies of optimizer states between device and host that no computation hides."""

from __future__ import annotations

from nxd_memopt.planner.hardware import Device
from nxd_memopt.planner.memory.peak import StepMemory
from nxd_memopt.planner.sizes.rank_model import RankModel
from nxd_memopt.planner.sizes.states import StateLayout, optimizer_element_bytes, parameters_on_host, shard_elements

_SHARED_COPIES = 0.74
"""Part of the rate of one GPU's copies that each of several GPUs of a host reaches at the same time: two H200s copy
34 to 39 GB/s each way, one 50 (docs/benchmarks/state_offload.csv)."""


def host_copy_rate(device: Device, ranks: int) -> float:
    """Return the bytes per second of a rank's copies to or from the host.

    All ranks measure at the same time, and a rate of Trainium is one core's part of the host's already.
    """
    rate = device.host_copy_bytes_per_s
    if ranks > 1 and device.kind == "cuda" and not device.measured:
        rate *= _SHARED_COPIES
    return rate


def state_copies_s(
    model: RankModel,
    layout: StateLayout,
    used: StepMemory,
    copy_rate: float,
    *,
    compute_s: float,
    forward_s: float,
) -> float:
    """Return the time of the copies of states in host memory that nothing hides.

    Args:
        model: the rank's share of the model.
        layout: states of the optimizer.
        used: the step's memory, for the bytes on the host and of the staging buffers.
        copy_rate: bytes per second, each way.
        compute_s: computation of all micro-batches.
        forward_s: forward of one micro-batch.
    """
    copied_s = used.host["optimizer states"] / copy_rate
    # All states pass in and out at once. What fits the staging buffers arrives before the norm of the
    # gradients is known, the rest only after it, when updated states leave room for it.
    staged_s = min(used.device.get("staging of optimizer states", 0) / copy_rate, compute_s)
    if not layout.update_in_forward or not copied_s:
        return max(0.0, copied_s - staged_s)
    # They go back to the host at any time until the next norm.
    late_s = max(0.0, copied_s - compute_s)
    # A layer's states must have arrived before its forward, so that only the forward of the layers before it hides
    # them, of the first micro-batch. The embedding's states come first, the head's with the last layer.
    sizes = [shard_elements(shape, layout) for shape in model.shapes]
    element_bytes = optimizer_element_bytes(param_remainders=layout.param_remainders)
    on_host = parameters_on_host(sizes, layout.optimizer_offload_fraction)
    layers = model.sizes.num_layers
    per_layer = len(model.layer_shapes)
    arrived = 0
    first = 0
    for layer in range(layers):
        last = 1 + (layer + 1) * per_layer
        if layer == layers - 1:
            last = len(sizes)
        arrived += sum(sizes[index] for index in range(first, last) if index in on_host) * element_bytes
        first = last
        late_s = max(late_s, arrived / copy_rate - staged_s - forward_s * layer / layers)
    return late_s
