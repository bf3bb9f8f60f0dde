"""Starts the training program from a checkout: ``torchrun --nproc_per_node N scripts/train.py --config FILE``."""

import sys

from nxd_memopt.training.__main__ import main
from nxd_memopt.training.runtime.signals import final_status

if __name__ == "__main__":
    sys.exit(final_status(main()))
