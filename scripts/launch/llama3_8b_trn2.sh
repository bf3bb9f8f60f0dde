#!/usr/bin/env bash
# LLaMA-3-8B on trn2, T=4, S=8192: one trn2.48xlarge, or several, started by slurm.sbatch. Other instances: --platform.
#   scripts/launch/llama3_8b_trn2.sh --dry-run --model.tokenizer DIRECTORY --data.dataset DATA   # shows what would run, and certifies its memory
#   scripts/launch/llama3_8b_trn2.sh --model.tokenizer DIRECTORY --data.dataset DATA             # trains, or resumes
set -euo pipefail
exec "${PYTHON:-python3}" -m nxd_memopt.cli launch --platform trn2 --recipe llama3_8b_trn2 "$@"
