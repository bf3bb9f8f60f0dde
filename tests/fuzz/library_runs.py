"""Trains a drawn model with the library on this rank, and measures how far it is from the reference."""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import load_config, load_pretrained, save_pretrained
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.data_parallel import Zero2Optimizer, Zero3Optimizer, shard_model
from nxd_memopt.memory import apply_memory, offload, weights_to_device
from nxd_memopt.memory.host_pool import HostPool
from nxd_memopt.models import model_class
from nxd_memopt.modules.fp8 import use_fp8
from nxd_memopt.modules.lora import LoraConfig, add_adapters, is_adapter
from nxd_memopt.modules.moe.hf_options import options_of
from nxd_memopt.ops.fp8 import Fp8Recipe
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer, OffloadedZero1Optimizer, OptimizerInBackward
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.data_shards import gather_rows
from nxd_memopt.pipeline.causal_lm import PipelinedCausalLM
from nxd_memopt.pipeline.tied import sum_tied_gradients
from nxd_memopt.trainer import initialize_parallel_optimizer, neuronx_distributed_config
from tests.deferred_transfers import Deferred, DeferredTransfers
from tests.dist.test_fp8_models import without_rounding
from tests.fuzz.draws import Spec
from tests.fuzz.reference import Batch, batches, groups_of, hf_config, learning_rate, stages_of, trained_tokens
from tests.host_copies import HostOnly, SlowCopy
from tests.reference_models import local_part

ALLOCATE = HostPool._allocate
CHUNK = 64  # elements of offloaded states that travel together: several chunks in each layer


class SimulatedTransfers(DeferredTransfers):
    """The copies of a device whose memory is the host's, as late as possible."""

    def __init__(self) -> None:
        super().__init__()
        activations = HostOnly(copy=SlowCopy)
        self.to_host, self.to_device = activations.to_host, activations.to_device

    def copy_out(self, pairs: Any, after: Any) -> Any:
        # Without the NaN that the base class leaves in the source: a saver copies parameters, which stay.
        pairs = list(pairs)

        def copy() -> None:
            after.wait()
            for target, source in pairs:
                target.data.copy_(source)

        self.out.append(copy)
        return Deferred(self.out)


def allocate_unpinned(pool: HostPool) -> Any:
    """Return a block of the pool; a CPU has no page-locked memory."""
    with mock.patch.object(pool, "_pinned", False):
        return ALLOCATE(pool)


@contextmanager
def simulated_device(loss_bytes: int) -> Iterator[None]:
    """Let the CPU copy to the host and back, and cut the tokens of the fused loss into chunks of ``loss_bytes``."""
    with ExitStack() as patches:
        patches.enter_context(mock.patch.object(type(backend), "host_transfers", lambda self: SimulatedTransfers()))
        patches.enter_context(mock.patch.object(offload, "_MIN_BYTES", 1))
        patches.enter_context(mock.patch.object(HostPool, "_allocate", allocate_unpinned))
        name = "nxd_memopt.parallel_layers.fused_loss.linear_cross_entropy.DEFAULT_LOGITS_BYTES"
        patches.enter_context(mock.patch(name, loss_bytes))
        yield


