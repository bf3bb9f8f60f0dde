"""Tests options of adapters, and the models that cannot have them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from nxd_memopt.checkpoint.huggingface.adapters import save_adapters
from nxd_memopt.modules.lora import LoraConfig, adapted_layers, add_adapters, get_lora_model, merged_adapters
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear
from tests.reference_models import CONFIGS, batch, parallel_model


def model(**options: Any) -> Any:
    torch.manual_seed(0)
    return parallel_model(CONFIGS["llama"](), **options)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lora_rank": 0}, "lora_rank must be at least 1"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights"),
        ({"target_modules": "q_proj"}, "is a text"),
    ],
)
def test_options_out_of_range(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        LoraConfig(**options)


@pytest.mark.parametrize(
    ("targets", "says"),
    [
        (["q_proj", "w1"], "'w1', and no layer has this name"),
        (["lm_head"], "lm_head, whose loss does not call it"),
        (["embed_tokens"], "a ParallelEmbedding"),
        (["input_layernorm"], "a RMSNorm"),
    ],
)
def test_layers_that_cannot_have_adapters(targets: list[str], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        add_adapters(model(), LoraConfig(target_modules=targets))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("option", ["mlp_tile_tokens", "attention_head_groups"])
def test_techniques_that_do_not_call_layers_are_refused(option: str) -> None:
    with pytest.raises(ValueError, match=f"{option} computes layers without their adapters"):
        add_adapters(model(**{option: 2}), LoraConfig())


def test_adapters_are_added_once_and_change_nothing_at_first() -> None:
    built = model()
    expected = built(**batch()).loss
    assert get_lora_model(built, None) is built and not adapted_layers(built)
    assert get_lora_model(built, LoraConfig()) is built and len(adapted_layers(built)) == 4
    assert torch.equal(built(**batch()).loss, expected)
    with pytest.raises(ValueError, match="has adapters already"):
        add_adapters(built, LoraConfig())
    assert any("projection of q_proj, k_proj, v_proj: on in 2 of 2" in line for line in built.fusions.describe())


def test_weights_are_bitwise_as_before_a_merge() -> None:
    built = model().bfloat16()
    add_adapters(built, LoraConfig(target_modules=("down_proj",)))
    layer = built.model.layers[0].mlp.down_proj
    torch.nn.init.normal_(layer.lora_B.weight)
    before = layer.weight.detach().clone()
    with pytest.raises(RuntimeError), merged_adapters(built):
        change = layer.weight.float() - before.float()
        assert torch.equal(layer.weight, (before.float() + layer.delta()).bfloat16()) and change.any()
        raise RuntimeError("while the model is exported")
    assert torch.equal(layer.weight, before)


@pytest.mark.filterwarnings("ignore:.*q_proj is a Doubled")
def test_a_subclass_that_shared_projections_do_not_know_is_called() -> None:
    """The fused projection may not pass over what a subclass adds."""
    built = model()
    add_adapters(built, LoraConfig())
    expected = built(**batch()).loss
    layer = built.model.layers[0].self_attn.q_proj

    class Doubled(type(layer)):
        def forward(self, input: torch.Tensor) -> torch.Tensor:
            return 2 * super().forward(input)

    layer.__class__ = Doubled
    built.model.layers[0].self_attn.share_input()
    assert built(**batch()).loss != expected


@pytest.mark.parametrize("name", ["other.txt", None])
def test_files_that_adapters_would_replace(tmp_path: Path, name: str | None) -> None:
    built = model()
    with pytest.raises(ValueError, match="has no adapters"):
        save_adapters(built, tmp_path, LoraConfig(), base_model=None)
    add_adapters(built, LoraConfig())
    target = tmp_path / "adapter"
    if name is None:
        target.write_text("", encoding="utf-8")
    else:
        target.mkdir()
        (target / name).write_text("", encoding="utf-8")
    with pytest.raises(ValueError, match="is a file: pass a directory" if name is None else "choose another"):
        save_adapters(built, target, LoraConfig(), base_model=None)


def test_files_of_adapters_have_the_scale_of_the_model(tmp_path: Path) -> None:
    built = model()
    add_adapters(built, LoraConfig(4, 8))
    with pytest.raises(ValueError, match=r"rank and scale \(4, 2.0\), and config has \(4, 4.0\)"):
        save_adapters(built, tmp_path / "adapter", LoraConfig(4, 16), base_model=None)
    save_adapters(built, tmp_path / "adapter", LoraConfig(4, 8), base_model=None)
    # Ours are replaced, other files stay, and those of another program are not replaced.
    (tmp_path / "adapter" / "README.md").write_text("mine", encoding="utf-8")
    save_adapters(built, tmp_path / "adapter", LoraConfig(4, 8), base_model=None)
    assert (tmp_path / "adapter" / "README.md").read_text(encoding="utf-8") == "mine"
    weights = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    save_file(weights, tmp_path / "adapter" / "adapter_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"adapter_model.safetensors has no mark of nxd_memopt"):
        save_adapters(built, tmp_path / "adapter", LoraConfig(4, 8), base_model=None)


def test_merged_weights_of_float64_are_not_rounded_to_fp32():
    layer = nn.Sequential(ColumnParallelLinear(4, 6, gather_output=False, dtype=torch.float64))
    get_lora_model(layer, LoraConfig(lora_rank=2, target_modules=("0",)))
    nn.init.normal_(layer[0].lora_B.weight)
    weight, update = layer[0].weight.detach().clone(), layer[0].lora_B.weight @ layer[0].lora_A.weight
    with merged_adapters(layer):
        torch.testing.assert_close(layer[0].weight, weight + layer[0].scale * update, rtol=1e-15, atol=1e-16)
