"""Tests that run in a process with the alias; ``test_compat.py`` starts it, so that the other tests stay without."""

from __future__ import annotations

import importlib
import io
import sys
from collections import UserDict
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.compat import install, xla
from nxd_memopt.compat.alias import install_alias
from nxd_memopt.compat.names import NAMES, TORCH_NEURONX
from nxd_memopt.parallel_layers import layers as our_layers
from nxd_memopt.parallel_layers import parallel_state as our_state

UNKNOWN = [
    (
        "from neuronx_distributed.parallel_layers.layers import ColumnParalelLinear",
        "neuronx_distributed.parallel_layers.layers.ColumnParallelLinear",
    ),
    ("import neuronx_distributed.parallel_layers.mapings", "neuronx_distributed.parallel_layers.mappings"),
    ("from neuronx_distributed import get_logger", "neuronx_distributed.utils.logger.get_logger"),
    ("import torch_xla.core.xla_model as xm; xm.mark_stepp", "torch_xla.core.xla_model.mark_step"),
]


@pytest.mark.parametrize(
    "table", [NAMES, xla.NAMES, TORCH_NEURONX], ids=["neuronx_distributed", "torch_xla", "torch_neuronx"]
)
def test_every_offered_name_is_the_object_it_stands_for(table):
    for module, names in table.items():
        imported = importlib.import_module(module)
        for name, location in names.items():
            owner, _, attribute = location.partition(":")
            assert getattr(imported, name) is getattr(importlib.import_module(owner), attribute), (module, name)


@pytest.mark.parametrize(("statement", "nearest"), UNKNOWN)
def test_unknown_names_say_the_nearest(statement, nearest):
    with pytest.raises((ImportError, AttributeError)) as caught:
        exec(statement)
    assert "is not offered by nxd_memopt" in str(caught.value)
    assert str(caught.value).endswith(f"nearest name that is: {nearest}; see docs/migrating_from_nxd.md")


def test_attributes_set_through_the_alias():
    """A patch reaches the library; a new name stays with the alias, and may be probed."""
    original = our_state.get_tensor_model_parallel_size
    name = "neuronx_distributed.parallel_layers.parallel_state.get_tensor_model_parallel_size"
    with patch(name, return_value=8):
        assert our_layers.parallel_state.get_tensor_model_parallel_size() == 8
    assert our_state.get_tensor_model_parallel_size is original
    alias = importlib.import_module("neuronx_distributed.parallel_layers.parallel_state")
    assert not hasattr(alias, "note") and getattr(alias, "__wrapped__", None) is None
    alias.note = "kept"
    assert alias.note == "kept" and not hasattr(our_state, "note")
    del alias.note


def test_a_second_install_changes_nothing_and_a_package_that_is_imported_is_refused():
    before = list(sys.meta_path)
    install()
    assert sys.meta_path == before
    with pytest.raises(RuntimeError, match="json was imported before its alias"):
        install_alias("json", {"json": {}})
    assert sys.meta_path == before


# The device "xla"


def test_literal_device_is_the_backends():
    made = [torch.zeros(2, device="xla"), torch.ones(2).to("xla"), torch.arange(3, device=torch.device("xla", 0))]
    made += [torch.ones(2).to(torch.device("xla")), torch.ones(2).to("xla:0", torch.float64), torch.ones(1).to(made[0])]
    made += list(torch.nn.Linear(2, 2).to("xla").parameters())
    assert {tensor.device for tensor in made} == {backend.device}
    assert made[4].dtype == torch.float64
    assert torch.einsum("xla->x", torch.ones(2, 3, 4)).tolist() == [12, 12]  # no device


# torch_xla


