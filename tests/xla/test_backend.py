"""The XLA backend beyond the contract that tests/dist/test_backends.py checks: random state, ranks, barriers, flags."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import BACKEND_REASON, BACKENDS, backend
from nxd_memopt.backends.neuron.xla_inspect import traced_hlo
from nxd_memopt.checkpoint import BackgroundSaver, TrainingState, save_training_state
from nxd_memopt.checkpoint.sharded import logical
from nxd_memopt.memory.recompute import checkpoint
from nxd_memopt.parallel_layers import parallel_state, random
from tests.dist.pool import distributed
from tests.reference import assert_says, error_message
from tests.reference_models import batch, llama_config, parallel_model


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **environment}
    return subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True)


def test_simulation_is_announced():
    assert backend.name == "xla" and backend.device.type == "xla"
    assert_says(BACKEND_REASON, "NXD_MEMOPT_BACKEND=xla", "simulated on a CPU", "gloo")


def test_simulation_is_not_chosen_unasked():
    assert_says(BACKENDS["xla"].passed_over_reason() or "", "PJRT_DEVICE=CPU", "simulate", "NXD_MEMOPT_BACKEND=xla")
    result = run_python("from nxd_memopt.backends import backend; print(backend.name)", NXD_MEMOPT_BACKEND="")
    assert result.stdout.strip() == "cpu", result.stderr


@pytest.mark.parametrize("seed", [11, -(2**63), 2**63 + 5])
def test_random_state_round_trip(seed):
    """With every seed that torch takes."""
    before = backend.get_rng_state()
    torch.manual_seed(seed)
    backend.manual_seed(seed)
    state = backend.get_rng_state()
    assert int.from_bytes(bytes(state.tolist()), "little") == torch.initial_seed() % 2**64
    first = torch.rand(8, device=backend.device)
    backend.set_rng_state(state)
    assert torch.equal(torch.rand(8, device=backend.device), first)
    assert not torch.equal(torch.rand(8, device=backend.device), first)
    backend.set_rng_state(before)


@pytest.mark.parametrize("in_background", [False, True])
def test_a_save_copies_each_tensor_to_the_host_once(in_background, tmp_path, monkeypatch):
    """Also a tensor of many boxes, of which each would be a graph of its own otherwise."""
    monkeypatch.setattr(logical, "MAX_BOX_BYTES", 1024)
    model = torch.nn.Linear(64, 64).to(backend.device)
    copied, cpu = [], torch.Tensor.cpu

    def count(tensor, *args, **options):
        if tensor.device.type == "xla":
            copied.append(tuple(tensor.shape))
        return cpu(tensor, *args, **options)

    monkeypatch.setattr(torch.Tensor, "cpu", count)
    if in_background:
        with BackgroundSaver(tmp_path) as saver:
            saver.save(1, TrainingState(model), {})
    else:
        save_training_state(tmp_path, 1, state=TrainingState(model), config={})
    assert sorted(copied) == [(64,), (64, 64)]


@distributed(2)
def test_streams_differ_between_ranks_and_agree_where_they_must():
    parallel_state.initialize_model_parallel(2)
    random.model_parallel_manual_seed(3)
    replicated = torch.rand(16, device=backend.device)
    with random.get_rng_tracker().fork():
        own = torch.rand(16, device=backend.device)
    group = parallel_state.get_tensor_model_parallel_group()
    assert torch.equal(*backend.all_gather(replicated, group).chunk(2))
    assert not torch.equal(*backend.all_gather(own, group).chunk(2))


@distributed(2)
def test_the_rank_is_data_of_the_graph():
    parallel_state.initialize_model_parallel(2)
    group = parallel_state.get_tensor_model_parallel_group()
    rank = backend.group_rank_in_graph(group)
    assert rank.device.type == "xla" and rank.dim() == 0 and int(rank) == dist.get_rank() == backend.group_rank(group)


@distributed(2)
def test_a_group_that_torch_made_is_refused():
    group = dist.new_group([0, 1])
    with pytest.raises(ValueError, match=r"backend\.new_group or parallel_state"):
        backend.all_reduce(torch.ones(2, device=backend.device), group)
    assert backend.all_reduce(torch.ones(2, device=backend.device), dist.group.WORLD).tolist() == [2.0, 2.0]


def test_barrier_leaves_its_input_outside():
    x = torch.arange(4.0).to(backend.device)
    doubled = x * 2
    (behind,) = backend.optimization_barrier([doubled])
    assert "opt-barrier" in traced_hlo([behind + 1]) and "opt-barrier" not in traced_hlo([doubled + 1])
    assert behind.tolist() == [0.0, 2.0, 4.0, 6.0]


def test_checkpoint_puts_inputs_and_gradient_behind_one_barrier():
    x = torch.ones(4, 4, device=backend.device, requires_grad=True)
    checkpoint(lambda t: (t @ t).sin(), x).sum().backward()
    barriers = [line for line in traced_hlo([x.grad]).splitlines() if "opt-barrier(" in line]
    assert len(barriers) == 1 and barriers[0].count("f32[4,4]{1,0}") >= 2, "the input and the gradient of the output"


def dropout_step(**options: str) -> list[torch.Tensor]:
    torch.manual_seed(1)
    config = llama_config(num_hidden_layers=2, attention_dropout=0.2)
    model = parallel_model(config, sequence_parallel=True, attention_backend="math", **options).to(backend.device)
    random.model_parallel_manual_seed(7)
    inputs = {name: tensor.to(backend.device) for name, tensor in batch().items()}
    loss = model.train()(**inputs).loss
    loss.backward()
    return [loss.detach().cpu(), *(param.grad.cpu() for param in model.parameters())]


@distributed(2, timeout_s=300)
def test_recompute_replays_dropout_with_collectives_inside():
    parallel_state.initialize_model_parallel(2)
    want, got = dropout_step(), dropout_step(recompute_granularity="full")
    for expected, found in zip(want, got, strict=True):
        # the compiler fuses the two graphs differently: a few fp32 roundings; another mask would be off by 1
        assert torch.allclose(found, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("flags", ["", "-O2", "-O1 --optlevel=2"])
def test_recompute_refuses_to_start_above_o1(flags, monkeypatch):
    monkeypatch.setattr(backend, "_recompute_checked", False)
    monkeypatch.setenv("NEURON_CC_FLAGS", flags)
    message = error_message(lambda: parallel_model(llama_config(), recompute_granularity="full"))
    assert_says(message, "-O1", "NEURON_CC_FLAGS=-O1", "NXD_MEMOPT_RECOMPUTE_CHECK=warn")
    monkeypatch.setenv("NXD_MEMOPT_RECOMPUTE_CHECK", "warn")
    with pytest.warns(RuntimeWarning, match="NEURON_CC_FLAGS=-O1"):
        parallel_model(llama_config(), recompute_granularity="full")


TRACE_LISTS = """
import os, sys, torch
from nxd_memopt.backends import backend
from nxd_memopt.backends.neuron import xla_inspect
from nxd_memopt.parallel_layers import parallel_state
from tests.reference import fake_world
with fake_world(4), xla_inspect.pretended_rank(4, 0):
    parallel_state.initialize_model_parallel(2)
    group = parallel_state.get_data_parallel_group()
    tensors = [torch.ones(size).to(backend.device) for size in (4, 6)]
    chunks = backend.reduce_scatter_mean_list(tensors, group)
    print(xla_inspect.traced_hlo(list(backend.all_gather_list(chunks, group))))
