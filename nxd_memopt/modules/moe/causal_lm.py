"""Base of causal language models with mixture-of-experts layers: adds the routers' losses to the loss."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.modules.causal_lm import IGNORE_INDEX, CausalLMOutput, ParallelCausalLM
from nxd_memopt.modules.moe.hf_options import resolve_moe
from nxd_memopt.modules.moe.load_balancing import RouterStatistics, means_of_totals
from nxd_memopt.modules.moe.moe_layer import MoELayer
from nxd_memopt.modules.moe.router import Routing
from nxd_memopt.modules.stages import WHOLE_MODEL, StageInput
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.ops.packed import PackedDocuments, packed_documents
from nxd_memopt.parallel_layers import mappings, parallel_state
from nxd_memopt.parallel_layers.random import random_states, set_random_states

LayerState = tuple[Tensor, Tensor]
"""What decoder layers pass on: hidden states, and the rows of ``RouterStatistics`` so far."""


OVER_ALL_LAYERS = ("hf_aux_loss", "global_aux_loss")
"""Balancing losses that a stage of a pipeline cannot compute from its own layers and one micro-batch."""


@dataclass
class MoECausalLMOutput(CausalLMOutput):
    """Output of a model with experts.

    Args:
        loss: as in ``CausalLMOutput``; in training with the routers' losses.
        logits: ``[B, S, V]`` or None.
        cross_entropy: ``loss`` without the routers' losses, 0-dim; None without labels.
        router_loss: the routers' part of ``loss``, 0-dim; None without labels and in evaluation.
        router: statistics of the routers of all MoE layers.
        router_logits: of each MoE layer, ``[B * S, E]``, without gradient; None unless they are requested.
    """

    cross_entropy: Tensor | None = None
    router_loss: Tensor | None = None
    router: RouterStatistics | None = None
    router_logits: tuple[Tensor, ...] | None = None

    @property
    def aux_loss(self) -> Tensor | None:
        """transformers' balancing loss over all MoE layers, without coefficient, whatever loss is trained.

        It has a gradient if the routers have a loss (``MoEConfig.has_router_loss``); ``loss`` has its own.
        """
        return None if self.router is None else self.router.hf_loss()


class MoECausalLM(ParallelCausalLM):
    """Causal language model some of whose MLPs are ``MoELayer``.

    The backbone maps ids, RoPE tables, mask and token mask to hidden states and the rows of
    ``RouterStatistics``. Its decoder layers map a ``LayerState`` to the next one.

    Args:
        config: Hugging Face config.
        parallel: see ``ParallelCausalLM``.
        memory: see ``ParallelCausalLM``.
        moe: options of the MoE layers, which must agree with ``config``; default the options that it has.

    Raises:
        ValueError: as ``ParallelCausalLM``, or ``moe`` contradicts ``config``, or ``memory`` has a technique that
            layers with experts do not have.
    """

    has_experts = True

    def __init__(
        self, config: Any, *, parallel: ParallelConfig | None, memory: MemoryConfig | None, moe: MoEConfig | None
    ) -> None:
        moe = resolve_moe(moe, config)
        super().__init__(config, parallel=parallel, memory=memory)
        require_moe_memory(self.memory)
        self.moe = moe
        if not self.stages.is_whole and moe.has_aux_loss and moe.moe_router_load_balancing_type in OVER_ALL_LAYERS:
            raise ValueError(
                f"moe_router_load_balancing_type {moe.moe_router_load_balancing_type} needs the routers of all layers, "
                "or of all micro-batches, at once, and pipeline_model_parallel_size is "
                f"{self.parallel.pipeline_model_parallel_size}: set it to aux_loss, which balances each layer"
            )
        self._rows: Tensor | None = None
        self._token_mask: Tensor | None = None
        self._counts_only = False
        # Of the block of ``balanced_over_step`` that runs; a new object for each block.
        self._step: list[Mapping[str, Any]] | None = None

    @property
    @abstractmethod
    def backbone(self) -> Any: ...

    def moe_layers(self) -> list[MoELayer]:
        """Return the MoE layers, in the order of the rows of ``RouterStatistics``."""
        return [layer.mlp for layer in self.decoder_layers() if isinstance(layer.mlp, MoELayer)]

    def moe_layer_numbers(self, chunk: int = 0) -> range:
        """Return which MoE layers of the full model, counted from 0, a chunk of this rank's layers has."""
        numbers, is_moe = self.stages.chunks[chunk], self.spec.moe_layers
        start = sum(is_moe[: numbers.start])
        return range(start, start + sum(is_moe[numbers.start : numbers.stop]))

    def dense_mlps(self) -> list[Any]:
        return [mlp for mlp in super().dense_mlps() if not isinstance(mlp, MoELayer)]

    def recompute_modules(self) -> dict[str, list[nn.Module]]:
        """Return the modules of all layers by name; ``mlp`` and ``mlp_act`` are of dense layers."""
        modules = super().recompute_modules()
        modules["moe"] = [*self.moe_layers()]
        return modules

    def recompute_names_elsewhere(self) -> list[str]:
        """Return which names of ``recompute_modules`` the layers of other stages may have."""
        if self.stages.is_whole:
            return []
        is_moe = self.spec.moe_layers
        return [*(["moe"] if any(is_moe) else []), *([] if all(is_moe) else ["mlp", "mlp_act"])]

    def run_backbone(
        self, input_ids: Tensor, rope: Any, mask: Any, attention_mask: Tensor | None, stage: StageInput
    ) -> Tensor:
        token_mask = self._token_mask
        if token_mask is not None and self.parallel.sequence_parallel_enabled:
            token_mask = mappings.split_along_dim(token_mask.t(), 0, mappings.resolve_group(None))
        # ``forward`` reads the rows as soon as the base class returns.
        hidden, self._rows = self.backbone(input_ids, rope, mask, token_mask, stage)
        return hidden

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_logits: bool = False,
        cu_seqlens: Tensor | PackedDocuments | None = None,
        num_items_in_batch: Tensor | None = None,
        token_mask: Tensor | None = None,
        router_loss_weight: float | None = None,
        output_router_logits: bool = False,
        stage: StageInput = WHOLE_MODEL,
    ) -> MoECausalLMOutput:
        """Compute the loss, the logits, or both, as ``ParallelCausalLM.forward``.

        In training, the loss has the losses of the routers (``RouterStatistics.loss``) times
        ``router_loss_weight``, by default 1. With ``num_items_in_batch`` the default is this batch's
        share of it, the number of trained labels divided by ``num_items_in_batch``: over the batches
        of a step the shares add up to 1. For ``global_aux_loss``, whose terms have their tokens as
        weights, all shares are equal: 1 / batches inside ``balanced_over_step``, otherwise the mean
        over the data-parallel ranks.

        ``output_router_logits`` adds the routers' logits of all tensor-parallel ranks to the output, at the cost of
        an all-gather for each layer under sequence parallelism.

        ``token_mask``, ``[B, S]``, is 0 for tokens that do not count in the routers' losses, such as
        padding that is a document of its own; default ``attention_mask``.

        All data-parallel ranks of an expert-parallel group must call this method, forward and
        backward, equally often. With the ``allgather`` dispatcher their batches need equal shapes.
        """
        self._check_shapes(input_ids, token_mask=token_mask)
        if isinstance(router_loss_weight, float) and not math.isfinite(router_loss_weight):
            raise ValueError(f"router_loss_weight must be a finite number, got {router_loss_weight}")
        if cu_seqlens is not None:
            cu_seqlens = packed_documents(cu_seqlens, input_ids, attention_mask)
        self._token_mask = attention_mask if token_mask is None else token_mask
        with self._recorded_logits() if output_router_logits else nullcontext() as router_logits:
            output = super().forward(
                input_ids, labels, position_ids, attention_mask, return_logits, cu_seqlens, num_items_in_batch, stage
            )
        assert self._rows is not None
        statistics = RouterStatistics(self._rows)
        self._rows = self._token_mask = None
        router_loss = None
        loss = output.loss
        # A stage has the losses of its own routers, whether or not it has the head.
        if labels is not None and self.training:
            weight = router_loss_weight
            if weight is None:
                weight = self._share(labels, cu_seqlens, num_items_in_batch)
            router_loss = statistics.loss(self.moe) * weight
            if loss is not None:
                router_loss = router_loss.to(loss.dtype)
                loss = loss + router_loss
            self._require_backward_within_step(router_loss)
        kept = None if router_logits is None else tuple(router_logits)
        return MoECausalLMOutput(loss, output.logits, output.hidden, output.loss, router_loss, statistics, kept)

    @contextmanager
    def _recorded_logits(self) -> Iterator[list[Tensor]]:
        """Collect the logits of each router in the block, ``[B * S, E]`` as transformers has them."""
        found: list[Tensor] = []

        def record(module: nn.Module, inputs: Any, routing: Routing) -> None:
            logits = routing.logits.detach()
            if self.parallel.sequence_parallel_enabled:
                gathered = backend.all_gather(logits, mappings.resolve_group(None))  # [s, B, E] -> [S, B, E]
                logits = gathered.transpose(0, 1)
            found.append(logits.reshape(-1, logits.size(-1)))

        hooks = [layer.gate.register_forward_hook(record) for layer in self.moe_layers()]
        try:
            yield found
        finally:
            for hook in hooks:
                hook.remove()

    def _require_backward_within_step(self, router_loss: Tensor) -> None:
        """Raise RuntimeError in a backward that runs after the block of ``balanced_over_step`` of this forward."""
        step = self._step
        if step is None or not router_loss.requires_grad:
            return

        def check(_: Tensor) -> None:
            if self._step is not step:
                raise RuntimeError(
                    "the backward of a forward inside balanced_over_step runs outside of it, where a recomputed "
                    "layer has no means of the step: call backward() inside the block"
                )

        router_loss.register_hook(check)

    def _share(
        self, labels: Tensor, documents: PackedDocuments | None, num_items_in_batch: Tensor | None
    ) -> Tensor | float:
        """Return the default factor of the routers' losses."""
        if num_items_in_batch is None:
            return 1.0
        if self._step is not None:
            return 1 / len(self._step)
        # The labels that ``ParallelCausalLM`` trains: not the first ones of documents.
        if documents is not None:
            labels = labels.masked_fill(documents.positions() == 0, IGNORE_INDEX)
        share = (self._shifted(labels) != IGNORE_INDEX).sum() / num_items_in_batch.reshape(())
        if self.moe.moe_router_load_balancing_type == "global_aux_loss":
            group = parallel_state.get_data_parallel_group()
            share = backend.all_reduce(share, group) / backend.group_size(group)
        return share

    def router_metrics(self, statistics: RouterStatistics) -> dict[str, Tensor]:
        """Return values for logs, 0-dim on the device, of this data-parallel rank's batch.

        They are the sums of the losses over the layers, with coefficients, and the largest share of a
        layer's choices that one expert has, times the number of experts: 1 is a perfect balance. With
        ``moe_per_layer_logging`` also the values of each MoE layer.
        """
        counts = statistics.tokens_per_expert
        load = counts.amax(1) / counts.mean(1).clamp(min=1e-6)
        values = {"z_loss": statistics.z_losses.detach(), "max_load": load}
        values["load_balancing_loss"] = statistics.balancing_losses.detach()
        metrics = {f"moe/{name}": value.sum() for name, value in values.items()}
        metrics["moe/max_load"] = load.amax()
        if self.moe.moe_router_load_balancing_type == "hf_aux_loss":
            metrics["moe/load_balancing_loss"] = self.moe.moe_aux_loss_coeff * statistics.hf_loss().detach()
        if self.moe.moe_per_layer_logging:
            for name, value in values.items():
                for index, of_layer in enumerate(value.unbind()):
                    metrics[f"moe/{name}_layer_{index}"] = of_layer
        return metrics

    @contextmanager
    def balanced_over_step(self, batches: Sequence[Mapping[str, Any]]) -> Iterator[None]:
        """Give ``global_aux_loss`` the choices and tokens of an optimizer step inside the block.

        They must be known before its first backward: this runs the forward pass
        of all batches without gradients, and restores the random streams. One batch needs none.
        Forward and backward of the batches belong inside the block.

        Args:
            batches: keyword arguments of ``forward`` for each micro-batch of the step.

        Raises:
            ValueError: the balancing loss is of another type, or there is no batch.
        """
        kind = self.moe.moe_router_load_balancing_type
        if kind != "global_aux_loss":
            raise ValueError(
                "balanced_over_step is for moe_router_load_balancing_type 'global_aux_loss', "
                f"got {kind!r}: leave it out"
            )
        if not batches:
            raise ValueError("balanced_over_step needs the batches of the step, got none")
        # Costs one more forward of every batch, without the head. Backward does the work of two forwards: at most a
        # third of the step.
        means = self._step_means(batches)
        layers = self.moe_layers()
        for layer, of_layer in zip(layers, means, strict=True):
            layer.step_means = of_layer
        self._step = list(batches)
        try:
            yield
        finally:
            self._step = None
            for layer in layers:
                layer.step_means = None

    @torch.no_grad()
    def _step_means(self, batches: Sequence[Mapping[str, Any]]) -> Tensor:
        """Return f_e and the mean tokens of all batches of all data-parallel ranks, ``[layers, E + 1]``."""
        layers = self.moe_layers()
        # [layers, E + 1]: choices of each expert, and tokens.
        total = torch.zeros(len(layers), self.moe.num_moe_experts + 1, device=backend.device)
        backend.mark_step()
        with _same_random_streams():
            self._counts_only = True
            for layer in layers:
                layer.counts_scored = True
            try:
                for batch in batches:
                    router = self(**batch).router
                    total = total + torch.cat([router.tokens_per_expert, router.tokens.unsqueeze(1)], 1)
                    # One graph for the forward of every batch, however many the step has, and the seeds of
                    # the step's own forwards.
                    backend.mark_step()
            finally:
                self._counts_only = False
                for layer in layers:
                    layer.counts_scored = False
            # A mark changes the seed on XLA: the marks here are inside the block that restores it.
            with backend.outside_step():
                total = backend.all_reduce(total, parallel_state.get_data_parallel_group())
                return means_of_totals(total, len(batches) * parallel_state.get_data_parallel_size())

    def _fused_loss(self, hidden: Tensor, labels: Tensor, num_items_in_batch: Tensor | None) -> Tensor:
        if self._counts_only:  # the head is not needed, and costs as much as several layers
            return hidden.new_zeros((), dtype=torch.float32)
        return super()._fused_loss(hidden, labels, num_items_in_batch)


@contextmanager
def _same_random_streams() -> Iterator[None]:
    """Restore all random streams after the block, so that the next forward draws the same numbers."""
    states = random_states()
    try:
        yield
    finally:
        set_random_states(states)


def require_moe_memory(memory: MemoryConfig) -> None:
    """Raise ``ValueError`` if ``memory`` has a technique that layers with experts do not have."""
    if memory.mlp_tile_tokens is not None:
        raise ValueError(
            f"mlp_tile_tokens {memory.mlp_tile_tokens!r} has no tiles of mixture-of-experts layers: leave it out"
        )
    if memory.cpu_offloading_weights:
        raise ValueError(
            "cpu_offloading_weights=True fetches weights by the gradient of a layer's output, and layers of models "
            "with experts have two outputs: leave it out"
        )
