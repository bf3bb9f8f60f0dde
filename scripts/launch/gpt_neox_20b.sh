#!/usr/bin/env bash
# GPT-NeoX-20B on trn1, T=32: NxD's recipe is for four trn1.32xlarge, started by slurm.sbatch.
#   scripts/launch/gpt_neox_20b.sh --dry-run --model.tokenizer DIRECTORY --data.dataset DATA   # shows what would run, and certifies its memory
#   scripts/launch/gpt_neox_20b.sh --compile --model.tokenizer DIRECTORY --data.dataset DATA   # compiles every graph beforehand
#   scripts/launch/gpt_neox_20b.sh --model.tokenizer DIRECTORY --data.dataset DATA             # trains, or resumes
set -euo pipefail
# neuronx-distributed's flag for this model: an overflow in bf16 becomes the largest number, not infinity.
export NEURON_CC_FLAGS="--enable-saturate-infinity ${NEURON_CC_FLAGS:-}"
exec "${PYTHON:-python3}" -m nxd_memopt.cli launch --recipe gpt_neox_20b "$@"