sys.stdout.flush()
os._exit(0)  # the pretended world's collectives must never run
"""


def test_a_list_of_tensors_is_one_collective_without_a_copy():
    result = run_python(TRACE_LISTS)
    lines = result.stdout.splitlines()
    for opcode, sizes in (("reduce-scatter", (2, 3)), ("all-gather", (4, 6))):
        (line,) = [line for line in lines if f" {opcode}(" in line]
        assert "(f32[{}]{{0}}, f32[{}]{{0}})".format(*sizes) in line and "replica_groups={{0,2},{1,3}}" in line
    assert not any(" concatenate(" in line for line in lines), result.stderr[-2000:]


FIRST_COLLECTIVE = """
import os, sys, torch.distributed as dist
from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
backend.is_simulated, backend.distributed_backend = False, "xla"
backend.init_process_group()
events, new_group = [], backend.new_group
backend.all_reduce = lambda x, group, op="sum": events.append(f"world {group is dist.group.WORLD}") or x + 1
backend.new_group = lambda groups: events.append("group") or new_group(groups)
parallel_state.initialize_model_parallel(1)
print(events[:2])
sys.stdout.flush()
os._exit(0)
"""


def test_the_first_collective_is_over_the_world_and_before_any_group():
    world = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "29655"}
    result = run_python(FIRST_COLLECTIVE, **world)
    # All dimensions of one rank share a group.
    assert result.stdout.strip() == str(["world True", "group"]), result.stderr[-2000:]