def test_xla_model_in_a_single_process(tmp_path, capsys):
    import torch_xla
    import torch_xla.core.xla_model as xm
    import torch_xla.runtime as xr

    assert xm.xla_device() == torch_xla.device() == backend.device
    assert (xr.world_size(), xr.global_ordinal(), xr.local_ordinal(), xm.is_master_ordinal()) == (1, 0, 0, True)
    xm.mark_step()
    xm.master_print("seen", 1)
    assert capsys.readouterr().out == "seen 1\n"
    tensor = torch.ones(2)
    assert xm.all_reduce(xm.REDUCE_SUM, tensor, scale=0.5).tolist() == [0.5, 0.5]
    assert xm.all_reduce(xm.REDUCE_SUM, [tensor], scale=3.0)[0] is tensor
    assert tensor.tolist() == [3, 3]
    assert xm.mesh_reduce("tag", 2.5, max) == 2.5
    xm.save({"weight": tensor, "step": 3}, tmp_path / "file.pt")
    assert torch.load(tmp_path / "file.pt", weights_only=True)["weight"].tolist() == [3, 3]
    with pytest.raises(ValueError, match="asked for n=3"):
        xm.xla_device(3)


def test_spawn_runs_here_and_torchrun_starts_processes():
    import torch_xla.distributed.xla_multiprocessing as xmp

    seen = []
    xmp.spawn(lambda index, name: seen.append((index, name)), args=("a",))
    assert seen == [(0, "a")]
    with pytest.raises(ValueError, match="torchrun --nproc_per_node 4"):
        xmp.spawn(print, nprocs=4)


def test_device_loader_moves_nested_batches():
    import torch_xla.distributed.parallel_loader as pl

    batches = [{"x": torch.ones(2), "pair": (torch.zeros(1), "text")}, UserDict(y=torch.ones(1))]
    loader = pl.MpDeviceLoader(batches, torch.device("meta"), batches_per_execution=2)
    first, second = list(loader)
    assert first["x"].is_meta and first["pair"][0].is_meta and first["pair"][1] == "text" and second["y"].is_meta
    assert len(loader) == 2 and loader.index(batches[1]) == 1  # what it does not have is the loader's own
    parallel = pl.ParallelLoader(batches, [torch.device("meta")], batches_per_execution=2)
    per_device = parallel.per_device_loader("meta")
    assert isinstance(per_device, pl.PerDeviceLoader) and next(iter(per_device))["x"].is_meta
    assert parallel.per_device_samples() == len(per_device) == 2
    parallel.close()
    with pytest.raises(ValueError, match="a process has one device"):
        pl.ParallelLoader(batches, ["cpu", "cpu"])


def test_xser_files_are_read_by_the_programs_own_code(tmp_path):
    """With the class that the pickle names, and one conversion of all references."""
    import torch_xla.core.xla_model as xm
    from neuronx_distributed.parallel_layers import checkpointing
    from torch_xla.utils.serialization import TensorReference

    state = {"weights": [torch.arange(3.0), torch.ones(2)], "step": (4, "text")}
    checkpointing.save(state, str(tmp_path), save_xser=True)
    path = next(tmp_path.glob("*.tensors")).with_suffix("")
    content = torch.load(path, weights_only=False)
    calls = []

    def convert(references):
        calls.append([reference.tid for reference in references])
        return [torch.load(f"{path}.tensors/tensor_{reference.tid}.pt") for reference in references]

    read = xm.ToXlaTensorArena(convert, lambda value: type(value) is TensorReference).transform(content)
    assert calls == [[0, 1]] and read["step"] == (4, "text")
    assert all(torch.equal(got, want) for got, want in zip(read["weights"], state["weights"], strict=True))
    assert xm.ToXlaTensorArena(convert, torch.is_tensor).transform({"a": 1}) == {"a": 1} and len(calls) == 1


def test_torchs_own_checkpoint_stays_where_it_works():
    import torch.utils.checkpoint

    assert torch.utils.checkpoint.checkpoint.__module__ == "torch.utils.checkpoint"


