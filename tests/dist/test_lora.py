"""Adapters (LoRA) against PEFT on transformers' models: loss, gradients of the adapters, files, merged exports."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from nxd_memopt.checkpoint import TrainingState, save_pretrained, save_training_state
from nxd_memopt.checkpoint.huggingface.adapters import save_adapters
from nxd_memopt.checkpoint.sharded.index import Index
from nxd_memopt.checkpoint.sharded.loading import load_weights
from nxd_memopt.modules import mlp
from nxd_memopt.modules.lora import LoraConfig, add_adapters, is_adapter
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from tests.dist.pool import distributed
from tests.reference import assert_same_on_all_ranks, relative_error
from tests.reference_models import (
    CONFIGS,
    batch,
    full_parameters,
    gathered,
    hugging_face,
    local_part,
    parallel_model,
    separate,
)

# As in test_models.py: fp32, sums in another order.
TOLERANCE = 1e-5
LLAMA = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
NEOX = ("query_key_value", "attention.dense", "dense_h_to_4h", "dense_4h_to_h")


PHI3 = ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")


def targets_of(name: str) -> tuple[str, ...]:
    return {"neox": NEOX, "phi3": PHI3}.get(name.partition(" ")[0], LLAMA)


def initialize(size: int) -> None:
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=size)


def of_peft(base: nn.Module, targets: tuple[str, ...], **options: Any) -> tuple[nn.Module, dict[str, nn.Parameter]]:
    """PEFT's model of rank 3, with random factors, and these by our names."""
    model: nn.Module = peft.get_peft_model(
        base,  # pyright: ignore[reportArgumentType]
        peft.LoraConfig(r=3, lora_alpha=5, target_modules=list(targets), **options),
    )
    torch.manual_seed(7)
    factors = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            nn.init.normal_(parameter, std=0.2)
            factors[name.removeprefix("base_model.model.").replace(".default", "")] = parameter
    return model, factors


def part(name: str, full: Tensor, config: Any) -> Tensor:
    """This rank's part of a full factor: A of row-parallel and B of column-parallel layers are sharded."""
    stem, factor, _ = name.rsplit(".", 2)
    is_row = stem.endswith(("o_proj", "down_proj", "dense", "dense_4h_to_h"))
    is_sharded = (factor == "lora_A") == is_row
    return local_part(f"{stem}.weight", full, config) if is_sharded else full


def with_adapters(config: Any, full: dict[str, Tensor], factors: dict[str, Any], targets: Any, **options: Any) -> Any:
    """Our model with this rank's part of PEFT's factors."""
    lora = LoraConfig(3, 5, target_modules=targets, use_rslora=options.pop("use_rslora", False))
    model = parallel_model(config, full, **options)
    assert len(add_adapters(model, lora)) == len(factors) / 2
    factors = separate(factors, config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if is_adapter(name):
                parameter.copy_(part(name, factors[name], config))
    return model


def check_against_peft(
    name: str, *, sequence_parallel: bool = False, targets: tuple[str, ...] = (), **options: Any
) -> None:
    config = CONFIGS[name]()
    base = hugging_face(config)
    full = full_parameters(base)
    targets = targets or targets_of(name)
    reference, factors = of_peft(base, targets, use_rslora=options.get("use_rslora", False))
    expected = reference(**batch()).loss
    expected.backward()
    model = with_adapters(config, full, factors, targets, sequence_parallel=sequence_parallel, **options)
    assert relative_error(model(**batch(), return_logits=True).loss, expected) < TOLERANCE
    loss = model(**batch()).loss
    assert relative_error(loss, expected) < TOLERANCE
    if dist.is_initialized():
        assert_same_on_all_ranks(loss, "loss")
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    trained = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    wanted = separate({each: factor.grad for each, factor in factors.items()}, config)
    assert trained == set(wanted)
    for each, parameter in model.named_parameters():
        if not is_adapter(each):
            assert parameter.grad is None, each
            continue
        want = wanted[each]
        assert parameter.grad is not None
        error = (parameter.grad - part(each, want, config)).norm() / want.norm()
        assert error < TOLERANCE, f"gradient of {each}: relative error {error:.1e}"


MODELS = [
    "llama",
    "granite",
    "phi3",
    "qwen2 tied, window in the second layer",
    "llama biases, gelu",
    "neox",
    "neox sequential residual",
]


@pytest.mark.parametrize("name", MODELS)
def test_one_process_is_peft(name: str) -> None:
    check_against_peft(name, use_rslora=name == "llama")


@distributed(world_size=[1, 2])
@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("llama", ("q_proj", "v_proj")),
        ("llama", ("gate_proj",)),
        ("llama", ("k_proj", "down_proj")),
        ("phi3", ("qkv_proj",)),
        ("phi3", ("gate_up_proj", "o_proj")),
        ("neox", ("dense_4h_to_h",)),
    ],
)
def test_some_layers_are_peft(name: str, targets: tuple[str, ...]) -> None:
    """The others keep no input, and what is before the first adapter has no gradient."""
    initialize(dist.get_world_size())
    check_against_peft(name, sequence_parallel=dist.get_world_size() > 1, targets=targets)


