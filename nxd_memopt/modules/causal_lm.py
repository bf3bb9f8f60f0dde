"""Base of causal language models: input checks, head, loss and output."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.architectures.model_spec import model_spec, rope_options
from nxd_memopt.architectures.parameters import require_shardable
from nxd_memopt.architectures.stages import rank_stages
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.modules.factory import resolve_memory, resolve_parallel
from nxd_memopt.modules.stages import WHOLE_MODEL, StageBuilder, StageInput
from nxd_memopt.ops.math_attention import padding_and_causal_mask
from nxd_memopt.ops.packed import PackedDocuments, packed_documents
from nxd_memopt.ops.rope import RotaryEmbedding
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.fusion import FusedPath, FusibleModule, Fusions
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear
from nxd_memopt.parallel_layers.loss_functions import fused_linear_cross_entropy, parallel_cross_entropy
from nxd_memopt.parallel_layers.mappings import gather_from_tensor_model_parallel_region, require_equal_shards

IGNORE_INDEX = -100


@dataclass
class CausalLMOutput:
    """Output of a causal language model.

    Args:
        loss: mean cross entropy over the labels that are not ignored (or their sum divided by
            ``num_items_in_batch``), fp32, the same on every tensor-parallel rank; None without
            labels.
        logits: ``[B, S, V]``; None if labels are given and logits are not requested.
        hidden: ``[B, S, H]`` or ``[s, B, H]``, of a pipeline stage that is not the last, which has nothing else.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    hidden: Tensor | None = None


