"""Recomputation: bytes kept for backward, FLOPs spent in it, and refusals. One process."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import recompute
from nxd_memopt.memory.recompute import apply_recompute, checkpoint, is_recomputed, remove_recompute
from nxd_memopt.parallel_layers.wrapping import wrapper_of
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model, qwen3_moe_config

LAYERS, HIDDEN, WIDTH, HEADS, ROWS, LENGTH = 4, 32, 44, 8, 3, 12
FULL = {"recompute_granularity": "full"}
CORE_ATTN = {"recompute_granularity": "selective", "recompute_modules": ("core_attn",)}


def model(**options):
    config = llama_config(num_hidden_layers=LAYERS)
    return parallel_model(config, **{"attention_backend": "math", **options})


def saved_bytes(net: torch.nn.Module, inputs: dict[str, torch.Tensor]) -> int:
    """Bytes of distinct storages that autograd keeps for backward, parameters apart."""
    own = {param.untyped_storage().data_ptr() for param in net.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor  # alive, so that no address is used twice
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = net(**inputs).loss
    del loss
    return sum(t.untyped_storage().nbytes() for pointer, t in kept.items() if pointer not in own)


@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_bytes_kept(config):
    """Full < selective < none; and of a longer sequence only core attention's grow with its square."""
    kept = {}
    for name, options in {"none": {}, "selective": CORE_ATTN, "full": FULL}.items():
        net = parallel_model(config(num_hidden_layers=LAYERS), attention_backend="math", **options)
        kept[name] = [saved_bytes(net, batch(length=length)) for length in (64, 128)]
    for i in range(2):
        assert kept["full"][i] < kept["selective"][i] < kept["none"][i]
    growth = {name: long / short for name, (short, long) in kept.items()}
    assert growth["none"] > 2.5, "S x S scores outweigh what is linear in S"
    assert growth["selective"] < 2.01, "what is left is linear in S, but for the rotary tables and the like"


def test_full_recompute_keeps_one_hidden_state_per_layer_or_chunk():
    """B * S * H fp32 numbers."""
    per_layer = ROWS * LENGTH * HIDDEN * 4
    few, many = (saved_bytes(parallel_model(llama_config(num_hidden_layers=n), **FULL), batch()) for n in (2, LAYERS))
    assert many - few == (LAYERS - 2) * per_layer
    uniform = {**FULL, "recompute_method": "uniform", "recompute_num_layers": 2}
    assert many - saved_bytes(parallel_model(llama_config(num_hidden_layers=LAYERS), **uniform), batch()) == (
        LAYERS // 2 * per_layer
    )


def backward_flops(**options) -> int:
    net = model(**options)
    loss = net(**batch()).loss
    with FlopCounterMode(display=False) as counter:
        loss.backward()
    return counter.get_total_flops()


def test_backward_flops_show_the_recomputation():
    """Hand-counted: 2mnk for each matmul of the layers' forward pass."""
    tokens, head = ROWS * LENGTH, HIDDEN // HEADS
    qkv = 2 * tokens * HIDDEN * (HIDDEN + 2 * 2 * head)
    scores = context = 2 * ROWS * HEADS * LENGTH * LENGTH * head
    output = 2 * tokens * HIDDEN * HIDDEN
    gate_and_up = 2 * (2 * tokens * HIDDEN * WIDTH)
    down = 2 * tokens * WIDTH * HIDDEN
    none = backward_flops()
    # a recomputation stops where its last tensor is saved: before the matmul whose result nobody needs
    assert backward_flops(**CORE_ATTN) - none == LAYERS * scores
    layer = qkv + scores + context + output + gate_and_up
    assert backward_flops(**FULL) - none == LAYERS * layer
    block = {**FULL, "recompute_method": "block", "recompute_num_layers": 1}
    assert backward_flops(**block) - none == layer
    uniform = {**FULL, "recompute_method": "uniform", "recompute_num_layers": LAYERS}
    assert backward_flops(**uniform) - none == LAYERS * (layer + down) - down
    norms = {"recompute_granularity": "selective", "recompute_modules": ("norm", "mlp_act")}
    assert backward_flops(**norms) == none, "no matmul in norms and activations"


@pytest.mark.parametrize(
    ("modules", "of_a_layer"),
    [(("norm", "mlp_act"), {"input_layernorm", "post_attention_layernorm", "mlp.act"}), (("mlp",), {"mlp"})],
)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_block_recomputes_the_modules_of_the_first_layers(config, modules, of_a_layer):
    memory = {"recompute_granularity": "selective", "recompute_modules": modules}
    for number in (1, 3, LAYERS):
        block = {**memory, "recompute_method": "block", "recompute_num_layers": number}
        layers = parallel_model(config(num_hidden_layers=LAYERS), **block).decoder_layers()
        for index, layer in enumerate(layers):
            found = {name for name, module in layer.named_modules() if is_recomputed(module)}
            assert found == (of_a_layer if index < number else set()), f"layer {index} of {number}"