def test_process_group_of_one_without_torchrun():
    with pytest.raises(ValueError, match="init_method 'file://x'"):
        dist.init_process_group("xla", init_method="file://x")
    from torch_xla.distributed.xla_backend import ProcessGroupXla

    assert not isinstance(dist.group.WORLD, ProcessGroupXla)
    dist.init_process_group(backend="xla", init_method="pjrt://")
    assert isinstance(dist.group.WORLD, ProcessGroupXla), "optimum-neuron initializes it again otherwise"
    assert (dist.get_world_size(), dist.get_backend()) == (1, "gloo")
    dist.destroy_process_group()


# Calling conventions


def test_lnc_size_is_the_environments(monkeypatch):
    from neuronx_distributed.parallel_layers import parallel_state

    monkeypatch.setenv("NEURON_LOGICAL_NC_CONFIG", "1")
    with pytest.raises(ValueError, match="lnc_size 2 is not the environment's 1"):
        parallel_state.initialize_model_parallel(lnc_size=2, mesh_only=True)
    from neuronx_distributed.utils.model_utils import LogicalNCConfig, get_platform_lnc
    from torch_neuronx.utils import get_platform_target

    assert get_platform_target() == "trn2" and get_platform_lnc() is LogicalNCConfig.LNC_1  # no Neuron: its KV order
    monkeypatch.delenv("NEURON_LOGICAL_NC_CONFIG")  # trn2's default is 2
    for platform, cores in (("trn1.32xlarge", 1), ("trn2", 2)):
        monkeypatch.setenv("NEURON_PLATFORM_TARGET_OVERRIDE", platform)
        assert (get_platform_target(), get_platform_lnc()) == (platform[:4], LogicalNCConfig(cores))
    assert parallel_state.initialize_model_parallel(lnc_size=2, mesh_only=True)["tensor"] == [[0]]


def test_column_parallel_linear_takes_nxds_positional_arguments():
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

    layer = ColumnParallelLinear(3, 5, False, True, torch.float64)
    assert (layer.reduce_dtype, layer.bias, layer.weight.dtype) == (torch.float32, None, torch.float64)
    assert isinstance(layer, our_layers.ColumnParallelLinear)
    rows = torch.tensor([4, 0])
    x = torch.randn(2, 3, dtype=torch.float64)
    assert torch.equal(layer(x, slice_indices=rows), (x @ layer.weight.t())[:, rows])
    with pytest.raises(ValueError, match=r"rank_ordering=\[1, 0\] is not offered"):
        ColumnParallelLinear(3, 5, rank_ordering=[1, 0])


def test_padded_layer_refuses_training_and_pads_checkpoints():
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear, RowParallelLinear

    column = ColumnParallelLinear(3, 5, pad=True, pad_alignment_size_per_rank=4)
    row = RowParallelLinear(6, 2, pad=True)
    with pytest.raises(RuntimeError, match="pad=True is for inference"):
        column(torch.ones(1, 3))
    state = {"head.weight": torch.ones(5, 3), "head.bias": torch.ones(5), "row.weight": torch.ones(2, 6)}
    column.preshard_hook(state, "head.weight")
    column.preshard_hook(state, "head.bias")
    row.preshard_hook(state, "row.weight")
    assert state["head.weight"].shape == (8, 3) and state["head.weight"][5:].eq(0).all()
    assert state["head.bias"][5:].eq(torch.finfo(torch.float32).min).all()
    assert state["row.weight"].shape == (2, 6)
    assert column.eval()(torch.ones(1, 3)).shape == (1, 5)
    with pytest.raises(ValueError, match=r"head\.weight has 8 entries along dimension 0, the layer 5"):
        column.preshard_hook(state, "head.weight")


def test_embedding_takes_nxds_positional_arguments():
    from neuronx_distributed.parallel_layers.layers import ParallelEmbedding

    layer = ParallelEmbedding(6, 4, 0, None, 2.0, False, False, torch.nn.init.ones_, None, torch.float64, True)
    assert layer.weight.dtype == torch.float64 and layer.shard_across_embedding
    assert layer.weight[0].eq(1).all()  # the given init_method alone decides, also on the padding row
    with pytest.raises(ValueError, match=r"max_norm=1\.0 is not offered"):
        ParallelEmbedding(6, 4, max_norm=1.0)


