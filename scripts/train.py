"""Starts the training program from a checkout: ``torchrun --nproc_per_node N scripts/train.py --config FILE``."""

import sys

from nxd_memopt.training.__main__ import main

if __name__ == "__main__":
    sys.exit(main())