def test_block_without_a_named_module_is_refused():
    """Layer 0 of this model has experts and no dense MLP."""
    memory = {"recompute_granularity": "selective", "recompute_modules": ("mlp",), "recompute_method": "block"}
    config = qwen3_moe_config(num_hidden_layers=2)
    message = error_message(lambda: parallel_model(config, **memory, recompute_num_layers=1))
    assert_says(message, "'mlp'", "first recompute_num_layers 1 layers", "'moe'")
    net = parallel_model(config, **memory, recompute_num_layers=2)
    assert [is_recomputed(layer.mlp) for layer in net.decoder_layers()] == [False, True]


def test_applying_again_replaces_and_removing_undoes():
    plain = backward_flops()
    net = model(**FULL)
    for change in (lambda: apply_recompute(net, MemoryConfig()), lambda: remove_recompute(net)):
        apply_recompute(net, MemoryConfig(**FULL))
        apply_recompute(net, MemoryConfig(**FULL))
        change()
        loss = net(**batch()).loss
        with FlopCounterMode(display=False) as counter:
            loss.backward()
        assert counter.get_total_flops() == plain


def test_without_gradients_nothing_is_kept():
    x = torch.ones(3, requires_grad=True)
    with torch.no_grad():
        assert not checkpoint(torch.exp, x).requires_grad


def test_fused_attention_is_said_to_save_nothing():
    with pytest.warns(UserWarning, match="saves no memory"):
        model(attention_backend="auto", **CORE_ATTN)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(attention_backend="math", **CORE_ATTN)


def test_kept_attention_with_dropout_is_refused():
    """The kernel is not run again, and the dropout after it would draw other numbers than in forward."""
    attention = torch.nn.Module()
    attention.implementation, attention.dropout = "flash", 0.1
    message = error_message(lambda: recompute._require_keepable([attention]))
    assert_says(message, "attention without dropout", "attention_dropout is 0.1", "set attention_dropout to 0")
    attention.dropout = 0.0
    recompute._require_keepable([attention])


class CountAttention(TorchDispatchMode):
    """How often a fused attention kernel's forward runs."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.name()
        self.count += "_scaled_dot_product" in name and "backward" not in name
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("chunk", [{}, {"recompute_method": "uniform", "recompute_num_layers": 2}], ids=str)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_kept_attention_runs_once(config, chunk):
    results, counts = {}, {}
    variants = {"none": {}, "full": {**FULL, **chunk}, "kept": {**FULL, **chunk, "recompute_keep_core_attn": True}}
    for name, options in variants.items():
        torch.manual_seed(0)
        net = parallel_model(config(num_hidden_layers=LAYERS), attention_backend="sdpa", **options)
        with CountAttention() as attention:
            net(**batch()).loss.backward()
        counts[name], results[name] = attention.count, {n: p.grad for n, p in net.named_parameters()}
    assert counts == {"none": LAYERS, "full": 2 * LAYERS, "kept": LAYERS}
    for name, value in results["none"].items():
        assert torch.equal(results["kept"][name], value), name


@pytest.mark.parametrize("block", [None, 3])
def test_attention_is_kept_in_the_last_recomputed_layers(block):
    """The kernel runs again in the layers before them, and in no layer that is not recomputed."""
    chunk = {} if block is None else {"recompute_method": "block", "recompute_num_layers": block}
    kept = {"recompute_keep_core_attn": 2}
    net = model(**FULL, **chunk, **kept, attention_backend="sdpa")
    with CountAttention() as attention:
        loss = net(**batch()).loss
        forward = attention.count
        loss.backward()
    assert forward == LAYERS
    assert attention.count == LAYERS + (block or LAYERS) - 2
    saved = [is_recomputed(layer) for layer in net.decoder_layers()]
    assert saved == [i < (block or LAYERS) for i in range(LAYERS)]
    wrappers = [wrapper_of(layer, "traced_recompute") is not None for layer in net.decoder_layers()]
    last = block or LAYERS
    assert wrappers == [last - 2 <= i < last for i in range(LAYERS)]
    memory = MemoryConfig(**FULL, **chunk, **kept | {"recompute_keep_core_attn": last + 1})
    message = error_message(lambda: apply_recompute(net, memory))
    assert_says(message, "recompute_keep_core_attn", str(last + 1), str(last), "lower it")


def test_attention_that_is_no_single_kernel_cannot_be_kept():
    for backend in ("math", "tiled"):
        with pytest.raises(ValueError, match=f"recompute_keep_core_attn needs .*{backend}"):
            model(**FULL, recompute_keep_core_attn=True, attention_backend=backend)
    with pytest.raises(ValueError, match="needs recompute_granularity 'full', got None"):
        MemoryConfig(recompute_keep_core_attn=True)
