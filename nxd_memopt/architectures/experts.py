"""Sizes of a mixture of experts on one rank: the options of a model's config, and the rows of the experts."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from nxd_memopt.architectures.model_spec import ModelSpec, model_spec
from nxd_memopt.config import ParallelConfig, require_divisible
from nxd_memopt.moe_config import MoEConfig

BALANCED_ROUTING = "a balanced routing; a rank whose experts are chosen more often needs more memory"
"""What plans of expert parallelism assume, unless the shapes do not depend on the routing."""
TILE_ROWS = 128
"""Most rows of an expert that a matmul on GPUs computes at a time."""
MOST_EXPERTS = 1024
"""Experts of a rank for which one program of a GPU plans the tiles."""
FP32_BYTES = 4
_FP64_BYTES = 8
_COLUMNS_WORTH_A_COPY = 8192
_COPIES = 4  # for one gradient: a copy of all columns would add to backward's peak
_TILE_COLUMNS = 256


@dataclass(frozen=True)
class MoESizes:
    """Sizes of a mixture of experts on one rank.

    How many rows reach an expert depends on the routing, unless capacities with padding or blocks fix
    them. Otherwise the sizes follow from a balanced routing, in which every expert of every rank is
    chosen equally often. A rank whose experts are chosen more often needs more.

    Args:
        options: options of the layers.
        expert_ranks: EP, ranks over which the experts are divided.
        width: M/T, width of an expert.
        shared_width: W/T, width of the shared expert; 0 for none.
        has_biases: the experts are GPT-NeoX's MLPs with biases, without a gate.
    """

    options: MoEConfig
    expert_ranks: int
    width: int
    shared_width: int = 0
    has_biases: bool = False

    @property
    def num_experts(self) -> int:
        """E, experts of all ranks."""
        return self.options.num_moe_experts

    @property
    def local_experts(self) -> int:
        """Experts of this rank."""
        return self.num_experts // self.expert_ranks

    @property
    def top_k(self) -> int:
        """k, experts of a token."""
        return self.options.moe_router_topk

    @property
    def has_hf_loss(self) -> bool:
        """Whether transformers' balancing loss, over all layers together, is computed."""
        return self.options.moe_router_load_balancing_type == "hf_aux_loss" and self.options.has_aux_loss

    @property
    def number_bytes(self) -> int:
        """Bytes of the router's scores and of the statistics: fp32, or fp64 with a router in fp64."""
        return _FP64_BYTES if self.options.moe_router_dtype == "fp64" else FP32_BYTES

    @property
    def row_bytes(self) -> int:
        """Bytes of a layer's row of ``RouterStatistics``."""
        return (3 + 2 * self.num_experts) * self.number_bytes

    @property
    def gathers_tokens(self) -> bool:
        """Whether every rank gets the tokens of all expert-parallel ranks."""
        return self.expert_ranks > 1 and self.options.moe_token_dispatcher_type == "allgather"

    @property
    def sends_rows(self) -> bool:
        """Whether rows are sent to the ranks of their experts."""
        return self.expert_ranks > 1 and not self.gathers_tokens

    @property
    def depends_on_routing(self) -> bool:
        """Whether a rank can have more rows than a balanced routing gives it."""
        is_static = self.options.moe_pad_expert_input_to_capacity or self.options.moe_expert_block_size is not None
        return self.expert_ranks > 1 and not is_static

    def gathered_tokens(self, tokens: int) -> int:
        """Return how many tokens the experts of a rank choose from, of ``tokens`` of its own."""
        return tokens * self.expert_ranks if self.gathers_tokens else tokens

    def rows(self, tokens: int) -> int:
        """Return how many rows this rank's experts process.

        Args:
            tokens: tokens of a micro-batch, of all tensor-parallel ranks together.
        """
        moe = self.options
        # The rows of every expert are padded to full blocks.
        if moe.moe_expert_block_size is not None:
            gathered = tokens * self.expert_ranks
            blocks = most_blocks(gathered, self.top_k, self.local_experts, moe.moe_expert_block_size)
            return blocks * moe.moe_expert_block_size
        # Each of E/EP experts has capacity for the tokens of each of EP ranks.
        capacity = self.num_experts * self.capacity(tokens)
        if moe.moe_pad_expert_input_to_capacity:
            return capacity
        return min(tokens * self.top_k, capacity)

    def capacity(self, tokens: int) -> int:
        """Return how many of a rank's ``tokens`` an expert takes at most."""
        factor = self.options.moe_expert_capacity_factor
        if factor is None:
            return tokens
        return expert_capacity(tokens, self.top_k, self.num_experts, factor)


