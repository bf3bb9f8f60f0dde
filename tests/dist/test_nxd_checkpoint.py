"""Tags of neuronx-distributed on real ranks: weights and ZeRO-1 states at the files' sizes and at others."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

from nxd_memopt import trainer
from nxd_memopt.modules.qkv_linear import GQAQKVColumnParallelLinear
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import layers, parallel_state
from nxd_memopt.parallel_layers.layer_norm import LayerNorm
from tests.dist.pool import distributed
from tests.nxd_fixtures import rank_name, read_xser, row_shard, write_tag
from tests.reference import assert_says, error_message, shard, tensors

HIDDEN, WIDTH = 6, 20
STATES = ("exp_avg", "exp_avg_sq")


class Block(nn.Module):
    """Each kind of shard; with a stride, and dimensions that two and three ranks do not divide."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = LayerNorm(HIDDEN + 1)
        self.up = layers.ColumnParallelLinear(HIDDEN + 1, WIDTH, gather_output=False, stride=2)
        self.down = layers.RowParallelLinear(WIDTH, HIDDEN + 1, input_is_parallel=True)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = layers.ParallelEmbedding(12, HIDDEN + 1)
        self.layers = nn.ModuleList(Block() for _ in range(2))


KINDS = {  # name's end: full shape, sharded dimension, stride
    "norm.weight": ((HIDDEN + 1,), None, 1),
    "norm.bias": ((HIDDEN + 1,), None, 1),
    "up.weight": ((WIDTH, HIDDEN + 1), 0, 2),
    "up.bias": ((WIDTH,), 0, 2),
    "down.weight": ((HIDDEN + 1, WIDTH), 1, 1),
    "down.bias": ((HIDDEN + 1,), None, 1),
    "embed.weight": ((12, HIDDEN + 1), 0, 1),
}
NAMES = ["embed.weight"] + [f"layers.{i}.{name}" for i in range(2) for name in list(KINDS)[:-1]]
GROUPS = [[name for name in NAMES if "bias" not in name and "norm" not in name], []]
GROUPS[1] = [name for name in NAMES if name not in GROUPS[0]]


def full(name: str, what: str) -> torch.Tensor:
    kind = next(kind for kind in KINDS if name.endswith(kind))
    seed = 1 + NAMES.index(name) * 10 + ("weight", "master", *STATES).index(what)
    return tensors(*KINDS[kind][0], seed=seed, dtype=torch.float32)


def local(name: str, what: str, rank: int, size: int) -> torch.Tensor:
    _, dim, stride = next(value for kind, value in KINDS.items() if name.endswith(kind))
    value = full(name, what)
    return value if dim is None else shard(value, dim, size=size, rank=rank, stride=stride)


def weights_of(rank: int, size: int, names=None) -> dict[str, torch.Tensor]:
    return {name: local(name, "weight", rank, size) for name in names or NAMES}


def optimizer_file(values, groups, data_rank: int, data_size: int) -> dict:
    """torch_xla's state dict: numbers count through the groups of names, shards are rows.

    ``values`` returns the tensor-parallel shard of a name for master, exp_avg and exp_avg_sq.
    """
    numbered = [name for group in groups for name in group]
    state: dict = {"state": {}, "param_groups": [], "base_state": {}, "shape_info": {}, "sharded_master_weights": {}}
    for group, decay in zip(groups, (0.25, 0.0), strict=True):
        numbers = [numbered.index(name) for name in group]
        state["param_groups"].append({"lr": 0.5, "weight_decay": decay, "params": numbers})
    for i, name in enumerate(numbered):
        master, *states = (row_shard(values(name, what), data_rank, data_size) for what in ("master", *STATES))
        state["base_state"][i] = {"step": torch.tensor(3.0), **dict(zip(STATES, states, strict=True))}
        state["shape_info"][i] = values(name, "master").shape
        state["sharded_master_weights"][i] = master
    return state


