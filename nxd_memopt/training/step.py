"""One optimizer step: forward and backward of its micro-batches, gradient reduction, clipping, update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.config import TrainConfig
from nxd_memopt.training.metrics import StepResult, sum_over_data_parallel_ranks
from nxd_memopt.training.schedule import learning_rate
from nxd_memopt.training.state import Training


def train_step(training: Training, config: TrainConfig, micro_batches: Sequence[Tensor]) -> StepResult:
    """Run one optimizer step and return its values without waiting for the device. Every rank calls.

    Args:
        micro_batches: this data-parallel rank's token ids, ``[B, S]`` each. The loss of a micro-batch is divided by the
            number that the configuration asks for, so fewer give the same graphs but a smaller loss.
    """
    optimizer = training.optimizer
    training.model.train()

    # Gradients accumulate over the micro-batches. Each micro-batch ends at mark_step: on XLA one graph serves them all.
    loss = torch.zeros((), device=backend.device)
    for i, micro_batch in enumerate(micro_batches):
        is_last = i == len(micro_batches) - 1
        with optimizer.last_backward() if is_last else nullcontext():
            loss += training.forward_backward(micro_batch)
        backend.mark_step()

    # Gradients of sequence-parallel norms are summed over tensor-parallel ranks, all gradients are averaged over
    # data-parallel ranks, and the norm that clips them is the full model's.
    grad_norm = optimizer.reduce_gradients()
    loss = sum_over_data_parallel_ranks(loss) / parallel_state.get_data_parallel_size()

    lr = learning_rate(training.step + 1, config.optimizer, config.decay_steps)
    optimizer.step(lr)
    optimizer.zero_grad()
    backend.mark_step()
    training.step += 1
    return StepResult(training.step, loss, grad_norm, lr)
