"""One rank that writes, reads or copies a checkpoint of an example's model, on neuronx-distributed or on this library.

The same program runs on both libraries. Parameters, master weights and optimizer states are drawn
by name for the full model, so any rank of any run can compute the values that it must have.
neuronx-distributed runs on torch_xla's CPU device, one per process; the collectives of its ZeRO-1
use gloo.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from example_rank import FOLDERS, HEADS, KV_HEADS, build_gpt_neox, draw, llama_sizes, parameter_groups
from torch import Tensor, nn

STEP = 3.0
LEARNING_RATE = 0.125
CONTENT = {"step": 3, "seen": [1, 2.5, "text"]}
STATES = ("exp_avg", "exp_avg_sq")


def main() -> None:
    """Run the task on this rank: write, read and compare, or copy."""
    options = parse()
    if options.library == "nxd":
        import_nxd(options.source / "src")
    dist.init_process_group({"nxd": "gloo"}.get(options.library, "xla"))
    from neuronx_distributed.parallel_layers import parallel_state

    parallel_state.initialize_model_parallel(tensor_model_parallel_size=options.tensor)
    sys.path.insert(0, str(options.source / "examples" / FOLDERS[options.example]))
    model, truth = build(options)
    optimizer = None
    if options.optimizer:
        optimizer = build_optimizer(model)
    # write: drawn values -> files. read: files -> comparison with the drawn values. copy: the files
    # of one tag -> model -> files, without drawn values.
    if options.task == "write":
        fill(options, model, optimizer, truth)
    else:
        load(options, model, optimizer)
    if options.task == "read":
        compare(options, model, optimizer, truth)
    else:
        save(options, model, optimizer)
    dist.barrier()
    dist.destroy_process_group()


def parse() -> argparse.Namespace:
    """Return the command line's arguments."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--library", choices=["ours", "nxd"], required=True)
    parser.add_argument("--task", choices=["write", "read", "copy"], required=True)
    parser.add_argument("--api", choices=["trainer", "layers"], required=True, help="save_checkpoint or checkpointing")
    parser.add_argument("--example", choices=list(FOLDERS), required=True)
    parser.add_argument("--source", type=Path, required=True, help="checkout of neuronx-distributed")
    parser.add_argument("--directory", type=Path, required=True)
    parser.add_argument("--tensor", type=int, required=True)
    parser.add_argument("--xser", action="store_true")
    parser.add_argument("--optimizer", action="store_true")
    parser.add_argument("--kv-replicas", type=int, default=1)
    parser.add_argument("--fused", action="store_true")
    parser.add_argument("--source-tag", type=Path, help="copy: a checkpoint of weights to load first")
    parser.set_defaults(recompute=False)  # of the models' builders
    return parser.parse_args()


def import_nxd(source: Path) -> None:
    """Import neuronx-distributed on torch_xla's CPU device.

    Its ZeRO-1 and its xser files need XLA tensors.
    """
    import torch_xla
    import torch_xla.core.xla_env_vars as xenv
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr
    from nxd_on_cpu import import_neuronx_distributed

    import_neuronx_distributed(source)
    xm.xla_device = lambda *_: torch_xla.device()
    xm.rendezvous = lambda *_, **__: dist.barrier()
    xm.all_reduce = all_reduce
    xm.all_gather = all_gather
    # The constant's name and meaning before torch_xla 2.9: NxD divides the world size by the number
    # of hosts.
    xenv.HOST_WORLD_SIZE = "HOST_WORLD_SIZE"
    os.environ["HOST_WORLD_SIZE"] = "1"
    # Every process has a torch_xla runtime of its own with one device. Ranks and world size are
    # those of the gloo processes instead, from which NxD computes its shards.
    xr.world_size = dist.get_world_size
    xr.global_ordinal = dist.get_rank
    xr.global_device_count = dist.get_world_size


def all_reduce(kind: str, tensors: list[Tensor], groups: Any = None, **_: Any) -> None:
    """Sum tensors over a group in place, on the host."""
    for tensor in tensors:
        host = tensor.cpu()
        dist.all_reduce(host, group=group_of(groups))
        tensor.copy_(host)


def all_gather(value: Tensor, dim: int = 0, groups: Any = None, **_: Any) -> Tensor:
    """Return the concatenation of the group's tensors along ``dim``, gathered on the host."""
    # gloo gathers CPU tensors; the copy also makes XLA run the pending operations.
    host = value.cpu().contiguous()
    ranks = next(ranks for ranks in groups if dist.get_rank() in ranks)
    gathered = [torch.empty_like(host) for _ in ranks]
    dist.all_gather(gathered, host, group=group_of(groups))
    return torch.cat(gathered, dim).to(value.device)


