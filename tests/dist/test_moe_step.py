"""One training step of a model with experts against its definition, computed by transformers' model in float64.

The step has micro-batches, data-parallel ranks, documents of uneven lengths and padding. The losses of the routers are
written here from their definitions, on the routers' inputs, which hooks record.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor, nn

from nxd_memopt.memory import is_recomputed
from nxd_memopt.models import model_class
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.training.config.moe import resolve_options
from nxd_memopt.training.config.parsing import config_from_mapping
from nxd_memopt.training.config.train_config import TrainConfig
from nxd_memopt.training.data.micro_batches import micro_batches
from nxd_memopt.training.data.packing import DOCUMENT_START, ID_MASK, NOT_TRAINED, PADDING
from nxd_memopt.training.loop import run_step
from nxd_memopt.training.model import load_hf_config
from nxd_memopt.training.parallelize import parallelize
from nxd_memopt.training.resume.plan import ResumePlan
from nxd_memopt.training.state import Training
from tests.dist.pool import distributed
from tests.reference import relative_error
from tests.reference_models import full_parameters, hugging_face, local_part, mixtral_config

# fp32 against float64: measured 3e-7 and 3e-6 at most. A router's loss that is divided by the ranks once more, or by
# the trained tokens, is off by 30 % and more.
LOSS_TOLERANCE = 1e-6
GRADIENT_TOLERANCE = 2e-5
LENGTH, GLOBAL_BATCH = 12, 4
AUX, Z = 0.2, 0.05
SIZES = {"head_dim", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"}
SIZES |= {"num_hidden_layers", "num_local_experts", "num_experts_per_tok", "vocab_size", "max_position_embeddings"}


class Rows:
    """Packed rows: documents of uneven lengths, tokens that are not trained, and at the end of two rows padding."""

    documents_per_row = 5

    def __init__(self) -> None:
        generator = np.random.default_rng(4)
        self.all = generator.integers(0, 61, (GLOBAL_BATCH, LENGTH)).astype(np.int32)
        for row, starts in enumerate([[0], [0, 3, 5, 9], [0, 6], [2, 7, 10]]):
            self.all[row, starts] |= DOCUMENT_START
        for row, first in ((1, 9), (3, 10)):
            self.all[row, first:] = 7 | NOT_TRAINED | PADDING
            self.all[row, first] |= DOCUMENT_START
        # Routers see the tokens of a question.
        self.all[2, 1:4] |= NOT_TRAINED

    def rows(self, indices: range) -> np.ndarray:
        return self.all[list(indices)]


@dataclass
class Sums:
    """Of one forward pass of one rank: the cross entropy's sum, and of each layer probabilities and choices."""

    cross_entropy: Tensor
    kept: Tensor  # [B, S]
    probabilities: list[Tensor] = field(default_factory=list)  # [B, S, E]
    chosen: list[Tensor] = field(default_factory=list)
    log_sums: list[Tensor] = field(default_factory=list)  # [B, S]


def run_reference(model: nn.Module, packed: np.ndarray, k: int) -> Sums:
    """Run rows of which tokens see the earlier tokens of their document."""
    rows = torch.from_numpy(packed.astype(np.int64))
    ids = rows & ID_MASK
    starts = (rows & DOCUMENT_START) != 0
    untrained = (rows & NOT_TRAINED) != 0
    padding = (rows & PADDING) != 0
    starts[:, 0] = True
    documents = starts.cumsum(1)
    visible = (documents.unsqueeze(2) == documents.unsqueeze(1)) & torch.ones(LENGTH, LENGTH).tril().bool()
    first = torch.where(starts, torch.arange(LENGTH), 0).cummax(1).values
    mask = torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -1e30).unsqueeze(1)
    inputs: list[Tensor] = []
    hooks = [
        layer.mlp.gate.register_forward_pre_hook(lambda gate, args: inputs.append(F.linear(args[0], gate.weight)))
        for layer in model.model.layers
    ]
    options = {"position_ids": torch.arange(LENGTH) - first, "use_cache": False, "output_router_logits": False}
    logits = model(ids, attention_mask=mask, **options).logits
    for hook in hooks:
        hook.remove()
    labels = ids.masked_fill(starts | untrained, -100)[:, 1:]
    result = Sums(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels.flatten(), reduction="sum"), ~padding)
    for each in inputs:
        scores = each.view(*ids.shape, -1)
        result.probabilities.append(scores.softmax(-1))
        result.chosen.append(F.one_hot(scores.topk(k).indices, scores.size(-1)).sum(-2).double())
        result.log_sums.append(scores.logsumexp(-1))
    return result