class Loop:
    """A user's own training loop: an optimizer of the library or of torch, and the calls that it needs."""

    def __init__(self, model: Any, spec: Spec) -> None:
        self.model = model
        self.options = spec["optimizer"]
        self.kind: str = self.options["kind"]
        if self.kind == "zero3":
            reduce_dtype = None if spec["dtype"] == "float64" else torch.float32
            shard_model(
                model,
                reduce_dtype=reduce_dtype,
                reshard_after_forward=self.options.get("reshard_after_forward", True),
            )
        self.params = [param for param in model.parameters() if param.requires_grad]
        trained = {name: param for name, param in model.named_parameters() if param.requires_grad}
        groups = groups_of(trained, spec)
        self.factors = [group.pop("factor") for group in groups]
        self.router_losses: list[Tensor] = []
        self.pipeline: PipelinedCausalLM | None = None
        if not model.stages.is_whole:
            self.pipeline = PipelinedCausalLM(model, on_output=self._note_router_loss)
        self.in_backward: OptimizerInBackward | None = None
        self.optimizer: Any = self._build(groups, spec)

    def _build(self, groups: list[Spec], spec: Spec) -> Any:
        options = self.options
        adam = {"lr": options["lr"], "betas": tuple(options["betas"]), "eps": options["eps"]}
        clipping = {"grad_clipping": options["clip"] is not None, "max_norm": options["clip"]}
        single = [[rank] for rank in range(parallel_state.get_world_size())]
        if self.kind == "torch":
            return torch.optim.AdamW(groups, **adam)
        if self.kind == "adamw":
            return AdamW(groups, **adam)
        if self.kind == "in_backward":
            self.in_backward = OptimizerInBackward(AdamW(groups, **adam), computes_norm=True)
            return self.in_backward
        if self.kind == "zero2":
            reduce_dtype = None if spec["dtype"] == "float64" else torch.float32
            # 2 KiB: several buckets
            buckets = {"bucket_cap_mb_reduce_scatter": 2 / 1024, "reduce_dtype": reduce_dtype}
            return Zero2Optimizer(groups, AdamW, **buckets, **clipping, **adam)
        if self.kind == "zero3":
            return Zero3Optimizer(groups, AdamW, **clipping, **adam)
        if self.kind == "nxd":
            config = neuronx_distributed_config(
                tensor_parallel_size=spec["tensor"],
                expert_parallel_size=spec["expert"],
                optimizer_config={
                    "zero_one_enabled": options["zero_one_enabled"],
                    "grad_clipping": options["clip"] is not None,
                    "max_grad_norm": options["clip"] or 1.0,
                },
                mixed_precision_config={"use_master_weights": True, "use_fp32_grad_acc": True},
            )
            return initialize_parallel_optimizer(config, torch.optim.AdamW, groups, **adam)
        sharded = self.kind == "zero1" or bool(options.get("sharded"))
        shared: Spec = {"sharding_groups": None if sharded else single, "use_grad_acc_hook": True, **clipping, **adam}
        if self.pipeline is not None:
            shared["sum_tied"] = True
        if self.kind != "offload":
            return NeuronZero1Optimizer(groups, AdamW, **shared)
        optimizer = OffloadedZero1Optimizer(
            groups,
            optimizer_offload_fraction=options["fraction"],
            store_param_remainders=options["remainders"],
            chunk_elements=CHUNK,
            staging_bytes=3 * 12 * CHUNK,
            resident_elements=16,
            **shared,
        )
        if options["in_forward"]:
            layers, after_layers = self.model.decoder_layers(), self.model.modules_after_layers()
            optimizer.update_in_forward(layers, after_layers=after_layers)
        return optimizer

    def _note_router_loss(self, micro_batch: int, chunk: int, output: Any) -> None:
        """Keep the losses of a stage's routers, which the loss of the pipeline does not contain."""
        if getattr(output, "router_loss", None) is not None:
            self.router_losses.append(output.router_loss.detach())

    def set_learning_rate(self, lr: float) -> None:
        """Set the rates of all groups, as a schedule does; before backward."""
        for group, factor in zip(self.optimizer.param_groups, self.factors, strict=True):
            group["lr"] = lr * factor

    def step(self, gradients: dict[str, Tensor] | None) -> Tensor:
        """Reduce, clip and update; return the norm. ``gradients`` receives the reduced ones, where they are visible."""
        if self.in_backward is not None:
            norm = self.in_backward.grad_norm()
            self.in_backward.step()
            return norm
        if self.kind in ("torch", "adamw"):
            norm = self._reduce(gradients)
            self.optimizer.step()
        else:
            if self.kind == "none" or (self.kind == "offload" and not self.options["sharded"]):
                grads.allreduce_sequence_parallel_gradients(self.model)
                grads.bucket_allreduce_gradients(self.params)
            self.optimizer.step()
            norm = self.optimizer.grad_norm
        self.optimizer.zero_grad()
        return norm.detach()

    def _reduce(self, gradients: dict[str, Tensor] | None) -> Tensor:
        norm_type = math.inf if self.options.get("norm") == "inf" else 2.0
        grads.allreduce_sequence_parallel_gradients(self.model)
        grads.bucket_allreduce_gradients(self.params)
        if self.pipeline is not None:
            sum_tied_gradients(self.params)
        if gradients is not None:
            for name, param in self.model.named_parameters():
                if param.requires_grad:
                    gradients[name] = torch.zeros_like(param) if param.grad is None else param.grad.clone()
        if self.options["clip"] is None:
            return grads.get_grad_norm(self.params, norm_type)
        return grads.clip_grad_norm(self.params, self.options["clip"], norm_type)

    def finish(self) -> None:
        """Complete updates that were left to the next forward; bring weights back that are on the host."""
        if self.kind == "offload":
            self.optimizer.finish_update()
        weights_to_device(self.model.parameters())


