#!/usr/bin/env bash
# LLaMA-3-70B on trn1, T=32, P=8, S=8192: eight trn1.32xlarge, or a multiple, started by slurm.sbatch.
#   scripts/launch/llama3_70b.sh --dry-run --model.tokenizer DIRECTORY --data.dataset DATA   # shows what would run, and certifies its memory
#   scripts/launch/llama3_70b.sh --compile --model.tokenizer DIRECTORY --data.dataset DATA   # compiles every graph beforehand
#   scripts/launch/llama3_70b.sh --model.tokenizer DIRECTORY --data.dataset DATA             # trains, or resumes
set -euo pipefail
exec "${PYTHON:-python3}" -m nxd_memopt.cli launch --recipe llama3_70b "$@"
