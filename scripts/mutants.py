"""Plants faults in a copy of the repository, one at a time, and names the test that notices each; exit 1 if one lives.

Run it as ``make mutants`` or ``python scripts/mutants.py [part of a name]``.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
COPIED = ("nxd_memopt", "models", "scripts", "tests", "pyproject.toml")
TIMEOUT_S = 600
ENVIRONMENT_CHECK = "import nxd_memopt.models.llama as m, nxd_memopt as n; print(n.__file__); print(m.__file__)"

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
        f"{PARALLEL}/layers.py",
        "return backend.reduce_scatter_async(grad.movedim(self.sequence_dimension, 0), self.group)",
        "from nxd_memopt.backends import Completed\n\n"
        "        return Completed(backend.shard(grad.movedim(self.sequence_dimension, 0), 0, self.group))",
        ("dist/test_layers.py",),
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
        f"{PARALLEL}/layers.py",
        "return [_flat(grad).t() @ x if needs",
        "return [2 * _flat(grad).t() @ x if needs",
        ("dist/test_layers.py",),
    ),
    Mutant(
        "input-gradient all-reduce lost",
        f"{PARALLEL}/layers.py",
        "return backend.all_reduce_async(grad, self.group)",
        "from nxd_memopt.backends import Completed\n\n            return Completed(grad)",
        ("dist/test_layers.py",),
    ),
    Mutant(
        "input-gradient all-reduce lost in bf16",
        f"{PARALLEL}/layers.py",
        "return backend.all_reduce_async(grad, self.group)",
        "from nxd_memopt.backends import Completed\n\n"
        "            low = grad.dtype == torch.bfloat16\n"
        "            return Completed(grad) if low else backend.all_reduce_async(grad, self.group)",
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
        f"{PARALLEL}/layers.py",
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
        "by_affine = backend.all_reduce(by_affine, comm.group)",
        "by_affine = by_affine.clone()",
        ("dist/test_branches.py", "dist/test_models.py"),
        "apart or gpt_neox",
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
)


def main() -> int:
    """Print one line per mutant; return the exit code."""
    part = " ".join(sys.argv[1:])
    chosen = [mutant for mutant in MUTANTS if part in mutant.name]
    if not chosen:
        print(f"no mutant has {part!r} in its name")
        return 2
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        copy = copy_repository(Path(folder))
        for mutant in chosen:
            planted(copy, mutant)
        for venv in sorted({mutant.venv for mutant in chosen}):
            check_imports(copy, venv)
            check_baseline(copy, venv, [mutant for mutant in chosen if mutant.venv == venv])
        width = max(len(mutant.name) for mutant in chosen)
        survivors = 0
        for mutant in chosen:
            began = time.monotonic()
            caught_by = try_mutant(copy, mutant)
            survivors += caught_by is None
            print(f"{mutant.name:{width}}  {time.monotonic() - began:4.0f} s  {caught_by or 'SURVIVED'}", flush=True)
    print(f"{len(chosen) - survivors} of {len(chosen)} mutants were caught")
    return 1 if survivors else 0


def copy_repository(folder: Path) -> Path:
    """A copy whose ``nxd_memopt.models`` is found beside the package, before an installed one."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy2(source, folder / name)
    (folder / "nxd_memopt" / "models").symlink_to(folder / "models", target_is_directory=True)
    return folder


def run(copy: Path, venv: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(copy), "PYTHONDONTWRITEBYTECODE": "1", "NXD_MEMOPT_BACKEND": "cpu"}
    command = [str(ROOT / venv / "bin" / "python"), *arguments]
    return subprocess.run(command, cwd=copy, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)


def check_imports(copy: Path, venv: str) -> None:
    """Fail unless Python takes both packages from the copy."""
    result = run(copy, venv, "-c", ENVIRONMENT_CHECK)
    files = result.stdout.split()
    if len(files) != 2 or not all(Path(file).is_relative_to(copy) for file in files):
        raise RuntimeError(f"the copy in {copy} is not what is imported: {files} {result.stderr[-500:]}")


def run_tests(copy: Path, venv: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return run(copy, venv, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--tb=line", "-rfE", *arguments)


def check_baseline(copy: Path, venv: str, mutants: list[Mutant]) -> None:
    """Fail unless every test that is to notice a mutant passes without it."""
    chosen = {(mutant.tests, mutant.keyword) for mutant in mutants}
    files = sorted({f"tests/{test}" for tests, _ in chosen for test in tests})
    keyword = " or ".join(sorted({f"({keyword})" for _, keyword in chosen}))
    result = run_tests(copy, venv, *files, "-k", keyword)
    if result.returncode != 0:
        raise RuntimeError(f"the tests fail without any mutant:\n{result.stdout[-3000:]}{result.stderr[-1000:]}")


def planted(copy: Path, mutant: Mutant) -> str:
    """The file's text with the fault; fail unless there is exactly one place for it."""
    text = (copy / mutant.file).read_text(encoding="utf-8")
    if text.count(mutant.old) != 1:
        raise RuntimeError(f"{mutant.name}: {mutant.file} holds {text.count(mutant.old)} times, not once: {mutant.old}")
    return text.replace(mutant.old, mutant.new)


def try_mutant(copy: Path, mutant: Mutant) -> str | None:
    """Plant, test, restore; return the first test that failed."""
    file = copy / mutant.file
    text = file.read_text(encoding="utf-8")
    file.write_text(planted(copy, mutant), encoding="utf-8")
    try:
        files = [f"tests/{test}" for test in mutant.tests]
        result = run_tests(copy, mutant.venv, *files, "-k", mutant.keyword)
    except subprocess.TimeoutExpired:
        return f"the tests hang: more than {TIMEOUT_S} s"
    finally:
        file.write_text(text, encoding="utf-8")
    if result.returncode == 0:
        return None
    # a fixture's failure counts, a file that cannot be imported does not
    failed = re.search(r"^(?:FAILED|ERROR) (?:tests/)?(\S+::[^\s\[]+(?:\[[^\]]*\])?)", result.stdout, re.MULTILINE)
    if result.returncode != 1 or failed is None:
        raise RuntimeError(f"{mutant.name}: the tests did not run:\n{result.stdout[-3000:]}{result.stderr[-1000:]}")
    return failed[1]


if __name__ == "__main__":
    sys.exit(main())
