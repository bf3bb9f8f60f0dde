"""Runs neuronx-distributed's ``convert_checkpoints.py`` examples, unchanged, on its package and through the alias."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor
from train_examples import require_overlay

ROOT = Path(__file__).resolve().parents[2]
HIDDEN, WIDTH, VOCABULARY, EXPERTS = 32, 48, 64, 4
RUN_ON_NXD = """
import runpy, sys
from pathlib import Path
from nxd_on_cpu import import_neuronx_distributed
import_neuronx_distributed(Path(sys.argv[1]) / "src")
sys.argv = sys.argv[2:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@dataclass(frozen=True)
class Case:
    """Conversion to compare.

    Args:
        example: directory below examples/training.
        options: options of the example.
        kv_heads: number of KV heads; the model has 8 query heads.
        nxd_fails: reason why neuronx-distributed cannot convert back; empty if it can.
        fault: fault in neuronx-distributed's files if they must differ from ours; else empty.
    """

    example: str
    options: str
    kv_heads: int = 2
    nxd_fails: str = ""
    fault: str = ""


CASES = (
    Case("llama", "--hw_backend trn1 --tp_size 8 --pp_size 2 --kv_size_multiplier 4 --qkv_linear 1"),
    Case("llama", "--hw_backend trn1 --tp_size 2 --qkv_linear 1 --fuse_qkv 1", nxd_fails="thirds of unequal parts"),
    Case("llama", "--hw_backend trn1 --tp_size 8 --kv_size_multiplier 4 --qkv_linear 1 --fuse_qkv 1"),
    Case("llama", "--hw_backend trn1 --tp_size 2"),
    Case("llama", "--hw_backend trn1 --tp_size 4 --pp_size 3", 8, "it expects qkv_proj without grouped heads"),
    Case("llama", "--hw_backend trn1 --tp_size 4 --coalesce_qkv 1", kv_heads=8),
    Case("llama", "--hw_backend trn2 --tp_size 2 --qkv_linear 1"),
    Case("mixtral", "--hw_backend trn1 --tp_size 4 --kv_size_multiplier 2 --qkv_linear 1 --pp_size 2"),
    Case("mixtral", "--hw_backend trn1 --tp_size 2 --qkv_linear 1 --ep_size 2", fault="each rank gets every expert"),
    Case("dbrx", "--hw_backend trn1 --tp_size 4 --kv_size_multiplier 2 --qkv_linear 1 --i_tp_round_factor 5"),
)


def compare_converters(source: Path, folder: Path) -> Iterator[tuple[str, str]]:
    """Yield rows per conversion: the files of both libraries, and the weights converted back."""
    for number, case in enumerate(CASES):
        directory = folder / f"converter_{number}"
        directory.mkdir()
        full, config = weights(case)
        torch.save(full, directory / "full.pt")
        (directory / "config.json").write_text(json.dumps(config))
        errors = [
            run(library, case, source, directory / "full.pt", directory / library, "from")
            for library in ("nxd", "ours")
        ]
        result = next(filter(None, errors), "") or differences(directory / "nxd", directory / "ours")
        if case.fault and not any(errors):
            result = f"equal not expected: {case.fault}" if "gate_up_proj" in result else f"FAILED: no fault: {result}"
        yield f"converter, {case.example} {case.options}: files", result
        for library in ("nxd", "ours"):
            back = directory / f"{library}_back"
            error = run(library, case, source, directory / "ours" / "model", back, "to")
            result = error or difference({"": full}, {"": torch.load(back / "checkpoint.pt", weights_only=True)})
            if library == "nxd" and case.nxd_fails:
                result = f"equal here only: NxD itself cannot, {case.nxd_fails}" if "equal" not in result else result
            yield f"converter, {case.example} {case.options}: back by {library}", result


def run(library: str, case: Case, source: Path, read: Path, write: Path, direction: str) -> str:
    """Run the example; return an empty text, or the last line of its error."""
    variables = {"nxd": {"NXD_CPU_MODE": "1", "PJRT_DEVICE": "CPU"}, "ours": {"NXD_MEMOPT_BACKEND": "cpu"}}[library]
    python = ROOT / (".venv-xla" if library == "nxd" else ".venv") / "bin" / "python"
    program = ["-c", RUN_ON_NXD, str(source)] if library == "nxd" else ["-m", "nxd_memopt.compat"]
    config = (read.parent if direction == "from" else read.parent.parent) / "config.json"
    command = [str(python), *program, str(source / "examples" / "training" / case.example / "convert_checkpoints.py")]
    command += ["--input_dir", str(read), "--output_dir", str(write), "--config", str(config)]
    command += [f"--convert_{direction}_full_state", "--n_layers", "3", *case.options.split()]
    paths = [str(require_overlay("llama")), *([str(Path(__file__).parent)] if library == "nxd" else [])]
    overlay = {"PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    environment = {**os.environ, **variables, **overlay}
    finished = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    return f"FAILED on {library}: {finished.stderr.strip().splitlines()[-1]}" if finished.returncode else ""


def differences(first: Path, second: Path) -> str:
    """Return ``equal, ...`` or the first difference between all files of two directories."""
    read = [
        {str(path.relative_to(root)): torch.load(path, weights_only=True) for path in sorted(root.rglob("*.pt"))}
        for root in (first, second)
    ]
    return difference(*read)


def difference(first: dict[str, dict[str, Tensor]], second: dict[str, dict[str, Tensor]]) -> str:
    """Return ``equal, ...`` or the first difference between state dicts by file name."""
    if first.keys() != second.keys():
        return f"FAILED: files {sorted(first.keys() ^ second.keys())[:3]}"
    for file, wanted in first.items():
        if wanted.keys() != second[file].keys():
            return f"FAILED: {file}: names {sorted(wanted.keys() ^ second[file].keys())[:3]}"
        for name, tensor in wanted.items():
            if not tensor.equal(second[file][name]):
                return f"FAILED: {file}: {name}"
    return f"equal, {sum(len(state) for state in first.values())} tensors in {len(first)} files"


def weights(case: Case) -> tuple[dict[str, Tensor], dict[str, object]]:
    """Return random weights with Hugging Face's names, and the model's config."""
    torch.manual_seed(0)
    kv = HIDDEN // 8 * case.kv_heads
    build = {"llama": _llama, "mixtral": _mixtral, "dbrx": _dbrx}[case.example]
    shapes = build(kv)
    config: dict[str, object] = {
        **{"num_attention_heads": 8, "num_key_value_heads": case.kv_heads, "hidden_size": HIDDEN},
        **{"num_hidden_layers": 3, "num_local_experts": EXPERTS},
    }
    if case.example == "dbrx":
        config = {"n_heads": 8, "d_model": HIDDEN, "n_layers": 3, "attn_config": {"kv_n_heads": case.kv_heads}}
        config["ffn_config"] = {"ffn_hidden_size": WIDTH}
    return {name: torch.randn(shape) for name, shape in shapes.items()}, config


def _attention(prefix: str, kv: int) -> dict[str, tuple[int, ...]]:
    """Return the shapes of attention's weights by name."""
    rows = {"q_proj": HIDDEN, "k_proj": kv, "v_proj": kv, "o_proj": HIDDEN}
    return {f"{prefix}.{name}.weight": (size, HIDDEN) for name, size in rows.items()}


def _outer() -> dict[str, tuple[int, ...]]:
    """Return the shapes of embedding, final norm and head by name."""
    table = (VOCABULARY, HIDDEN)
    return {"model.embed_tokens.weight": table, "model.norm.weight": (HIDDEN,), "lm_head.weight": table}


def _llama(kv: int) -> dict[str, tuple[int, ...]]:
    shapes = _outer()
    for i in range(3):
        layer = f"model.layers.{i}"
        shapes |= _attention(f"{layer}.self_attn", kv)
        shapes |= {f"{layer}.mlp.{name}_proj.weight": (WIDTH, HIDDEN) for name in ("gate", "up")}
        shapes |= {f"{layer}.mlp.down_proj.weight": (HIDDEN, WIDTH), f"{layer}.input_layernorm.weight": (HIDDEN,)}
    return shapes


def _mixtral(kv: int) -> dict[str, tuple[int, ...]]:
    shapes = _outer()
    for i in range(3):
        layer = f"model.layers.{i}"
        experts = f"{layer}.block_sparse_moe.experts"
        shapes |= _attention(f"{layer}.self_attn", kv)
        shapes[f"{layer}.block_sparse_moe.gate.weight"] = (EXPERTS, HIDDEN)
        for j in range(EXPERTS):
            shapes |= {f"{experts}.{j}.{name}.weight": (WIDTH, HIDDEN) for name in ("w1", "w3")}
            shapes[f"{experts}.{j}.w2.weight"] = (HIDDEN, WIDTH)
    return shapes


def _dbrx(kv: int) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"transformer.wte.weight": (VOCABULARY, HIDDEN)}
    for i in range(3):
        layer = f"transformer.blocks.{i}"
        shapes[f"{layer}.norm_attn_norm.attn.Wqkv.weight"] = (HIDDEN + 2 * kv, HIDDEN)
        shapes[f"{layer}.norm_attn_norm.attn.out_proj.weight"] = (HIDDEN, HIDDEN)
        shapes[f"{layer}.norm_attn_norm.norm_1.weight"] = (HIDDEN,)
        shapes[f"{layer}.ffn.router.layer.weight"] = (EXPERTS, HIDDEN)
        shapes |= {f"{layer}.ffn.experts.mlp.{name}": (EXPERTS * WIDTH, HIDDEN) for name in ("w1", "v1", "w2")}
    return {**shapes, "transformer.norm_f.weight": (HIDDEN,), "lm_head.weight": (VOCABULARY, HIDDEN)}


if __name__ == "__main__":
    sys.exit("run nxd_checkpoints.py --only converters")