class ParallelCausalLM(FusibleModule, ABC):
    """Backbone (embedding, decoder layers, final norm) and a vocabulary-parallel head.

    A model's class builds its backbone with ``builder``, then calls ``add_head`` and ``apply_memory``:

    - Modules are built in one order on all ranks, because with CPU initialization they draw from one random stream.
    - Recompute and offload come last, because they replace the forward of finished modules.

    Args:
        config: Hugging Face config.
        parallel: default T and EP of the process groups, with sequence parallelism as in
            ``config.sequence_parallel_enabled``. With a pipeline-parallel size above 1 the model has only the layers
            of this rank's stages, under the names of the full model.
        memory: memory techniques to apply; default NxD's switch in ``config``.

    Raises:
        ValueError: sizes differ from the process groups, or T does not divide heads, KV heads or the MLP's width.
    """

    has_experts: ClassVar[bool] = False
    attention_name: ClassVar[str]
    """Hugging Face's name of the attention module of a decoder layer."""
    lm_head: ColumnParallelLinear
    """The head; missing (None) on ranks of a pipeline without the last stage."""
    lora_config: LoraConfig | None = None
    """The adapters that ``add_adapters`` has added; None without."""
    fusions: Fusions
    """The fused paths of the model; ``describe()`` lists which are on."""

    def __init__(self, config: Any, *, parallel: ParallelConfig | None, memory: MemoryConfig | None) -> None:
        super().__init__()
        wants_sequence = getattr(config, "sequence_parallel_enabled", False)
        parallel = resolve_parallel(parallel, sequence_parallel_enabled=wants_sequence, has_experts=self.has_experts)
        self.config = config
        self.spec = model_spec(config)
        require_shardable(self.spec, parallel.tensor_model_parallel_size)
        self.parallel = parallel
        self.memory = resolve_memory(memory, config)
        self.stages = rank_stages(self.spec, parallel, parallel_state.get_pipeline_model_parallel_rank())
        self.rope = RotaryEmbedding(self.spec.rotary_dim, rope_options(config), config.max_position_embeddings)

    @property
    @abstractmethod
    def backbone(self) -> Any:
        """The backbone module, under Hugging Face's name.

        It maps ids, RoPE tables and mask to normalized hidden states ``[B, S, H]`` (``[s, B, H]``
        under sequence parallelism). Its ``layers`` are the decoder layers.
        """

    @abstractmethod
    def embedding_weight(self) -> nn.Parameter:
        """Return the input embedding's table ``[V/T, H]``, which a tied head shares."""

    def any_weight(self) -> nn.Parameter:
        """Return a weight with the dtype of the activations: the embedding's, or one of the first layer of a stage."""
        if self.stages.has_embedding:
            return self.embedding_weight()
        # of one byte: weights that are stored in float8
        return next(each for each in self.decoder_layers()[0].parameters() if each.itemsize > 1)

    def builder(self, dtype: torch.dtype | None, device: torch.device | str | None) -> StageBuilder:
        """Return the builder of the model's modules; None is torch's default dtype or device."""
        return StageBuilder(self.config, self.spec, self.stages, self.parallel, dtype, device)

    def add_head(self, builder: StageBuilder) -> None:
        """Build ``lm_head``, the last module. If tied, it shares the embedding's table, which is sharded equally."""
        self.lm_head = builder.head(self.embedding_weight)
        if self.stages.has_head:
            self.fused_loss = FusedPath(
                self,
                "head with loss",
                {"lm_head": ColumnParallelLinear},
                cost="the logits are stored for backward",
                unavailable=None if self.memory.fused_linear_cross_entropy else "fused_linear_cross_entropy is False",
            )
        # Last: it lists the fused paths of all modules that exist now.
        self.fusions = Fusions(self)

    def decoder_layers(self) -> list[Any]:
        """Return the decoder layers, in order."""
        return list(self.backbone.layers)

    def dense_mlps(self) -> list[Any]:
        """Return the MLPs of the decoder layers, without mixtures of experts."""
        return [layer.mlp for layer in self.decoder_layers()]

    def modules_after_layers(self) -> list[nn.Module]:
        """Return the modules whose parameters are used after the last decoder layer only: a head that is not tied."""
        return [] if self.config.tie_word_embeddings else [self.lm_head]

    def recompute_modules(self) -> dict[str, list[nn.Module]]:
        """Return, for each name in ``config.RECOMPUTE_MODULES``, the modules of all layers."""
        # Names of submodules are the same in all models, except for the attention, which has
        # Hugging Face's name. The modules of one name are recomputed one by one, not as a group.
        layers = self.decoder_layers()
        mlps = self.dense_mlps()
        attention = [getattr(layer, self.attention_name) for layer in layers]
        return {
            "core_attn": [module.core_attn for module in attention],
            "attn": attention,
            "norm": [norm for layer in layers for norm in (layer.input_layernorm, layer.post_attention_layernorm)],
            "mlp_act": [mlp.act for mlp in mlps],
            "mlp": mlps,
        }

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor | None = None,
        position_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        return_logits: bool = False,
        cu_seqlens: Tensor | PackedDocuments | None = None,
        num_items_in_batch: Tensor | None = None,
        stage: StageInput = WHOLE_MODEL,
    ) -> CausalLMOutput:
        """Compute the loss, the logits, or both.

        Args:
            input_ids: ``[B, S]``, the same on every tensor-parallel rank.
            labels: ``[B, S]``, usually ``input_ids``. They are shifted here, and -100 is ignored.
                The loss is 0 if all labels are ignored.
            position_ids: ``[B, S]`` or ``[1, S]``; default 0 .. S-1, or with ``cu_seqlens`` the
                position in each document.
            attention_mask: ``[B, S]``, 0 for padding; default None, which allows fused attention
                kernels.
            return_logits: with labels, return logits in addition to the loss.
            cu_seqlens: ``[N + 1]`` integers, the starts of N documents in the batch's B * S tokens
                (row after row), followed by B * S (``ops.packed``), or ``PackedDocuments``. Tokens
                attend only to their own document, and the first token of a document is not
                predicted.
            num_items_in_batch: divisor of the loss, on the device, 0-dim or ``[1]``; default the
                number of labels that are not ignored. The losses of several batches with one
                divisor add up to the mean over all their tokens, in any split into batches.
            stage: what a rank of a pipeline computes; all other arguments are those of the full model.

        Raises:
            ValueError: T does not divide S under sequence parallelism, shapes differ, or
                a document of ``cu_seqlens`` crosses the end of a row or is given with
                ``attention_mask``.
            RuntimeError: the process groups have another tensor-parallel size than the model.
        """
        self.fusions.begin_forward()
        self._check_shapes(input_ids, labels=labels, attention_mask=attention_mask)
        documents = None
        if cu_seqlens is not None:
            documents = packed_documents(cu_seqlens, input_ids, attention_mask)
        length = input_ids.size(1)
        self.rope.require_one_length(length, packed=cu_seqlens is not None, positions_given=position_ids is not None)
        if position_ids is None and documents is not None:
            position_ids = documents.positions()
        elif position_ids is None:
            position_ids = torch.arange(length, device=input_ids.device).unsqueeze(0)
        elif position_ids.shape not in (input_ids.shape, (1, length)):
            raise ValueError(
                f"position_ids has shape {list(position_ids.shape)}, input_ids {list(input_ids.shape)}: "
                "must agree, or have a leading 1"
            )
        # Computed once and shared by all layers, in the dtype of the embedding's weight, which is
        # the dtype of the activations: wider tables would promote queries and keys.
        rope = self.rope.tables(position_ids, length, self.any_weight().dtype)
        mask = documents
        if attention_mask is not None:
            mask = padding_and_causal_mask(attention_mask)
        # Each document's first token would be predicted from the document before it.
        if documents is not None and labels is not None:
            labels = labels.masked_fill(documents.positions() == 0, IGNORE_INDEX)
        hidden = self.run_backbone(input_ids, rope, mask, attention_mask, stage)
        if not self.stages.is_last(stage.chunk):
            return CausalLMOutput(hidden=hidden)
        # logits / c = (hidden / c) W^t: the division before the head is in every loss and its gradients, and reads
        # H numbers of a token, not V. Granite's c is a power of two, by which the division is exact.
        if self.spec.logits_scaling is not None:
            hidden = hidden / self.spec.logits_scaling
        # The fused loss never stores all logits; it is not possible if the caller needs them.
        if labels is not None and not return_logits and self.fused_loss.is_active:
            return CausalLMOutput(self._fused_loss(hidden, labels, num_items_in_batch))
        logits = self.lm_head(hidden)  # [B, S, V/T] or [S, B, V/T]
        output = CausalLMOutput()
        if labels is not None:
            output.loss = self._loss(logits, labels, num_items_in_batch)
        # An all-gather of [B, S, V/T] from each rank: only if the caller uses the logits.
        if labels is None or return_logits:
            output.logits = self._gather_logits(logits)
        return output

    def run_backbone(
        self, input_ids: Tensor, rope: Any, mask: Any, attention_mask: Tensor | None, stage: StageInput
    ) -> Tensor:
        """Return the backbone's hidden states; ``mask`` has ``attention_mask`` already."""
        return self.backbone(input_ids, rope, mask, stage)

    def _check_shapes(self, input_ids: Tensor, **others: Tensor | None) -> None:
        """Raise if shapes differ, T differs from the process groups, or T does not divide S."""
        if input_ids.dim() != 2:
            raise ValueError(f"input_ids must be [B, S], got {list(input_ids.shape)}")
        for name, tensor in others.items():
            if tensor is not None and tensor.shape != input_ids.shape:
                raise ValueError(
                    f"{name} has shape {list(tensor.shape)}, input_ids {list(input_ids.shape)}: must agree"
                )
        size = self.parallel.tensor_model_parallel_size
        if parallel_state.get_tensor_model_parallel_size() != size:
            raise RuntimeError(
                f"the model was built for tensor_model_parallel_size {size}, the process groups have "
                f"{parallel_state.get_tensor_model_parallel_size()}: build the model again"
            )
        if self.parallel.sequence_parallel_enabled:
            require_equal_shards(input_ids.size(1), size)

    def _fused_loss(self, hidden: Tensor, labels: Tensor, num_items_in_batch: Tensor | None) -> Tensor:
        return fused_linear_cross_entropy(
            hidden,
            self.lm_head.weight,
            self._shifted(labels),
            ignore_index=IGNORE_INDEX,
            vocab_size=self.config.vocab_size,
            sequence_parallel_enabled=self.parallel.sequence_parallel_enabled,
            reduce_dtype=self.lm_head.reduce_dtype,
            num_items_in_batch=num_items_in_batch,
        )

    def _shifted(self, labels: Tensor) -> Tensor:
        """Return next-token labels, ``[B, S]``, or ``[S, B]`` under sequence parallelism."""
        # Position i predicts token i + 1; the last position has no next token and is ignored. The
        # length stays S, so T still divides it.
        labels = F.pad(labels, (0, 1), value=IGNORE_INDEX)[:, 1:]
        if self.parallel.sequence_parallel_enabled:
            labels = labels.t()
        return labels

    def _loss(self, logits: Tensor, labels: Tensor, num_items_in_batch: Tensor | None) -> Tensor:
        """Return the mean cross entropy of the logits ``[B, S, V/T]`` (``[S, B, V/T]``)."""
        labels = self._shifted(labels)
        # Under sequence parallelism too, every rank has the logits of the full sequence here, for
        # its shard of the vocabulary: the mean needs no further collective.
        losses = parallel_cross_entropy(logits, labels, ignore_index=IGNORE_INDEX, vocab_size=self.config.vocab_size)
        if num_items_in_batch is not None:
            return (losses / num_items_in_batch).sum()
        # clamp: 0 instead of NaN if all labels are ignored.
        return losses.sum() / (labels != IGNORE_INDEX).sum().clamp(min=1)

    def _gather_logits(self, logits: Tensor) -> Tensor:
        """All-gather the logits over the vocabulary: ``[B, S, V]``, without padding columns."""
        if self.parallel.sequence_parallel_enabled:
            logits = logits.transpose(0, 1)
        return gather_from_tensor_model_parallel_region(logits)[..., : self.config.vocab_size]
