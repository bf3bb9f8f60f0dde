"""Trains tiny models on the device: recorded losses, compiled graphs, planned memory, and a checkpoint's way back."""

from __future__ import annotations

import functools
import tempfile
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import TrainingState, gather_full_tensor, load_training_state, save_training_state
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.coordination import share_texts
from nxd_memopt.planner.hardware import GIB
from nxd_memopt.selftest.check import AbsentError, Check, CheckError
from nxd_memopt.selftest.golden import FAMILIES, LARGEST_T, build, optimizer_of, recorded_losses, step, train
from nxd_memopt.training.config.data import DataConfig
from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig, TrainerConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.memory_plan import planned
from nxd_memopt.training.model import build_model, load_hf_config, load_initial_weights
from nxd_memopt.training.parallelize import parallelize
from nxd_memopt.training.state import Training
from nxd_memopt.training.step import train_step

STEPS = 10
LOSS_BOUND = 1e-4
"""Relative: AdamW amplifies sums in another order, 1e-7, to 1e-5 in 20 steps."""
ROUNDED_LOSS_BOUND = 1e-2
"""Where fp32 matmuls take bf16 inputs: with these roundings on the CPU, losses of 20 steps differ by up to 2e-3."""
_FULL = "full"


@functools.cache
def trained(name: str, size: int, sequence_parallel: bool, recompute: str | None) -> tuple[list[float], list[float]]:
    """Return the losses of ``STEPS`` steps, and the graphs that were compiled by the end of each; once per process."""
    del size  # the groups' own; the runs of each T are other runs
    compiled: list[float] = []

    def count() -> None:
        compiled.append(backend.step_counters().get("compiled graphs", 0))

    memory = MemoryConfig(recompute_granularity=cast(Any, recompute))
    losses = train(name, sequence_parallel=sequence_parallel, memory=memory, steps=STEPS, after_step=count)
    return losses, compiled


def golden(name: str, *, sequence_parallel: bool, recompute: str | None = None) -> str:
    """Return how far the losses are from the recorded ones.

    Raises:
        CheckError: further than the bound.
    """
    size = parallel_state.get_tensor_model_parallel_size()
    losses, _ = trained(name, size, sequence_parallel, recompute)
    bound = LOSS_BOUND
    if backend.rounds_matmuls:
        bound = ROUNDED_LOSS_BOUND
    wanted = recorded_losses(name)[:STEPS]
    errors = [abs(ours - theirs) / theirs for ours, theirs in zip(losses, wanted, strict=True)]
    for number, error in enumerate(errors, start=1):
        # Not ">": of NaN.
        if not error <= bound:
            found = f"loss of step {number} is {losses[number - 1]:.6f}, recorded {wanted[number - 1]:.6f}"
            raise CheckError(f"{found}: they differ by {error:.1e}, allowed {bound:.0e}")
    return f"loss {losses[0]:.4f} to {losses[-1]:.4f} in {STEPS} steps, {max(errors):.1e} from recorded, of {bound:.0e}"


def compile_counts() -> str:
    """Return how many graphs each step of the LLaMA compiled.

    Raises:
        AbsentError: the device compiles no graphs, or does not count them.
        CheckError: a step after the second one compiled a graph.
    """
    if "compiled graphs" not in backend.step_counters():
        raise AbsentError(f"the backend {backend.name} counts no compiled graphs")
    size = parallel_state.get_tensor_model_parallel_size()
    recompute = _FULL if size == 1 else None
    _, totals = trained("llama", size, size > 1, recompute)
    counts = [int(after - before) for before, after in pairwise(totals)]
    text = f"compiled graphs in steps 2 to {STEPS}: {counts}"
    if any(counts[1:]):
        raise CheckError(f"{text}: none is expected from step 3 on")
    return text


