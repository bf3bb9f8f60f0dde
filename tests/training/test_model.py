"""Tests what the training script trains: models and tokenizers from directories or configurations, the optimizer."""

from __future__ import annotations

import gc
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig

from nxd_memopt.backends import XlaBackend, backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.training.config.lora import LoraOptions
from nxd_memopt.training.config.train_config import ModelConfig, OptimizerConfig, TrainConfig, TrainerConfig
from nxd_memopt.training.device_support import require_executable, uses_cuda_graph
from nxd_memopt.training.loop import gc_frozen
from nxd_memopt.training.model import build_model, load_hf_config, load_initial_weights, load_vocabulary
from nxd_memopt.training.optimizer import MasterWeightOptimizer
from nxd_memopt.training.parallelize import describe_step, parallelize
from nxd_memopt.training.schedule import learning_rate
from tests.reference_models import full_parameters, hugging_face, mixtral_config
from tests.training.runs import END, LLAMA, byte_tokenizer


def test_config_from_overrides_alone_and_over_a_directory(tmp_path: Path) -> None:
    alone = load_hf_config(ModelConfig(tokenizer="t", config_overrides=LLAMA))
    assert (alone.model_type, alone.hidden_size) == ("llama", 24)
    alone.save_pretrained(tmp_path)
    over = load_hf_config(ModelConfig(pretrained=str(tmp_path), config_overrides={"num_hidden_layers": 1}))
    assert (over.hidden_size, over.num_hidden_layers) == (24, 1)


def test_weights_that_are_loaded_are_not_drawn(tmp_path: Path) -> None:
    theirs = hugging_face(mixtral_config())
    theirs.save_pretrained(tmp_path)
    options = {"pretrained": str(tmp_path), "tokenizer": "t"}
    config = TrainConfig(model=ModelConfig(**options))
    hf_config = load_hf_config(config.model)
    before = torch.random.get_rng_state()
    model = build_model(config, hf_config)
    assert torch.equal(torch.random.get_rng_state(), before)
    load_initial_weights(model, config, hf_config)
    ours = full_parameters(model)
    assert all(torch.equal(ours[name], weight) for name, weight in full_parameters(theirs).items())
    # What no file has is drawn.
    random = TrainConfig(model=ModelConfig(**options, random_init=True))
    for config in (random, TrainConfig(model=ModelConfig(tokenizer="t", config_overrides=LLAMA))):
        drawn = build_model(config, load_hf_config(config.model))
        assert all(weight.any() for name, weight in drawn.named_parameters() if "bias" not in name)


def test_what_a_cuda_graph_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    def config(overrides: dict[str, Any], enabled: bool | str = "auto", **sections: Any) -> TrainConfig:
        trainer = TrainerConfig(enable_cuda_graph=enabled, **sections.pop("trainer", {}))
        return TrainConfig(model=ModelConfig(tokenizer="t", config_overrides=overrides), trainer=trainer, **sections)

    def uses(config: TrainConfig) -> bool:
        hf_config = load_hf_config(config.model)
        require_executable(config, hf_config)
        return uses_cuda_graph(config, hf_config)

    monkeypatch.setattr(backend, "capture_refusal", lambda: "needs a device")
    assert not uses(config(LLAMA))
    with pytest.raises(ValueError, match=r"enable_cuda_graph is true, but a CUDA graph needs a device; set .* auto"):
        uses(config(LLAMA, True))

    monkeypatch.setattr(backend, "capture_refusal", lambda: None)
    monkeypatch.setattr(backend, "host_transfers_refusal", lambda: None)
    for model_type in ("llama", "gpt_neox"):  # whose classifier has dropout
        assert uses(config({"model_type": model_type}))
        assert not uses(config({"model_type": model_type}, False))
    dropping = {**LLAMA, "attention_dropout": 0.1}
    assert not uses(config(dropping))
    with pytest.raises(ValueError, match=r"needs dropout 0, got \{'attention_dropout': 0\.1\}"):
        uses(config(dropping, True))
    assert not uses(config(LLAMA, optimizer=OptimizerConfig(overlap_grad_reduce=True)))
    assert not uses(config(LLAMA, memory=MemoryConfig(cpu_offloading_num_layers=1)))
    assert not uses(config(LLAMA, trainer={"compile": "layer"}))
    assert uses(config(LLAMA, lora=LoraOptions(lora_rank=4)))
    assert not uses(config(LLAMA, lora=LoraOptions(lora_rank=4, lora_dropout=0.1)))


