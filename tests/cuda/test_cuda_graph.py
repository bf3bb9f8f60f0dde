"""Forward and backward as one CUDA graph: the bits of eager passes, over one GPU and several."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.backends import backend
from nxd_memopt.backends.cuda import backend as cuda
from nxd_memopt.memory import GraphedLoss
from nxd_memopt.optimizer import AdamW, NeuronZero1Optimizer
from nxd_memopt.parallel_layers import grads, parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from nxd_memopt.training.config.train_config import ModelConfig, TrainConfig, TrainerConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.parallelize import parallelize
from tests.dist.pool import distributed
from tests.packed_rows import packed_rows
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model, qwen3_moe_config

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]
GPUS = torch.cuda.device_count()
two_gpus = pytest.mark.skipif(GPUS < 2, reason="needs two GPUs")
SIZES = [size for size in (2, 4) if size <= GPUS] or [2]
CONFIGS = [llama_config, gpt_neox_config]
STEPS, LENGTHS = 6, (512, 256)


def built(config, **memory):
    settings = config(hidden_size=512, intermediate_size=1024, num_attention_heads=8, num_hidden_layers=3)
    options = {"sequence_parallel": dist.is_initialized(), "attention_backend": "math", **memory}
    return parallel_model(settings, **options).to(backend.device, torch.bfloat16)


def experts_config(**sizes):
    """Experts in every layer, whose rows the kernels can read."""
    return qwen3_moe_config(**sizes, moe_intermediate_size=128, mlp_only_layers=[])


def trained(model, start, micro_batches: int, *, graph: bool) -> list[torch.Tensor]:
    """Losses of training steps, whose second micro-batch is shorter, and of a longer batch without a gradient.

    Behind recordings a larger batch makes peer memory take larger slots, while the graphs use the smaller ones.
    """
    model.load_state_dict(start)
    optimizer = AdamW(model.parameters(), lr=1e-3)
    graphed = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss) if graph else None
    generator, losses = torch.Generator().manual_seed(1 + parallel_state.get_data_parallel_rank()), []
    for step in range(STEPS):
        for i in range(micro_batches):
            ids = torch.randint(VOCAB, (2, LENGTHS[i % 2]), generator=generator).to(backend.device)
            if graphed is not None:
                losses.append(graphed(ids))
                continue
            loss = model(ids, labels=ids).loss
            loss.backward()
            losses.append(loss.detach())
        grads.allreduce_sequence_parallel_gradients(model)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            ids = torch.randint(VOCAB, (1, 1024), generator=generator).to(backend.device)
            losses.append(model(ids, labels=ids).loss)
            if graph and step == 3:
                model(ids.expand(8, -1), labels=ids.expand(8, -1))
    return losses


@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "full"}])
@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize("config", CONFIGS)
def test_bit_equal_to_eager(config, micro_batches, memory):
    model = built(config, **memory)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = [trained(model, start, micro_batches, graph=graph) for graph in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True)), losses


@pytest.mark.parametrize("attention_backend", ["auto", "math"])
@pytest.mark.parametrize("config", CONFIGS)
def test_one_graph_runs_every_packed_micro_batch(config, attention_backend):
    """Each replay has its own labels, bounds, positions and divisor, with other numbers of documents."""
    parallel_state.initialize_model_parallel(1)
    model = built(config, attention_backend=attention_backend)
    options = TrainConfig(
        ModelConfig(tokenizer="none", config_overrides={"model_type": "llama"}),
        trainer=TrainerConfig(precision="bf16-true"),  # without master weights gradients stay in .grad
    )
    _, graphed = parallelize(model, options)
    layouts = [((5, 1, 6),), ((12,),), ((4, 8),), ((2, 2, 2, 6),), ((1, 11),), ((12,),)]
    for i, lengths in enumerate(layouts):
        rows = packed_rows(lengths, not_trained=((0, i + 1),), seed=i)
        batch = MicroBatch.of(rows, divisor=i + 1, num_boundaries=6).to(backend.device)
        found = graphed(batch)
        replayed = [param.grad.clone() for param in model.parameters()]
        model.zero_grad()
        loss = batch.loss(model)
        loss.backward()
        # A live graph would keep its gradient accumulators, which cannot join a capture.
        loss = loss.detach()
        # Flash attention's backward adds with atomics, in another order in each call.
        bound = {"rtol": 0, "atol": 0} if attention_backend == "math" else {"rtol": 2e-2, "atol": 1e-3}
        torch.testing.assert_close(found, loss, **bound)
        for value, param in zip(replayed, model.parameters(), strict=True):
            torch.testing.assert_close(value, param.grad, **bound)
        model.zero_grad()
    parallel_state.destroy_model_parallel()


@two_gpus
@distributed(world_size=SIZES)
@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "full"}])
@pytest.mark.parametrize("config", CONFIGS)
def test_bit_equal_over_ranks(config, memory):
    parallel_state.initialize_model_parallel(dist.get_world_size())
    model_parallel_manual_seed(3)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cuda, "_PEER_MEMORY_BYTES", 1)
        patch.setattr(cuda, "_PEER_MEMORY_BYTES_AHEAD", 1)
        model = built(config, **memory)
        start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        losses = [trained(model, start, 2, graph=graph) for graph in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True)), losses
    dist.barrier()


@two_gpus
@distributed(world_size=2)
@pytest.mark.parametrize("memory", [{}, {"recompute_granularity": "selective", "recompute_modules": ("moe",)}])
@pytest.mark.parametrize("expert_size", [1, 2])
def test_experts_bit_equal_over_ranks(expert_size, memory):
    """Each replay has another routing, and with expert parallelism another number of rows on this rank."""
    parallel_state.initialize_model_parallel(2 // expert_size, expert_model_parallel_size=expert_size)
    model_parallel_manual_seed(3)
    model = built(experts_config, **memory)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    losses = [trained(model, start, 2, graph=graph) for graph in (False, True)]
    assert all(torch.equal(a, b) for a, b in zip(*losses, strict=True)), losses
    dist.barrier()


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_gradients_accumulate_in_fp32_through_hooks(micro_batches):
    model = built(llama_config)
    start = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def run(graph: bool):
        model.load_state_dict(start)
        optimizer = NeuronZero1Optimizer(
            model.parameters(), AdamW, sharding_groups=[[0]], use_grad_acc_hook=True, lr=1e-3
        )
        graphed = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
        losses = []
        for i in range(STEPS * micro_batches):
            ids = torch.randint(VOCAB, (1, 256), generator=torch.Generator().manual_seed(i)).to(backend.device)
            losses.append(graphed(ids) if graph else model(ids, labels=ids).loss)
            if not graph:
                losses[-1].backward()
            if i % micro_batches == micro_batches - 1:
                optimizer.step()
                optimizer.zero_grad()
        for hook in optimizer._hooks:
            hook.remove()
        return [loss.detach() for loss in losses]

    assert all(torch.equal(a, b) for a, b in zip(run(False), run(True), strict=True))


@pytest.mark.parametrize("micro_batches", [1, 2, 4])
def test_memory_is_counted_between_replays(micro_batches):
    others = backend.memory_allocated()  # of earlier tests
    model = built(llama_config)
    ids = torch.randint(VOCAB, (1, 1024)).to(backend.device)
    graphed = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
    peaks = []
    for _ in range(6):
        backend.reset_peak_memory_stats()
        for _ in range(micro_batches):
            graphed(ids)
        model.zero_grad()
        peaks.append(backend.max_memory_allocated())
    assert all(0.95 * peaks[0] < peak < 1.5 * peaks[0] for peak in peaks), peaks
    before = backend.memory_allocated()
    del graphed
    assert backend.memory_allocated() - others < 0.5 * (before - others)


def test_a_loss_that_asks_for_a_value_is_refused_and_the_process_goes_on():
    model = built(llama_config)
    ids = torch.randint(VOCAB, (1, 256)).to(backend.device)
    graphed = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss * ids.max().item())
    for _ in range(2):
        graphed(ids)
        model.zero_grad()
    stream = torch.cuda.current_stream()
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        graphed(ids)
    assert torch.cuda.current_stream() == stream
    lent = torch.ones(1 << 20, device=backend.device)
    lent.record_stream(torch.cuda.Stream())
    before = torch.cuda.memory_allocated()
    del lent
    torch.cuda.synchronize()
    torch.ones(1, device=backend.device)  # the allocator looks for what other streams have done with
    assert torch.cuda.memory_allocated() < before
    again = GraphedLoss(model.parameters(), lambda ids: model(ids, labels=ids).loss)
    assert len({again(ids).item() for _ in range(5)}) == 1