# A step of about half a GiB: the process's other memory is small next to it.
_SIZES = {
    "model_type": "llama",
    "vocab_size": 8192,
    "hidden_size": 512,
    "intermediate_size": 1408,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
MEMORY_BOUND = 0.25
"""Of a step this small, in which the allocator's own blocks count; large steps are planned to a few percent."""


def memory() -> str:
    """Return the planned and the measured bytes of a training step.

    Raises:
        AbsentError: the device does not report its memory, or is simulated.
        CheckError: they differ by more than the bound.
    """
    if backend.max_memory_allocated() is None:
        raise AbsentError(f"the backend {backend.name} does not report its memory")
    if getattr(backend, "is_simulated", False):
        raise AbsentError("a simulated device's memory is the host's, of which there is no plan")
    size = parallel_state.get_tensor_model_parallel_size()
    replicas = parallel_state.get_data_parallel_size()
    config = TrainConfig(
        ModelConfig(tokenizer="none", config_overrides=dict(_SIZES)),
        ParallelConfig(size, sequence_parallel_enabled=size > 1),
        data=DataConfig(seq_length=512, micro_batch_size=2, global_batch_size=2 * replicas),
        # A CUDA graph is captured in the third step.
        trainer=TrainerConfig(enable_cuda_graph=False),
    )
    hf_config = load_hf_config(config.model)
    _, plan = planned(config, hf_config)
    # What other checks have freed, and the process keeps, is used again.
    before = (backend.memory_allocated() or 0) - (backend.freed_bytes_kept() or 0)
    model = build_model(config, hf_config)
    load_initial_weights(model, config, hf_config)  # none here; on XLA it moves the model to the device
    optimizer, forward_backward = parallelize(model, config)
    # A run's plan of resumption and its tokens are not read by a step.
    training = Training(model, optimizer, forward_backward, cast(Any, None), cast(Any, None))
    ids = torch.randint(0, _SIZES["vocab_size"], (2, 512), generator=torch.Generator().manual_seed(3))
    batch = MicroBatch(ids, ids, torch.tensor([2.0 * 511])).to(backend.device)
    # The second step has the optimizer's states.
    for _ in range(2):
        backend.reset_peak_memory_stats()
        train_step(training, config, [batch]).loss.item()
    measured = (backend.max_memory_allocated() or 0) - before
    text = f"planned {plan.memory.device_bytes / GIB:.3f} GiB, measured {measured / GIB:.3f}"
    if abs(plan.memory.device_bytes / measured - 1) > MEMORY_BOUND:
        raise CheckError(f"{text}: they differ by more than {MEMORY_BOUND:.0%}")
    return text


def checkpoint() -> str:
    """Return where a checkpoint of a step was loaded bit-equal.

    It is saved at T and loaded at T, then loaded at T=1, saved there and loaded at T again.

    Raises:
        CheckError: a weight or a state differs.
    """
    size = parallel_state.get_tensor_model_parallel_size()
    # All ranks take rank 0's directory.
    with tempfile.TemporaryDirectory(prefix="nxd-memopt-selftest-") as own:
        directory = Path(share_texts(own)[0])
        # The graph of a step that has been compiled already.
        model, optimizer = _new()
        step(model, optimizer, torch.ones(4, 32, dtype=torch.int64).to(backend.device))
        config = {"of": "selftest"}
        save_training_state(directory / "first", 1, state=TrainingState(model, optimizer), config=config)
        wanted = _host_tensors(model, optimizer)
        full = _full_weights(model)
        _require_equal(_loaded(directory / "first", config), wanted, f"T={size}")
        if size > 1:
            _use_size(1)
            state = _loaded(directory / "first", config)
            # Tensor-parallel rank 0 has gathered the full weights.
            if full:
                loaded = [param.detach().cpu() for param in state.model.parameters()]
                _require_equal_tensors(loaded, full, "T=1")
            save_training_state(directory / "second", 1, state=state, config=config)
            _use_size(size)
            _require_equal(_loaded(directory / "second", config), wanted, f"T={size} from T=1")
        share_texts("")  # rank 0's directory is read until here
    text = f"weights and states bit-equal at T={size}"
    if size > 1:
        text += f", T=1, and T={size} from T=1"
    return text


def _use_size(size: int) -> None:
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(size)


def _new() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """Return a LLaMA and its optimizer, without states."""
    model = build("llama", sequence_parallel=parallel_state.get_tensor_model_parallel_size() > 1)
    return model, optimizer_of(model)


def _loaded(directory: Path, config: dict[str, str]) -> TrainingState:
    """Return another model and optimizer with the values of the checkpoint."""
    model, optimizer = _new()
    # Other values than the checkpoint's, which is a step ahead.
    state = TrainingState(model, optimizer)
    load_training_state(directory, state=state, config=config)
    backend.mark_step()
    return state


def _host_tensors(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> list[Tensor]:
    """Return this rank's weights and optimizer states on the CPU."""
    found: list[Tensor] = []
    for param in model.parameters():
        states = [optimizer.state[param][name] for name in ("exp_avg", "exp_avg_sq", "step")]
        found += [torch.as_tensor(each).detach().cpu() for each in (param, *states)]
    return found


def _full_weights(model: torch.nn.Module) -> list[Tensor]:
    """Return the full weights on the CPU of tensor-parallel rank 0, and nothing on the others."""
    gathered = [gather_full_tensor(param) for param in model.parameters()]
    return [tensor for tensor in gathered if tensor is not None]


def _require_equal(state: TrainingState, wanted: list[Tensor], where: str) -> None:
    assert state.optimizer is not None
    _require_equal_tensors(_host_tensors(state.model, state.optimizer), wanted, where)


def _require_equal_tensors(found: list[Tensor], wanted: list[Tensor], where: str) -> None:
    """Raise ``CheckError`` if tensors differ in a bit."""
    wrong = [index for index, pair in enumerate(zip(found, wanted, strict=True)) if not torch.equal(*pair)]
    if wrong:
        raise CheckError(f"{len(wrong)} of {len(wanted)} tensors differ after loading at {where}")


def checks(sizes: list[int]) -> list[Check]:
    """Return the checks of training at each T, and those of the largest T alone."""
    sizes = [size for size in sizes if size <= LARGEST_T]
    largest = sizes[-1]
    named = "memory.attention_backend: math, memory.fused_linear_cross_entropy: false, one at a time"
    found: list[Check] = []
    # Few runs, because each has two graphs to compile: with and without recompute and sequence parallelism.
    for size in sizes:
        for name in FAMILIES:
            sequence_parallel = size > 1 and name != "gpt_neox"
            instead, recompute = named, None
            if size == 1 and name == "llama":
                instead, recompute = f"memory.recompute_granularity: null, {named}", _FULL
            elif sequence_parallel:
                instead = f"parallel.sequence_parallel_enabled: false, {named}"
            run = partial(golden, name, sequence_parallel=sequence_parallel, recompute=recompute)
            found.append(Check(f"training: {name}", run, instead, size))
    one_value = "trainer.log_every_n_steps: 10 or more reads fewer values; report it"
    found.append(Check("compilations of ten steps", compile_counts, one_value, largest))
    explicit = "explicit options of the memory section instead of memory: auto"
    found.append(Check("planned and measured memory", memory, explicit, largest))
    unsaved = "trainer.save_interval: never, with trainer.export: true"
    found.append(Check("checkpoint", checkpoint, unsaved, largest))
    return found
