"""The start at ZeRO stage 3: from a model on the host, one unit in full on the device at a time, zero1's weights."""

from __future__ import annotations

from unittest import mock

import pytest
import torch
import torch.distributed.fsdp
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.checkpoint import save_pretrained
from nxd_memopt.data_parallel import fully_sharded, shard_model
from nxd_memopt.parallel_layers.data_shards import gather_rows, is_data_sharded, local_rows, row_range
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.training.model import build_model, load_hf_config
from nxd_memopt.training.parallelize import parallelize
from tests.data_parallel.stages import batch_of, build, initialize
from tests.dist.pool import distributed
from tests.training.resume.test_rules import build as build_config
from tests.training.runs import LLAMA


def moved(tensor: Tensor) -> Tensor:
    """Return a copy, and overwrite ``tensor``: what still reads the host's memory has NaN."""
    copy = tensor.clone()
    tensor.fill_(torch.nan)
    return copy


def storages(model: torch.nn.Module) -> dict[int, int]:
    """Bytes of each storage of the parameters and buffers, by its address."""
    tensors = [local_rows(param) for param in model.parameters()] + list(model.buffers())
    found = [tensor.untyped_storage() for tensor in tensors]
    return {storage.data_ptr(): storage.nbytes() for storage in found if storage.nbytes()}


@distributed(world_size=4)
@pytest.mark.parametrize("tie", [False, True])
def test_the_device_has_rows_and_one_unit_at_a_time(tie):
    initialize(2)
    model = build("llama", dtype=torch.bfloat16, num_hidden_layers=6, tie_word_embeddings=tie)
    model.register_buffer("scale", torch.ones(3))
    model.model.layers[2].register_buffer("scale", torch.ones(5))
    # Kept here, so that no copy on the device has the address of one that was freed.
    kept = [tensor.data for tensor in (*model.parameters(), *model.buffers())]
    host = storages(model)
    assert len(host) == len(kept)
    # The bytes of each unit as fp32 masters.
    layer_bytes = 4 * sum(param.numel() for param in model.model.layers[0].parameters())
    outer_bytes = 4 * sum(param.numel() for param in model.parameters()) - 6 * layer_bytes
    used: list[int] = []
    fully_shard = torch.distributed.fsdp.fully_shard

    def recorded(*args, **kwargs):
        used.append(sum(size for address, size in storages(model).items() if address not in host))
        return fully_shard(*args, **kwargs)

    with (
        mock.patch.object(torch.distributed.fsdp, "fully_shard", recorded),
        mock.patch.object(fully_sharded, "_on_device", moved),
    ):
        shard_model(model)
    assert len(used) == 7
    rows = 4 * sum(local_rows(param).numel() for param in model.model.layers[0].parameters())
    for number, size in enumerate(used[:-1]):
        assert size <= number * rows + layer_bytes + 64  # buffers
    assert used[-1] <= 6 * rows + outer_bytes + 64
    assert all(is_data_sharded(param) for param in model.parameters())
    for buffer, size in ((model.scale, 3), (model.model.layers[2].scale, 5)):
        assert torch.equal(buffer, torch.ones(size))
        assert buffer.untyped_storage().data_ptr() not in host
    assert all(local_rows(param).isfinite().all() for param in model.parameters())
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tie


@distributed(world_size=4)
@pytest.mark.parametrize(("tensor_size", "source"), [(1, "random"), (2, "pretrained")])
def test_training_starts_from_the_weights_of_zero1(tensor_size, source, tmp_path):
    """On every rank and in every bit, as does the first loss; D is 4 or 2."""
    initialize(tensor_size)
    model: dict[str, object] = {"config_overrides": LLAMA | {"tie_word_embeddings": True}}
    if source == "pretrained":
        save_pretrained(build("llama", dtype=torch.bfloat16), tmp_path)
        model = {"pretrained": str(tmp_path), "config_overrides": {}}
    found = {}
    for stage in ("zero1", "zero3"):
        config = build_config(
            model=model,
            parallel={"tensor_model_parallel_size": tensor_size, "sequence_parallel_enabled": tensor_size > 1},
            data_parallel={"sharding": stage},
            trainer={"precision": "bf16-mixed"},
        )
        model_parallel_manual_seed(config.trainer.seed)
        built = build_model(config, load_hf_config(config.model))
        with mock.patch.object(fully_sharded, "_on_device", moved):
            parallelize(built, config)
        ids = batch_of(0)
        found[stage] = dict(built.named_parameters()), built(ids, labels=ids).loss
    expected, loss = found["zero1"]
    weights, sharded_loss = found["zero3"]
    assert weights.keys() == expected.keys()
    assert torch.equal(sharded_loss, loss) and loss.isfinite()
    for name, weight in weights.items():
        rows = slice(*row_range(weight))
        assert torch.equal(local_rows(weight), expected[name][rows].to(local_rows(weight).dtype)), name
        assert torch.equal(gather_rows(weight), expected[name]), name


def test_the_model_is_built_on_the_host(monkeypatch):
    """``meta`` stands for the device: what is built there has no values."""
    initialize(1)
    monkeypatch.setattr(backend, "device", torch.device("meta"))
    places = {}
    for stage, on_cpu in (("zero1", True), ("zero3", True), ("zero3", False)):
        config = build_config(data_parallel={"sharding": stage}, parallel={"use_cpu_initialization": on_cpu})
        model = build_model(config, load_hf_config(config.model))
        places[stage, on_cpu] = {param.device.type for param in model.parameters()}
    assert places == {("zero1", True): {"meta"}, ("zero3", True): {"cpu"}, ("zero3", False): {"meta"}}
