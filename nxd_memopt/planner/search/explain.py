"""Each term of a plan with its formula and where the formula is from."""

from __future__ import annotations

from nxd_memopt.planner.hardware import GIB
from nxd_memopt.planner.memory.peak import StepMemory
from nxd_memopt.planner.timing.step_time import StepTime

MEMORY_TERMS = {
    "weights": ("parameters of the rank x bytes; none with zero3", "states.weight_bytes"),
    "master weights": ("shard of the rank, ceil(n / D), x bytes of a master or its remainder", "states.master_bytes"),
    "optimizer moments": ("2 x shard x bytes of the optimizer's dtype (arXiv:1910.02054)", "states.moment_bytes"),
    "staging of optimizer states": ("a ring of chunks, and one of gradients in fp32", "states.stream_bytes"),
    "inputs of the all-gather": ("zero1 with offloaded states: updated shards", "peak.step_memory"),
    "gathered weights": ("zero3: layers that are gathered at the same time, embedding, norm, head", "peak.step_memory"),
    "cuBLAS workspaces": ("2 threads x 32 MiB", "allocator.CUBLAS_WORKSPACE_BYTES"),
    "small tensors": ("sums and statistics below 1 MiB that no term counts", "peak.SMALL_TENSORS_BYTES"),
    "peer memory": ("4 slots of S x B x H, or of a chunk of the loss", "peer_slots.slot_bytes"),
    "gradients": ("those at the peak, as data_parallel.grad_reduce_in_fp32 says", "states.gradient_bytes"),
    "activations": ("storages kept for backward, layer by layer", "layer_parts.layer_parts"),
    "other micro-batches": ("what the forwards of the micro-batches in flight keep", "pipeline_schedule.in_flight"),
    "temporary tensors": ("gradients of activations and weights at the peak", "backward.layer_moments"),
    "gradient buckets": ("full gradients on their way into shards", "peak.step_memory"),
    "reduced gradients": ("zero1, or rounded sums: ceil(n / D) in the optimizer's dtype", "states.shard_bytes"),
    "CUDA graph's pool": ("its peak without the gradients", "allocator.graph_pool_bytes"),
    "updated parameters": ("trn1: those with masters, whose old values still exist", "compiled_graphs.graph_terms"),
    "DMA ring spills": ("trn1: 11.5 % of activations and temporary tensors", "compiled_graphs.DMA_SPILL_SHARE"),
}
"""Term -> formula in words, and the function that computes it, in ``nxd_memopt/planner``."""
TIME_TERMS = {
    "matmuls": ("6 FLOPs a weight and token, 2 more where recomputed, at the reached rate", "step_work.matmul_flops"),
    "attention": ("2 S^2 columns forward, 2.5 times that backward", "step_work.attention_flops"),
    "elementwise": (
        "bytes of norms, RoPE, activations, casts over the bandwidth",
        "step_work.elementwise_bytes",
    ),
    "tensor-parallel collectives": ("bytes over the link that nothing hides", "step_work.tensor_parallel_bytes"),
    "expert-parallel collectives": ("rows of a balanced routing, there and back", "step_work.expert_parallel_bytes"),
    "copies to and from the host": ("activations and weights, beyond the computation", "step_time.step_time"),
    "messages between stages": ("hidden states and their gradients over the link", "step_time.step_time"),
    "waiting for other stages": ("(P - 1) / V times the time of a micro-batch", "step_time.step_time"),
    "waiting for the host": ("launches beyond the computation, and between two steps", "step_time.launches"),
    "data-parallel collectives": ("gradients and parameters over the link", "step_time.step_time"),
    "optimizer": ("clipping and AdamW, and copies of states that nothing hides", "step_work.update_bytes"),
}
"""Term -> formula in words, and the function that computes it, in ``nxd_memopt/planner``."""


def explanation(memory: StepMemory, time: StepTime) -> list[str]:
    """Return one line for each term of memory and time."""
    lines = [f"Device memory at the peak, {memory.moment}: {memory.device_bytes / GIB:.3f} GiB"]
    for name, size in memory.device.items():
        formula, source = MEMORY_TERMS[name]
        lines.append(f"  {size / GIB:9.3f} GiB  {name}: {formula} [{source}]")
    if memory.margin_bytes:
        lines.append(
            f"  {memory.margin_bytes / GIB:9.3f} GiB  besides, the margin with which it fits: free parts of the "
            "allocator's pages [allocator.margin_bytes]"
        )
    lines.append(f"Host memory: {memory.host_bytes / GIB:.3f} GiB")
    lines += [f"  {size / GIB:9.3f} GiB  {name}" for name, size in memory.host.items() if size]
    most = ""
    if time.uncertain_s:
        most = f" to {time.most_s * 1e3:.1f}"
    lines.append(f"Step: {time.step_s * 1e3:.1f}{most} ms")
    for name, seconds in time.terms.items():
        formula, source = TIME_TERMS[name]
        lines.append(f"  {seconds * 1e3:9.1f} ms   {name}: {formula} [{source}]")
    return lines
