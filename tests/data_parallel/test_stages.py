"""ZeRO stages on D=2 x T=2 ranks: losses, gradients, norms and weights equal those without sharding."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from nxd_memopt.modules.packed_weights import pack_weights
from nxd_memopt.ops.parts import packed_view
from nxd_memopt.optimizer.loss_scaler import LossScaler
from nxd_memopt.parallel_layers import grads
from nxd_memopt.parallel_layers.data_shards import is_data_sharded
from tests.data_parallel.stages import MAX_NORM, STAGES, Run, batch_of, build, initialize
from tests.dist.pool import distributed
from tests.reference import assert_same_on_all_ranks

MODELS = ["llama", "gpt_neox"]


def assert_equal(found: dict, expected: dict, *, atol: float, what: str) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        torch.testing.assert_close(found[name], tensor, rtol=0, atol=atol, msg=f"{what} {name}")


@distributed(world_size=4)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("sequence", [False, True])
def test_gradients_equal(name, sequence):
    initialize(2)
    expected = None
    for stage in STAGES:
        run = Run.of(build(name, sequence=sequence), stage, max_norm=1e9)
        run.backward([batch_of(0)])
        run.reduce()
        if expected is None:
            expected = run.losses, run.norms, run.gradients()
        assert run.losses == expected[0], stage  # forward is the same
        # Sums of squares of shards are added in another order: fp32 rounding.
        assert run.norms == pytest.approx(expected[1], rel=1e-6)
        assert_same_on_all_ranks(torch.tensor(run.norms), "norm")
        # The mean of two ranks is one addition, in any stage. With sequence parallelism zero1 adds over
        # tensor ranks before data ranks, the other stages after them: fp32 rounding.
        atol = 1e-6 if sequence and stage == "zero1" else 0
        assert_equal(run.gradients(), expected[2], atol=atol, what=stage)


@distributed(world_size=4)
@pytest.mark.parametrize(("name", "sequence"), [("llama", True), ("gpt_neox", False)])
def test_clipped_steps_equal(name, sequence):
    initialize(2)
    runs = {stage: Run.of(build(name, sequence=sequence), stage) for stage in STAGES}
    for step in range(3):
        for run in runs.values():
            run.step(step)
    expected = runs["zero1"]
    assert min(expected.norms) > MAX_NORM, "clipping is active"
    for stage, run in runs.items():
        if stage != "none" and not sequence:
            assert (run.losses, run.norms) == (expected.losses, expected.norms), stage
            assert_equal(run.weights(), expected.weights(), atol=0, what=stage)
        # Norms differ by fp32 rounding (see above), and with them the clipping factor.
        assert run.losses == pytest.approx(expected.losses, rel=1e-6)
        assert run.norms == pytest.approx(expected.norms, rel=1e-6)
        assert_equal(run.weights(), expected.weights(), atol=1e-6, what=stage)


@distributed(world_size=4)
def test_accumulation_equals():
    """Three micro-batches, reduced one by one, or once from full gradients."""
    initialize(2)
    expected = Run.of(build("llama", sequence=False), "zero1")
    expected.step(0, micro_batches=3)
    full = Run.of(build("llama", sequence=False), "zero3")
    full.step(0, micro_batches=3, full=True)
    assert full.norms == expected.norms
    assert_equal(full.weights(), expected.weights(), atol=0, what="full gradients")
    for stage in ("zero2", "zero3"):
        run = Run.of(build("llama"), stage)
        run.step(0, micro_batches=3)
        # Reduced before they are added, so added in another order: fp32 rounding.
        assert run.norms == pytest.approx(expected.norms, rel=1e-6)
        assert_equal(run.weights(), expected.weights(), atol=1e-6, what=stage)


@distributed(world_size=4)
@pytest.mark.parametrize(
    "memory",
    [
        MemoryConfig(recompute_granularity="full", recompute_method="nested", recompute_num_layers=3),
        MemoryConfig(recompute_granularity="selective", recompute_modules=("mlp", "norm")),
        pytest.param(MemoryConfig(fused_linear_cross_entropy=False), marks=pytest.mark.slow),
        pytest.param(MemoryConfig(recompute_granularity="full", mlp_tile_tokens=4), marks=pytest.mark.slow),
    ],
    ids=["nested", "selective", "logits", "tiles"],
)
def test_recompute_changes_nothing(memory):
    initialize(2)
    for stage in ("zero2", "zero3"):
        runs = [Run.of(build("llama", memory=each, num_hidden_layers=4), stage) for each in (None, memory)]
        for run in runs:
            run.step(0)
            run.step(1)
        plain, changed = runs
        is_exact = memory.fused_linear_cross_entropy and memory.mlp_tile_tokens is None
        if is_exact:
            assert (plain.losses, plain.norms) == (changed.losses, changed.norms)
        # Logits in one matmul instead of chunks, or weight gradients summed over tiles: fp32 rounding.
        atol = 0 if is_exact else 1e-6
        assert_equal(changed.weights(), plain.weights(), atol=atol, what=stage)


@distributed(world_size=4, timeout_s=300)
@pytest.mark.slow
def test_compiled_layers():
    initialize(2)
    expected = Run.of(build("llama"), "zero3")
    model = build("llama")
    apply_memory(model, MemoryConfig(), compile="layer")
    compiled = Run.of(model, "zero3")
    for run in (expected, compiled):
        run.step(0)
        run.step(1)
    # Inductor fuses operations of a layer: fp32 rounding.
    assert_equal(compiled.weights(), expected.weights(), atol=1e-5, what="compiled")


@distributed(world_size=4)
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_bf16_models_have_fp32_masters(reduce_dtype):
    """The weights are the rounded masters; gradients reduced in fp32 lose nothing."""
    initialize(2)
    expected = Run.of(build("llama", dtype=torch.bfloat16, sequence=False), "zero1")
    expected.step(0)
    for stage in ("zero2", "zero3"):
        run = Run.of(build("llama", dtype=torch.bfloat16, sequence=False), stage, reduce_dtype=reduce_dtype)
        run.step(0)
        weights = run.weights()
        assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
        shards = [each.shard for each in run.optimizer._sharded]
        assert {shard.dtype for shard in shards} == {torch.float32}
        assert any(not torch.equal(shard, shard.bfloat16().float()) for shard in shards)
        if reduce_dtype is torch.float32:
            assert (run.losses, run.norms) == (expected.losses, expected.norms)
            assert_equal(weights, expected.weights(), atol=0, what=stage)
        else:
            # one rounding of each gradient to bf16: a part of 2^-8 of it
            assert run.norms == pytest.approx(expected.norms, rel=2**-8)


@distributed(world_size=4)
def test_zero2_frees_gradients_while_backward_runs():
    """Buckets are those of the order of backward: groups of the optimizer have the norms after all matrices."""
    initialize(2)
    run = Run.of(build("llama", num_hidden_layers=4), "zero2")
    present: list[int] = []

    def count(*_: object) -> None:
        present.append(sum(param.grad is not None for param in run.model.parameters()))

    # The embedding's gradient is the last one.
    next(iter(run.model.parameters())).register_post_accumulate_grad_hook(count)
    for _ in range(2):
        run.backward([batch_of(0)])
    # The first pass finds the order. In the second one those of a layer at most wait for others of their bucket.
    one_layer = len(list(run.model.decoder_layers()[0].parameters()))
    assert present[1] <= one_layer < len(list(run.model.parameters())) / 3


@distributed(world_size=4)
@pytest.mark.parametrize("tensor_size", [1, 2])
def test_shards_of_unequal_size_and_kv_replicas(tensor_size):
    """33 rows on 4 ranks are 9, 9, 9, 6; with one KV head each tensor-parallel rank has a replica."""
    sizes = {"vocab_size": 33, "intermediate_size": 26, "num_key_value_heads": 1}
    results = []
    for stage in ("zero1", "zero2", "zero3"):
        initialize(tensor_size)
        run = Run.of(build("llama", **sizes), stage)
        for step in range(2):
            run.step(step)
        results.append((run.norms, run.weights()))
    for norms, weights in results[1:]:
        # other shards and order of additions: fp32 rounding
        assert norms == pytest.approx(results[0][0], rel=1e-6)
        assert_equal(weights, results[0][1], atol=1e-6, what=str(tensor_size))


@distributed(world_size=4)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_hybrid_sharding(stage):
    """Shards over runs of two of four data-parallel ranks, replicated over the runs."""
    initialize(1)
    check_hybrid_sharding(stage)


@distributed(world_size=8)
@pytest.mark.slow
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_hybrid_sharding_of_tensor_parallel_shards(stage):
    """With sequence parallelism: gradients are summed over sequence shards after the averages."""
    initialize(2)
    check_hybrid_sharding(stage)


def check_hybrid_sharding(stage: str) -> None:
    expected = Run.of(build("llama"), "zero1")
    hybrid = Run.of(build("llama"), stage, ranks_per_replica=2)
    for step in range(2):
        expected.step(step, micro_batches=2)
        hybrid.step(step, micro_batches=2)
    elements = sum(param.numel() for param in hybrid.model.parameters())
    assert sum(each.shard.numel() for each in hybrid.optimizer._sharded) == elements / 2
    if stage == "zero3":
        assert hybrid.stored_bytes() == 4 * elements / 2
    # (a + b) + (c + d) instead of the order of a reduce-scatter over four: fp32 rounding
    assert hybrid.norms == pytest.approx(expected.norms, rel=1e-6)
    assert_equal(hybrid.weights(), expected.weights(), atol=1e-6, what="hybrid")


@distributed(world_size=4)
def test_gathered_parameters_between_steps_are_not_stale():
    """A forward without backward leaves the root's parameters gathered; the update frees them."""
    initialize(2)
    runs = [Run.of(build("llama"), "zero3", reshard_after_forward=reshard) for reshard in (True, False)]
    for run in runs:
        run.backward([batch_of(0)])
        run.reduce()
        with torch.no_grad():
            run.model(batch_of(5))
        run.model(batch_of(5), labels=batch_of(5))
        run.optimizer.update_parameters()
        run.optimizer.zero_grad()
        run.step(1)
    expected = Run.of(build("llama"), "zero3")
    expected.step(0)
    expected.step(1)
    for run in runs:
        assert run.losses == expected.losses
        assert_equal(run.weights(), expected.weights(), atol=0, what="after evaluation")