@distributed(world_size=2, slow=[4])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("name", ["llama", "llama one KV head", "phi3", "neox"])
def test_ranks_are_peft(world_size: int, name: str, sequence_parallel: bool) -> None:
    """Ranks that have one KV head, all with a single head and two at T=4, sum its gradients."""
    initialize(world_size)
    check_against_peft(name, sequence_parallel=sequence_parallel)


@distributed(world_size=2)
@pytest.mark.parametrize(
    "options",
    [
        {"recompute_granularity": "full"},
        {"recompute_granularity": "selective", "recompute_modules": ("core_attn", "norm", "mlp")},
    ],
    ids=["full", "selective"],
)
def test_recompute_is_peft(options: dict[str, Any]) -> None:
    initialize(2)
    check_against_peft("llama", sequence_parallel=True, **options)


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("options", [{}, {"recompute_granularity": "full"}], ids=["none", "full"])
@pytest.mark.parametrize("targets", [LLAMA, ("up_proj", "o_proj"), ("down_proj",)])
def test_the_gated_kernels_path_is_peft(targets: tuple[str, ...], options: dict[str, Any]) -> None:
    """The path of GPUs through plain operations: adapters of each layer keep it on, dropout turns it off."""
    size = dist.get_world_size()
    initialize(size)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(mlp, "unavailable_reason", lambda device: None)
        patch.setattr(mlp, "can_use_triton", lambda *tensors: True)
        check_against_peft("llama", sequence_parallel=size > 1, targets=targets, **options)
        described = []
        model_parallel_manual_seed(3)
        for dropout in (0.0, 0.1):
            model = parallel_model(CONFIGS["llama"]())
            add_adapters(model, LoraConfig(3, 5, dropout, LLAMA))
            described.append({line.partition(":")[0]: line.partition(": ")[2] for line in model.fusions.describe()})
            assert torch.isfinite(model(**batch()).loss)
    on, off = described
    assert on["gated activation with down projection"] == "on in 2 of 2" and on["residual + norm"] == "on in 4 of 4"
    assert on["adapter with its layer"] == "on in 14 of 14"
    assert off["adapter with its layer"] == "off (lora_dropout is 0.1)"
    assert off["gated activation with down projection"].startswith("off (down_proj is a LoraRowParallelLinear")


def _step(size: int, dropout: float, *, sequence_parallel: bool, **options: Any) -> dict[str, Tensor]:
    """The loss and the full gradients of a model with drawn adapters and dropout."""
    config = CONFIGS["llama"]()
    model = parallel_model(
        config, full_parameters(hugging_face(config)), sequence_parallel=sequence_parallel, **options
    )
    model_parallel_manual_seed(3)
    add_adapters(model, LoraConfig(3, 5, dropout, LLAMA))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                full = torch.randn(parameter.full_shape, generator=torch.Generator().manual_seed(len(name)))
                parameter.copy_(part(name, full, config))
    model_parallel_manual_seed(4)
    loss = model(**batch()).loss
    loss.backward()
    grads.allreduce_sequence_parallel_gradients(model)
    assert_same_on_all_ranks(loss, "loss")
    found = {"loss": loss.detach()}
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            found[name] = gathered(parameter.grad, parameter) if size > 1 else parameter.grad
            if not getattr(parameter, "tensor_model_parallel", False):
                assert_same_on_all_ranks(parameter.grad, name)
    return found


@distributed(world_size=2)
@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_dropout_is_equal_where_the_input_is(sequence_parallel: bool) -> None:
    """Replicated gradients agree, a recompute draws the same masks, and dropout is at work."""
    initialize(2)
    found = _step(2, 0.3, sequence_parallel=sequence_parallel)
    again = _step(2, 0.3, sequence_parallel=sequence_parallel, recompute_granularity="full")
    for name, value in found.items():
        assert relative_error(again[name], value) < TOLERANCE, name
    assert relative_error(_step(2, 0.0, sequence_parallel=sequence_parallel)["loss"], found["loss"]) > 1e-3


