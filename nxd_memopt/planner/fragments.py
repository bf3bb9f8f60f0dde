"""Memory of a GPU that no tensor uses: free parts of the allocator's pages, and of a CUDA graph's pool.

PyTorch's allocator, with expandable segments, maps pages of 2 MiB for small and of 20 MiB for large tensors, and
returns a page only when all of it is free. The figures here are fitted to steps on H200s that may not reserve
more (docs/benchmarks/planned_memory.csv).
"""

from __future__ import annotations

FRAGMENT_FRACTION = 0.019
"""Part of the tensors' bytes that is free in pages of many tensors: 1.8 % measured at most."""
_FRACTION_OF_HEAD_GROUPS = 0.025
_FRACTION_WITH_GRAPH = 0.015
_FRACTION_WITH_GRAPH_AND_MASTERS = 0.012
_FEWEST_BYTES = 132 << 20
_FEWEST_BYTES_OF_MANY_LAYERS = 176 << 20
_MANY_LAYERS = 16
_LARGE_STREAM_BYTES = 8 << 20
_BESIDES_GRAPH_BYTES = 128 << 20
_BESIDES_GRAPH_AND_MASTERS_BYTES = 48 << 20
_PAGE_BYTES = 20 << 20
CUBLAS_WORKSPACE_BYTES = 64 << 20
"""cuBLAS workspaces of the threads of forward and backward, 32 MiB each on Hopper (PyTorch's default)."""


def fragment_bytes(tensors: int, *, layers: int = 1, stream_bytes: int = 0, has_head_groups: bool = False) -> int:
    """Return what the allocator needs besides ``tensors`` bytes: 1.9 % of them, and at least a few pages.

    Few pages are free in parts after the backward of few layers or of few tokens (20 to 84 MiB measured, of 2 to
    8 GiB of tensors), more with at least 16 layers whose hidden states have 8 MiB (to 169 MiB). Attention by groups
    of heads has more tensors between those of the layers (1.5 and 2.3 % measured).

    Args:
        tensors: allocated bytes.
        layers: decoder layers.
        stream_bytes: hidden states between two layers.
        has_head_groups: attention runs by groups of heads.
    """
    has_many_holes = layers >= _MANY_LAYERS and stream_bytes >= _LARGE_STREAM_BYTES
    fewest = _FEWEST_BYTES_OF_MANY_LAYERS if has_many_holes else _FEWEST_BYTES
    fraction = _FRACTION_OF_HEAD_GROUPS if has_head_groups else FRAGMENT_FRACTION
    return max(fewest, int(tensors * fraction))


def fragment_bytes_with_graph(tensors: int, outside: int, *, has_masters: bool) -> int:
    """Return what the allocator needs besides ``tensors`` bytes, which a CUDA graph's pool has in part.

    The update of weights with fp32 masters uses the memory of the gradients' sums: nothing to 24 MiB measured,
    without masters 24 to 123 MiB, of small models.

    Args:
        tensors: allocated bytes, with all of the pool.
        outside: those outside of the pool.
        has_masters: fp32 master weights.
    """
    fewest, fraction = _BESIDES_GRAPH_BYTES, _FRACTION_WITH_GRAPH
    if has_masters:
        fewest, fraction = _BESIDES_GRAPH_AND_MASTERS_BYTES, _FRACTION_WITH_GRAPH_AND_MASTERS
    return max(fewest, int(outside * FRAGMENT_FRACTION), int(tensors * fraction))


def graph_pool_bytes(
    peak_bytes: int, gradients: int, *, largest: int, layer: int, recomputed_width_bytes: int = 0, captures: int = 1
) -> int:
    """Return the memory pool of a CUDA graph of forward and backward.

    The pool is as large as the peak, or as all gradients, of which the last and largest, the embedding's, finds no
    room between the others, and cuBLAS workspaces of each capture. The fragments are fitted to steps of LLaMA-3-8B,
    GPT-NeoX-20B and SmolLM2 on H200s with T=1 and 2: at most three quarters of a layer's gradients, of all ranks.

    Args:
        peak_bytes: peak of activations, gradients and temporary tensors without a graph.
        gradients: bytes of all gradients in the dtype of the weights; the next arguments likewise.
        largest: the gradient of the largest parameter outside the layers.
        layer: the gradients of a layer, of all tensor-parallel ranks.
        recomputed_width_bytes: the widest activation, if the peak is in the last layer and this layer is recomputed.
            Its tensors do not fill the memory that the loss has freed: less than one of them, and a page, stay free.
        captures: graphs that share the pool: a second one adds to the gradients of the first.
    """
    hole = recomputed_width_bytes + _PAGE_BYTES if recomputed_width_bytes else 0
    return max(peak_bytes, gradients + largest) + 3 * layer // 4 + hole + captures * CUBLAS_WORKSPACE_BYTES