def balancing_loss(kind: str, steps: list[list[Sums]], k: int) -> Tensor:
    """docs/moe.md's loss: the mean over micro-batches (``steps[micro-step][rank]``), or of all their tokens."""
    every = [each for step in steps for each in step]
    layers = range(len(every[0].probabilities))
    num_experts = every[0].probabilities[0].size(-1)

    def means(runs: list[Sums], layer: int, rows: Any = slice(None)) -> tuple[Tensor, Tensor]:
        """f and P over the tokens that count."""
        kept = [each.kept[rows] for each in runs]
        tokens = sum(each.sum() for each in kept)
        chosen = sum(each.chosen[layer][rows][at].sum(0) for each, at in zip(runs, kept, strict=True))
        scores = sum(each.probabilities[layer][rows][at].sum(0) for each, at in zip(runs, kept, strict=True))
        return chosen / tokens, scores / tokens

    total = torch.zeros((), dtype=torch.float64)
    if kind == "global_aux_loss":
        for layer in layers:
            fractions, scores = means(every, layer)
            total = total + (fractions * scores).sum() * num_experts / k
    for step in steps:
        for each in step:
            of_micro_batch = torch.zeros((), dtype=torch.float64)
            for layer in layers:
                if kind == "aux_loss":
                    fractions, scores = means([each], layer)
                    of_micro_batch = of_micro_batch + (fractions * scores).sum() * num_experts / k
                elif kind == "seq_aux_loss":
                    rows = [means([each], layer, slice(row, row + 1)) for row in range(len(each.kept))]
                    of_micro_batch = of_micro_batch + sum((f * p).sum() for f, p in rows) / len(rows) * num_experts / k
            if kind == "hf_aux_loss":
                both = [means([each], layer) for layer in layers]
                fractions = sum(f for f, _ in both) / len(both)
                scores = sum(p for _, p in both) / len(both)
                of_micro_batch = (fractions * scores).sum() * num_experts
            total = total + of_micro_batch / len(every)
    return AUX * total


def z_loss(steps: list[list[Sums]]) -> Tensor:
    every = [each for step in steps for each in step]
    terms = [each.log_sums[layer][each.kept].square().mean() for each in every for layer in range(len(each.log_sums))]
    return Z * sum(terms) / len(every)


def reference_step(
    kind: str, rows: Rows, *, micro: int, ranks: int
) -> tuple[dict[str, Tensor], dict[str, Tensor], dict[str, float]]:
    """Initial weights, gradients of the step's loss in float64, and its parts."""
    config = mixtral_config()
    model = hugging_face(config)
    full = full_parameters(model)
    model.set_experts_implementation("eager")  # grouped matmuls have no float64
    model = model.double()
    steps: list[list[Sums]] = []
    for micro_step in range(GLOBAL_BATCH // (micro * ranks)):
        firsts = [(micro_step * ranks + rank) * micro for rank in range(ranks)]
        steps.append([run_reference(model, rows.all[first : first + micro], 2) for first in firsts])
    labels = (rows.all[:, 1:] < DOCUMENT_START).sum()
    cross_entropy = sum(each.cross_entropy for step in steps for each in step) / int(labels)
    balance, z = balancing_loss(kind, steps, 2), z_loss(steps)
    (cross_entropy + balance + z).backward()
    gradients = {name: param.grad for name, param in model.named_parameters()}
    parts = {"loss": cross_entropy.item(), "load_balancing_loss": balance.item(), "z_loss": z.item()}
    return full, gradients, parts


RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["moe"]}