def group_of(groups: Any) -> Any:
    """Return the data-parallel group if ``groups`` have its size, else the world."""
    from neuronx_distributed.parallel_layers import parallel_state

    # NxD passes the ranks of every group. Only the data-parallel groups and the world occur here,
    # so the size of the first group tells which it is; if they have the same size they are equal.
    data = parallel_state.get_data_parallel_group()
    if len(groups[0]) == dist.get_world_size(data):
        return data
    return None


# Model and optimizer


def build(options: argparse.Namespace) -> tuple[nn.Module, dict[str, Tensor]]:
    """Return the example's bf16 model on the device, and full fp32 parameters by name."""
    from neuronx_distributed.parallel_layers.utils import move_model_to_device

    build_example = {"llama": build_llama, "gpt_neox": build_gpt_neox}[options.example]
    model = build_example(options).to(torch.bfloat16)
    # fp32, because master weights must come back with all their bits; the bf16 parameters are
    # these values rounded.
    truth = {name: draw(name, full_shape(param)) for name, param in model.named_parameters()}
    if options.library == "nxd":
        import torch_xla

        move_model_to_device(model, torch_xla.device())
    return model, truth


def build_llama(options: argparse.Namespace) -> nn.Module:
    """Return the example's LLaMA; with KV replicas it has GQAQKVColumnParallelLinear."""
    from modeling_llama_nxd import LlamaForCausalLM
    from transformers import LlamaConfig

    # KV replicas exist with grouped heads only. Otherwise every query head has its KV head, and
    # K and V are sharded like Q.
    heads = HEADS
    if options.kv_replicas > 1:
        heads = KV_HEADS
    config: Any = LlamaConfig(**{**llama_sizes(), "num_key_value_heads": heads}, use_cache=False)
    config.torch_dtype = torch.float32
    config.sequence_parallel_enabled = options.tensor > 1
    config.selective_checkpoint_enabled = False
    config.transpose_nki_inputs = False
    config.qkv_linear = options.kv_replicas > 1
    config.fuse_qkv = options.fused
    config.kv_shared_group_size = options.kv_replicas
    return LlamaForCausalLM(config)


def full_shape(param: Any) -> tuple[int, ...]:
    """Return the shape of the full tensor of a sharded parameter."""
    shape = list(param.shape)
    if getattr(param, "tensor_model_parallel", False):
        shape[param.partition_dim] *= param.num_partitions
    return tuple(shape)


def build_optimizer(model: nn.Module) -> Any:
    """Return ZeRO-1 over AdamW, which saves master weights."""
    from neuronx_distributed.optimizer import NeuronZero1Optimizer

    return NeuronZero1Optimizer(
        parameter_groups(model),
        torch.optim.AdamW,
        lr=LEARNING_RATE,
        pin_layout=False,
        save_master_weights=True,
    )


def local_values(model: nn.Module, truth: dict[str, Tensor], suffix: str = "") -> dict[str, Tensor]:
    """Return this tensor-parallel rank's shard of each parameter, or of its state ``suffix``."""
    from neuronx_distributed.parallel_layers.layers import create_local_weight

    # create_local_weight is of the library under test: it interleaves the shards of a parameter
    # with a stride, such as GPT-NeoX's fused QKV.
    local: dict[str, Tensor] = {}
    for name, param in model.named_parameters():
        full = truth[name]
        if suffix:
            full = draw(name + suffix, tuple(full.shape))
        if getattr(param, "tensor_model_parallel", False):
            dim: int = param.partition_dim  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
            stride: int = param.partition_stride  # pyright: ignore[reportAssignmentType, reportAttributeAccessIssue]
            full = create_local_weight(full, dim, param.size(dim), stride)
        local[name] = full
    return local


def shards(options: argparse.Namespace, optimizer: Any) -> list[tuple[Tensor, Tensor]]:
    """Return pairs of a parameter and this data-parallel rank's shard of it."""
    if options.library == "ours":
        return [(each.param, each.shard) for each in optimizer._sharded]
    # torch_xla's ZeRO-1 has a base optimizer with the same groups, whose parameters are the shards
    # in the same order.
    pairs: list[tuple[Tensor, Tensor]] = []
    groups = zip(optimizer.param_groups, optimizer.base_optimizer.param_groups, strict=True)
    for full, sharded in groups:
        pairs += zip(full["params"], sharded["params"], strict=True)
    return pairs