def test_dropout_scales_what_it_keeps() -> None:
    """Without adapters' dropout in evaluation: the loss is that of the model without dropout."""
    config = CONFIGS["llama"]()
    base = hugging_face(config)
    full = full_parameters(base)
    _, factors = of_peft(base, LLAMA)
    model = with_adapters(config, full, factors, LLAMA)
    expected = model(**batch()).loss
    other = parallel_model(config, full)
    add_adapters(other, LoraConfig(3, 5, 0.5, LLAMA))
    other.load_state_dict(model.state_dict())
    assert torch.equal(other.eval()(**batch()).loss, expected)
    losses = torch.stack([other.train()(**batch()).loss.detach() for _ in range(3)])
    assert len(losses.unique()) == 3


def _drawn(size: int) -> dict[str, Tensor]:
    config = CONFIGS["llama"]()
    model = parallel_model(config, full_parameters(hugging_face(config)))
    torch.manual_seed(11)
    add_adapters(model, LoraConfig(4, 8))
    named = {name: parameter for name, parameter in model.named_parameters() if is_adapter(name)}
    return {name: gathered(each, each) if size > 1 else each.detach() for name, each in named.items()}


@distributed(world_size=2)
def test_the_initial_factors_are_those_of_one_rank() -> None:
    initialize(2)
    found = _drawn(2)
    config = CONFIGS["llama"]()
    torch.manual_seed(11)
    first = nn.Linear(config.hidden_size, 4, bias=False)
    torch.testing.assert_close(found["model.layers.0.self_attn.q_proj.lora_A.weight"], first.weight.detach())
    assert set(found) == {
        f"model.layers.{layer}.self_attn.{target}.{factor}.weight"
        for layer in range(2)
        for target in ("q_proj", "v_proj")
        for factor in ("lora_A", "lora_B")
    }
    assert all(not value.any() for name, value in found.items() if "lora_B" in name)


@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_stored_adapters_are_merged_or_loaded(name: str, tmp_path: Path) -> None:
    """Of a training checkpoint, into a model without adapters and one with the same ones."""
    config = CONFIGS[name]()
    base = hugging_face(config)
    full = full_parameters(base)
    _, factors = of_peft(base, targets_of(name))
    model = with_adapters(config, full, factors, targets_of(name))
    index = Index(save_training_state(tmp_path, 1, state=TrainingState(model), config={}))
    expected = model(**batch()).loss
    for has_adapters in (False, True):
        other = parallel_model(config, full)
        if has_adapters:
            add_adapters(other, LoraConfig(3, 5, target_modules=targets_of(name)))
        assert load_weights(index, other, 5 / 3, {}) == has_adapters
        assert relative_error(other(**batch()).loss, expected) < TOLERANCE


@distributed(world_size=2)
@pytest.mark.parametrize("name", ["llama", "phi3", "neox"])
def test_peft_loads_the_files_and_the_export_is_merged(name: str, tmp_path: Path) -> None:
    initialize(2)
    config = CONFIGS[name]()
    base = hugging_face(config)
    full = full_parameters(base)
    reference, factors = of_peft(base, targets_of(name))
    expected = reference(**batch()).loss
    model = with_adapters(config, full, factors, targets_of(name), sequence_parallel=True)
    before = full_parameters(model)
    lora = LoraConfig(3, 5, target_modules=targets_of(name))
    save_adapters(model, tmp_path / "adapter", lora, base_model=None)
    save_pretrained(model, tmp_path / "export")
    assert all(torch.equal(parameter, before[each]) for each, parameter in model.named_parameters())
    if dist.get_rank() == 0:
        fresh = hugging_face(config)
        loaded = peft.PeftModel.from_pretrained(fresh, str(tmp_path / "adapter"))
        torch.testing.assert_close(loaded(**batch()).loss, expected, rtol=1e-6, atol=0)  # the same factors
        export = load_file(tmp_path / "export" / "model.safetensors")
        assert not any("lora" in each for each in export)
        merged = loaded.merge_and_unload()  # pyright: ignore[reportCallIssue]
        for each, parameter in merged.named_parameters():
            stored = "embed_out.weight" if name == "neox" and each == "lm_head.weight" else each
            assert relative_error(export[stored], parameter) < 1e-6, each
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        torch.testing.assert_close(again(**batch()).loss, expected, rtol=1e-5, atol=0)
    dist.barrier()