def run_config(kind: str, *, tensor: int, expert: int, micro: int, stage: str, dispatcher: str) -> TrainConfig:
    """Options of a run whose micro-batches and padding are those of ``Rows``."""
    values = mixtral_config().to_dict()
    return config_from_mapping(
        {
            "model": {
                "tokenizer": "t",
                "config_overrides": {"model_type": "mixtral", **{name: values[name] for name in SIZES}},
            },
            "parallel": {
                "tensor_model_parallel_size": tensor,
                "sequence_parallel_enabled": tensor > 1,
                "expert_model_parallel_size": expert,
            },
            "data_parallel": {"sharding": stage},
            "memory": RECOMPUTED if dispatcher == "alltoall" else {},
            "moe": {
                "moe_router_load_balancing_type": kind,
                "moe_aux_loss_coeff": AUX,
                "moe_z_loss_coeff": Z,
                "moe_per_layer_logging": True,
                "moe_token_dispatcher_type": dispatcher,
            },
            "data": {
                "seq_length": LENGTH,
                "packing": "best_fit",
                "micro_batch_size": micro,
                "global_batch_size": GLOBAL_BATCH,
            },
            "optimizer": {"clip_grad": 0, "lr": 0},
        }
    )


def check(kind: str, *, tensor: int, expert: int, ranks: int, micro: int, stage: str, dispatcher: str) -> None:
    """Gradients on every rank before clipping, the values of metrics.jsonl, and the norm."""
    rows = Rows()
    full, gradients, parts = reference_step(kind, rows, micro=micro, ranks=ranks)
    config = run_config(kind, tensor=tensor, expert=expert, micro=micro, stage=stage, dispatcher=dispatcher)
    parallel_state.initialize_model_parallel(tensor, expert_model_parallel_size=expert)
    hf_config = load_hf_config(config.model, config.moe)
    model = model_class("mixtral")(
        hf_config, parallel=config.parallel, memory=config.memory, moe=resolve_options(config.moe, hf_config)
    )
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(local_part(name, full[name], hf_config))
    optimizer, forward_backward = parallelize(model, config)
    assert {is_recomputed(layer) for layer in model.moe_layers()} == {dispatcher == "alltoall"}
    kept: dict[str, Tensor] = {}
    training = Training(model, optimizer, forward_backward, ResumePlan(config, {}), {})
    zero_grad = optimizer.zero_grad

    def keep_gradients() -> None:
        kept.update({name: param.grad.clone() for name, param in model.named_parameters() if param.grad is not None})
        zero_grad()

    optimizer.zero_grad = keep_gradients  # what a step leaves before it releases them
    result = run_step(training, config, micro_batches(config.data, rows, 0))
    row = {"loss": result.loss.item(), **result.routers.values()}
    for name, value in parts.items():
        assert relative_error(torch.tensor(row[name]), torch.tensor(value)) < LOSS_TOLERANCE, name
    assert sum(row["z_loss_per_layer"]) == pytest.approx(row["z_loss"])
    tokens = int(((rows.all & PADDING) == 0).sum())
    assert [sum(layer) for layer in row["tokens_per_expert"]] == [2 * tokens] * 2
    norm = torch.stack([grad.norm() for grad in gradients.values()]).norm()
    assert relative_error(result.grad_norm, norm.float()) < GRADIENT_TOLERANCE
    # ZeRO-1 leaves the reduced gradients in its shards, of which the norm is a sum.
    if stage == "zero1":
        return
    for name, grad in kept.items():
        error = (grad.double() - local_part(name, gradients[name], hf_config)).norm() / gradients[name].norm()
        assert error < GRADIENT_TOLERANCE, f"gradient of {name}: relative error {error:.1e}"
    assert len(kept) == len(list(model.named_parameters()))


KINDS = ("aux_loss", "seq_aux_loss", "global_aux_loss", "hf_aux_loss")
# T, EP, D, micro-batch size, ZeRO stage
SPLITS = {
    1: [(1, 1, 1, 2, "none"), (1, 1, 1, 1, "none")],  # the halves of the step have equally many trained labels
    2: [(2, 1, 1, 1, "none"), (1, 2, 2, 1, "none")],
    4: [(2, 2, 2, 1, "none"), (1, 2, 4, 1, "zero1"), (1, 4, 4, 1, "none")],
}


@distributed(world_size=[1, 2], slow=[4])
@pytest.mark.parametrize("kind", KINDS)
def test_a_step_is_its_definition(kind, world_size):
    for tensor, expert, ranks, micro, stage in SPLITS[world_size]:
        dispatcher = "alltoall" if (expert + KINDS.index(kind)) % 2 else "allgather"
        parallel_state.destroy_model_parallel()
        try:
            check(kind, tensor=tensor, expert=expert, ranks=ranks, micro=micro, stage=stage, dispatcher=dispatcher)
        except Exception as error:
            error.add_note(f"T={tensor} EP={expert} D={ranks} B={micro} {stage} {dispatcher}")
            raise
