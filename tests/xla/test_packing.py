"""Isolated documents on simulated NeuronCores: the loss of separate documents, in one graph for all batches."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import torch_xla.debug.metrics

from nxd_memopt.backends import backend
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import move_model_to_device
from nxd_memopt.training.data.micro_batches import MicroBatch
from tests.dist.pool import distributed
from tests.packed_rows import check_packed_losses, packed_rows
from tests.reference_models import llama_config, parallel_model


@distributed(2, slow=[1])
@pytest.mark.parametrize("name", ["llama", "neox"])
def test_packed_rows_have_the_loss_of_separate_documents(name, world_size):
    assert backend.name == "xla"
    check_packed_losses(name, world_size, {})


def compilations() -> int:
    data = torch_xla.debug.metrics.metric_data("CompileTime")
    return data[0] if data else 0


def test_documents_labels_and_divisors_change_no_graph() -> None:
    parallel_state.initialize_model_parallel(1)
    torch.manual_seed(0)
    model = parallel_model(llama_config(num_hidden_layers=1))
    move_model_to_device(model, backend.device)
    counts = []
    for i, lengths in enumerate((((5, 1, 6),), ((12,),), ((2, 2, 2, 2, 4),), ((1, 11),))):
        rows = packed_rows(lengths, not_trained=((0, i + 1),), seed=i)
        batch = MicroBatch.of(rows, divisor=(7, 1, 9, 10)[i], num_boundaries=6).to(backend.device)
        backend.mark_step()
        before = compilations()
        loss = batch.loss(model)
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        backend.mark_step()
        assert np.isfinite(loss.item()) and len(gradients)
        counts.append(compilations() - before)
    assert counts[0] > 0 and counts[1:] == [0, 0, 0]
    parallel_state.destroy_model_parallel()