def optimizer_of(rank: int, size: int, data_rank: int, data_size: int, names=None) -> dict:
    groups = [[name for name in group if name in (names or NAMES)] for group in GROUPS]
    return optimizer_file(lambda name, what: local(name, what, rank, size), groups, data_rank, data_size)


def stage_names(stage: int) -> list[str]:
    return [name for name in NAMES if name.startswith("layers.1.") == (stage == 1)]


def write_theirs(directory, size, data_size, *, stages=1, xser=False) -> None:
    if dist.get_rank() == 0:
        files = {}
        for stage in range(stages):
            names = stage_names(stage) if stages > 1 else NAMES
            for rank in range(size):
                files[f"model/{rank_name(rank, stage)}"] = weights_of(rank, size, names)
                for data_rank in range(data_size):
                    state = optimizer_of(rank, size, data_rank, data_size, names)
                    files[f"optim/{rank_name(rank, stage, data_rank)}"] = state
        write_tag(directory, "theirs", files, xser=xser, user_content={"epoch": 2})
    dist.barrier()


def build(tensor_size: int):
    parallel_state.destroy_model_parallel()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
    model = Model()
    params = dict(model.named_parameters())
    groups = [{"params": [params[name] for name in group], "weight_decay": 0.1} for group in GROUPS]
    return model, NeuronZero1Optimizer(groups, torch.optim.AdamW, lr=1.0, eps=1e-5)


def assert_weights(model, what="weight") -> None:
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    for name, param in model.named_parameters():
        assert torch.equal(param.detach(), local(name, what, rank, size)), name


def assert_states(optimizer) -> None:
    """Every element of this rank's flat shards, the step, and the groups' options."""
    rank, size = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_tensor_model_parallel_size()
    data_rank, data_size = parallel_state.get_data_parallel_rank(), parallel_state.get_data_parallel_size()
    names = [name for group in GROUPS for name in group]
    shards = [param for group in optimizer.base_optimizer.param_groups for param in group["params"]]
    assert len(shards) == len(names)
    for name, param in zip(names, shards, strict=True):
        state = optimizer.base_optimizer.state[param]
        assert state["step"].item() == 3
        for what, value in (("master", param.detach()), *((key, state[key]) for key in STATES)):
            flat = local(name, what, rank, size).reshape(-1)
            length = -(-flat.numel() // data_size)
            flat = torch.cat([flat, flat.new_zeros(length * data_size - flat.numel())])
            assert torch.equal(value.reshape(-1), flat[data_rank * length :][:length]), (name, what)
    assert [group["lr"] for group in optimizer.param_groups] == [0.5, 0.5]
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.25, 0.0]
    assert optimizer.base_optimizer.param_groups[0]["eps"] == 1e-5  # torch_xla's groups have no such option


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(
    ("size", "data_size", "stages", "xser"), [(2, 1, 1, False), (1, 3, 1, True), (2, 2, 1, False), (2, 2, 2, True)]
)
def test_tags_of_neuronx_distributed_load(size, data_size, stages, xser, tmp_path):
    """Whatever T, D and number of stages wrote them, at T=2, so that D is 1 and 2; every element is the file's."""
    write_theirs(tmp_path, size, data_size, stages=stages, xser=xser)
    model, optimizer = build(2)
    assert trainer.has_checkpoint(tmp_path)
    assert trainer.load_checkpoint(tmp_path, None, model) == {"epoch": 2}
    assert_weights(model)
    trainer.load_checkpoint(tmp_path, "theirs", model, optimizer)
    assert_weights(model, "master")
    assert_states(optimizer)


@distributed(world_size=2)
def test_one_tensor_parallel_rank_merges_two(tmp_path):
    write_theirs(tmp_path, 2, 2, stages=2)
    model, optimizer = build(1)
    trainer.load_checkpoint(tmp_path, "theirs", model, optimizer)
    assert_weights(model, "master")
    assert_states(optimizer)
    message = error_message(lambda: optimizer.load_rank_files(tmp_path / "theirs" / "optim"))
    assert_says(message, "pipeline_model_parallel_size 2", "load the model and the optimizer together")