def cut(options: argparse.Namespace, optimizer: Any, local: Tensor) -> Tensor:
    """Return this data-parallel rank's shard of ``local``, in the library's layout."""
    if options.library == "ours":
        from nxd_memopt.optimizer.sharding import cut_shard

        return cut_shard(local, optimizer.sharding_group)
    return optimizer._shard_tensor(local)


def each_value(
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: Any,
    truth: dict[str, Tensor],
) -> Any:
    """Yield (shard, parameter's name, expected master weight, expected optimizer states)."""
    names = {id(param): name for name, param in model.named_parameters()}
    masters = local_values(model, truth)
    states = {state: local_values(model, truth, f".{state}") for state in STATES}
    for param, shard in shards(options, optimizer):
        name = names[id(param)]
        expected = {state: cut(options, optimizer, values[name]) for state, values in states.items()}
        yield shard, name, cut(options, optimizer, masters[name]), expected


@torch.no_grad()
def fill(
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: Any,
    truth: dict[str, Tensor],
) -> None:
    """Set parameters, master weights and optimizer states to their drawn values."""
    local = local_values(model, truth)
    for name, param in model.named_parameters():
        param.copy_(local[name].to(param.dtype))
    if optimizer is None:
        return
    # init_zero creates shards and master weights from the parameters, which are bf16: the fp32
    # values are written over them. The states are what a step would have created.
    optimizer.init_zero()
    for shard, _, master, states in each_value(options, model, optimizer, truth):
        shard.copy_(master)
        on_device = {name: value.to(shard.device, copy=True) for name, value in states.items()}
        optimizer.base_optimizer.state[shard] = {"step": torch.tensor(STEP), **on_device}


# Files


def save(options: argparse.Namespace, model: nn.Module, optimizer: Any) -> None:
    """Write the checkpoint with the chosen API."""
    import neuronx_distributed as nxd
    from neuronx_distributed.parallel_layers import checkpointing

    directory = str(options.directory)
    if options.api == "trainer":
        nxd.save_checkpoint(directory, "tag", model, optimizer, None, CONTENT, 8, options.xser)
        return
    # The older API of the layers writes the model and the content into one file; the optimizer
    # writes its own.
    checkpoint = {"model": model.state_dict(), **CONTENT}
    checkpointing.save(checkpoint, directory, save_xser=options.xser)
    if optimizer is not None:
        optimizer.save_sharded_state_dict(directory)


def load(options: argparse.Namespace, model: nn.Module, optimizer: Any) -> None:
    """Read the checkpoint with the chosen API, and check its user content."""
    import neuronx_distributed as nxd
    from neuronx_distributed.parallel_layers import checkpointing

    if options.source_tag:
        nxd.load_checkpoint(str(options.source_tag.parent), options.source_tag.name, model)
        return
    if options.api == "trainer":
        content = nxd.load_checkpoint(str(options.directory), "tag", model, optimizer)
        assert content == CONTENT, content
        return
    content = checkpointing.load(
        str(options.directory),
        model_or_optimizer=model,
        load_xser=options.xser,
    )
    assert content["step"] == CONTENT["step"], content["step"]
    if optimizer is not None:
        optimizer.load_sharded_state_dict(str(options.directory))


def compare(
    options: argparse.Namespace,
    model: nn.Module,
    optimizer: Any,
    truth: dict[str, Tensor],
) -> None:
    """Compare every value of this rank bitwise with its drawn value."""
    # The count is printed and becomes part of the table: a comparison of no tensors would be
    # visible there.
    count = 0
    local = local_values(model, truth)
    for name, param in model.named_parameters():
        require_equal(name, param, local[name].to(param.dtype))
        count += 1
    if optimizer is not None:
        for shard, name, master, states in each_value(options, model, optimizer, truth):
            require_equal(f"master of {name}", shard, master)
            state = optimizer.base_optimizer.state[shard]
            for key, value in states.items():
                require_equal(f"{key} of {name}", state[key], value)
            assert float(state["step"]) == STEP, (name, state["step"])
            count += 1 + len(states)
        assert optimizer.param_groups[0]["lr"] == LEARNING_RATE
    print(f"COMPARED {count} tensors", flush=True)


def require_equal(name: str, actual: Tensor, expected: Tensor) -> None:
    """Raise ``AssertionError`` unless dtype, shape and all values are equal."""
    actual = actual.detach().cpu()
    if actual.dtype != expected.dtype or not actual.equal(expected):
        difference: Tensor | str = "another shape"
        if actual.shape == expected.shape:
            difference = (actual.double() - expected.double()).abs().max()
        kind = f"{actual.dtype} {list(actual.shape)}"
        raise AssertionError(f"rank {dist.get_rank()}: {name}: {kind} {difference}")


if __name__ == "__main__":
    main()