@distributed(world_size=4)
@pytest.mark.parametrize("stage", ["zero2", "zero3"])
def test_functions_of_grads_on_a_sharded_model(stage):
    """A script may sum sequence-parallel gradients and clip as with any other model."""
    initialize(2)
    expected = Run.of(build("llama"), stage)
    expected.step(0)
    run = Run.of(build("llama"), stage)
    run.backward([batch_of(0)])
    grads.allreduce_sequence_parallel_gradients(run.model)
    if stage == "zero3":
        norm = grads.clip_grad_norm(run.model, 1e9)
        # clipped by the script before, so by exactly 1: the norm of the full model
        assert norm.item() == expected.norms[0]
        grads.allreduce_sequence_parallel_gradients(run.model)
    run.reduce()
    run.reduce()  # a second call neither sums nor clips again
    run.optimizer.update_parameters()
    run.optimizer.zero_grad()
    assert run.norms[0] == expected.norms[0]
    assert_equal(run.weights(), expected.weights(), atol=0, what=stage)
    # A step that is left out does not change the next one.
    run.backward([batch_of(1)])
    run.reduce()
    run.optimizer.zero_grad()
    run.backward([batch_of(1)])
    run.reduce()
    assert run.norms[-1] == run.norms[-2]
    with pytest.raises(RuntimeError, match=r"reduce_gradients\(\)"):
        run.backward([batch_of(2)])
        run.reduce()


