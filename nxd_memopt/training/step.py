"""One optimizer step: forward and backward of its micro-batches, gradient reduction, clipping, update."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.profiling.operations import OPTIMIZER
from nxd_memopt.profiling.ranges import part_of_step
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.pipeline import PipelinedForwardBackward
from nxd_memopt.training.reporting.metrics import StepResult
from nxd_memopt.training.routers import take_router_sums
from nxd_memopt.training.runtime.reductions import sum_over_replicas_and_stages
from nxd_memopt.training.schedule import learning_rate
from nxd_memopt.training.state import Training


def train_step(training: Training, config: TrainConfig, micro_batches: Sequence[MicroBatch]) -> StepResult:
    """Run one optimizer step; return its values without waiting for the device. Every rank calls.

    Args:
        training: model, optimizer and step counter, which is incremented.
        config: hyperparameters of the run.
        micro_batches: this data-parallel rank's micro-batches. The loss of each is the sum of its
            token losses divided by the trained tokens of the step, so fewer micro-batches run the
            same graphs but give a smaller loss.
    """
    optimizer = training.optimizer
    training.model.train()
    # In fp16 the optimizer may skip the step; the schedule then repeats this learning rate.
    lr = learning_rate(training.updates + 1, config.optimizer, config.decay_steps)
    optimizer.begin_step(lr)

    # Gradients accumulate over the micro-batches. On XLA mark_step ends the graph of a
    # micro-batch, so all micro-batches run the same graph, and the gradient reduction may overlap
    # with the last backward only: earlier ones have partial sums.
    if isinstance(training.forward_backward, PipelinedForwardBackward):
        loss = training.forward_backward.run(micro_batches, optimizer.last_backward)
    else:
        loss = torch.zeros((), device=backend.device)
        for index, micro_batch in enumerate(micro_batches):
            is_last = index == len(micro_batches) - 1
            with optimizer.last_backward() if is_last else nullcontext():
                loss += training.forward_backward(micro_batch)
            backend.mark_step()

    # Gradients of sequence-parallel norms are summed over tensor-parallel ranks, all gradients
    # are averaged over data-parallel ranks (the divisor of the losses is the step's trained
    # tokens / D), and clipping uses the norm of the full model's gradients.
    with part_of_step("gradient reduction and clipping"):
        grad_norm = optimizer.reduce_gradients()
    loss = sum_over_replicas_and_stages(loss) / parallel_state.get_data_parallel_size()

    with part_of_step(OPTIMIZER):
        optimizer.step(lr)
        optimizer.zero_grad()
    # Their collective is part of this graph: after mark_step it would become part of the next step's first one.
    routers = take_router_sums(training.forward_backward)
    backend.mark_step()
    training.step += 1
    return StepResult(training.step, loss, grad_norm, lr, optimizer.loss_scaling, routers)