@distributed(world_size=[2, 4])
@pytest.mark.parametrize(("xser", "async_save"), [(False, False), (True, False), (True, True)])
def test_tags_written_here_are_neuronx_distributeds(xser, async_save, tmp_path):
    """Markers, names, row shards with padding, masters of every parameter, user content as it was passed."""
    write_theirs(tmp_path, 2, 2)
    model, optimizer = build(2)
    trainer.load_checkpoint(tmp_path, "theirs", model, optimizer)
    trainer.save_checkpoint(tmp_path, "ours", model, optimizer, None, {"epoch": 5}, 8, xser, async_save=async_save)
    trainer.finalize_checkpoint()
    rank, data_rank = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_data_parallel_rank()
    data_size = parallel_state.get_data_parallel_size()
    tag = tmp_path / "ours"
    assert all((tag / marker).read_text() == "1" for marker in ("checkpoint", "done"))
    assert torch.load(tag / "user_content.pt", weights_only=True) == {"epoch": 5}
    read = read_xser if xser else lambda path: torch.load(path, weights_only=True)
    stored = read(tag / "model" / rank_name(rank))
    assert stored.keys() == set(NAMES)
    for name in NAMES:
        assert torch.equal(stored[name], local(name, "master", rank, 2)), name
    if data_size == 1:
        return  # fp32 parameters of one rank are their own masters
    state, want = read(tag / "optim" / rank_name(rank, 0, data_rank)), optimizer_of(rank, 2, data_rank, data_size)
    assert [group["params"] for group in state["param_groups"]] == [group["params"] for group in want["param_groups"]]
    assert {i: tuple(shape) for i, shape in state["shape_info"].items()} == want["shape_info"]
    for i, values in want["base_state"].items():
        for what, value in values.items():
            assert torch.equal(state["base_state"][i][what], value), (i, what)
    again, other = build(2)
    assert trainer.load_checkpoint(tmp_path, None, again, other) == {"epoch": 5}
    assert_states(other)


@distributed(world_size=4)
def test_masters_of_all_parameters_are_in_the_files(tmp_path):
    """neuronx-distributed's loader asks for every parameter's master where there are any; frozen ones included."""
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=1)
    params = [nn.Parameter(tensors(5, 3, seed=i).bfloat16()) for i in range(3)]
    params[1].requires_grad_(False)
    optimizer = NeuronZero1Optimizer(params, torch.optim.AdamW, lr=1.0)
    optimizer.save_sharded_state_dict(tmp_path)
    rank = dist.get_rank()
    state = torch.load(tmp_path / f"optim.dp_rank_{rank:02d}.tp_rank_00", weights_only=True)
    assert state["param_groups"][0]["params"] == [0, 1, 2] and list(state["sharded_master_weights"]) == [0, 1, 2]
    for i, param in enumerate(params):
        assert torch.equal(state["sharded_master_weights"][i], row_shard(param.detach().float(), rank, 4)), i
    optimizer.load_sharded_state_dict(tmp_path)


@distributed(world_size=2)
def test_weights_that_were_left_to_the_masters(tmp_path):
    """avoid_saving_lower_precision_weights: the model's files refer to tensors that were not written."""
    write_theirs(tmp_path, 2, 1, xser=True)
    model, optimizer = build(2)
    if dist.get_rank() == 0:
        for path in (tmp_path / "theirs" / "model").glob("*.tensors/*"):
            path.unlink()
    dist.barrier()
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, None, model))
    assert_says(message, "avoid_saving_lower_precision_weights", "NeuronZero1Optimizer")
    trainer.load_checkpoint(tmp_path, None, model, optimizer)
    assert_weights(model, "master")


