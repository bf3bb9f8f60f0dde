"""The planned memory of runs with adapters (LoRA) equals the tensors that exist, as integers."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
import yaml

from nxd_memopt.architectures.configs import NAMED_CONFIGS
from nxd_memopt.architectures.model_spec import model_spec
from nxd_memopt.commands.plan import command as plan_command
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.models import model_class
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.data_shards import local_rows
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.planner.hardware import device_named
from nxd_memopt.planner.memory.activations import activations
from nxd_memopt.planner.memory.layer_tensors import Kernels
from nxd_memopt.planner.search.plan import evaluate
from nxd_memopt.planner.search.problem import Problem, Setting
from nxd_memopt.planner.sizes.rank_sizes import rank_sizes
from nxd_memopt.planner.sizes.states import StateLayout, gradient_bytes, master_bytes, moment_bytes, weight_bytes
from nxd_memopt.training.config.parsing import parse_config
from tests.data_parallel.stages import STAGES, Run, build, initialize
from tests.dist.pool import distributed
from tests.planner.storages import LENGTH, ROWS, counted_bytes, named, share_of, sizes_of
from tests.planner.test_activations import LAYERS, ONE_RANK, TECHNIQUES
from tests.planner.test_states import BATCH, gradients, stored_bytes
from tests.reference import assert_says, error_message
from tests.reference_models import batch, gpt_neox_config, llama_config, mixtral_config, qwen3_config

# Adapters call layers, which tiles and groups of heads do not.
CALLED = {
    name: options
    for name, options in TECHNIQUES.items()
    if not {"mlp_tile_tokens", "attention_head_groups"} & set(options)
}
LINEAR = {
    llama_config: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    qwen3_config: ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"),
    gpt_neox_config: ("query_key_value", "dense", "dense_h_to_4h", "dense_4h_to_h"),
}


def lora_of(targets, dropout=0.0) -> LoraConfig:
    return LoraConfig(lora_rank=3, target_modules=targets, lora_dropout=dropout)


def check(config, dtype, attention, options, lora, parallel=ONE_RANK):
    memory = MemoryConfig(attention_backend=attention, **options)
    net = model_class(config.model_type)(config, parallel=parallel, memory=memory, dtype=dtype)
    add_adapters(net, lora)
    inputs = batch(rows=ROWS, length=LENGTH)
    net(**inputs).loss.backward()  # caches that a first call makes are not activations
    counted, listed = counted_bytes(net, inputs)
    name = str(dtype).removeprefix("torch.")
    sizes = sizes_of(config, parallel, LENGTH, ROWS, name, lora=lora)
    plan = activations(sizes, memory, Kernels(fused=False, attention=attention))
    assert plan.device_bytes == counted, "\n".join([str(lora), str(memory), str(plan), *listed])


@pytest.mark.parametrize("dropout", [pytest.param(0.0, marks=pytest.mark.slow), 0.1])
@pytest.mark.parametrize("technique", CALLED)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config, pytest.param(qwen3_config, marks=pytest.mark.slow)])
def test_storages_of_default_targets(config, technique, dropout):
    check(config(num_hidden_layers=LAYERS), torch.bfloat16, "sdpa", CALLED[technique], lora_of(None, dropout))


@pytest.mark.parametrize("dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16], ids=str)
@pytest.mark.parametrize(
    "attention", ["sdpa", *(pytest.param(name, marks=pytest.mark.slow) for name in ("tiled", "math"))]
)
@pytest.mark.parametrize("config", LINEAR)
def test_storages_of_each_target(config, attention, dtype):
    for target in LINEAR[config]:
        check(config(), dtype, attention, {}, lora_of((target,)))


def draw(seed: int):
    """Return model, dtype, attention, options of the memory section and adapters."""
    generator = random.Random(seed)
    config = generator.choice(list(LINEAR))
    targets = tuple(generator.sample(LINEAR[config], generator.randint(1, 3)))
    changes = {"num_hidden_layers": LAYERS, "hidden_act": generator.choice(("silu", "gelu", "relu"))}
    if config is gpt_neox_config:
        changes |= {"hidden_dropout": generator.choice((0.0, 0.1)), "use_parallel_residual": generator.random() < 0.5}
    attention = generator.choice(("sdpa", "tiled", "math"))
    if attention == "math":
        changes["attention_dropout"] = generator.choice((0.0, 0.2))
    options = {**generator.choice(list(CALLED.values())), "fused_linear_cross_entropy": generator.random() < 0.8}
    dtype = generator.choice((torch.float32, torch.bfloat16, torch.float16))
    return config(**changes), dtype, attention, options, lora_of(targets, generator.choice((0.0, 0.1)))


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 200))])
def test_storages_of_drawn_adapters(seed):
    check(*draw(seed))


@pytest.mark.parametrize("sequence_parallel", [pytest.param(False, marks=pytest.mark.slow), True])
@distributed(world_size=2)
def test_storages_of_adapters_on_a_rank(world_size, sequence_parallel):
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=world_size)
    model_parallel_manual_seed(1)
    parallel = ParallelConfig(world_size, sequence_parallel_enabled=sequence_parallel)
    for config in (llama_config, gpt_neox_config):
        for technique, dropout in (("none", 0.1), ("full", 0.0), ("core_attn+norm+mlp", 0.0)):
            lora = lora_of(LINEAR[config], dropout)
            check(config(num_hidden_layers=LAYERS), torch.bfloat16, "sdpa", TECHNIQUES[technique], lora, parallel)


@distributed(world_size=2)
def test_states_of_adapters_at_every_stage():
    initialize(1)
    for name, config in (("llama", llama_config), ("neox", gpt_neox_config)):
        for stage in STAGES:
            model = build(name, dtype=torch.bfloat16)
            lora = lora_of(LINEAR[config])
            add_adapters(model, lora)
            run = Run.of(model, stage)
            run.backward([BATCH])
            found = {"gradients": gradients(run, stage)}
            run.optimizer.step()
            found |= stored_bytes(run, stage)
            frozen = [local_rows(param) for param in model.parameters() if not param.requires_grad]
            found["frozen"] = sum(weight.nbytes for weight in frozen)
            layout = StateLayout(2, master_weights=True, sharding=stage, data_parallel_size=2)
            share = share_of(model.spec, length=12, rows=2, dtype="bfloat16", lora=lora)
            plan = {
                "gradients": share.total(gradient_bytes, layout),
                "weights": share.total(weight_bytes, layout),
                "masters": share.total(master_bytes, layout),
                "moments": share.total(moment_bytes, layout),
                "frozen": share.frozen_bytes(layout),
            }
            # Ranks other than the first may have fewer rows of a parameter with stage 3.
            if stage != "zero3" or parallel_state.get_data_parallel_rank() == 0:
                assert plan == found, (name, stage)


def test_adapters_that_are_not_planned():
    def refusal(config, targets):
        options = {"sequence_length": 8, "micro_batch_size": 1, "dtype": "float32", "lora": lora_of(targets)}
        return error_message(lambda: rank_sizes(model_spec(config), ONE_RANK, **options))

    assert_says(refusal(llama_config(), ("layers.1.self_attn.q_proj",)), "layers.1.", "not planned", "q_proj")
    assert_says(refusal(llama_config(), ("lm_head",)), "'lm_head'", "q_proj")
    assert_says(refusal(gpt_neox_config(), ("q_proj",)), "'q_proj'", "query_key_value")
    assert_says(refusal(mixtral_config(), ("q_proj",)), "experts", "not planned")
    sizes = sizes_of(llama_config(), ONE_RANK, 8, 1, "float32", lora=lora_of(("q_proj",)))
    memory = MemoryConfig(mlp_tile_tokens=4)
    message = error_message(lambda: activations(sizes, memory, Kernels(fused=True, attention="flash4")))
    assert_says(message, "mlp_tile_tokens 4", "lora_rank")


def test_the_section_is_planned_and_written(tmp_path, capsys):
    """The file that plan writes trains the same adapters, and not all weights."""
    sizes = {**NAMED_CONFIGS["llama-3-8b"], "num_hidden_layers": 4}
    lora = {"lora_rank": 4, "target_modules": ["o_proj", "down_proj"], "lora_dropout": 0.1}
    file = tmp_path / "run.yaml"
    arguments = ["--config", str(file), "--device", "h200", "--devices", "2", "--seq-length", "65536", "--json"]
    arguments += ["--model.config-overrides.max-position-embeddings", "65536"]

    def planned_of(**sections):
        file.write_text(yaml.safe_dump({"model": {"config_overrides": sizes}, **sections}))
        assert plan_command.main([*arguments, "--show", "99", "--write", str(tmp_path / "written.yaml")]) == 0
        return json.loads(capsys.readouterr().out)["plans"]

    plans = planned_of(lora=lora)
    written = parse_config(["--config", str(tmp_path / "written.yaml"), "--model.tokenizer", "somewhere"])
    assert written.lora.config() == LoraConfig(**lora)
    # What adapters do not support is not tried.
    assert not any(plan["setting"]["cuda_graph"] or plan["setting"]["memory"]["mlp_tile_tokens"] for plan in plans)
    (tmp_path / "written.yaml").unlink()
    assert plans[0]["device_bytes"]["optimizer moments"] < planned_of()[0]["device_bytes"]["optimizer moments"] / 100


def test_the_peak_of_long_sequences_is_in_forward():
    """The last MLP's activation and output exist next to its input, which a frozen layer does not keep.

    With dropout gate and up are kept under the adapters' names, and would count twice: backward counts.
    """
    problem = Problem(
        model=named("llama-3-8b", num_hidden_layers=8),
        device=device_named("h200"),
        devices=1,
        sequence_length=65536,
        global_batch_size=1,
        precision="bf16-true",
        stages=("none",),
        lora=lora_of(("gate_proj", "up_proj")),
    )
    memory = evaluate(problem, Setting(1, "none", 1, MemoryConfig())).memory
    assert memory.moment == "forward of the last layer"
    assert memory.device["temporary tensors"] == 65536 * (14336 + 4096 + 4096) * 2
    dropped = replace(problem, lora=lora_of(("gate_proj", "up_proj"), dropout=0.1))
    assert not evaluate(dropped, Setting(1, "none", 1, MemoryConfig())).memory.moment.startswith("forward")
