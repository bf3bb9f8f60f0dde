"""Forward and backward of models with experts, and what their routers did in a step."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from nxd_memopt.architectures.experts import expert_capacity
from nxd_memopt.modules.moe.causal_lm import MoECausalLM
from nxd_memopt.modules.moe.load_balancing import RouterStatistics, move_expert_bias
from nxd_memopt.moe_config import MoEConfig
from nxd_memopt.optimizer import LossScaler
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.data.micro_batches import MicroBatch
from nxd_memopt.training.runtime.reductions import sum_over_replicas_and_stages

_HEAD = 3  # sums before those of the layers


class RouterSums:
    """What the routers did in one step, on the device.

    Args:
        sums: ``[3 + layers * (3 + 2 E)]``: the balancing loss of all layers, the dropped choices of all layers,
            the micro-batches with padding, and the rows of ``RouterStatistics``, added up over the step's
            micro-batches on all ranks.
        forwards: number of micro-batches in the sums.
        moe: options of the model.
    """

    def __init__(self, sums: Tensor, forwards: int, moe: MoEConfig) -> None:
        self._sums = sums
        self._forwards = forwards
        self._moe = moe

    @property
    def tokens_per_expert(self) -> Tensor:
        """Choices of each expert, ``[layers, E]``, on the device."""
        experts = self._moe.num_moe_experts
        return self._sums[_HEAD:].view(-1, 3 + 2 * experts)[:, 3 + experts :]

    def values(self) -> dict[str, Any]:
        """Return the values of a row of metrics.jsonl; waits for the device.

        Losses have their coefficients and are means over the micro-batches of all ranks: added to
        the cross entropy they are the loss that is trained. ``max_load`` is the largest share of a
        layer's choices that one expert has, times the number of experts. ``dropped_share``, with a capacity, is
        the share of all layers' choices that found their expert full. A batch with padding does not have it:
        padding is not counted among the choices, but takes places.
        """
        moe = self._moe
        sums = self._sums.cpu()
        rows = sums[_HEAD:].view(-1, 3 + 2 * moe.num_moe_experts)
        counts = rows[:, 3 + moe.num_moe_experts :]
        load = counts.amax(1) / counts.mean(1).clamp(min=1e-6)
        values: dict[str, Any] = {}
        if moe.has_aux_loss:
            values["load_balancing_loss"] = sums[0].item() / self._forwards
        if moe.moe_z_loss_coeff:
            values["z_loss"] = rows[:, 1].sum().item() / self._forwards
        values["max_load"] = load.max().item()
        dropped, padded = sums[1].item(), sums[2].item()
        if moe.moe_expert_capacity_factor is not None and not padded:
            values["dropped_share"] = dropped / max(1.0, counts.sum().item())
        if not moe.moe_per_layer_logging:
            return values
        # transformers' loss is over all layers together: no layer has one of its own.
        if moe.has_aux_loss and moe.moe_router_load_balancing_type != "hf_aux_loss":
            values["load_balancing_loss_per_layer"] = (rows[:, 0] / self._forwards).tolist()
        if moe.moe_z_loss_coeff:
            values["z_loss_per_layer"] = (rows[:, 1] / self._forwards).tolist()
        values["tokens_per_expert"] = counts.round().int().tolist()
        return values


class ExpertForwardBackward:
    """Forward and backward of the micro-batches of a model with experts.

    The loss that is trained has the routers' losses of every micro-batch, divided by the number of
    the step's micro-batches: averaged over the data-parallel ranks, as gradients are, they add up to
    the mean over all micro-batches of the step. All have equally many tokens. A share of the trained
    labels would weigh rows with more documents less.

    Args:
        model: the model.
        micro_batches: micro-batches of this rank in one step.
        scaler: scales the gradients; None scales nothing.
    """

    def __init__(self, model: MoECausalLM, micro_batches: int, scaler: LossScaler | None) -> None:
        self._model = model
        self._micro_batches = micro_batches
        self._scaler = scaler
        self._sums: Tensor | None = None
        self._forwards = 0

    def __call__(self, micro_batch: MicroBatch) -> Tensor:
        """Accumulate gradients; return the share of the step's cross entropy, without the routers' losses."""
        output = self._model(**self.inputs(micro_batch))
        loss = output.loss if self._scaler is None else self._scaler.scale_gradients_of(output.loss)
        loss.backward()
        self.add(output.router, micro_batch)
        return output.cross_entropy.detach()

    def inputs(self, micro_batch: MicroBatch) -> dict[str, Any]:
        """Return the arguments of a forward of the model in training."""
        return {
            **micro_batch.inputs(),
            "token_mask": micro_batch.token_mask,
            "router_loss_weight": 1 / self._micro_batches,
        }

    def add(self, statistics: RouterStatistics, micro_batch: MicroBatch, chunk: int = 0) -> None:
        """Add what the routers of a chunk of layers did with a micro-batch."""
        moe = self._model.moe
        loss = statistics.balancing_losses.sum()
        if moe.has_aux_loss and moe.moe_router_load_balancing_type == "hf_aux_loss":
            loss = moe.moe_aux_loss_coeff * statistics.hf_loss()
        dropped = torch.zeros_like(loss)
        if moe.moe_expert_capacity_factor is not None:
            tokens = micro_batch.ids.numel()
            capacity = expert_capacity(tokens, moe.moe_router_topk, moe.num_moe_experts, moe.moe_expert_capacity_factor)
            dropped = (statistics.tokens_per_expert - capacity).clamp(min=0).sum()
        padded = torch.full_like(loss, float(micro_batch.token_mask is not None))
        head = torch.stack([loss, dropped, padded])
        # Rows of all layers of the model: zeros for those of other stages.
        numbers = self._model.moe_layer_numbers(chunk)
        before, count = numbers.start, sum(self._model.spec.moe_layers)
        rows = F.pad(statistics.rows, (0, 0, before, count - before - len(numbers)))
        values = torch.cat([head, rows.reshape(-1)]).detach()
        self._sums = values if self._sums is None else self._sums + values
        # Every rank of a pipeline has each micro-batch once per chunk.
        self._forwards += chunk == 0

    @contextmanager
    def balanced_over(self, micro_batches: Sequence[MicroBatch]) -> Iterator[None]:
        """Balance the choices of all micro-batches of a step together inside the block, with ``global_aux_loss``."""
        kind = self._model.moe.moe_router_load_balancing_type
        if kind != "global_aux_loss" or not self._model.moe.has_aux_loss or len(micro_batches) == 1:
            yield
            return
        # Counted with the same jitter as in the step.
        self._model.train()
        with self._model.balanced_over_step([self.inputs(each) for each in micro_batches]):
            yield

    def take(self) -> RouterSums:
        """Return the sums of a step over all data-parallel ranks and stages, and start again. Every rank calls.

        The routers' biases follow the load of the step.
        """
        assert self._sums is not None, "a step has at least one micro-batch"
        # Tensor-parallel ranks of one replica have equal statistics.
        sums = sum_over_replicas_and_stages(self._sums)
        forwards = self._forwards * parallel_state.get_data_parallel_size()
        self._sums = None
        self._forwards = 0
        result = RouterSums(sums, forwards, self._model.moe)
        if self._model.moe.has_expert_bias:
            gates = [layer.gate for layer in self._model.moe_layers()]
            chunks = range(len(self._model.stages.chunks))
            own = [number for chunk in chunks for number in self._model.moe_layer_numbers(chunk)]
            move_expert_bias(gates, result.tokens_per_expert[own])
        return result


def take_router_sums(forward_backward: object) -> RouterSums | None:
    """Return ``ExpertForwardBackward.take``; None of a model without experts."""
    experts = getattr(forward_backward, "experts", forward_backward)
    return experts.take() if isinstance(experts, ExpertForwardBackward) else None
