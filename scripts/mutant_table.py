"""Owns the faults that scripts/mutants.py plants: where each goes, and which tests are to notice it."""

from __future__ import annotations

from dataclasses import dataclass

PARALLEL = "nxd_memopt/parallel_layers"


@dataclass(frozen=True)
class Mutant:
    """One fault: ``old``, which ``file`` must hold exactly once, becomes ``new``; ``tests`` are likely to notice.

    ``venv`` names the track whose Python runs the tests.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    keyword: str = "ranks2"
    venv: str = ".venv"


MUTANTS = (
    Mutant(
        "sequence-parallel input gradient not reduced",
        f"{PARALLEL}/linear_functions.py",
        "return comm.reduce(rows, (*grads[0].shape[:-1], weights[0].size(1)), grads[0].dtype)",
        "from nxd_memopt.backends.pieces import Completed, ReductionAtOnce\n"
        "    own = lambda x: x if comm.sequence_dimension is None else backend.shard(x, 0, comm.group)\n"
        "    lost = ReductionAtOnce(grads[0].size(0), lambda x: Completed(own(x)))\n"
        "    lost.put(0, rows(0, grads[0].size(0)))\n"
        "    return lost",
        ("dist/test_layers.py",),
    ),
    Mutant(
        "offloaded activations used before they are back",
        "nxd_memopt/memory/offload.py",
        "            self._returned.wait()\n",
        "            pass\n",
        ("test_offload.py",),
        "bit_equal",
    ),
    Mutant(
        "peer memory written to while a rank reads it",
        "nxd_memopt/backends/peer_memory.py",
        "_SLOTS = 2",
        "_SLOTS = 1",
        ("test_peer_memory.py",),
        "no_order",
    ),
    Mutant(
        "replays do not wait for what another stream reads",
        "nxd_memopt/backends/peer_memory.py",
        "            self._finish(operation, stream)\n        self._use_on(stream)\n",
        "            self._finish(operation, stream)\n",
        ("test_peer_memory.py",),
        "no_order",
    ),
    Mutant(
        "a recording goes on adding to an eager pass's gradients",
        "nxd_memopt/memory/graphed.py",
        "            each.adding = None",
        "            del each",
        ("test_graphed.py",),
        "equals_eager",
    ),
    Mutant(
        "peer memory's abandoned gathers leave their signals",
        "nxd_memopt/backends/peer_memory.py",
        "            self._finish(self._unfinished[kind], stream)\n",
        "            pass\n",
        ("test_peer_memory.py",),
        "no_order",
    ),
    Mutant(
        "gradients under backward not averaged",
        f"{PARALLEL}/overlapped_grads.py",
        "flat /= parallel_state.get_data_parallel_size()",
        "",
        ("dist/test_overlapped_grads.py",),
    ),
    Mutant(
        "buckets start before their last gradient",
        f"{PARALLEL}/overlapped_grads.py",
        "itertools.takewhile(lambda each: not each.missing, self._buckets)",
        "itertools.takewhile(lambda each: len(each.missing) < 2, self._buckets)",
        ("dist/test_overlapped_grads.py",),
    ),
    Mutant(
        "optimizer in backward does not average over data",
        "nxd_memopt/optimizer/in_backward.py",
        "        grads.bucket_allreduce_gradients([param])\n",
        "",
        ("dist/test_in_backward.py",),
    ),
    Mutant(
        "all-gather in wrong rank order",
        "nxd_memopt/backends/c10d.py",
        "return _Work(_all_gather(result, source, group=group, async_op=True), source, result)",
        "_all_gather(result, source, group=group)\n"
        "        return Completed(result.unflatten(0, (size, -1)).flip(0).flatten(0, 1))",
        ("dist/test_mappings.py",),
    ),
    Mutant(
        "reduce_from is the identity",
        f"{PARALLEL}/mappings.py",
        "        del ctx\n        return backend.all_reduce(tensor, group)",
        "        del ctx\n        return tensor.clone()",
        ("dist/test_mappings.py",),
    ),
    Mutant(
        "cross-entropy gradient sign",
        f"{PARALLEL}/loss_functions.py",
        "torch.mul(grad, grad_loss.unsqueeze(-1), out",
        "torch.mul(-grad, grad_loss.unsqueeze(-1), out",
        ("dist/test_cross_entropy.py",),
    ),
    Mutant(
        "sequence-parallel gradient hook is a no-op",
        f"{PARALLEL}/grads.py",
        'if getattr(param, "sequence_parallel_enabled", False) and',
        "if False and",
        ("dist/test_grads.py",),
    ),
    Mutant(
        "column weight gradient doubled",
        f"{PARALLEL}/linear_functions.py",
        "return (_flat(whole).t() @ x).split",
        "return (2 * _flat(whole).t() @ x).split",
        ("dist/test_layers.py",),
    ),
    Mutant(
        "column weight gradients doubled, of weights apart",
        f"{PARALLEL}/linear_functions.py",
        "return [_flat(grad).t() @ x if needs",
        "return [2 * _flat(grad).t() @ x if needs",
        ("dist/test_qkv_linear.py",),
    ),
    Mutant(
        "input-gradient all-reduce lost",
        "nxd_memopt/backends/base.py",
        "if scattered else self.all_reduce_async",
        "if scattered else (lambda tensor, _: Completed(tensor))",
        ("dist/test_layers.py",),
    ),
    Mutant(
        "input-gradient all-reduce lost in bf16",
        "nxd_memopt/backends/base.py",
        "return ReductionAtOnce(shape[0], lambda tensor: start(tensor, group))",
        "lost = lambda tensor: tensor.dtype == torch.bfloat16 and not scattered\n"
        "        return ReductionAtOnce(shape[0], lambda x: Completed(x) if lost(x) else start(x, group))",
        ("dist/test_bf16_layers.py",),
    ),
    Mutant(
        "embedding not masked",
        f"{PARALLEL}/embedding.py",
        ".masked_fill(~held.unsqueeze(-1), 0.0)",
        "",
        ("dist/test_embedding.py",),
    ),
    Mutant(
        "LayerNorm eps ignored",
        f"{PARALLEL}/layer_norm.py",
        "super().__init__(normalized_shape, eps,",
        "super().__init__(normalized_shape, 1e-5,",
        ("test_ops.py",),
        "layer_norm",
    ),
    Mutant(
        "gradient norm not summed over ranks",
        f"{PARALLEL}/grads.py",
        "return (backend.all_reduce(sharded, group) + replicated)",
        "return (sharded + replicated)",
        ("dist/test_grads.py",),
        "ranks2 and clip",
    ),
    Mutant(
        "tensor-parallel rank order flipped",
        "nxd_memopt/backends/base.py",
        "return list(range(world_size))",
        "return list(reversed(range(world_size)))",
        ("dist/test_parallel_state.py",),
        "grid",
    ),
    Mutant(
        "RMSNorm weight dropped",
        "nxd_memopt/ops/norm.py",
        "return weight * normalised.to(x.dtype)",
        "return normalised.to(x.dtype)",
        ("test_ops.py",),
        "rms_norm",
    ),
    Mutant(
        "reduce-scatter replaced by slicing",
        "nxd_memopt/backends/c10d.py",
        "return _Work(_reduce_scatter(result, source, group=group, async_op=True), source, result)",
        "return Completed(result.copy_(self.shard(source, 0, group)))",
        ("dist/test_mappings.py",),
    ),
    Mutant(
        "wrong random stream in recomputation",
        f"{PARALLEL}/random.py",
        "tracker.set_states(at_forward)",
        "tracker.set_states(now)",
        ("dist/test_random.py",),
    ),
    Mutant(
        "KV replica gradients not summed",
        f"{PARALLEL}/linear_functions.py",
        "results += [g if g is None else backend.all_reduce(g, group) for g in (weight_grad, bias_grad)]",
        "results += [weight_grad, bias_grad]",
        ("dist/test_qkv_linear.py",),
    ),
    Mutant(
        "row bias added once per rank",
        f"{PARALLEL}/layers.py",
        "output + self.bias.to(output.dtype)",
        "output + backend.group_size(self.tensor_parallel_group) * self.bias.to(output.dtype)",
        ("dist/test_layers.py",),
    ),
    Mutant(
        "strided shards in wrong order",
        f"{PARALLEL}/utils.py",
        "starts = [i * block + partition * length for",
        "starts = [(partition * description.partition_stride + i) * length for",
        ("test_parallel_layers.py", "dist/test_initialization.py"),
        "shard_ranges or strided",
    ),
    Mutant(
        "loss of ignored labels not masked",
        f"{PARALLEL}/loss_functions.py",
        "loss = loss.masked_fill(~valid, 0.0)\n",
        "loss = loss * 1.0\n",
        ("dist/test_cross_entropy.py",),
    ),
    Mutant(
        "parallel branches keep each rank's part of the norms' gradients",
        f"{PARALLEL}/branches.py",
        "by_affine_sum = backend.all_reduce(by_affine_sum, comm.group)",
        "by_affine_sum = by_affine_sum.clone()",
        ("dist/test_branches.py", "dist/test_models.py"),
        "apart or gpt_neox",
    ),
    Mutant(
        "parallel branches keep the last piece's norm gradients",
        f"{PARALLEL}/branches.py",
        "torch.stack(by_affine).sum(0) if len(by_affine) > 1 else by_affine[0]",
        "by_affine[-1]",
        ("dist/test_pieces.py",),
        "models",
    ),
    Mutant(
        "gated MLP adds its tiles' weight gradients wrongly",
        f"{PARALLEL}/gated_row.py",
        "weight_grad.addmm_(grads.t(), activated)",
        "weight_grad = grads.t() @ activated",
        ("dist/test_gated_row.py",),
    ),
    Mutant(
        "fused loss keeps each rank's own softmax",
        f"{PARALLEL}/head_pass.py",
        "sums = combined_sums(backend.all_gather(sums.unsqueeze(0), group))",
        "sums = sums.clone()",
        ("dist/test_linear_cross_entropy.py",),
    ),
    Mutant(
        "fused loss overwrites logits that are still needed",
        "nxd_memopt/ops/logits_storage.py",
        "stop = min(end, start * tokens // width) if start < kept else end",
        "stop = min(end, start + window_rows + 1)",
        ("test_linear_cross_entropy.py",),
        "whole_logits or ranges",
    ),
    Mutant(
        "fused loss counts padding rows",
        f"{PARALLEL}/head_pass.py",
        "self.valid_rows = options.terms.vocab_size - self.first_row if padded else None",
        "self.valid_rows = None",
        ("test_linear_cross_entropy.py", "dist/test_linear_cross_entropy.py"),
        "vocabulary or whole_head",
    ),
    Mutant(
        "gradient of ignored labels not masked",
        f"{PARALLEL}/loss_functions.py",
        "grad.masked_fill_(~valid.unsqueeze(-1), 0.0)",
        "grad",
        ("dist/test_cross_entropy.py",),
    ),
    Mutant(
        "label smoothing by the local vocabulary",
        f"{PARALLEL}/loss_functions.py",
        "- smoothing / options.vocab_size * logit_sum",
        "- smoothing / logits.size(-1) * logit_sum",
        ("dist/test_cross_entropy.py",),
    ),
    Mutant(
        "all-reduce overwrites the caller's tensor",
        "nxd_memopt/backends/c10d.py",
        "result = tensor.clone(memory_format=torch.contiguous_format)\n        dist.all_reduce(result, op=",
        "result = tensor.contiguous()\n        dist.all_reduce(result, op=",
        ("dist/test_backends.py", "dist/test_mappings.py"),
    ),
    Mutant(
        "a KV shard counts once per replica in the gradient norm",
        f"{PARALLEL}/grads.py",
        "return (norms**norm_type / norms.new_tensor(replicas)).sum()",
        "return (norms**norm_type).sum()",
        ("dist/test_grads.py",),
        "ranks2 and clip",
    ),
    Mutant(
        "recomputation does not wait for the gradient",
        "nxd_memopt/backends/barrier_checkpoint.py",
        "fresh = iter(backend.optimization_barrier([*saved, *present]))",
        "fresh = iter([*saved, *present])",
        ("test_barrier_checkpoint.py",),
        "barrier",
    ),
    Mutant(
        "recomputation draws other dropout masks",
        "nxd_memopt/backends/barrier_checkpoint.py",
        "    _set_rng_states(region.backend, region.rng_states)\n    try:",
        "    try:",
        ("test_barrier_checkpoint.py",),
        "random_state or once",
    ),
    Mutant(
        "any optimisation level will do",
        "nxd_memopt/backends/compiler_flags.py",
        "if level == RECOMPUTE_LEVEL:",
        "if level >= RECOMPUTE_LEVEL:",
        ("test_compiler_flags.py",),
        "spellings or error",
    ),
    Mutant(
        "the rank is a constant of the graph",
        "nxd_memopt/backends/xla.py",
        "return self._rank_tensor(group).squeeze(0)",
        "return self.group_rank(group)",
        ("xla/test_graphs.py",),
        "one_graph",
        ".venv-xla",
    ),
    Mutant(
        "all-gather pins its layout",
        "nxd_memopt/backends/xla.py",
        "self._xm.all_gather(tensor, dim=0, groups=self._groups(group), pin_layout=False)",
        "self._xm.all_gather(tensor, dim=0, groups=self._groups(group))",
        ("xla/test_graphs.py",),
        "theory",
        ".venv-xla",
    ),
    Mutant(
        "XLA merges the recomputation with the forward pass",
        "nxd_memopt/backends/xla.py",
        "        self._xm.optimization_barrier_(behind)\n",
        "",
        ("xla/test_graphs.py",),
        "matmul",
        ".venv-xla",
    ),
    Mutant(
        "a replay is no write to the gradients",
        "nxd_memopt/memory/graphed.py",
        "torch.autograd.graph.increment_version([grad for _, grad in reached])",
        "pass",
        ("test_graphed.py",),
        "count_as_writes",
    ),
    Mutant(
        "rows of a gather are used before they arrive",
        "nxd_memopt/backends/peer_memory.py",
        "self._receive(len(block))",
        "self._receive(len(block) - 1)",
        ("test_peer_memory.py",),
        "no_order",
    ),
    Mutant(
        "flash4 knows one document a row",
        "nxd_memopt/ops/cuda/attention.py",
        "documents.boundaries, query.size(2))",
        "None, query.size(2))",
        ("test_flash4.py",),
        "equals_the_reference",
    ),
    Mutant(
        "the residual is lost beside the biases",
        "nxd_memopt/parallel_layers/branches.py",
        "add_residual(residual, output, sum(biases[1:], biases[0]))",
        "output + sum(biases[1:], biases[0])",
        ("dist/test_golden.py",),
        "neox",
    ),
)
