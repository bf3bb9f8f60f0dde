"""The launcher: the environment and command of each recipe, SLURM's variables, and what it refuses."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from nxd_memopt.certify.command import Asked, read
from nxd_memopt.certify.request import Request
from nxd_memopt.launch.command import Launch, certify_arguments
from nxd_memopt.launch.hosts import Hosts, find_hosts
from nxd_memopt.launch.platforms import PLATFORMS
from nxd_memopt.planner.sizes.states import StateLayout
from tests.launch.launching import EFA, FOUR_HOSTS, ROOT, TOKENIZER, TRN1, planned
from tests.training.runs import LLAMA, write_config

LAUNCHER = (sys.executable, "-m", "nxd_memopt.cli", "launch")
FRONT_ENDS = ("gpt_neox_20b", "llama3_8b", "llama2_7b", "llama3_8b_trn2", "llama2_13b", "llama3_70b")
BACKENDS = {"trn1": "xla", "trn2": "neuron", "trn3": "neuron", "cuda": "cuda", "cpu": "cpu", "xla_cpu": "xla"}
SCALED_DOWN = (  # docs/trainium.md, "On a laptop"
    "--model.config-overrides.num-hidden-layers 4 --model.config-overrides.hidden-size 256 "
    "--model.config-overrides.intermediate-size 512 --model.config-overrides.num-attention-heads 8 "
    "--parallel.tensor-model-parallel-size 2 --data.dataset stdlib --data.seq-length 256 --data.global-batch-size 4 "
    "--trainer.max-steps 5"
)


@pytest.mark.parametrize("recipe", ["gpt_neox_20b", "llama3_8b"])
def test_environment_and_command_on_one_trn1(recipe: str) -> None:
    found = planned(recipe)
    assert found.environment == TRN1
    agent = [sys.executable, "-m", "nxd_memopt.launch.agent", "--nproc", "32"]
    assert found.command == [*agent, "--recipe", recipe, *TOKENIZER]
    assert found.notes == ()
    several = planned(recipe, environ=FOUR_HOSTS)
    assert several.environment == TRN1 | EFA
    place = "--nnodes 4 --node_rank 2 --master_addr host0 --master_port 29500 --nproc_per_node 32"
    assert " ".join(several.command[3:13]) == place
    assert several.world_size == 128


def test_bf16_without_masters_turns_stochastic_rounding_on() -> None:
    name = "NEURON_RT_STOCHASTIC_ROUNDING_EN"
    assert planned("gpt_neox_20b", "--trainer.precision", "bf16-true").environment[name] == "1"
    assert planned("gpt_neox_20b", "--trainer.precision", "32-true").environment[name] == "0"
    trn2 = ("--platform", "trn2", "--trainer.precision", "bf16-true")
    assert planned("llama3_8b_trn2", *trn2).environment[name] == "1"


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


def test_hosts_from_options_win_over_slurms() -> None:
    assert find_hosts(FOUR_HOSTS) == Hosts(4, 2, "host0")
    assert find_hosts(FOUR_HOSTS, nodes=2, node_rank=1, master_addr="b", master_port=5) == Hosts(2, 1, "b", 5)
    assert find_hosts(FOUR_HOSTS, nodes=1) == Hosts(1, 0, "host0")
    assert find_hosts({}) == Hosts()


@pytest.mark.parametrize("platform", sorted(PLATFORMS))
def test_one_recipe_runs_on_every_platform(platform: str) -> None:
    processes = min(32, PLATFORMS[platform].processes or 32)
    size = ("--parallel.tensor-model-parallel-size", str(processes)) if processes <= 4 else ()
    found = planned("llama3_8b", "--platform", platform, "--nproc", str(processes), *size)
    assert found.environment["NXD_MEMOPT_BACKEND"] == BACKENDS[platform.split("-")[0]]


def test_the_documented_overrides_scale_a_recipe_down() -> None:
    heads = ["--model.config-overrides.num-key-value-heads", "8"]
    found = planned("llama3_8b", "--platform", "cpu", *SCALED_DOWN.split(), *heads)
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


def test_stages_over_hosts_run_more_graphs_ahead() -> None:
    """neuronx-distributed's layout of LLaMA-3-70B: T=32 and P=8, on eight hosts of 32 cores."""
    launch = planned("llama3_70b", environ=FOUR_HOSTS | {"SLURM_NNODES": "8"})
    assert launch.environment["NEURON_RT_ASYNC_EXEC_MAX_INFLIGHT_REQUESTS"] == "7"
    parallel = certified(launch).run.config.parallel
    assert (parallel.tensor_model_parallel_size, parallel.pipeline_model_parallel_size) == (32, 8)
    with pytest.raises(ValueError, match="world size 128 is not divisible by tensor_model_parallel_size x pipeline"):
        certified(planned("llama3_70b", environ=FOUR_HOSTS))


@pytest.mark.parametrize(
    "recipe", [FRONT_ENDS[0], *(pytest.param(name, marks=pytest.mark.slow) for name in FRONT_ENDS[1:])]
)
def test_front_ends_pass_their_options_on(recipe: str) -> None:
    front_end = str(ROOT / "scripts" / "launch" / f"{recipe}.sh")
    done = run([front_end, "--nodes", "2", *TOKENIZER], PYTHON=sys.executable)
    message = "nxd-memopt: error: 2 hosts need this one's number: start the launcher by srun, or pass --node-rank\n"
    assert (done.returncode, done.stderr) == (2, message)