def test_flash_attention_layouts():
    from neuronx_distributed.kernels.flash_attn import nki_flash_attn_func
    from neuronx_distributed.kernels.ring_attention_kernel import nki_ring_attn_func

    q, k, v = torch.randn(3, 2, 4, 6, 8, dtype=torch.float64).unbind()  # [B, h, S, d]
    expected = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=0.3)
    transposed = (tensor.transpose(-1, -2) for tensor in (q, k, v))
    for output in (
        nki_flash_attn_func(*transposed, softmax_scale=0.3),
        nki_ring_attn_func(q, k, v, 0, [[0, 0]], softmax_scale=0.3),
    ):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)  # fp64: other order of products


def test_rotary_embedding_layouts():
    from neuronx_distributed.overrides.transformer_overrides import apply_rotary_pos_emb

    q, k = torch.randn(2, 1, 2, 5, 6, dtype=torch.float64).unbind()
    angles = torch.randn(5, 3, dtype=torch.float64).repeat(1, 2)  # [positions, d]
    turn = torch.polar(torch.ones(5, 3, dtype=torch.float64), angles[:, :3])
    paired = torch.view_as_complex(torch.stack(q.chunk(2, -1), -1).contiguous()) * turn
    expected = torch.cat((paired.real, paired.imag), -1)
    position_ids = torch.arange(5).unsqueeze(0)
    plain, _ = apply_rotary_pos_emb(q, k, angles.cos(), angles.sin(), position_ids, False)
    turned, _ = apply_rotary_pos_emb(q.mT, k.mT, angles.cos()[None], angles.sin()[None], None, True)
    for output in (plain, turned.mT):
        torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)  # fp64


def test_configuration_records_stages_and_completes_the_callers_section():
    import neuronx_distributed as nxd

    section = {"meta_device_init": True, "param_init_fn": print}
    config = nxd.neuronx_distributed_config(tensor_parallel_size=1, pipeline_parallel_size=4, model_init_config=section)
    assert config["model_init_config"] is section and section["sequential_move_factor"] == 11
    assert config["mixed_precision_config"]["use_master_weights_in_ckpt"] is False
    with pytest.raises(ValueError, match="world size 1 is not divisible by 4"):
        nxd.initialize_parallel_model(config, lambda: torch.nn.Linear(1, 1))
    stages = {"num_microbatches": 4, "virtual_pipeline_size": 1}
    config = nxd.neuronx_distributed_config(pipeline_config=stages)
    assert config["pipeline_config"] is stages, "programs add to it"


def test_adapters_of_the_configuration():
    import neuronx_distributed as nxd
    from neuronx_distributed.modules.lora import LoraConfig
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

    options = LoraConfig(lora_rank=2, target_modules=["0"], lora_verbose=True, merge_sharded_lora=False)
    config = nxd.neuronx_distributed_config(optimizer_config={"zero_one_enabled": True})
    config["lora_config"] = options  # as NxD Training sets it
    model = nxd.initialize_parallel_model(
        config, lambda: torch.nn.Sequential(ColumnParallelLinear(3, 4, gather_output=False))
    )
    frozen = [param for name, param in model.named_parameters() if "lora" not in name]
    before = [param.detach().clone() for param in frozen]
    factors = dict(model.named_parameters())
    down, up = (factors[f"0.lora_{name}.weight"] for name in "AB")
    torch.nn.init.ones_(up)
    optimizer = nxd.initialize_parallel_optimizer(
        config, torch.optim.AdamW, model.parameters(), lr=0.5, weight_decay=0.1
    )
    x = torch.randn(5, 3)
    want = x @ before[0].T + before[1] + options.lora_alpha / 2 * (x @ down.detach().T) @ up.detach().T
    output = model(x)
    torch.testing.assert_close(output, want)
    output.square().sum().backward()
    optimizer.step()
    assert all(torch.equal(param, old) for param, old in zip(frozen, before, strict=True))
    assert not torch.equal(up, torch.ones_like(up))
    with pytest.raises(ValueError, match="merge_lora=True is not offered"):
        LoraConfig(merge_lora=True)