def full_part(name: str, full: Tensor, config: Any) -> Tensor:
    """Return this rank's part of a full parameter or adapter, by the hand-written table of the tests."""
    if not is_adapter(name):
        return local_part(name, full, config)
    # A of row-parallel and B of column-parallel layers have the shards of the layer's weight.
    layer, factor, _ = name.rsplit(".", 2)
    is_row_parallel = layer.endswith(("o_proj", "down_proj", "dense", "dense_4h_to_h"))
    if (factor == "lora_A") == is_row_parallel:
        return local_part(f"{layer}.weight", full, config)
    return full


def build(spec: Spec, initial: dict[str, Tensor], directory: str | None) -> Any:
    """Return the library's model with this rank's part of the reference's initial weights."""
    config = hf_config(spec) if directory is None else load_config(directory)
    stages = stages_of(spec)
    parallel = ParallelConfig(
        spec["tensor"],
        sequence_parallel_enabled=spec["sequence"],
        expert_model_parallel_size=spec["expert"],
        pipeline_model_parallel_size=stages["size"],
        virtual_pipeline_model_parallel_size=stages["chunks"],
        pipeline_model_parallel_layout=stages["layout"] and tuple(stages["layout"]),
    )
    memory = MemoryConfig(**spec["memory"])
    dtype = getattr(torch, spec["dtype"])
    given: Spec = {}
    if spec["moe"]:
        given["moe"] = dataclasses.replace(options_of(config), **spec["moe"])
    before = memory
    if spec["lora"]:
        # As in the training program: adapters come before the techniques that replace forwards.
        names = ("fused_linear_cross_entropy", "attention_backend")
        before = MemoryConfig(**{name: getattr(memory, name) for name in names})
    model = model_class(config.model_type)(config, parallel=parallel, memory=before, dtype=dtype, **given)
    if directory is None:
        load(model, {name: value for name, value in initial.items() if not is_adapter(name)}, config)
    else:
        load_pretrained(model, directory)
    if spec["lora"]:
        add_adapters(model, LoraConfig(**spec["lora"]))
        load(model, {name: value for name, value in initial.items() if is_adapter(name)}, config)
        apply_memory(model, memory)
    if "fp8" in spec:
        options = spec["fp8"]
        recipe = Fp8Recipe(options["format"], options["granularity"])
        use_fp8(model, recipe, first_last_layers_bf16=options["first_last_layers_bf16"])
    return model


@torch.no_grad()
def load(model: Any, full: dict[str, Tensor], config: Any) -> None:
    """Copy this rank's part of the full parameters."""
    named = dict(model.named_parameters())
    for name, value in full.items():
        # The names of other stages are missing.
        if name in named or model.stages.is_whole:
            named[name].copy_(full_part(name, value, config))


