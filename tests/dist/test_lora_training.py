"""Tests runs that train adapters (LoRA): equal losses in every layout, resumption, and files that PEFT loads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, cast

import peft
import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from nxd_memopt.checkpoint import find_latest
from nxd_memopt.commands.convert import Convert
from tests.reference_models import llama_config
from tests.training.runs import (
    LLAMA,
    TENSOR_AND_SEQUENCE,
    exact,
    require_converted,
    rows,
    run_here,
    run_on_pool,
    summary,
    write_config,
)

LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A base model with weights that a run of a few steps moves visibly."""
    directory = tmp_path_factory.mktemp("base")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(llama_config(**LLAMA)).save_pretrained(directory / "model")
    return directory / "model"


def config(directory: Path, base: Path, name: str = "run", **sections: Any) -> Path:
    lora = LORA | sections.pop("lora", {})
    trainer = {"output_dir": str(directory / name), "max_steps": 4} | sections.pop("trainer", {})
    # A large eps: AdamW's first updates would otherwise amplify the rounding of gradients near 0.
    optimizer = {"lr": 0.02, "eps": 1e-3}
    model = {"pretrained": str(base), "config_overrides": {}} | sections.pop("model", {})
    file = write_config(directory, model=model, trainer=trainer, optimizer=optimizer, **sections)
    with file.open("a", encoding="utf-8") as opened:
        opened.write(f"lora: {json.dumps(lora)}\n")
    return file


def losses(directory: Path) -> list[float]:
    return [row[name] for row in rows(directory) for name in ("loss", "grad_norm")]


def test_a_run_trains_adapters_alone_and_peft_loads_them(base: Path, tmp_path: Path) -> None:
    outcome = run_here(config(tmp_path, base, trainer={"export": "verify", "max_steps": 6}))
    assert outcome.returncode == 0, outcome.stderr
    assert "LoRA: rank 4, scale 2, in 10 layers" in outcome.stdout
    found = summary(tmp_path / "run")
    assert found["held_out_loss_after"] < found["held_out_loss_before"] - 0.01
    assert found["transformers_difference"] < 1e-5 * found["held_out_loss_after"]  # of the merged export
    require_converted(tmp_path / "run")
    require_refused_conversions(base, tmp_path)
    # The checkpoint has adapters and their optimizer states only, and the base is what it was.
    checkpoints = tmp_path / "run" / "checkpoints"
    index = json.loads(next(checkpoints.glob("*/index.json")).read_text(encoding="utf-8"))
    assert index["base"]["directory"] == str(base) and not (checkpoints / "base").exists()
    assert (
        sum(name.startswith("model.") for name in index["tensors"])
        == 20
        == sum(name.startswith("model.") and ".lora_" in name for name in index["tensors"])
    )
    states = [name for name in index["tensors"] if name.startswith("optimizer.")]
    assert len(states) == 3 * 20 and all(".lora_A." in name or ".lora_B." in name for name in states)
    plain = AutoModelForCausalLM.from_pretrained(base)
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "export")
    loaded = peft.PeftModel.from_pretrained(plain, str(tmp_path / "run" / "adapter")).merge_and_unload()  # pyright: ignore
    for name, weight in merged.named_parameters():
        torch.testing.assert_close(weight, loaded.get_parameter(name), rtol=1e-6, atol=1e-7)
    before = load_file(base / "model.safetensors")
    changed = {
        name
        for name, weight in merged.state_dict().items()
        if not torch.equal(weight, cast(Any, before).get(name, weight))
    }
    assert changed and all(name.split(".")[-2] in LORA["target_modules"] for name in changed)


