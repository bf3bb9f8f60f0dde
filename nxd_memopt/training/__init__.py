"""The training program: ``nxd-memopt train``, or ``torchrun -m nxd_memopt.training``. Begin reading at ``step.py``.

This file imports no module: importing the backend may raise an error, which
``errors.user_errors`` shows as one line. The package ``nxd_memopt.trainer`` implements
neuronx-distributed's trainer functions, which this program does not use.
"""
