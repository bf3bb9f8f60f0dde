"""The launcher: the environment and command of each recipe, SLURM's variables, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from nxd_memopt.launch.certificate import certify_command
from nxd_memopt.launch.hosts import Hosts, find_hosts
from nxd_memopt.launch.platforms import PLATFORMS
from tests.launch.launching import EFA, FOUR_HOSTS, RECIPES, ROOT, TOKENIZER, TRN1, planned
from tests.training.runs import LLAMA, rows, write_config

LAUNCHER = (sys.executable, "-m", "nxd_memopt.launch")
FRONT_ENDS = (*RECIPES, "llama3_8b_trn2")
GPT_NEOX = TRN1 | {"NEURON_CC_FLAGS": "--model-type=transformer --enable-saturate-infinity -O1"}
BACKENDS = {"trn1": "xla", "trn2": "neuron", "trn3": "neuron", "cuda": "cuda", "cpu": "cpu", "xla_cpu": "xla"}
SCALED_DOWN = (  # docs/trainium.md, "On a laptop"
    "--model.config-overrides.num-hidden-layers 4 --model.config-overrides.hidden-size 256 "
    "--model.config-overrides.intermediate-size 512 --model.config-overrides.num-attention-heads 8 "
    "--parallel.tensor-model-parallel-size 2 --data.seq-length 256 --data.global-batch-size 4 --trainer.max-steps 5"
)


@pytest.mark.parametrize(("recipe", "expected"), [("gpt_neox_20b", GPT_NEOX), ("llama3_8b", TRN1), ("llama2_7b", TRN1)])
def test_environment_and_command_on_one_trn1(recipe: str, expected: dict[str, str]) -> None:
    found = planned(recipe)
    assert found.environment == expected
    agent = [sys.executable, "-m", "nxd_memopt.launch.agent", "--nproc", "32"]
    assert found.command == [*agent, "--recipe", recipe, *TOKENIZER]
    assert found.notes == ()


@pytest.mark.parametrize("recipe", RECIPES)
def test_several_hosts_add_efa_and_host_0s_address(recipe: str) -> None:
    found = planned(recipe, environ=FOUR_HOSTS)
    assert found.environment == planned(recipe).environment | EFA
    place = "--nnodes 4 --node_rank 2 --master_addr host0 --master_port 29500 --nproc_per_node 32"
    assert " ".join(found.command[3:13]) == place
    assert found.world_size == 128


def test_the_published_recipes() -> None:
    """Sizes, batch, schedule and optimizer of neuronx-distributed's GPT-NeoX-20B and LLaMA samples."""
    facts = {}
    for recipe in RECIPES:
        config = planned(recipe, environ=FOUR_HOSTS).config
        data, optimizer = config.data, config.optimizer
        size = config.parallel.tensor_model_parallel_size
        assert (optimizer.warmup_steps, config.trainer.max_steps, optimizer.lr_schedule) == (100, 10000, "linear")
        assert (optimizer.weight_decay, optimizer.clip_grad) == (0.01, 1.0)
        assert config.data_parallel.stage == "zero1"
        assert config.parallel.sequence_parallel_enabled
        facts[recipe] = (size, data.seq_length, data.global_batch_size, data.micro_batch_size, optimizer.lr)
    assert facts == {
        "gpt_neox_20b": (32, 2048, 256, 1, 0.97e-5),
        "llama3_8b": (8, 8192, 1024, 1, 1.5e-4),
        "llama2_7b": (8, 4096, 1024, 1, 3e-4),
    }


def test_bf16_without_masters_turns_stochastic_rounding_on() -> None:
    name = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
    assert planned("gpt_neox_20b", "--trainer.precision", "bf16-true").environment[name] == "1"
    assert planned("gpt_neox_20b", "--trainer.precision", "32-true").environment[name] == "0"


def test_users_flags_join_the_recipes_and_a_default_gives_way() -> None:
    given = {"NEURON_CC_FLAGS": "--cache_dir=/shared/cache", "MALLOC_ARENA_MAX": "128"}
    found = planned("llama3_8b", environ=given).environment
    assert found["NEURON_CC_FLAGS"] == "--model-type=transformer --cache_dir=/shared/cache -O1"
    assert found["MALLOC_ARENA_MAX"] == "128"


def test_without_recompute_the_level_is_the_users() -> None:
    without = ("--memory.recompute-granularity", "None")
    assert planned("llama3_8b", *without).environment["NEURON_CC_FLAGS"] == "--model-type=transformer"
    given = {"NEURON_CC_FLAGS": "-O2"}
    assert planned("llama3_8b", *without, environ=given).environment["NEURON_CC_FLAGS"].endswith("-O2")


