"""ZeRO stages 2 and 3: gradients and parameters sharded over the data-parallel ranks.

==========  ==================================================================================
stage       optimizer of a step
==========  ==================================================================================
``none``    ``NeuronZero1Optimizer`` with sharding groups of one rank, after
            ``grads.bucket_allreduce_gradients``
``zero1``   ``NeuronZero1Optimizer``
``zero2``   ``Zero2Optimizer``
``zero3``   ``shard_model``, then ``Zero3Optimizer``
==========  ==================================================================================

All of them have ``reduce_gradients``, ``update_parameters`` and ``zero_grad``, and checkpoints that
any other stage, T and D loads.
"""

from nxd_memopt.data_parallel.fully_sharded import shard_model, without_reduction
from nxd_memopt.data_parallel.zero2 import Zero2Optimizer
from nxd_memopt.data_parallel.zero3 import Zero3Optimizer

__all__ = ["Zero2Optimizer", "Zero3Optimizer", "shard_model", "without_reduction"]
