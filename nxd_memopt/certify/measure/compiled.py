"""Measures a step under torch.compile, from AOTAutograd's forward and backward graphs."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from nxd_memopt.certify.measure.eager import MATMULS
from nxd_memopt.certify.measure.measurement import LiveTensor, Measurement, largest_distinct


def measure_compiled(loss_of: Callable[[], Tensor]) -> Measurement:
    """Compile ``loss_of``, run it and its backward, and measure the graphs.

    The fx graphs run directly, without Inductor: recomputation is decided earlier, when the min-cut
    partitioner, which torch.compile uses, splits the joint graph into forward and backward.

    Args:
        loss_of: runs the forward pass and returns the loss, 0-dim. It runs on one process, so the
            graphs have no collectives.

    Returns:
        Matmuls of all graphs, and the tensors passed from forward to backward graphs.
    """
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.partitioners import min_cut_rematerialization_partition

    graphs = _Graphs()
    compiler = aot_autograd(
        fw_compiler=graphs.forward_compiler,
        bw_compiler=graphs.keep,
        inference_compiler=graphs.keep,
        partition_fn=min_cut_rematerialization_partition,
    )
    # A graph that was compiled for another variant of the step, such as the one without
    # recomputation, must not be reused.
    torch.compiler.reset()
    try:
        torch.compile(loss_of, backend=compiler, dynamic=False)().backward()
    finally:
        torch.compiler.reset()
    return graphs.measurement()


class _Graphs:
    """Forward and backward graphs of one step; several of each if dynamo has graph breaks."""

    def __init__(self) -> None:
        self.graphs: list[fx.Graph] = []
        self.forward_graphs: list[fx.Graph] = []

    def forward_compiler(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Record a forward graph, whose outputs include the tensors saved for backward."""
        self.forward_graphs.append(module.graph)
        return self.keep(module, inputs)

    def keep(self, module: fx.GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Record the graph and return a function that interprets it."""
        del inputs
        from functorch.compile import make_boxed_func

        self.graphs.append(module.graph)
        return make_boxed_func(module.forward)

    def measurement(self) -> Measurement:
        """Return the figures of the recorded graphs."""
        # held_bytes counts what forward graphs pass to backward graphs: recomputation by the
        # partitioner shows as fewer saved tensors and more matmuls in the backward graph.
        calls = [node for graph in self.graphs for node in graph.nodes if node.op == "call_function"]
        saved = _saved_tensors(self.forward_graphs)
        matmuls = sum(_name(node) in MATMULS for node in calls)
        # Nothing after the partitioner is measured: the counts before and after optimization are
        # the same one, and scratch memory inside a graph, thus the peak, is unknown.
        return Measurement(
            matmuls=matmuls,
            traced_matmuls=matmuls,
            held_bytes=sum(tensor.nbytes for tensor in saved),
            peak_bytes=None,
            flops=None,
            collectives=Counter(),
            largest=largest_distinct(saved),
            fingerprint=hashlib.sha256(" ".join(map(_name, calls)).encode()).hexdigest()[:16],
        )


def _name(node: fx.Node) -> str:
    """Return the name of a node's operation without its overload, such as ``addmm``."""
    packet = getattr(node.target, "overloadpacket", node.target)
    return str(getattr(packet, "__name__", packet))


def _saved_tensors(forward_graphs: Sequence[fx.Graph]) -> list[LiveTensor]:
    """Return the tensors that forward graphs save for backward graphs.

    Parameters and inputs are left out. Views of one tensor count once.
    """
    # Outputs of a forward graph are its results and the saved tensors. An output whose base is a
    # placeholder is a parameter or an input, which exists without the step.
    saved: dict[fx.Node, LiveTensor] = {}
    for graph in forward_graphs:
        (output,) = (node for node in graph.nodes if node.op == "output")
        for node in output.args[0]:
            # An output may also be a constant such as None, and a value may be a symbolic size.
            if not isinstance(node, fx.Node):
                continue
            value = node.meta.get("val")
            if not isinstance(value, Tensor):
                continue
            # The base is the key, so that views of one storage replace each other. The size is
            # that of the storage: a saved slice keeps all of it alive.
            base = _base(node)
            if base.op != "placeholder":
                saved[base] = LiveTensor(
                    dtype=str(value.dtype).removeprefix("torch."),
                    shape=tuple(value.shape),
                    nbytes=value.untyped_storage().nbytes(),
                    source=_name(node),
                )
    return list(saved.values())


def _base(node: fx.Node) -> fx.Node:
    """Return the node that allocated the storage of ``node``."""
    # Follow views back to the operation that allocated the storage: the base of a transposed weight
    # is a placeholder, so it counts as a parameter.
    value = node.meta.get("val")
    for source in node.all_input_nodes:
        origin = source.meta.get("val")
        if isinstance(value, Tensor) and isinstance(origin, Tensor) and _is_view(node):
            return _base(source)
    return node


def _is_view(node: fx.Node) -> bool:
    """Return whether the operation's schema declares a result that is a view of an argument."""
    # In ATen's schemas Tensor(a) is an alias of argument a, and Tensor(a!) the result of an in-place
    # operation, which writes to it: only the first is a view.
    schema = getattr(node.target, "_schema", None)
    if schema is None:
        return False
    aliases = [result.alias_info for result in schema.returns if result.alias_info is not None]
    return any(not alias.is_write for alias in aliases)