@pytest.mark.parametrize(
    ("ranks", "sections"),
    [
        pytest.param(2, {"parallel": TENSOR_AND_SEQUENCE}, id="T=2, SP"),
        pytest.param(
            2, {"data_parallel": {"sharding": "zero3", "reshard_after_forward": False}}, id="D=2, ZeRO-3, gathered"
        ),
        pytest.param(
            4,
            {
                "parallel": TENSOR_AND_SEQUENCE,
                "data_parallel": {"sharding": "zero3"},
                "memory": {"recompute_granularity": "full"},
            },
            id="T=2, SP, D=2, ZeRO-3, recompute",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_losses_of_every_layout(base: Path, tmp_path: Path, ranks: int, sections: dict[str, Any]) -> None:
    assert run_here(config(tmp_path, base, "one", data={"micro_batch_size": 4})).returncode == 0
    data = {"micro_batch_size": 2}
    printed = run_on_pool(config(tmp_path, base, "many", data=data, **sections), ranks=ranks)
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=2e-5), printed  # other sums
    require_converted(tmp_path / "many")
    names = ("lora_A", "lora_B")
    adapters = [load_file(tmp_path / run / "adapter" / "adapter_model.safetensors") for run in ("one", "many")]
    assert all(any(each in name for each in names) for name in adapters[0]) and len(adapters[0]) == 20
    for name, value in adapters[0].items():
        torch.testing.assert_close(adapters[1][name], value, rtol=1e-4, atol=1e-6)
    merged = [load_file(tmp_path / run / "export" / "model.safetensors") for run in ("one", "many")]
    before = load_file(base / "model.safetensors")
    for name, value in merged[0].items():
        torch.testing.assert_close(merged[1][name], value, rtol=1e-4, atol=1e-6)
        # Weights without adapters are those of the base, bit by bit.
        if name.split(".")[-2] not in LORA["target_modules"]:
            assert torch.equal(merged[1][name], before[name]), name


@pytest.mark.slow
def test_a_run_goes_on_at_another_stage_and_size(base: Path, tmp_path: Path) -> None:
    """Of the frozen weights' rows too, which no optimizer has."""
    trainer = {"max_steps": 6, "output_dir": str(tmp_path / "one")}
    data = {"micro_batch_size": 2}
    assert run_here(config(tmp_path, base, trainer=trainer, data=data)).returncode == 0
    for steps, ranks, stage in ((2, 2, "zero3"), (4, 2, "zero1"), (6, 4, "zero3")):
        parallel = TENSOR_AND_SEQUENCE if ranks == 4 else {}
        trainer = {"max_steps": steps, "output_dir": str(tmp_path / "many")}
        file = config(tmp_path, base, trainer=trainer, data=data, data_parallel={"sharding": stage}, parallel=parallel)
        printed = run_on_pool(file, "--optimizer.decay-steps", "6", ranks=ranks)
        assert steps == 2 or f"resuming after step {steps - 2}" in printed
    assert losses(tmp_path / "many") == pytest.approx(losses(tmp_path / "one"), rel=5e-5)  # other sums


def test_a_resumed_run_goes_on_with_its_adapters(base: Path, tmp_path: Path) -> None:
    lora = {"lora_dropout": 0.2}
    at_once: dict[str, Any] = {"trainer": {"save_interval": 2, "output_dir": str(tmp_path / "once"), "max_steps": 4}}
    assert run_here(config(tmp_path, base, lora=lora, **at_once)).returncode == 0
    shutil.copytree(tmp_path / "once", tmp_path / "resumed")
    shutil.rmtree(tmp_path / "resumed" / "checkpoints" / "step_00000004")
    again: dict[str, Any] = {"trainer": at_once["trainer"] | {"output_dir": str(tmp_path / "resumed")}}
    outcome = run_here(config(tmp_path, base, lora=lora, **again))
    assert outcome.returncode == 0 and "resuming after step 2" in outcome.stdout, outcome.stderr
    assert exact(tmp_path / "resumed") == exact(tmp_path / "once")
    refused = run_here(config(tmp_path, base, lora=lora | {"lora_rank": 2}, **again))
    assert refused.returncode == 2 and "lora.lora_rank was 4 and is 2" in refused.stderr


def require_refused_conversions(base: Path, directory: Path) -> None:
    """Check that a conversion takes the base of the adapters alone, and writes neither to it nor to the checkpoint."""
    checkpoint = find_latest(directory / "run" / "checkpoints")
    assert checkpoint is not None
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(llama_config(**LLAMA)).save_pretrained(directory / "other base")
    for target, other, says in (
        (directory / "new", directory / "other base", "has SHA-256"),
        (checkpoint / "new", base, "which stays as it is"),
        (base, base, "which stays as it is"),
    ):
        with pytest.raises(ValueError, match=says):
            Convert(checkpoint, target, source_format="checkpoint", base=other)()
        assert not (directory / "new").exists() and not (checkpoint / "new").exists()


def logits(model: Any) -> torch.Tensor:
    """Of transformers' or PEFT's model in float64; experts in fp32, as transformers' kernel takes no float64."""
    ids = torch.arange(1, 41).reshape(2, 20)
    with torch.no_grad():
        wide = model.float() if hasattr(model.config, "num_local_experts") else model.double()
        return wide.eval()(input_ids=ids).logits


def require_adapters_of(directory: Path) -> list[str]:
    """Check the adapters of a run with PEFT on the base that they name; return the layers that PEFT adapts."""
    named = json.loads((directory / "adapter" / "adapter_config.json").read_text(encoding="utf-8"))
    plain = AutoModelForCausalLM.from_pretrained(named["base_model_name_or_path"])
    before = logits(plain)
    loaded = peft.PeftModel.from_pretrained(plain, str(directory / "adapter"))
    exported = logits(AutoModelForCausalLM.from_pretrained(directory / "export"))
    torch.testing.assert_close(exported, logits(loaded), rtol=0, atol=1e-5)  # the merged weights are fp32
    assert (exported - before).abs().max() > 1e-3
    return [name.removeprefix("base_model.model.") for name, each in loaded.named_modules() if hasattr(each, "lora_A")]


@pytest.mark.parametrize(
    ("sections", "differs"),
    [
        ({"model": {"config_overrides": {"max_position_embeddings": 128}}}, None),
        ({"model": {"config_overrides": {"rms_norm_eps": 1e-2}}}, "rms_norm_eps is 1e-06 in"),
        ({"model": {"random_init": True}}, None),
        ({"moe": {"num_moe_experts": 2}, "lora": {"target_modules": ["v_proj"]}}, None),
        (
            {"model": {"random_init": True}, "trainer": {"save_interval": "never"}},
            "embed_tokens.weight differs from the one in",
        ),
    ],
    ids=["more positions", "eps", "random_init", "upcycled", "random_init, no checkpoints"],
)
def test_adapters_name_their_base_or_are_only_merged(
    base: Path, tmp_path: Path, sections: dict[str, Any], differs: str | None
) -> None:
    outcome = run_here(config(tmp_path, base, **sections))
    assert outcome.returncode == 0, outcome.stderr
    assert (tmp_path / "run" / "export" / "model.safetensors").is_file()
    if differs is None:
        require_adapters_of(tmp_path / "run")
    else:
        assert f"model.pretrained is not their base: {differs}" in outcome.stdout.replace("model.embed", "embed")
        assert not (tmp_path / "run" / "adapter").exists()
        if not (tmp_path / "run" / "checkpoints").exists():
            return
        # The weight files of the base are those of the checkpoint; what the base computes is not.
        with pytest.raises(ValueError, match=f"--to peft: the base computes something else: {differs}"):
            Convert(tmp_path / "run", tmp_path / "peft", source_format="checkpoint", target_format="peft")()


def test_a_resumed_run_goes_on_with_its_base_alone(base: Path, tmp_path: Path) -> None:
    """Another base of the same shape has the same configuration, and files of the same size."""
    trainer = {"output_dir": str(tmp_path / "once"), "save_interval": 0}
    assert run_here(config(tmp_path, base, trainer=trainer)).returncode == 0
    trainer = {"save_interval": 2}
    assert run_here(config(tmp_path, base, trainer=trainer)).returncode == 0
    shutil.rmtree(tmp_path / "run" / "checkpoints" / "step_00000004")
    moved, other = tmp_path / "moved", tmp_path / "other"
    shutil.copytree(base, moved)
    torch.manual_seed(2)
    AutoModelForCausalLM.from_config(llama_config(**LLAMA)).save_pretrained(other)
    refused = run_here(config(tmp_path, other, trainer=trainer))
    assert refused.returncode == 2 and len(refused.stderr.splitlines()) == 1
    assert f"whose weights were in {base}: {other}/model.safetensors has SHA-256" in refused.stderr
    # Weights that are read from a directory of the base, not from the initial values of this start.
    model = {"random_init": True}
    outcome = run_here(config(tmp_path, moved, trainer=trainer, model=model))
    assert outcome.returncode == 0 and "resuming after step 2" in outcome.stdout, outcome.stderr
    assert exact(tmp_path / "run") == exact(tmp_path / "once")
    require_adapters_of(tmp_path / "run")


def test_a_base_without_a_directory_is_stored_once(tmp_path: Path) -> None:
    """A killed run with random weights goes on from them, also at other sizes and in another directory."""
    model = {"pretrained": None, "config_overrides": LLAMA}
    stage = {"data_parallel": {"sharding": "zero3"}}
    data = {"micro_batch_size": 2}
    at_once = config(tmp_path, tmp_path, "once", model=model, data=data, trainer={"save_interval": 2})
    printed = run_on_pool(at_once, ranks=2)
    stored = tmp_path / "once" / "checkpoints"
    (stored / "step_00000004").rename(tmp_path / "last")
    assert sorted(path.name for path in stored.iterdir()) == ["base", "step_00000002"], printed
    before = load_file(stored / "base" / "model.safetensors")
    trainer = {"resume_from": str(tmp_path / "once")}
    file = config(tmp_path, tmp_path, "other", model=model, data=data, trainer=trainer, **stage)
    assert "resuming after step 2" in run_on_pool(file, ranks=2)
    assert losses(tmp_path / "other") == pytest.approx(losses(tmp_path / "once")[4:], rel=2e-5)  # other sums
    after = load_file(tmp_path / "other" / "checkpoints" / "base" / "model.safetensors")
    assert all(torch.equal(after[name], value) for name, value in before.items()) and after.keys() == before.keys()
    require_adapters_of(tmp_path / "other")
    # What the new run writes no longer needs the run that it continued.
    shutil.rmtree(tmp_path / "once")
    model = model | {"warm_start": str(tmp_path / "other")}
    file = config(tmp_path, tmp_path, "third", model=model, data=data, trainer={"max_steps": 2})
    outcome = run_here(file, "--optimizer.lr", "2e-5")
    assert outcome.returncode == 0 and "optimizer.lr is 2e-05; adapters usually need 1e-4" in outcome.stdout
    expected = summary(tmp_path / "other")["held_out_loss_after"]
    assert summary(tmp_path / "third")["held_out_loss_before"] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("lora", "ranks", "says"),
    [
        ({}, 2, "weights and adapters of"),
        ({"lora_alpha": 3}, 1, "weights, with its adapters merged, of"),
        ({"lora_rank": None, "lora_alpha": None, "target_modules": None}, 2, "weights, with its adapters merged, of"),
    ],
    ids=["same, T=2", "other scale", "full training, T=2"],
)
def test_a_run_starts_from_the_adapters_of_another(
    base: Path, tmp_path: Path, lora: dict[str, Any], ranks: int, says: str
) -> None:
    """The first loss is the last one of transformers with the other run's export."""
    file = config(tmp_path, base, "first", trainer={"export": "verify"})
    assert run_here(file).returncode == 0
    model = {"warm_start": str(tmp_path / "first"), "random_init": True}
    sections = {"parallel": TENSOR_AND_SEQUENCE} if ranks == 2 else {}
    file = config(tmp_path, base, "second", model=model, lora=lora, trainer={"max_steps": 2}, **sections)
    printed = run_on_pool(file, ranks=ranks) if ranks > 1 else run_here(file).stdout
    assert f"warm start: {says}" in printed
    expected = summary(tmp_path / "first")["transformers_held_out_loss"]
    assert summary(tmp_path / "second")["held_out_loss_before"] == pytest.approx(expected, rel=1e-6)
    assert summary(tmp_path / "first")["held_out_loss_before"] > expected * 1.001
    if lora.get("lora_rank", 4) is None:
        assert not (tmp_path / "second" / "adapter").exists()
    else:
        require_adapters_of(tmp_path / "second")


@pytest.mark.parametrize(
    ("sections", "says"),
    [
        ({"memory": {"mlp_tile_tokens": 8}}, "memory.mlp_tile_tokens is 8: tiles compute the MLP without adapters"),
        ({"lora": {"lora_rank": None}}, "lora.lora_alpha 8 needs adapters"),
    ],
)
def test_options_that_adapters_do_not_follow(base: Path, tmp_path: Path, sections: dict[str, Any], says: str) -> None:
    outcome = run_here(config(tmp_path, base, **sections))
    assert outcome.returncode == 2 and len(outcome.stderr.splitlines()) == 1 and says in outcome.stderr, outcome.stderr
