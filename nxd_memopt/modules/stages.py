"""Builds the modules of this rank's stages of a pipeline, and skips those that other ranks have."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from nxd_memopt.architectures.model_spec import ModelSpec
from nxd_memopt.architectures.parameters import shardings
from nxd_memopt.architectures.stages import RankStages
from nxd_memopt.config import ParallelConfig
from nxd_memopt.modules.factory import LayerFactory
from nxd_memopt.parallel_layers.initialization import numbers_of_meta_weights
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, ParallelEmbedding

Module = TypeVar("Module", bound=nn.Module)


@dataclass(frozen=True)
class StageInput:
    """Which chunk of this rank's layers a forward runs, and on what.

    Args:
        chunk: number of the chunk.
        hidden: output of the stage before, ``[B, S, H]`` or ``[s, B, H]``; None where the chunk begins with the
            embedding.
    """

    chunk: int = 0
    hidden: Tensor | None = None


WHOLE_MODEL = StageInput()
"""The only input of a model without pipeline stages."""


class LayerStack(nn.ModuleList):
    """The decoder layers of this rank, with the numbers of the full model in their names."""

    def __init__(self, stages: RankStages, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        for number, layer in zip(stages.layers, layers, strict=True):
            self.add_module(str(number), layer)
        self._stages = stages

    def is_last(self, chunk: int) -> bool:
        """Return whether the final norm follows the layers of ``chunk``."""
        return self._stages.is_last(chunk)

    def of_chunk(self, chunk: int) -> list[nn.Module]:
        """Return the layers of a chunk, in order."""
        return [self._modules[str(number)] for number in self._stages.chunks[chunk]]  # pyright: ignore[reportReturnType]


class StageBuilder:
    """Builder of a model's modules in the order of the full model.

    All ranks draw the numbers of all modules, so that initial weights do not depend on P: drawing takes 7 to 9
    seconds of a core for each billion parameters of the full model. Modules of other ranks take no memory.

    Args:
        config: Hugging Face config of the full model.
        spec: facts of the full model.
        stages: this rank's stages.
        parallel: T, and how weights are initialized.
        dtype: of the weights; None is torch's default, as of ``device``.
        device: of the weights.
    """

    def __init__(
        self,
        config: Any,
        spec: ModelSpec,
        stages: RankStages,
        parallel: ParallelConfig,
        dtype: torch.dtype | None,
        device: torch.device | str | None,
    ) -> None:
        self.stages = stages
        self._spec = spec
        # With T above g, each KV head is on T/g ranks. Each of them has different query heads of its group, and a
        # copy of the KV head whose gradients are summed over the ranks.
        replicas = spec.kv_replicas(parallel.tensor_model_parallel_size)
        dtype = dtype or torch.get_default_dtype()
        sharding = shardings(config.model_type)
        self.factory = LayerFactory(sharding, parallel, config.initializer_range, dtype, device, replicas)

    def head(self, table: Callable[[], nn.Parameter]) -> ColumnParallelLinear:
        """Return the language-model head, whose weight is ``table()`` if it is tied; missing (None) on other ranks."""
        spec = self._spec

        def make(factory: LayerFactory) -> ColumnParallelLinear:
            return factory.column("lm_head", spec.hidden_size, spec.vocab_size, bias=False)

        if not spec.is_tied:
            return cast(ColumnParallelLinear, self.optional(self.stages.has_head, make))
        if not self.stages.has_head:
            return cast(ColumnParallelLinear, None)
        # A tied head is built on meta: its weight is replaced, and no random numbers are drawn.
        head = make(replace(self.factory, device="meta"))
        head.weight = table()
        return head

    def embedding(self, name: str, padding_idx: int | None) -> ParallelEmbedding:
        """Return the embedding, also where a tied head needs its table; missing (None) on other ranks."""
        spec = self._spec
        is_here = self.stages.has_embedding or (spec.is_tied and self.stages.has_head)
        module = self.optional(
            is_here, lambda factory: factory.embedding(name, spec.vocab_size, spec.hidden_size, padding_idx)
        )
        if module is not None and spec.is_tied and not self.stages.is_whole:
            # A copy on two stages: gradients are summed over both (``pipeline.tied``), and norms of the full model
            # and checkpoints have it once, from the first stage.
            cast(Any, module.weight).shared = not self.stages.has_embedding
        return cast(ParallelEmbedding, module)

    def final_norm(self, make: Callable[[LayerFactory], Module]) -> Module:
        """Return the norm after the last layer; missing (None) on ranks without the head."""
        return cast(Module, self.optional(self.stages.has_head, make))

    def optional(self, is_here: bool, make: Callable[[LayerFactory], Module]) -> Module | None:
        """Return the module that ``make`` builds, or None if another rank has it."""
        if is_here:
            return make(self.factory)
        # Without CPU initialization each rank draws its own weights from its own stream.
        with numbers_of_meta_weights() if self.factory.draws_full_weights else nullcontext():
            make(replace(self.factory, device=torch.device("meta")))
        return None

    def layers(self, make: Callable[..., nn.Module]) -> LayerStack:
        """Return this rank's decoder layers; ``make(factory, number=n)`` builds layer n."""
        own = set(self.stages.layers)
        built = [self.optional(i in own, partial(make, number=i)) for i in range(self._spec.num_layers)]
        return LayerStack(self.stages, [layer for layer in built if layer is not None])
