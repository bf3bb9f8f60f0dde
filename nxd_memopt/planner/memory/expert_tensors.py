"""The tensors that a mixture of experts keeps for backward: plain operations, or the kernels of GPUs."""

from __future__ import annotations

from nxd_memopt.architectures.experts import TILE_ROWS, MoESizes
from nxd_memopt.planner.sizes.rank_sizes import RankSizes

_INT32_BYTES = 4
_INT64_BYTES = 8
_ROUTER_BYTES = {"fp32": 4, "fp64": 8}
_NORMED = "normed mlp input"


def expert_tensors(sizes: RankSizes, moe: MoESizes, *, fused: bool = False, rounds: bool = False) -> dict[str, int]:
    """Return what router, dispatch and experts save, by name.

    The router's figures are of this rank's tokens. A row is the choice of an expert by a token, of all
    tokens that the tensor-parallel ranks have together.

    Args:
        sizes: sizes of the rank.
        moe: sizes of the experts.
        fused: GPUs' kernels compute the gated MLPs of the experts and of the shared expert, and
            their backward needs gate and up only.
        rounds: the experts round their operands to float8, and save what the kernels do on every device.
    """
    tensors = _router(sizes, moe) | _losses(sizes, moe) | _shared_expert(sizes, moe, fused=fused)
    if rounds or (fused and has_expert_kernels(sizes, moe)):
        return tensors | _rows_of_kernels(sizes, moe, fused=fused)
    return tensors | _rows(sizes, moe, fused=fused)


def has_expert_kernels(sizes: RankSizes, moe: MoESizes) -> bool:
    """Return whether the kernels of ``ops/cuda/experts.py`` support the experts.

    They have gates and exact numbers of rows, in bf16 or fp16. GPUs before Hopper, and sizes that no
    tile has, run plain operations, which this does not know.
    """
    is_padded = moe.options.moe_pad_expert_input_to_capacity
    has_blocks = moe.options.moe_expert_block_size is not None
    return not (moe.has_biases or is_padded or has_blocks) and sizes.element_bytes == 2


def _shared_expert(sizes: RankSizes, moe: MoESizes, *, fused: bool) -> dict[str, int]:
    """Return what the shared expert saves, as a dense MLP, and its gate."""
    if not moe.shared_width:
        return {}
    stream = sizes.residual_bytes
    width = sizes.tokens * moe.shared_width * sizes.element_bytes
    tensors = {_NORMED: stream}
    # ReLU's gradient needs its result, not its input.
    saves_input = sizes.hidden_act != "relu"
    if moe.has_biases:
        tensors |= {"shared activation": width} | ({"shared expanded": width} if saves_input else {})
    elif fused:
        tensors["shared gate, up"] = 2 * width
    else:
        tensors |= dict.fromkeys(("shared up", "shared activated gate", "shared activation"), width)
        tensors |= {"shared gate": width} if saves_input else {}
    if moe.options.moe_shared_expert_gate:
        tensors |= {"shared output": stream, "gate of the shared output": sizes.shard_tokens * sizes.element_bytes}
    return tensors


def _router(sizes: RankSizes, moe: MoESizes) -> dict[str, int]:
    """Return what the router and the sums of its statistics save."""
    number = moe.number_bytes
    scores = sizes.shard_tokens * moe.num_experts * number
    chosen = sizes.shard_tokens * moe.top_k * number
    per_token = sizes.shard_tokens * number
    tensors = _router_input(sizes, moe) | {
        "chosen experts": sizes.shard_tokens * moe.top_k * _INT64_BYTES,
        "weights of the choices": chosen,
    }
    options = moe.options
    if options.has_router_loss:
        tensors |= dict.fromkeys(("router logits", "scores"), scores)
        tensors |= dict.fromkeys(("log-sum-exps of the router", "counted tokens"), per_token)
    if options.moe_router_load_balancing_type == "sinkhorn" or options.moe_router_pre_softmax:
        # The weights are entries of the scores of all experts.
        tensors["weights of the choices"] = scores
    elif options.moe_router_score_function == "sigmoid":
        # Sigmoid scores are divided by their sum, for the weights and for the balance.
        tensors |= {"divisors of the weights": per_token, "sigmoid scores of the choice": scores}
        if options.has_router_loss:
            tensors["divisors of the scores"] = per_token
    return tensors


def _router_input(sizes: RankSizes, moe: MoESizes) -> dict[str, int]:
    """Return the operands of the router's matmul: its input, and copies in ``moe_router_dtype``."""
    stream = sizes.shard_tokens * sizes.hidden
    tensors: dict[str, int] = {}
    jitters = bool(moe.options.moe_input_jitter_eps)
    if jitters:
        tensors["jitter of the router"] = stream * sizes.element_bytes
    name = _NORMED
    if jitters:
        name = "jittered router input"
    element = _ROUTER_BYTES.get(moe.options.moe_router_dtype or "", sizes.element_bytes)
    if element == sizes.element_bytes:
        return tensors | {name: stream * element}
    weight = moe.num_experts * sizes.hidden * element
    return tensors | {"wide router input": stream * element, "wide router weight": weight}


