"""Planned memory of forward and backward against that of the graphs that XLA compiles for trn1, for each recipe.

    NEURON_CC_FLAGS=-O1 python -m scripts.bench.planner.certificates

runs ``nxd-memopt certify`` for each recipe with the launcher's options, in an environment with torch_xla,
which takes minutes for each and needs no hardware. Certified are the graph's temporaries and results, and
the states by arithmetic; the update and ``certify``'s reserve are not compared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from nxd_memopt.planner.hardware import GIB, device_named
from nxd_memopt.planner.memory.compiled_graphs import SPILLS, UPDATED
from nxd_memopt.planner.search.plan import Plan
from nxd_memopt.training.config.parsing import parse_config
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.memory_plan import planned
from nxd_memopt.training.model import load_hf_config

PLATFORM = "trn1"
RANKS = {"gpt_neox_20b": 128, "llama3_8b": 32, "llama2_7b": 32}
"""Recipes, and ranks of each: four hosts, and one."""


def plan_of(config: TrainConfig, ranks: int) -> Plan:
    """Return the plan of a configuration on ``ranks`` ranks of trn1."""
    hf_config = load_hf_config(config.model, config.moe)
    return planned(config, hf_config, device_named(PLATFORM), ranks=ranks)[1]


def certified_bytes(recipe: str, ranks: int) -> int:
    """Return what ``certify`` finds for a rank, without its reserve.

    Raises:
        ValueError: the command fails.
    """
    with tempfile.TemporaryDirectory() as name:
        figures = Path(name) / "figures.json"
        command = [sys.executable, "-m", "nxd_memopt.cli", "certify", "--recipe", recipe]
        command += ["--device", PLATFORM, "--devices", str(ranks), "--backend", "xla"]
        result = subprocess.run([*command, "--json", str(figures)], check=False, capture_output=True, text=True)
        if not figures.exists():
            raise ValueError(f"certify failed: {(result.stderr or result.stdout).strip().splitlines()[-1]}")
        found = json.loads(figures.read_text(encoding="utf-8"))["memory_bytes"]
    return found["total"] - sum(found[name] for name in ("reserve", UPDATED, SPILLS))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recipes", nargs="+", choices=tuple(RANKS), default=tuple(RANKS))
    recipes = parser.parse_args().recipes
    print("| recipe | ranks | planned | certified | difference |\n|---|---|---|---|---|")
    for recipe in recipes:
        # A recipe names no tokenizer, which neither plan nor certificate reads.
        config = parse_config(["--recipe", recipe, "--model.tokenizer", "none"])
        planned_bytes = plan_of(config, RANKS[recipe]).memory.forward_backward_bytes
        try:
            certified = certified_bytes(recipe, RANKS[recipe])
        except ValueError as error:
            sys.exit(f"{recipe}: {error}")
        print(
            f"| {recipe} | {RANKS[recipe]} | {planned_bytes / GIB:.2f} GiB | {certified / GIB:.2f} GiB | "
            f"{100 * (planned_bytes / certified - 1):+.1f} % |",
            flush=True,
        )


if __name__ == "__main__":
    main()