@pytest.mark.parametrize(
    ("arguments", "environ", "message"),
    [
        ((), {"NEURON_CC_FLAGS": "-O2"}, "NEURON_CC_FLAGS says -O2"),
        ((), {"NEURON_CC_FLAGS": "--optlevel 3"}, "NEURON_CC_FLAGS says -O3"),
        ((), {"NEURON_CC_FLAGS": "--cache_dir='x"}, "cannot be split into words"),
        ((), {"NXD_MEMOPT_BACKEND": "cpu"}, "NXD_MEMOPT_BACKEND is 'cpu' in the environment, but this run needs 'xla'"),
        ((), {"NEURON_RT_STOCHASTIC_ROUNDING_EN": "1"}, "NEURON_RT_STOCHASTIC_ROUNDING_EN is '1'"),
        ((), {"XLA_DOWNCAST_BF16": "1"}, "XLA_DOWNCAST_BF16=1 makes every fp32 tensor bf16"),
        (("--parallel.tensor-model-parallel-size", "16"), {}, "tensor_model_parallel_size 16 is not one of"),
        (("--processes-per-node", "12"), {}, "world size 12 is not divisible by tensor_model_parallel_size 8"),
        (("--compile", "--platform", "cpu"), {}, "--compile is for trn1's ahead-of-time compiler"),
        (("--trainer.enable-cuda-graph", "True"), {}, "--platform trn1 has no CUDA graphs: set it to auto"),
        (("--processes-per-node", "0"), {}, "--processes-per-node must be at least 1, got 0"),
        (("--nodes", "0"), {}, "a run needs at least 1 host, got 0"),
        (("--master-port", "0"), {}, r"master port 0 is outside \[1, 65535\]"),
        ((), FOUR_HOSTS | {"MASTER_PORT": "99999"}, "master port 99999 is outside"),
        (("--nodes", "2", "--node-rank", "0"), {}, "2 hosts need host 0's address"),
        (("--nodes", "2", "--master-addr", "a"), {}, "2 hosts need this one's number"),
        (("--nodes", "2", "--node-rank", "2", "--master-addr", "a"), {}, r"node rank 2 is outside \[0, 2\)"),
        ((), FOUR_HOSTS | {"SLURM_LOCALID": "1"}, "SLURM_LOCALID is 1: torchrun starts the ranks of a host itself"),
        ((), FOUR_HOSTS | {"SLURM_NNODES": "four"}, "SLURM_NNODES must be a number, got 'four'"),
        ((), FOUR_HOSTS | {"SLURM_NNODES": "²"}, "SLURM_NNODES must be a number"),
        (("--data.seq-lenght", "8"), {}, "did you mean --data.seq-length"),
    ],
)
def test_refusals_name_relation_values_and_remedy(
    arguments: tuple[str, ...], environ: dict[str, str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        planned("llama3_8b", *arguments, environ=environ)


def test_hosts_from_options_win_over_slurms() -> None:
    assert find_hosts(FOUR_HOSTS) == Hosts(4, 2, "host0")
    assert find_hosts(FOUR_HOSTS, nodes=2, node_rank=1, master_addr="b", master_port=5) == Hosts(2, 1, "b", 5)
    assert find_hosts(FOUR_HOSTS, nodes=1) == Hosts(1, 0, "host0")
    assert find_hosts({}) == Hosts()


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_recipe_runs_on_every_platform(recipe: str, platform: str) -> None:
    processes = min(32, PLATFORMS[platform].processes or 32)
    size = ("--parallel.tensor-model-parallel-size", str(processes)) if processes <= 4 else ()
    found = planned(recipe, "--platform", platform, "--processes-per-node", str(processes), *size)
    assert found.environment["NXD_MEMOPT_BACKEND"] == BACKENDS[platform.split("-")[0]]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_documented_overrides_scale_a_recipe_down(recipe: str) -> None:
    heads = ["--model.config-overrides.num-key-value-heads", "8"] if recipe.startswith("llama") else []
    found = planned(recipe, "--platform", "cpu", *SCALED_DOWN.split(), *heads)
    assert (found.world_size, found.config.model.config_overrides["hidden_size"]) == (2, 256)
    documented = (ROOT / "docs" / "trainium.md").read_text(encoding="utf-8").replace("\\", "")
    assert SCALED_DOWN in " ".join(documented.split())


def test_the_compile_pass_runs_the_same_command() -> None:
    assert planned("llama2_7b", "--compile").command == ["neuron_parallel_compile", *planned("llama2_7b").command]


def test_the_shown_text_is_shell_that_sets_the_environment() -> None:
    found = planned("gpt_neox_20b")
    lines = found.text().splitlines()
    assert all("  # " in line for line in lines[:-1])
    program = "\n".join([*lines[:-1], "env -0"])
    shown = subprocess.run(["bash", "-c", program], env={"PATH": os.environ["PATH"]}, capture_output=True, check=True)
    variables = dict(entry.split("=", 1) for entry in shown.stdout.decode().split("\0") if entry)
    assert found.environment.items() <= variables.items()


@pytest.mark.parametrize(
    "recipe", [FRONT_ENDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FRONT_ENDS[1:])]
)
def test_front_ends_pass_their_options_on(recipe: str) -> None:
    front_end = str(ROOT / "scripts" / "launch" / f"{recipe}.sh")
    done = run([front_end, "--nodes", "2", *TOKENIZER], PYTHON=sys.executable)
    message = "error: 2 hosts need this one's number: start the launcher by srun, or pass --node-rank\n"
    assert (done.returncode, done.stderr) == (2, message)


def test_the_launcher_trains(tmp_path: Path) -> None:
    config = write_config(tmp_path, trainer={"max_steps": 2, "save_checkpoints": False, "export": False})
    arguments = ["--platform", "cpu", "--config", str(config)]
    done = run([*LAUNCHER, *arguments])
    assert done.returncode == 0, done.stderr[-3000:]
    assert "backend cpu (NXD_MEMOPT_BACKEND=cpu" in done.stdout
    assert [row["step"] for row in rows(tmp_path / "run")] == [1, 2]


CERTIFIED = {
    "gpt_neox_20b": "--backend xla --device trn1 --tensor-model-parallel-size 32 --sequence-parallel-enabled "
    "--seq-length 2048 --micro-batch-size 1 --dtype bfloat16 --recompute-granularity full --attention-backend auto "
    "--master-weights --zero1 --data-parallel-size 4",
    "llama2_7b": "--backend xla --device trn1 --tensor-model-parallel-size 8 --sequence-parallel-enabled "
    "--seq-length 4096 --micro-batch-size 1 --dtype bfloat16 --recompute-granularity selective "
    "--attention-backend auto --recompute-modules core_attn mlp_act --master-weights --zero1 --data-parallel-size 16",
}


@pytest.mark.parametrize("recipe", CERTIFIED)
def test_what_a_dry_run_certifies(recipe: str, tmp_path: Path) -> None:
    found = planned(recipe, environ=FOUR_HOSTS)
    command = certify_command(
        found.config, "trn1", world_size=found.world_size, device_memory_gib=None, directory=tmp_path
    )
    assert command[1:3] == ["certify", "--model"]
    assert json.loads(Path(command[3]).read_text(encoding="utf-8")) == found.config.model.config_overrides
    assert " ".join(command[4:]) == CERTIFIED[recipe]


def test_isolated_documents_are_certified_where_the_graph_is_traced(tmp_path: Path) -> None:
    found = planned("llama3_8b", "--data.isolate-documents", environ=FOUR_HOSTS)
    commands = {
        platform: certify_command(
            found.config, platform, world_size=found.world_size, device_memory_gib=80, directory=tmp_path
        )
        for platform in ("trn1", "cuda")
    }
    assert [platform for platform, words in commands.items() if "--isolate-documents" in words] == ["trn1"]


def test_a_pretrained_models_changes_are_certified_too(tmp_path: Path) -> None:
    found = planned("llama2_7b", "--model.pretrained", "some/model", "--data-parallel.sharding", "none")
    command = certify_command(found.config, "trn2", world_size=32, device_memory_gib=23.5, directory=tmp_path)
    first = command.index("--override")
    assert command[1:first] == ["certify", "--model", "some/model"]
    assert {'model_type="llama"', "hidden_size=4096"} < set(command[first:])
    assert "--device trn2 --device-memory-gib 23.5" in " ".join(command) and "--zero1" not in command
    assert list(tmp_path.iterdir()) == []


def test_techniques_that_certify_cannot_measure_are_refused(tmp_path: Path) -> None:
    def command(*options: str) -> list[str]:
        config = planned("llama3_8b", *options).config
        return certify_command(config, "trn2", world_size=32, device_memory_gib=None, directory=tmp_path)

    assert "--recompute-keep-core-attn" in command("--memory.recompute-keep-core-attn")
    assert "--isolate-documents" not in command()
    block = ("--memory.recompute-method", "block", "--memory.recompute-num-layers")
    selective = ("--memory.recompute-granularity", "selective", "--memory.recompute-modules", "norm")
    assert "--measure-layers" not in command(*block, "2")
    words = " ".join(command(*selective, *block, "6"))
    assert "--recompute-granularity selective --recompute-method block --recompute-num-layers 6" in words
    assert words.count("--measure-layers 6 7 ") == 1 and "--recompute-modules norm" in words
    with pytest.raises(ValueError, match="pass --device-memory-gib"):
        certify_command(planned("llama3_8b").config, "cuda", world_size=8, device_memory_gib=None, directory=tmp_path)
    for option, message in (
        (("--data.isolate-documents",), "data.isolate_documents on platform trn2: set it to false"),
        (("--memory.cpu-offloading-num-layers", "2"), "memory.cpu_offloading_num_layers 2: set 0"),
        (("--memory.no-fused-linear-cross-entropy",), "memory.fused_linear_cross_entropy False: set True"),
        (("--data-parallel.sharding", "zero2"), "data_parallel.sharding zero2.*set zero1"),
    ):
        with pytest.raises(ValueError, match=message):
            command(*option)


@pytest.mark.parametrize(
    ("memory_gib", "expected", "verdict"),
    [
        # The reserve alone is 1.25 GiB.
        pytest.param(1, 1, "does not fit 1 GiB", marks=pytest.mark.slow),
        pytest.param(4, 0, "fits 4 GiB", marks=pytest.mark.slow),
    ],
)
def test_a_dry_run_has_certifys_exit_status(tmp_path: Path, memory_gib: int, expected: int, verdict: str) -> None:
    model = {"config_overrides": LLAMA | {"num_hidden_layers": 4}}
    config = write_config(tmp_path, model=model)
    done = run(
        [
            *LAUNCHER,
            "--config",
            str(config),
            "--platform",
            "cpu",
            "--dry-run",
            "--memory.recompute-granularity",
            "full",
            "--device-memory-gib",
            str(memory_gib),
        ],
        COLUMNS="200",
    )
    assert done.returncode == expected, done.stdout[-3000:] + done.stderr[-3000:]
    assert verdict in done.stdout + done.stderr
    assert "export NXD_MEMOPT_BACKEND=cpu  # " in done.stdout
    assert not (tmp_path / "run").exists()


def test_a_value_of_the_environment_is_not_given_the_defaults_reason() -> None:
    own = planned("llama3_8b", "--platform", "cuda").text()
    assert "export CUBLAS_WORKSPACE_CONFIG=:0:0  # matmuls without a counter" in own
    given = planned("llama3_8b", "--platform", "cuda", environ={"CUBLAS_WORKSPACE_CONFIG": ":4096:8"}).text()
    assert "export CUBLAS_WORKSPACE_CONFIG=:4096:8  # as the environment has it; default :0:0" in given


def test_slurm_script_gives_every_host_the_first_ones_address(tmp_path: Path) -> None:
    for name, body in (
        ("scontrol", 'test "$*" = "show hostnames node[1-3]" && printf "node1\\nnode2\\nnode3\\n"'),
        ("srun", 'while [[ $1 == --* ]]; do shift; done; exec "$@"'),
    ):
        (tmp_path / name).write_text(f"#!/usr/bin/env bash\n{body}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    script = str(ROOT / "scripts" / "launch" / "slurm.sbatch")
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = run(["bash", script, "printenv", "MASTER_ADDR"], PATH=path, SLURM_JOB_NODELIST="node[1-3]")
    assert (done.returncode, done.stdout) == (0, "node1\n"), done.stderr
    assert run(["bash", script], PATH=path).returncode == 2


def run(command: list[str], **environ: str) -> subprocess.CompletedProcess[str]:
    env = {"PATH": os.environ["PATH"]} | environ
    return subprocess.run(command, env=env, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("depth", "options", "measured"),
    [
        (32, (), None),
        (3, (), "2 3"),
        (4, ("block", "3"), "3 4"),
        (4, ("uniform", "2"), None),
        (2, (), "certify measures models of 2 and 3 layers, and this one has 2"),
        (4, ("block", "4"), "certify measures models of 4 and 5 layers, and this one has 4"),
        (5, ("uniform", "3"), "certify measures models of 3 and 6 layers, and this one has 5"),
    ],
)
def test_measured_depths_are_within_the_model(depth, options, measured, tmp_path: Path) -> None:
    chosen = ("--memory.recompute-method", options[0], "--memory.recompute-num-layers", options[1]) if options else ()
    config = planned("llama3_8b", *chosen).config
    overrides = {**config.model.config_overrides, "num_hidden_layers": depth}
    config = replace(config, model=replace(config.model, config_overrides=overrides))

    def command() -> str:
        words = certify_command(config, "trn2", world_size=32, device_memory_gib=None, directory=tmp_path)
        return " ".join(words)

    if measured and measured.startswith("certify"):
        with pytest.raises(ValueError, match=measured):
            command()
    else:
        assert (f"--measure-layers {measured}" in command()) if measured else "--measure-layers" not in command()