@distributed(world_size=2)
def test_bad_tags_are_refused(tmp_path):
    write_theirs(tmp_path, 2, 2)
    model, optimizer = build(2)
    tag = tmp_path / "theirs"

    def failure() -> str:
        dist.barrier()
        return error_message(lambda: trainer.load_checkpoint(tmp_path, "theirs", model, optimizer))

    def on_first(action) -> None:
        dist.barrier()
        if dist.get_rank() == 0:
            action()
        dist.barrier()

    assert_says(error_message(lambda: trainer.load_checkpoint(tmp_path, "absent", model)), "'absent'", "['theirs']")
    plain = torch.optim.AdamW(model.parameters())
    assert_says(error_message(lambda: trainer.load_checkpoint(tmp_path, None, None, plain)), "ZeRO-1", "AdamW")
    state = tag / "optim" / rank_name(1, 0, 1)
    content = state.read_bytes()
    on_first(state.unlink)
    assert_says(failure(), "lacks 1 of 4", "dp_rank 1 tp_rank 1")
    on_first(lambda: state.write_bytes(content[:-50]))
    on_first(lambda: (tag / "optim" / rank_name(0, 0, 1)).write_bytes(content[:-50]))
    assert_says(failure(), "cannot be read")

    def other_shapes(rank: int) -> None:
        wrong = optimizer_of(rank, 2, 0, 2)
        wrong["shape_info"][0] = torch.Size([3, 3])
        torch.save(wrong, tag / "optim" / rank_name(rank, 0, 0))

    on_first(lambda: [other_shapes(rank) for rank in range(2)])
    assert_says(failure(), "parameter 0 has shape [3, 3]", f"[6, {HIDDEN + 1}]", "same parameter groups")
    one_group = NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=1.0)
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, None, model, one_group))
    assert_says(message, "parameter groups", "build the same")
    on_first((tag / "done").unlink)
    assert_says(failure(), "done is missing", "interrupted")


@distributed(world_size=2)
def test_pieces_of_another_length_are_refused(tmp_path):
    """Three files of a run with four data-parallel ranks would otherwise be joined as a run of three."""
    write_theirs(tmp_path, 2, 4)
    model, optimizer = build(2)
    if dist.get_rank() == 0:
        for rank in range(2):
            (tmp_path / "theirs" / "optim" / rank_name(rank, 0, 3)).unlink()
    dist.barrier()
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, None, model, optimizer))
    assert_says(message, "over 3 shards", "a rank file is missing")


@distributed(world_size=2)
def test_missing_tensor_parallel_ranks_are_refused(tmp_path):
    """One file of a run with two tensor-parallel ranks: the other half of the elements would become zeros."""
    write_theirs(tmp_path, 2, 1)
    model, optimizer = build(2)
    if dist.get_rank() == 0:
        for folder in ("model", "optim"):
            (tmp_path / "theirs" / folder / rank_name(1)).unlink()
    dist.barrier()
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, None, model))
    assert_says(message, "theirs/model", "embed.weight", "6 on each of 1", "6 of 12", "copy the files of all ranks")
    message = error_message(lambda: trainer.load_checkpoint(tmp_path, None, None, optimizer))
    assert_says(message, "theirs/optim", "parameter 0", "6 on each of 1", "6 of 12", "copy the files of all ranks")


@distributed(world_size=2)
def test_unknown_entries_of_an_optimizer_are_listed(tmp_path):
    _, optimizer = build(2)
    rank = dist.get_rank()
    state = {**optimizer_of(rank, 2, 0, 1), "dp_rank": 0, "tp_rank": rank, "loss_scale": 8.0}
    torch.save(state, tmp_path / f"optim.dp_rank_00.tp_rank_{rank:02d}")
    dist.barrier()
    with pytest.warns(UserWarning, match=r"not loaded: \['loss_scale'\]"):
        optimizer.load_sharded_state_dict(tmp_path)
    assert_states(optimizer)


