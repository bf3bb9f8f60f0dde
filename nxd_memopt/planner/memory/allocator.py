"""What PyTorch's allocator on a GPU needs besides the tensors of a step: a margin, with which a plan promises to fit.

With expandable segments the allocator maps pages of 2 MiB for small and of 20 MiB for large tensors, and returns a
page only when all of it is free. How much stays free in used pages differs from run to run of the same step.
"""

from __future__ import annotations

# Fitted once to the 497 rows of docs/benchmarks/planned_memory.csv on H200s with reserved bytes, and to the 16 limits
# of tests/planner/test_recorded_moments.py, as round figures with which no step was out of memory. Largest needs:
# 201 MiB of less than 7 GiB of tensors (SmolLM2, weights in host memory), 2.75 % of more (LLaMA-3-8B with T=4, layers
# of 104 MiB), and 5.2 % with a CUDA graph (GPT-NeoX-20B with 4,864 tokens; 49 of the rows).
MARGIN_BYTES = 208 << 20
"""Smallest margin."""
MARGIN_FRACTION = 0.03
"""Part of the tensors' bytes that may be free in used pages."""
GRAPH_MARGIN_FRACTION = 0.07
"""The same with a CUDA graph, in whose pool gradients also find no room between the tensors of a layer."""

_POOL_PAGES_BYTES = 40 << 20
"""Two pages of a graph's pool that are used in part: its bytes are counted in pages."""
CUBLAS_WORKSPACE_BYTES = 64 << 20
"""cuBLAS workspaces of the threads of forward and backward, 32 MiB each on Hopper (PyTorch's default)."""


def margin_bytes(tensors: int, *, cuda_graph: bool) -> int:
    """Return what the allocator may need besides ``tensors`` bytes."""
    # Free parts of pages grow with the tensors, and small steps have a few pages of each kind at least. Both bounds
    # are equal at 6.8 GiB of tensors, with a graph at 2.9 GiB.
    fraction = MARGIN_FRACTION
    if cuda_graph:
        fraction = GRAPH_MARGIN_FRACTION
    return max(MARGIN_BYTES, int(tensors * fraction))


def graph_pool_bytes(peak_bytes: int, gradients: int, *, largest: int, captures: int) -> int:
    """Return the memory pool of a CUDA graph of forward and backward.

    The pool is as large as the peak, or as all gradients, of which the last and largest, the embedding's, finds no
    room between the others.

    Args:
        peak_bytes: peak of activations, gradients and temporary tensors without a graph.
        gradients: bytes of all gradients in the dtype of the weights.
        largest: the gradient of the largest parameter outside of the layers.
        captures: graphs whose cuBLAS workspaces exist: two if the second one adds to the gradients of the first.
    """
    return max(peak_bytes, gradients + largest) + captures * CUBLAS_WORKSPACE_BYTES + _POOL_PAGES_BYTES