def test_the_start_report_says_why_there_is_no_graph() -> None:
    config = TrainConfig(model=ModelConfig(tokenizer="t", config_overrides=LLAMA))
    model = build_model(config, load_hf_config(config.model))
    lines = describe_step(model, config)
    assert "CUDA graph: off (a CUDA graph needs an NVIDIA GPU, and the backend is cpu)" in lines
    assert "residual + norm: on in 4 of 4" in lines


def test_objects_of_the_setup_are_collected_again_after_training() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(KeyError), gc_frozen():
        assert gc.get_freeze_count() > before
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_layers_are_not_compiled_where_whole_steps_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model = ModelConfig(tokenizer="t", config_overrides=LLAMA)
    config = TrainConfig(model=model, trainer=TrainerConfig(compile="layer"))
    require_executable(config, load_hf_config(model))
    monkeypatch.setattr(backend, "compile_refusal", lambda: XlaBackend.compile_refusal(object.__new__(XlaBackend)))
    with pytest.raises(ValueError, match=r"trainer\.compile layer is not for the backend xla.* set it to null"):
        require_executable(config, load_hf_config(model))


def test_vocabulary_errors(tmp_path: Path) -> None:
    hf_config = load_hf_config(ModelConfig(tokenizer="t", config_overrides=LLAMA))
    byte_tokenizer(extra=3).save_pretrained(tmp_path / "larger")
    with pytest.raises(ValueError, match="needs 260 rows, more than the model's vocab_size 257"):
        load_vocabulary(ModelConfig(tokenizer=str(tmp_path / "larger"), config_overrides=LLAMA), hf_config)
    with pytest.raises(ValueError, match=r"tokenizer directory .*absent does not exist"):
        load_vocabulary(ModelConfig(tokenizer=str(tmp_path / "absent"), config_overrides=LLAMA), hf_config)


def test_the_model_names_the_end_of_text_where_the_tokenizer_does_not(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.eos_token = None
    tokenizer.save_pretrained(tmp_path)
    model = ModelConfig(tokenizer=str(tmp_path), config_overrides=LLAMA)
    assert load_vocabulary(model, load_hf_config(model)).end_of_text == END
    without = ModelConfig(tokenizer=str(tmp_path), config_overrides=LLAMA | {"eos_token_id": None})
    with pytest.raises(ValueError, match="nor the model has an eos_token"):
        load_vocabulary(without, load_hf_config(without))


def test_learning_rate_warms_up_and_decays_to_the_minimum() -> None:
    config = OptimizerConfig(lr=1.0, min_lr_ratio=0.1, warmup_steps=4)
    assert [learning_rate(step, config, 12) for step in (1, 2, 4)] == [0.25, 0.5, 1.0]
    assert learning_rate(8, config, 12) == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 2)))
    assert learning_rate(12, config, 12) == learning_rate(99, config, 12) == pytest.approx(0.1)


def test_learning_rate_is_stable_until_its_decay() -> None:
    config = OptimizerConfig(lr=1.0, lr_schedule="wsd", wsd_decay_steps=4, min_lr_ratio=0.2, warmup_steps=2)
    expected = [0.5, 1.0, 1.0, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2]
    assert [learning_rate(step, config, 10) for step in (1, 2, 3, 6, 7, 8, 9, 10, 11)] == pytest.approx(expected)