def moe_sizes(spec: ModelSpec, parallel: ParallelConfig, options: MoEConfig | None = None) -> MoESizes | None:
    """Return the sizes of the experts, or None for a dense model.

    Args:
        spec: the model.
        parallel: T and EP.
        options: options of the layers; None: the options of the model's config.

    Raises:
        ValueError: some layers are dense, or EP does not divide the experts.
    """
    if spec.experts is None or not spec.has_experts:
        return None
    # The planner has one kind of layer.
    if not all(spec.moe_layers):
        raise ValueError("a model with dense layers and layers with experts is not planned: plan one of either kind")
    expert_ranks = parallel.expert_model_parallel_size
    if options is None:
        options = _options(spec)
    require_divisible("num_moe_experts", options.num_moe_experts, "expert_model_parallel_size", expert_ranks)
    size = parallel.tensor_model_parallel_size
    shared_width = spec.experts.shared_width or 0
    return MoESizes(options, expert_ranks, spec.experts.width // size, shared_width // size, spec.is_gpt_neox)


def fixed_options(spec: ModelSpec) -> dict[str, Any]:
    """Return the options that follow from the config of a model with experts."""
    experts = spec.experts
    assert experts is not None, f"{spec.model_type} has no experts"
    frequency: int | tuple[int, ...] = 1
    if not all(spec.moe_layers):
        frequency = tuple(int(each) for each in spec.moe_layers)
    return {
        "moe_shared_expert_intermediate_size": experts.shared_width,
        "moe_shared_expert_gate": experts.has_shared_gate,
        "num_moe_experts": experts.num_experts,
        "moe_router_topk": experts.top_k,
        "moe_ffn_hidden_size": experts.width,
        "moe_router_pre_softmax": experts.has_pre_softmax,
        "moe_layer_freq": frequency,
    }


def require_option_of(
    config: Any, name: str, value: object, remedy: str = "leave it out, or change the config"
) -> None:
    """Raise ``ValueError`` unless ``value`` is the value in the config of a model with experts.

    Args:
        config: as an object or as a complete mapping.
        name: an option of ``fixed_options``.
        value: what was given for it.
        remedy: what to do if it differs.
    """
    fixed = fixed_options(model_spec(config))[name]
    if value != fixed:
        of_model = type(config).__name__
        if isinstance(config, Mapping):
            of_model = f"the config of {config['model_type']}"
        raise ValueError(f"{name} {value!r} contradicts {of_model}, which says {fixed!r}: {remedy}")


def options_of(config: Any, **given: Any) -> MoEConfig:
    """Return the options of Hugging Face's ``config``, with its balancing loss if it outputs the routers' logits.

    Args:
        config: as an object or as a complete mapping.
        **given: options that replace options of ``config``.
    """
    return _options(model_spec(config), **given)


def _options(spec: ModelSpec, **given: Any) -> MoEConfig:
    experts = spec.experts
    assert experts is not None, f"{spec.model_type} has no experts"
    balancing = "hf_aux_loss" if experts.aux_loss_coeff else "none"
    options: dict[str, Any] = {
        **fixed_options(spec),
        "moe_router_load_balancing_type": balancing,
        "moe_aux_loss_coeff": experts.aux_loss_coeff,
        "moe_input_jitter_eps": experts.input_jitter,
    }
    return MoEConfig(**(options | given))


def expert_capacity(tokens: int, top_k: int, num_experts: int, factor: float) -> int:
    """Return ``ceil(tokens * k / E * factor)``, at most ``tokens``.

    Args:
        tokens: tokens of a micro-batch, of all tensor-parallel ranks together.
        top_k: k, experts of a token.
        num_experts: E.
        factor: capacity factor; 1 is an even distribution without padding.
    """
    # An expert occurs at most once among the choices of a token, so it never has more than all.
    return min(math.ceil(tokens * top_k / num_experts * factor), tokens)


def most_blocks(tokens: int, top_k: int, num_experts: int, block_size: int) -> int:
    """Return how many blocks the choices of ``tokens`` tokens fill at most, whatever the routing.

    The blocks are ``sum_e ceil(n_e / B)``, with ``n_e`` of at most N choices for each of the E experts and at most
    ``N min(k, E)`` together: at most ``(N min(k, E) + E (B - 1)) / B`` and ``E ceil(N / B)``.

    Args:
        tokens: N.
        top_k: k, different experts of a token.
        num_experts: E, the experts of this rank.
        block_size: B.
    """
    choices = tokens * min(top_k, num_experts)
    return min((choices + num_experts * (block_size - 1)) // block_size, num_experts * -(-tokens // block_size))


def copies_rows(columns: int) -> bool:
    """Return whether an expert's matmul with this many columns reads a copy of the tokens' rows, on GPUs.

    It is 4 to 10 % faster than one that gathers the rows (bf16, H200). The copy moves 4 bytes per
    number, in the time of about 350 columns of the matmul.
    """
    return columns >= _COLUMNS_WORTH_A_COPY


def copied_columns(hidden: int) -> int:
    """Return how many of the tokens' columns are copied at a time for the gradient of the first weights."""
    return min(hidden, -(-hidden // (_COPIES * _TILE_COLUMNS)) * _TILE_COLUMNS)