def micro_batches(spec: Spec, step: int) -> tuple[list[Batch], Tensor]:
    """Return this data-parallel rank's micro-batches, and the divisor of their losses."""
    replicas, rank = parallel_state.get_data_parallel_size(), parallel_state.get_data_parallel_rank()
    of_all = batches(spec, step)
    # Gradients are averaged over the replicas.
    return of_all[rank::replicas], torch.tensor([trained_tokens(of_all) / replicas], dtype=torch.float64)


def run_step(model: Any, loop: Loop, spec: Spec, step: int, gradients: dict[str, Tensor]) -> tuple[float, float]:
    """Run a step; return the loss of all data-parallel ranks and the norm of the gradients."""
    loop.set_learning_rate(learning_rate(spec, step))
    mine, divisor = micro_batches(spec, step)
    inputs: list[dict[str, Any]] = [{**batch, "num_items_in_batch": divisor} for batch in mine]
    whole_step: Any = nullcontext()
    if spec["moe"]:
        inputs = [{**each, "router_loss_weight": 1 / len(mine)} for each in inputs]
        if spec["moe"]["moe_router_load_balancing_type"] == "global_aux_loss" and len(mine) > 1:
            whole_step = model.balanced_over_step(inputs)
    total = torch.zeros((), dtype=torch.float64)
    with whole_step:
        if loop.pipeline is not None:
            loop.router_losses.clear()
            total += loop.pipeline.train(inputs) + sum(loop.router_losses)
        for each in () if loop.pipeline is not None else inputs:
            loss = model(**each).loss
            loss.backward()
            total += loss.detach()
    norm = loop.step(gradients if step == 0 else None)
    losses = [torch.zeros_like(total) for _ in range(dist.get_world_size())]
    dist.all_gather(losses, total)
    # Tensor-parallel ranks have equal losses: the mean over all ranks is that over the replicas. Of the stages the last
    # one has the loss, and each rank the losses of its routers.
    return torch.stack(losses).mean().item() * stages_of(spec)["size"], norm.item()


def train(spec: Spec, reference: dict[str, Any], directory: str | None) -> dict[str, Any]:
    """Train on this rank.

    Returns:
        ``losses`` and ``norms`` of the steps; ``gradients`` and ``weights``: the largest error of a
        parameter and its name, as ``error_of`` measures it.
    """
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=spec["tensor"],
        pipeline_model_parallel_size=stages_of(spec)["size"],
        expert_model_parallel_size=spec["expert"],
    )
    # Operands that are rounded would hide in their own errors what a layout loses.
    with simulated_device(spec["loss_bytes"]), without_rounding() if "fp8" in spec else nullcontext():
        model = build(spec, reference["initial"], directory)
        model.train()
        loop = Loop(model, spec)
        gradients: dict[str, Tensor] = {}
        result: dict[str, Any] = {"losses": [], "norms": []}
        for step in range(spec["steps"]):
            loss, norm = run_step(model, loop, spec, step, gradients)
            result["losses"].append(loss)
            result["norms"].append(norm)
        loop.finish()
        if directory is not None and not spec["lora"]:
            save_pretrained(model, Path(directory) / "saved")
        weights = {name: gather_rows(param).detach() for name, param in model.named_parameters() if param.requires_grad}
    result["gradients"] = worst(gradients, reference["gradients"], reference["gradient_scales"], model.config)
    result["weights"] = worst(weights, reference["weights"], reference["weight_scales"], model.config)
    return result


def worst(
    found: dict[str, Tensor], expected: dict[str, Tensor], scales: dict[str, float], config: Any
) -> tuple[float, str]:
    """Return the largest difference from this rank's part of ``expected``, over its scale, and the parameter's name."""
    errors = [(0.0, "")]
    for name, value in found.items():
        difference = value.double() - full_part(name, expected[name].double(), config)
        error = difference.norm().item() / scales[name]
        errors.append((math.inf if math.isnan(error) else error, name))
    return max(errors)


def run(spec: Spec, reference: dict[str, Any], directory: str | None) -> dict[str, Any]:
    """Return what ``train`` does, or ``refused`` and the message of a ValueError."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return train(spec, reference, directory)
    except ValueError as error:
        return {"refused": str(error)}
