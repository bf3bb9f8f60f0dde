"""A graph of adapters (LoRA) trains what eager steps train, and frozen weights that move are refused.

tests/cuda/test_lora.py runs ``trained`` with graphs of a GPU.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import save_pretrained
from nxd_memopt.config import MemoryConfig
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.modules.lora import is_adapter, merged_adapters
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.lora import LoraOptions
from nxd_memopt.training.config.optimizer import OptimizerConfig
from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig, TrainerConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.lora import apply_lora
from nxd_memopt.training.model import apply_fp8, build_model, load_hf_config, load_initial_weights
from nxd_memopt.training.parallelize import describe_step, parallelize
from tests.memory.test_cuda_graph import PlayedGraph
from tests.reference_models import VOCAB, llama_config

STEPS, MICRO_BATCHES = 4, 2
# Sizes that float8 can have.
SIZES = {"hidden_size": 128, "intermediate_size": 96, "num_attention_heads": 4}
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")


def written(directory: Path) -> Path:
    """A directory with the weights of a small model."""
    torch.manual_seed(0)
    save_pretrained(LlamaForCausalLM(llama_config(**SIZES)), directory)
    return directory


def config_of(base: Path, *, graph: bool, precision: str, base_dtype: Any = None, **memory: Any) -> TrainConfig:
    trainer = TrainerConfig(precision=precision, enable_cuda_graph=graph, fp8=base_dtype and "hybrid")
    return TrainConfig(
        ModelConfig(tokenizer="none", pretrained=str(base)),
        data=DataConfig(seq_length=16, isolate_documents=False),
        lora=LoraOptions(lora_rank=4, target_modules=TARGETS, base_dtype=base_dtype),
        memory=MemoryConfig(attention_backend="math", **memory),
        optimizer=OptimizerConfig(lr=1e-2),
        trainer=trainer,
    )


def built(config: TrainConfig) -> Any:
    """The model of a run, in the order of ``training/loop.py``."""
    hf_config = load_hf_config(config.model)
    model = build_model(config, hf_config)
    load_initial_weights(model, config, hf_config)
    torch.manual_seed(1)
    apply_lora(model, config)
    apply_fp8(model, config)
    return model


def batch(index: int) -> MicroBatch:
    ids = torch.randint(VOCAB, (2, 16), generator=torch.Generator().manual_seed(index))
    return MicroBatch(ids, ids, torch.tensor([32.0 * MICRO_BATCHES])).to(backend.device)


def trained(model: Any, config: TrainConfig) -> list[Tensor]:
    """Losses of steps, held-out losses between them, some with merged adapters, and the adapters at the end."""
    optimizer, forward_backward = parallelize(model, config)
    assert callable(forward_backward)
    found: list[Tensor] = []
    for step in range(STEPS):
        model.train()
        optimizer.begin_step(1e-2)
        found += [forward_backward(batch(MICRO_BATCHES * step + i)) for i in range(MICRO_BATCHES)]
        found.append(torch.as_tensor(optimizer.reduce_gradients()).clone())
        optimizer.step(1e-2)
        optimizer.zero_grad()
        model.eval()
        with torch.no_grad():
            found.append(batch(99).loss(model))
            if config.lora.base_dtype is None:
                with merged_adapters(model):
                    pass
    return [*found, *(p.detach().clone() for name, p in model.named_parameters() if is_adapter(name))]


@pytest.fixture
def played(monkeypatch: pytest.MonkeyPatch) -> list[torch.nn.Parameter]:
    """Let the CPU play recordings; the caller fills in the parameters."""
    parameters: list[torch.nn.Parameter] = []
    monkeypatch.setattr(backend, "capture_refusal", lambda: None)
    monkeypatch.setattr(backend, "capture", lambda function, pool_of: PlayedGraph(function, parameters))
    return parameters


@pytest.mark.parametrize("base_dtype", [None, "fp8"])
@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "full"}])
@pytest.mark.parametrize("precision", ["bf16-true", "bf16-mixed"])
def test_a_graph_of_adapters_is_eager_steps(played, tmp_path, precision, memory, base_dtype):
    runs = []
    PlayedGraph.recorded = 0
    base = written(tmp_path)
    for graph in (False, True):
        config = config_of(base, graph=graph, precision=precision, base_dtype=base_dtype, **memory)
        model = built(config)
        played[:] = model.parameters()
        runs.append(trained(model, config))
        assert any(line == "CUDA graph: on" for line in describe_step(model, config)) == graph
    assert PlayedGraph.recorded
    assert all(torch.equal(*pair) for pair in zip(*runs, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(runs[0], runs[0][4:], strict=False))


def test_a_frozen_weight_that_moved_is_refused(played, tmp_path):
    config = config_of(written(tmp_path), graph=True, precision="bf16-true")
    model = built(config)
    played[:] = model.parameters()
    _, forward_backward = parallelize(model, config)
    assert callable(forward_backward)
    for i in range(3):
        forward_backward(batch(i))
    weight = model.model.layers[0].mlp.down_proj.weight
    weight.data = weight.data.clone()
    with pytest.raises(ValueError, match="moved in memory"):
        forward_backward(batch(3))