def test_state_of_saves(tmp_path):
    import neuronx_distributed as nxd

    assert nxd.trainer.checkpoint.g_iostate is None
    for tag in "abc":
        nxd.save_checkpoint(str(tmp_path), tag, {"weight": torch.ones(1)}, async_save=True)
    state = nxd.trainer.checkpoint.g_iostate
    state.wait_save(async_remove=True)
    assert (tmp_path / "c" / "done").is_file()
    state.submit_remove(-1, True, ["b", "unknown"])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "c"]
    state.submit_remove(1, False)
    assert [path.name for path in tmp_path.iterdir()] == ["c"]
    state.wait_all()


def test_names_of_pipeline_stages():
    """Programs with a single stage import them; tracing with leaf modules is torch.fx's."""
    from neuronx_distributed.pipeline import NxDPPModel, trace

    tracer = trace.NxDTracer()
    tracer.leaf_modules = ("Block", "1")
    model = torch.nn.Sequential(type("Block", (torch.nn.Sequential,), {})(torch.nn.ReLU()), torch.nn.Sequential())
    called = [node.target for node in tracer.trace(model).nodes if node.op == "call_module"]
    assert called == ["0", "1"] and not isinstance(model, NxDPPModel)
    model[0] = torch.nn.Sequential(torch.nn.ReLU())
    assert [node.target for node in tracer.trace(model).nodes if node.op == "call_module"] == ["0.0", "1"]
    with pytest.raises(ImportError, match=r"transformers\.utils\.fx, which traces transformers' models, is missing"):
        trace.HFTracerWrapper()
    with pytest.raises(ValueError, match="needs transformer_layer_cls"):
        NxDPPModel(model)


def test_helpers():
    from neuronx_distributed.parallel_layers import mappings, utils
    from neuronx_distributed.utils import cpu_mode, hardware

    assert utils.EmbeddingUtility.range_from_global_vocab_size(12, 2, 4) == (6, 9)
    assert utils.get_padding_length(10, 4) == 2
    assert utils.indices_split_along_dim(torch.ones(2, 8), 1, 3, 4).tolist() == [6, 7]
    nested = utils.cast_all({"a": [torch.ones(1), torch.ones(1, dtype=torch.int64)], "b": "text"})
    assert (nested["a"][0].dtype, nested["a"][1].dtype, nested["b"]) == (torch.bfloat16, torch.int64, "text")
    assert utils.move_all_tensor_to_cpu((torch.ones(1), {"x": io.StringIO}))[1] == {"x": io.StringIO}
    assert hardware("inf2") is hardware.TRN1 and not cpu_mode()
    assert [part.tolist() for part in mappings.split_tensor_along_last_dim(torch.arange(4).view(1, 4), 2)] == [
        [[0, 1]],
        [[2, 3]],
    ]
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half, number = utils.cast_if_autocast_enabled(torch.ones(1), 12)
        assert (half.dtype, number) == (torch.bfloat16, 12)
        with pytest.raises(AssertionError, match=r"expected to be torch.bfloat16, got torch.float32 instead"):
            utils.verify_casted_dtype([half, torch.ones(1)])


def test_recomputed_code_may_name_the_device_xla():
    """As the example models' causal masks do: it runs again in backward."""
    from torch_xla.utils.checkpoint import checkpoint

    devices = []

    def scaled(x):
        ones = torch.ones(3, device="xla")
        devices.append(ones.device)
        return (x * ones).square()

    x = torch.arange(3.0, requires_grad=True)
    checkpoint(scaled, x, use_reentrant=True).backward(torch.ones(3))
    assert devices == [backend.device] * 2
    assert x.grad is not None and x.grad.tolist() == [0, 2, 4]