@distributed(world_size=4)
@pytest.mark.parametrize(("fuse_qkv", "stages"), [(False, 2), (True, 1)])
def test_the_other_platforms_order_of_kv_replicas_is_refused(fuse_qkv, stages, tmp_path):
    """Files in strided and in consecutive order: exactly the one whose replicas are this run's loads.

    With two stages the layer is in the second one's files.
    """
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=4)
    options = {"bias": False, "gather_output": False, "kv_size_multiplier": 2, "fuse_qkv": fuse_qkv}
    layer = nn.Module()
    layer.qkv = GQAQKVColumnParallelLinear(5, [8, 4], **options)
    layer.norm = LayerNorm(5) if stages == 2 else None
    key, value, query = tensors(4, 5, seed=1).float(), tensors(4, 5, seed=2).float(), tensors(8, 5, seed=3).float()
    for tag, index in (("consecutive", [0, 0, 1, 1]), ("strided", [0, 1, 0, 1])):
        files = {}
        for rank in range(4):
            parts = [query.chunk(4)[rank], key.chunk(2)[index[rank]], value.chunk(2)[index[rank]]]
            separate = {f"weight_{name}": part.clone() for name, part in zip("qkv", parts, strict=True)}
            state = {"weight_qkv": torch.cat(parts)} if fuse_qkv else separate
            state = {f"qkv.{name}": value for name, value in state.items()}
            files[f"model/{rank_name(rank, stages - 1)}"] = state
            if stages == 2:
                files[f"model/{rank_name(rank)}"] = {"norm.weight": torch.ones(5), "norm.bias": torch.zeros(5)}
        if dist.get_rank() == 0:
            write_tag(tmp_path, tag, files)
    dist.barrier()
    outcomes = dict.fromkeys(("consecutive", "strided"))
    for tag in outcomes:
        try:
            trainer.load_checkpoint(tmp_path, tag, layer)
        except ValueError as error:
            outcomes[tag] = str(error)
    refused = [message for message in outcomes.values() if message]
    assert len(refused) == 1
    assert_says(refused[0], "hold the same KV heads", "trn1 strided, trn2 consecutive", "nxd-memopt convert")


@distributed(world_size=4)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parameters_without_dimensions_are_saved_and_loaded(dtype, tmp_path):
    """A trained and a frozen scalar, at D=4, and from there at D=2 and back: every state is that of the run."""

    def build_scalars(tensor_size: int):
        parallel_state.destroy_model_parallel()
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=tensor_size)
        model = nn.Module()
        model.scale, model.frozen = (nn.Parameter(torch.tensor(value, dtype=dtype)) for value in (2.0, 3.0))
        model.weight = nn.Parameter(torch.ones(3, dtype=dtype))
        model.frozen.requires_grad_(False)
        return model, NeuronZero1Optimizer(model.parameters(), torch.optim.AdamW, lr=0.25)

    def values(model, optimizer) -> torch.Tensor:
        """Of the first elements: all are on data-parallel rank 0."""
        state = optimizer.base_optimizer.state
        shards = [param for group in optimizer.base_optimizer.param_groups for param in group["params"]]
        found = [model.scale, *shards, *(state[shard][name] for shard in shards for name in (*STATES, "step"))]
        return torch.stack([value.detach().float().reshape(-1)[0] for value in found])

    model, optimizer = build_scalars(1)
    (model.scale * 3.0 + model.weight.sum()).backward()
    optimizer.step()
    want = values(model, optimizer)
    dist.broadcast(want, 0)
    for tag, size in (("first", 2), ("second", 4), ("third", 1)):
        trainer.save_checkpoint(tmp_path, tag, model, optimizer)
        model, optimizer = build_scalars(size)
        trainer.load_checkpoint(tmp_path, tag, model, optimizer)
        if parallel_state.get_data_parallel_rank() == 0:
            assert torch.equal(values(model, optimizer), want)
        for param in optimizer.base_optimizer.param_groups[0]["params"]:
            state = optimizer.base_optimizer.state[param]
            assert all(state[name].shape == param.shape for name in STATES)