@distributed(world_size=4)
def test_loss_scaler():
    """fp16: the scale is divided out before clipping, and a step with overflow changes nothing."""
    initialize(2)
    results = []
    for stage in ("zero1", "zero2", "zero3"):
        run = Run.of(build("llama", dtype=torch.float16, sequence=False), stage)
        scaler = run.optimizer.loss_scaler = LossScaler(initial_scale=2.0**10, hysteresis=1)
        for step, factor in enumerate([1.0, float("inf"), 1.0]):
            before = run.weights()
            loss = run.model(batch_of(step), labels=batch_of(step)).loss
            scaler.scale_gradients_of(loss * factor).backward()
            norm = run.optimizer.reduce_gradients()
            run.optimizer.reduce_gradients()
            run.optimizer.update_parameters()
            run.optimizer.zero_grad()
            if factor == 1:
                run.norms.append(norm.item())
            else:
                assert_equal(run.weights(), before, atol=0, what="skipped")
        results.append((run.norms, run.weights()))
    # The same numbers in another order or dtype of the reduction, rounded to fp16: a unit of 2^-10.
    for norms, weights in results[1:]:
        assert norms == pytest.approx(results[0][0], rel=1e-3)
        assert max(norms) < 10, "without the scale"
        assert_equal(weights, results[0][1], atol=1e-3, what="fp16")