def test_learning_rate_without_an_end() -> None:
    constant = OptimizerConfig(lr=2.0, lr_schedule="constant", warmup_steps=2)
    assert [learning_rate(step, constant, 4) for step in (1, 2, 3, 99)] == [1.0, 2.0, 2.0, 2.0]
    root = OptimizerConfig(lr=1.0, lr_schedule="inverse_sqrt", warmup_steps=4, min_lr_ratio=0.1)
    assert [learning_rate(step, root, 4) for step in (2, 4, 16, 10**6)] == [0.5, 1.0, 0.5, 0.1]
    assert learning_rate(4, OptimizerConfig(lr=1.0, lr_schedule="inverse_sqrt"), 4) == 0.5


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"lr_schedule": "wsd"}, "wsd_decay_steps must be at least 1"),
        ({"wsd_decay_steps": 3}, "is for optimizer.lr_schedule wsd, which is cosine"),
        ({"lr_schedule": "constant", "decay_steps": 3}, "decay_steps 3 has no effect"),
    ],
)
def test_options_that_a_schedule_does_not_read(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        OptimizerConfig(**options)


def test_learning_rate_can_decay_along_a_line() -> None:
    config = OptimizerConfig(lr=1.0, lr_schedule="linear", min_lr_ratio=0.0, warmup_steps=4)
    assert [learning_rate(step, config, 12) for step in (2, 4, 6, 12, 13)] == [0.5, 1.0, 0.75, 0.0, 0.0]


def test_updates_below_a_bf16_step_add_up_in_the_masters() -> None:
    parameter = nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([parameter], OptimizerConfig(weight_decay=0.0))
    for _ in range(100):
        parameter.sum().backward()
        optimizer.reduce_gradients()
        optimizer.step(lr=1e-4)  # each moves the weight by 1e-4; bf16 just below 1 has steps of 4e-3
        optimizer.zero_grad()
    assert parameter[0, 0].item() == pytest.approx(1 - 100 * 1e-4, abs=2e-3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_continues_exactly(dtype: torch.dtype) -> None:
    def steps(optimizer: MasterWeightOptimizer, parameter: nn.Parameter, seeds: range) -> None:
        for seed in seeds:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
            optimizer.reduce_gradients()
            optimizer.step(lr=0.01)
            optimizer.zero_grad()

    whole = nn.Parameter(torch.ones(3, 5, dtype=dtype))
    first = MasterWeightOptimizer([whole], OptimizerConfig())
    steps(first, whole, range(3))
    state = torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, first.inner.state_dict())
    other = nn.Parameter(whole.detach().clone())
    second = MasterWeightOptimizer([other], OptimizerConfig())
    second.inner.load_state_dict(state)
    steps(first, whole, range(3, 6))
    steps(second, other, range(3, 6))
    assert torch.equal(whole, other)


def test_many_small_gradients_are_not_lost_in_bf16() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([parameter], OptimizerConfig())
    for _ in range(512):
        (parameter.float() * 1e-3).sum().backward()
    # each share is bf16(1e-3), within 2^-9; a bf16 sum would stand still at 256 times a share (0.26)
    torch.testing.assert_close(parameter.main_grad, torch.full((4, 4), 0.512), rtol=2**-8, atol=0)
    optimizer.zero_grad()
    assert parameter.grad is None and parameter.main_grad is None


def test_without_master_weights_everything_is_bf16() -> None:
    parameter = torch.nn.Parameter(torch.ones(4, 4, dtype=torch.bfloat16))
    optimizer = MasterWeightOptimizer([parameter], OptimizerConfig(), master_weights=False)
    parameter.sum().backward()
    optimizer.reduce_gradients()
    optimizer.step(lr=0.5)
    assert getattr(parameter, "main_grad", None) is None and parameter.grad is not None
    assert parameter[0, 0].item() != 1
    state = optimizer.inner.state_dict()
    assert state["sharded_master_weights"] == {}
    assert all(value.dtype == torch.bfloat16 for value in state["state"][0].values() if value.dim())


@pytest.mark.parametrize(("precision", "has_masters"), [("bf16-mixed", True), ("bf16-true", False)])
def test_the_precision_of_a_run_decides_on_master_weights(precision: str, has_masters: bool) -> None:
    config = TrainConfig(ModelConfig(tokenizer="t", config_overrides=LLAMA), trainer=TrainerConfig(precision=precision))
    hf_config = load_hf_config(config.model)
    assert isinstance(hf_config, LlamaConfig)
    optimizer, _ = parallelize(LlamaForCausalLM(hf_config, dtype=torch.bfloat16), config)
    assert bool(optimizer.inner.state_dict()["sharded_master_weights"]) == has_masters
