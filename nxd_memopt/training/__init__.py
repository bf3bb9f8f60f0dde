"""The training program: ``nxd-memopt train``, or ``torchrun -m nxd_memopt.training``. Begin reading at ``step.py``.

This file imports no module: importing the backend may be refused, which ``errors.user_errors`` shows as one line. The
package ``nxd_memopt.trainer`` has neuronx-distributed's trainer functions, which this program does not use.
"""