def certified(launch: Launch, memory_gib: float | None = None) -> Asked:
    """What the dry run certifies; on trn1 as where torch_xla is installed."""
    backend = ("--backend", "xla") if launch.platform.package == "torch_xla" else ()
    return read([*certify_arguments(launch, memory_gib), *backend])


def test_what_a_dry_run_certifies() -> None:
    found = planned("gpt_neox_20b", environ=FOUR_HOSTS)
    asked = certified(found)
    config, request = found.config, asked.request
    assert config.model.config_overrides.items() <= request.config.items()
    assert request.parallel == config.parallel and request.memory == config.memory
    assert (request.sequence_length, request.micro_batch_size) == (config.data.seq_length, 1)
    assert (request.dtype, request.backend, request.layer_counts) == ("float16", "xla", (2, 4))
    assert asked.states == StateLayout(2, master_weights=True, sharding="zero1", data_parallel_size=4)
    assert asked.device.memory_gib == 16.0 and asked.device.reserve_gib == 1.25
    # fp32 parameters are their own masters.
    fp32 = certified(planned("gpt_neox_20b", "--trainer.precision", "32-true", environ=FOUR_HOSTS)).states
    assert (fp32.element_bytes, fp32.master_weights) == (4, False)


def test_isolated_documents_are_certified_where_the_graph_is_traced() -> None:
    found = {}
    for platform in ("trn1", "cuda"):
        launch = planned("llama3_8b", "--data.isolate-documents", "--platform", platform, environ=FOUR_HOSTS)
        found[platform] = certified(launch, 80).request.isolate_documents
    assert found == {"trn1": True, "cuda": False}


def test_a_pretrained_models_changes_are_certified_too(tmp_path: Path) -> None:
    model = {"model_type": "llama", "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 8}
    (tmp_path / "config.json").write_text(json.dumps(model | {"num_hidden_layers": 9, "vocab_size": 61}))
    options = ("--model.pretrained", str(tmp_path), "--data-parallel.sharding", "none")
    launch = planned("fine_tune", *options, "--model.config-overrides.num-hidden-layers", "6", "--platform", "cpu")
    asked = certified(launch, 23.5)
    assert (asked.request.config["num_hidden_layers"], asked.request.config["hidden_size"]) == (6, 64)
    assert asked.device.memory_gib == 23.5 and asked.states.sharding == "none"


def test_techniques_that_are_planned_where_they_are_not_measured() -> None:
    def request(*options: str, platform: str = "trn2") -> Request:
        return certified(planned("llama3_8b", *options, "--platform", platform)).request

    assert request("--memory.recompute-keep-core-attn").memory.recompute_keep_core_attn
    assert not request().isolate_documents
    block = ("--memory.recompute-method", "block", "--memory.recompute-num-layers")
    selective = ("--memory.recompute-granularity", "selective", "--memory.recompute-modules", "norm")
    assert request(*block, "2").layer_counts == (2, 4)
    assert request(*selective, *block, "6").layer_counts == (2, 4)
    # A compiled graph is the one of the run.
    assert request(*selective, *block, "6", platform="trn1").layer_counts == (6, 7)
    assert request("--data.isolate-documents").planned == ("data.isolate_documents true",)
    with pytest.raises(ValueError, match="pass --device-memory-gib"):
        certified(planned("llama3_8b", "--platform", "cuda"))
    with pytest.raises(ValueError, match="sharding zero2 is not available on the backend neuron"):
        request("--data-parallel.sharding", "zero2")
    with pytest.raises(ValueError, match="is true, but a CUDA graph needs an NVIDIA GPU, and the backend is neuron"):
        request("--trainer.enable-cuda-graph")


@pytest.mark.slow
def test_a_dry_run_has_certifys_exit_status(tmp_path: Path) -> None:
    config = write_config(tmp_path, model={"config_overrides": LLAMA | {"num_hidden_layers": 4}})
    command = [*LAUNCHER, "--config", str(config), "--platform", "cpu", "--dry-run"]
    # A CPU has no reserve, and the parameters alone need more than 107 kB.
    done = run([*command, "--device-memory-gib", "0.0001"], COLUMNS="200")
    assert done.returncode == 1, done.stdout[-3000:] + done.stderr[-3000:]
    assert "does not fit" in done.stdout + done.stderr
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
        (3, (), (2, 3)),
        (4, ("block", "3"), (3, 4)),
        (4, ("uniform", "2"), (2, 4)),
        (2, (), "certify measures models of 2 and 3 layers, and this one has 2"),
        (3, ("uniform", "3"), "certify measures models of 3 and 6 layers, and this one has 3"),
        (5, ("uniform", "3"), "5 layers are not divisible by recompute_num_layers 3"),
    ],
)
def test_measured_depths_are_within_the_model(depth, options, measured) -> None:
    words = ["--platform", "trn1", "--model.config-overrides.num-hidden-layers", str(depth)]
    if options:
        words += ["--memory.recompute-method", options[0], "--memory.recompute-num-layers", options[1]]
    launch = planned("llama3_8b", *words)
    if isinstance(measured, tuple):
        assert certified(launch).request.layer_counts == measured
    else:
        with pytest.raises(ValueError, match=measured):
            certified(launch)
