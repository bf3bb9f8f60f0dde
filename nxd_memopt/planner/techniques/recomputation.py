"""Which layers full recompute runs again, in which chunks, and how often.

``memory/recompute.py`` and the planner read it: layers whose activations are in host memory are not recomputed, and
the chunks start at the layer after them.
"""

from __future__ import annotations

from dataclasses import dataclass

from nxd_memopt.config import MemoryConfig


@dataclass(frozen=True)
class Recomputation:
    """The layers that full recompute runs again in backward.

    A chunk is the layers of one checkpoint. ``nested`` runs a chunk twice: once to restore the inputs of its
    layers, which stops before its last layer, and then layer by layer.

    Args:
        first: number of the first recomputed layer; the layers before it keep their activations in host memory.
        recomputed: number of recomputed layers, 0 without full recompute.
        chunk: layers of a chunk; the last chunk of ``nested`` may have fewer.
        is_nested: whether each layer of a chunk has a checkpoint too.
    """

    first: int = 0
    recomputed: int = 0
    chunk: int = 1
    is_nested: bool = False

    @classmethod
    def of(cls, memory: MemoryConfig, num_layers: int) -> Recomputation:
        """Return the recomputation of a model of ``num_layers`` layers; of no layer without full recompute.

        Raises:
            ValueError: no layer is left to recompute, or ``recompute_num_layers`` exceeds the layers that are
                left, or, for ``uniform``, does not divide them.
        """
        if memory.recompute_granularity != "full":
            return cls()
        # Layers in host memory are not recomputed as well, unless it is their checkpoints that are there.
        first = 0
        if not memory.cpu_offloading_activations:
            first = memory.num_offloaded_layers(num_layers)
        depth = num_layers - first
        if depth < 1:
            raise ValueError(
                "recompute_granularity 'full' is left no layer by cpu_offloading_num_layers: leave one out"
            )
        number = memory.recompute_num_layers
        if (number or 1) > depth:
            raise ValueError(f"recompute_num_layers {number} exceeds the {depth} layers to recompute: lower it")
        # The first layers only; each is a chunk.
        if memory.recompute_method == "block":
            return cls(first, number or depth)
        if memory.recompute_method == "nested":
            return cls(first, depth, number or nested_chunk_layers(depth), is_nested=True)
        if depth % (number or 1):
            raise ValueError(
                f"{depth} layers are not divisible by recompute_num_layers {number}: use a divisor, or "
                "recompute_method 'block'"
            )
        return cls(first, depth, number or 1)

    @property
    def stop(self) -> int:
        """Number of the layer after the last recomputed one."""
        return self.first + self.recomputed

    @property
    def chunks(self) -> int:
        """Number of chunks."""
        return -(-self.recomputed // self.chunk)

    @property
    def complete(self) -> int:
        """Forwards that recomputation runs to the end, over all layers: their outputs are the next layers' inputs."""
        return self.recomputed - self.chunks

    @property
    def stopped(self) -> int:
        """Forwards that recomputation stops before their last projection, over all layers.

        PyTorch's checkpoint stops at the last tensor that backward needs: in the last layer of a chunk, and with
        ``nested`` in every layer.
        """
        if self.is_nested:
            return self.recomputed
        return self.chunks

    @property
    def forwards(self) -> int:
        """Forwards of layers that recomputation runs: with ``nested`` two of every layer but the last of a chunk."""
        return self.complete + self.stopped

    def is_recomputed(self, index: int) -> bool:
        """Return whether layer ``index`` is recomputed."""
        return self.first <= index < self.stop

    def position(self, index: int) -> int:
        """Return the place of layer ``index`` in its chunk, from 0; 0 if it is not recomputed."""
        if not self.is_recomputed(index):
            return 0
        return (index - self.first) % self.chunk

    def unit(self, index: int) -> range:
        """Return the layers of the chunk of layer ``index``; itself alone if it is not recomputed."""
        place = index - self.first
        if not 0 <= place < self.recomputed:
            return range(index, index + 1)
        start = index - place % self.chunk
        return range(start, min(start + self.chunk, self.stop))

    def forwards_of(self, index: int, *, stops_early: bool = True) -> int:
        """Return how many forwards of layer ``index`` recomputation runs: 0, 1 or 2.

        Args:
            index: number of the layer.
            stops_early: a recomputation ends with the last tensor that backward needs, as in PyTorch's eager
                checkpoint. On XLA it runs to the end, with ``nested`` in the last layer of a chunk too.
        """
        if not self.is_recomputed(index):
            return 0
        unit = self.unit(index)
        runs_last_twice = not stops_early and len(unit) > 1
        return 1 + int(self.is_nested and (index != unit[-1] or runs_last_twice))


def require_layers(memory: MemoryConfig, num_layers: int, chunks: int = 1) -> None:
    """Raise ``ValueError`` if recompute does not suit the layers of a rank.

    Args:
        memory: recompute.
        num_layers: layers of the rank.
        chunks: V, stages of a pipeline into which they are divided.
    """
    recomputation = Recomputation.of(memory, num_layers)
    # The layers of a chunk run one after the other; those of two stages do not.
    if chunks > 1 and recomputation.chunk > 1:
        raise ValueError(
            f"recompute_method {memory.recompute_method!r} recomputes {recomputation.chunk} layers together, which may "
            "be of two stages of a rank: leave out virtual_pipeline_model_parallel_size, or the method"
        )
    memory.num_selective_layers(num_layers)
    memory.layers_keeping_attention(num_layers)


def keeps_inputs_alone(memory: MemoryConfig) -> bool:
    """Return whether every layer, or chunk of layers, keeps its input only, whatever a compiler chooses inside."""
    recomputes_all = memory.recompute_granularity == "full" and memory.recompute_method != "block"
    # Offloaded layers keep all activations in host memory, unless only checkpoints are offloaded.
    checkpoints_all = memory.num_offloaded_layers(1) == 0 or memory.cpu_offloading_activations
    return recomputes_all and checkpoints_all and not memory.recompute_keep_core_attn


def nested_chunk_layers(num_layers: int) -> int:
    """Return the layers per chunk n for which nested recompute keeps the fewest layer inputs.

    Forward keeps the inputs of ceil(L / n) chunks, and the backward of a chunk restores n - 1 more.
    The sum is smallest near n = sqrt(L). Of equal sums the smallest n is the fastest: backward runs
    all layers but the last of a chunk once more. For L = 32: n = 4, 8 + 3 inputs.
    """
    return min(range(1, num_layers + 1), key=lambda n: -(-num_layers // n) + n - 1)