@distributed(world_size=4)
@pytest.mark.parametrize("has_frozen", [False, True], ids=["tied", "frozen"])
def test_tied_and_frozen_parameters(has_frozen):
    initialize(2)
    results = []
    for stage in ("zero1", "zero2", "zero3"):
        model = build("llama", sequence=False, tie_word_embeddings=not has_frozen)
        if has_frozen:
            model.model.embed_tokens.weight.requires_grad_(False)
            model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
        run = Run.of(model, stage)
        run.step(0)
        run.step(1)
        assert (model.lm_head.weight is model.model.embed_tokens.weight) != has_frozen
        results.append((run.losses, run.norms, run.weights()))
    for losses, norms, weights in results[1:]:
        assert (losses, norms) == results[0][:2]
        assert_equal(weights, results[0][2], atol=0, what="tied or frozen")


@distributed(world_size=4)
def test_a_failed_backward_leaves_nothing():
    """zero2: gradients of a pass that raised are dropped with their buckets."""
    initialize(2)
    expected = Run.of(build("llama"), "zero2")
    expected.step(0)
    run = Run.of(build("llama"), "zero2")

    def fail(grad: torch.Tensor) -> None:
        raise KeyError("planted")

    hook = run.model.model.embed_tokens.weight.register_hook(fail)
    with pytest.raises(KeyError):
        run.backward([batch_of(3)])
    hook.remove()
    dist.barrier()
    run.optimizer.zero_grad()
    run.losses.clear()
    run.step(0)
    assert (run.losses, run.norms) == (expected.losses, expected.norms)
    assert_equal(run.weights(), expected.weights(), atol=0, what="after a failure")


@distributed(world_size=4)
@pytest.mark.parametrize("reshard", [True, False])
def test_weights_that_are_packed_before(reshard):
    """Slices of one storage, as on GPUs, are gathered as slices of one storage: one matmul for all."""
    initialize(2)
    model = build("llama")
    for layer in model.model.layers:
        for module in (layer.self_attn, layer.mlp):
            weights = shared_weights(module)
            packed = torch.cat([weight.detach() for weight in weights])
            for weight, values in zip(weights, packed.split([len(weight) for weight in weights]), strict=True):
                weight.data = values
    runs = [Run.of(model, "zero3", reshard_after_forward=reshard), Run.of(build("llama"), "zero3")]
    seen: list[bool] = []
    gathered: list[torch.Tensor] = []
    attention = model.model.layers[1].self_attn
    attention.register_forward_pre_hook(lambda *_: seen.append(is_packed(attention)))
    attention.register_forward_pre_hook(lambda *_: gathered.append(attention.k_proj.weight))
    mlp = model.model.layers[1].mlp
    mlp.register_full_backward_pre_hook(lambda *_: seen.append(is_packed(mlp)))
    for run in runs:
        run.step(0)
        run.step(1)
        pack_weights(run.model)  # leaves sharded rows alone
    assert seen == [True] * 4
    # One matmul for several weights may add in another order: fp32 rounding.
    assert runs[0].norms == pytest.approx(runs[1].norms, rel=1e-6)
    assert_equal(runs[0].weights(), runs[1].weights(), atol=1e-6, what="packed")
    assert is_data_sharded(attention.k_proj.weight)
    assert [weight.untyped_storage().size() for weight in gathered] == [0, 0]  # freed between steps


@distributed(world_size=4)
def test_packed_rows_that_the_ranks_do_not_divide():
    """Padding would be between the weights: they stay separate, with the same results."""
    initialize(2)
    results = []
    for pack in (False, True):
        model = build("llama", intermediate_size=26)  # 13 rows on each tensor-parallel rank
        mlp = model.model.layers[0].mlp
        if pack:
            weights = shared_weights(mlp)
            for weight, values in zip(weights, torch.cat([w.detach() for w in weights]).chunk(2), strict=True):
                weight.data = values
        seen: list[bool] = []
        mlp.register_forward_pre_hook(lambda module, _, seen=seen: seen.append(is_packed(module)))
        run = Run.of(model, "zero3")
        run.step(0)
        assert seen == [False]
        results.append(run.weights())
    assert_equal(results[1], results[0], atol=0, what="not divisible")


def shared_weights(module) -> list[torch.Tensor]:
    return [getattr(module, name).weight for name in module.shared_input_layers]


def is_packed(module) -> bool:
    return packed_view(shared_weights(module), 0) is not None
