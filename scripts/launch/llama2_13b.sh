#!/usr/bin/env bash
# LLaMA-2-13B on trn1, T=8, P=4, S=4096: one trn1.32xlarge, or several, started by slurm.sbatch.
#   scripts/launch/llama2_13b.sh --dry-run --model.tokenizer DIRECTORY --data.dataset DATA   # shows what would run, and certifies its memory
#   scripts/launch/llama2_13b.sh --compile --model.tokenizer DIRECTORY --data.dataset DATA   # compiles every graph beforehand
#   scripts/launch/llama2_13b.sh --model.tokenizer DIRECTORY --data.dataset DATA             # trains, or resumes
set -euo pipefail
exec "${PYTHON:-python3}" -m nxd_memopt.cli launch --recipe llama2_13b "$@"
