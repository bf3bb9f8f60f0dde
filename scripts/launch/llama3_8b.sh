#!/usr/bin/env bash
# LLaMA-3-8B on trn1, T=8, S=8192: one trn1.32xlarge, or several, started by slurm.sbatch.
#   scripts/launch/llama3_8b.sh --dry-run --model.tokenizer DIRECTORY --data.dataset DATA   # shows what would run, and certifies its memory
#   scripts/launch/llama3_8b.sh --compile --model.tokenizer DIRECTORY --data.dataset DATA   # compiles every graph beforehand
#   scripts/launch/llama3_8b.sh --model.tokenizer DIRECTORY --data.dataset DATA             # trains, or resumes
set -euo pipefail
exec "${PYTHON:-python3}" -m nxd_memopt.cli launch --recipe llama3_8b "$@"