def _losses(sizes: RankSizes, moe: MoESizes) -> dict[str, int]:
    """Return what the losses of a layer save: numbers for each expert, and for each sequence if it has a loss."""
    number = moe.number_bytes
    experts = moe.num_experts
    tensors: dict[str, int] = {}
    if moe.options.moe_z_loss_coeff:
        tensors["z-loss"] = 3 * number
    if not moe.options.has_aux_loss:
        return tensors
    kind = moe.options.moe_router_load_balancing_type
    if kind == "aux_loss":
        tensors["balancing loss"] = (2 + 4 * experts) * number
    elif kind == "global_aux_loss":
        tensors["balancing loss"] = (1 + experts) * number
    elif kind == "seq_aux_loss":
        per_sequence = (2 + 3 * experts) + 1 + 2 * experts
        tensors["balancing loss"] = sizes.micro_batch_size * per_sequence * number + _INT64_BYTES
    return tensors


def _rows(sizes: RankSizes, moe: MoESizes, *, fused: bool) -> dict[str, int]:
    """Return what dispatch and experts save."""
    element = sizes.element_bytes
    rows = moe.rows(sizes.tokens)
    is_padded = moe.options.moe_pad_expert_input_to_capacity
    block = moe.options.moe_expert_block_size
    ordered, index_bytes = rows, _INT32_BYTES
    # Without padding the order of all choices is sorted, of which a rank's rows are a view.
    if not is_padded and block is None:
        ordered, index_bytes = moe.gathered_tokens(sizes.tokens) * moe.top_k, _INT64_BYTES
    tensors = {
        "choices": ordered * index_bytes,
        "tokens to gather": rows * index_bytes,
        "tokens to add to": rows * index_bytes,
        "rows": rows * sizes.hidden * element,
        "activation of the rows": rows * moe.width * element,
        "outputs of the rows": rows * sizes.hidden * element,
        "weights of the rows": rows * moe.number_bytes,
        "weighted rows": rows * sizes.hidden * element,
    }
    tensors |= _activations(sizes, moe, rows, fused=fused)
    if is_padded or block is not None:
        tensors["which rows are tokens"] = rows * element
        if moe.has_biases:
            tensors["which weights are of tokens"] = rows * moe.number_bytes
    # A single expert has all blocks, and their numbers are not read.
    if block is not None and moe.local_experts > 1:
        tensors["experts of the blocks"] = rows // block * _INT32_BYTES
    if moe.sends_rows and not is_padded:
        # At the rank of the expert each row is a token of its own, with a weight of 1.
        order = dict.fromkeys(("arrived rows to gather", "arrived rows to add to"), rows * _INT64_BYTES)
        tensors |= order | {"weights of 1": rows * element, "added rows": rows * sizes.hidden * element}
    return tensors


def _rows_of_kernels(sizes: RankSizes, moe: MoESizes, *, fused: bool) -> dict[str, int]:
    """Return what dispatch and the kernels save: tokens instead of rows, and one output instead of all operands."""
    element = sizes.element_bytes
    rows = moe.rows(sizes.tokens)
    tokens = moe.gathered_tokens(sizes.tokens)
    choices = tokens * moe.top_k
    # Every expert has at most one tile that is not full; a CPU has none.
    tiles = 3 * (-(-rows // TILE_ROWS) + moe.local_experts) * int(fused)
    tensors = {
        "gate, up of the rows": rows * 2 * moe.width * element,
        "choices and tokens of the rows": 2 * rows * _INT32_BYTES,
        "ends and tiles of the rows": (2 * moe.local_experts + 2 + tiles) * _INT32_BYTES,
    }
    if moe.sends_rows:
        # Here the source adds up the rows that came back, in plain operations, and a row that has
        # arrived is a token with one choice of weight 1.
        return tensors | {
            "choices": choices * _INT64_BYTES,
            "tokens to gather": rows * _INT64_BYTES,
            "tokens to add to": rows * _INT64_BYTES,
            "arrived rows": rows * sizes.hidden * element,
            "rows of the choices": rows * _INT32_BYTES,
            "weights of 1": rows * element,
            "weights of the rows": rows * moe.number_bytes,
            # The outputs that came back, and their products with the weights.
            "weighted outputs": 2 * rows * sizes.hidden * element,
        }
    # With sequence or expert parallelism the tokens are a gathered copy, otherwise the router's input.
    is_copy = sizes.shards > 1 or moe.gathers_tokens
    name = "tokens of the experts" if is_copy else _NORMED
    tensors |= {name: tokens * sizes.hidden * element, "rows of the choices": choices * _INT32_BYTES}
    # A softmax over the chosen scores saves its result, the weights.
    options = moe.options
    saves_weights = options.moe_router_score_function == "softmax" and not options.moe_router_pre_softmax
    if is_copy or not saves_weights or options.moe_router_load_balancing_type == "sinkhorn":
        tensors["weights of the choices of all tokens"] = choices * moe.number_bytes
    return tensors


def _activations(sizes: RankSizes, moe: MoESizes, rows: int, *, fused: bool) -> dict[str, int]:
    """Return what the experts save besides the operands of their second matmul."""
    element = sizes.element_bytes
    if not moe.has_biases:
        tensors = {"gate, up of the rows": rows * 2 * moe.width * element}
        if not fused:
            tensors["activated gate of the rows"] = rows * moe.width * element
        return tensors
    # Each bias is added by a matmul with the experts of the rows; of the second one each tensor-parallel rank has a
    # part.
    tensors = {
        "experts of the rows": rows * moe.local_experts * element,
        "experts of the rows (outputs)": rows * moe.local_experts * element,
    }
    if sizes.hidden_act != "relu":
        tensors["expanded rows"] = rows * moe.width * element
    if sizes.tensor_model_parallel_size > 1:
        tensors["own part of the bias"] = sizes.tensor_model_parallel_size
    return tensors
