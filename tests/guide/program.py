"""Trains the guide's model on two ranks and compares it with transformers' own GPT-NeoX in one process: a program.

``modeling.py`` is looked for in the program's own directory, where the test puts a version of it.
"""

from __future__ import annotations

import sys

import modeling  # pyright: ignore[reportMissingImports]
import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

from nxd_memopt.backends import backend
from nxd_memopt.optimizer import NeuronZero1Optimizer
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.utils import move_model_to_device
from tests.reference import shard

STEPS, MICRO_BATCHES = 3, 2
LAYERS = 1 if backend.name == "xla" else 2  # XLA compiles the graphs between collectives one by one
# fp32 sums in another order over two layers; XLA fuses them differently. A gradient that is not summed is off by 0.1.
BOUND = {"rtol": 1e-4, "atol": 2e-5}


def configuration(*, recompute: bool) -> GPTNeoXConfig:
    config = GPTNeoXConfig(
        vocab_size=32,
        hidden_size=16,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        intermediate_size=24,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        attn_implementation="eager",
    )
    config.sequence_parallel_enabled = True
    config.selective_activation_checkpointing_is_enabled = recompute
    return config


def reference_model() -> GPTNeoXForCausalLM:
    """transformers' model with every parameter away from its start, where norms and biases would hide faults."""
    torch.manual_seed(5)
    model = GPTNeoXForCausalLM(configuration(recompute=False)).float()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(0.3 * torch.randn(param.shape, generator=generator))
    return model


def own_part(name: str, full: Tensor) -> Tensor:
    """This rank's part of transformers' parameter, or of its gradient."""
    if "query_key_value" in name:  # [heads, (query, key, value), d, ...] to [(query, key, value), heads, d, ...]
        heads = configuration(recompute=False).num_attention_heads
        full = full.unflatten(0, (heads, 3, -1)).transpose(0, 1).flatten(0, 2)
        return shard(full, 0, stride=3)
    if "dense_h_to_4h" in name:
        return shard(full, 0)
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        return shard(full, 1)
    return full


def theirs(reference: GPTNeoXForCausalLM) -> dict[str, nn.Parameter]:
    """transformers' parameters by our names; some of its versions call the head lm_head."""
    renamed = ((name.removeprefix("gpt_neox."), param) for name, param in reference.named_parameters())
    return {name.replace("lm_head", "embed_out"): param for name, param in renamed}


def parallel_model(reference: GPTNeoXForCausalLM, *, recompute: bool = False):
    model = modeling.GPTNeoXNxD(configuration(recompute=recompute))
    full = theirs(reference)
    names = {name for name, _ in model.named_parameters()}
    assert set(full) == names, set(full) ^ names
    with torch.no_grad():
        for name, param in model.named_parameters():
            param.copy_(own_part(name, full[name]))
    move_model_to_device(model, backend.device)  # on XLA, Module.to makes new parameters, without block 3's mark
    return model


def batches(step: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(step)
    return [torch.randint(32, (2, 8), generator=generator) for _ in range(MICRO_BATCHES)]


def run_micro_batches(forward, step: int) -> float:
    """Losses' mean; their gradients accumulate."""
    total = 0.0
    for ids in batches(step):
        ids = ids.to(backend.device if forward.__class__.__name__ == "GPTNeoXNxD" else "cpu")
        logits = forward(ids)
        logits = getattr(logits, "logits", logits)
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten()) / MICRO_BATCHES
        loss.backward()
        backend.mark_step()
        total += loss.item()
    return total


def require_equal(model, reference: GPTNeoXForCausalLM, what: str, *, gradients: bool) -> None:
    full = theirs(reference)
    for name, param in model.named_parameters():
        ours, expected = (param.grad, full[name].grad) if gradients else (param, full[name])
        text = f"{what}: {name} of rank {dist.get_rank()}"
        torch.testing.assert_close(
            ours.detach().cpu(), own_part(name, expected.detach()), **BOUND, msg=lambda m, t=text: f"{t}\n{m}"
        )


def check_the_hook_alone(*, recompute: bool) -> None:
    """Losses, gradients and parameters of plain SGD after the guide's hook, over steps that accumulate."""
    reference = reference_model()
    model = parallel_model(reference, recompute=recompute)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
    dense = torch.optim.SGD(reference.parameters(), lr=0.2)
    tagged = [name for name, param in model.named_parameters() if getattr(param, "sequence_parallel_enabled", False)]
    assert len(tagged) == LAYERS * (4 + 2) + 2, tagged  # two norms and two row-parallel biases a layer; the last norm
    for step in range(STEPS):
        modeling.GPTNeoXAttentionNxD.attn_calls = 0
        loss = run_micro_batches(model, step)
        assert modeling.GPTNeoXAttentionNxD.attn_calls == MICRO_BATCHES * LAYERS * (2 if recompute else 1)
        expected = run_micro_batches(reference, step)
        assert abs(loss - expected) < 1e-4 * expected, (step, loss, expected)  # fp32, as above
        partial = dict(model.named_parameters())[tagged[0]].grad.detach().cpu()
        assert not torch.allclose(partial, theirs(reference)[tagged[0]].grad, rtol=0.05), "already a sum"
        modeling.allreduce_sequence_parallel_gradients(optimizer)
        backend.mark_step()
        require_equal(model, reference, f"step {step}", gradients=True)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)  # the same tensors hold the next sums, or other ones
        backend.mark_step()
        dense.step()
        dense.zero_grad()
    require_equal(model, reference, "trained", gradients=False)


def check_the_hook_and_zero1(*, hook: bool) -> None:
    """The guide's hook and then ZeRO-1, which sums too, give a single sum; so does ZeRO-1 alone."""
    reference = reference_model()
    model = parallel_model(reference)
    optimizer = NeuronZero1Optimizer(model.parameters(), torch.optim.SGD, max_norm=1.0, lr=0.5)
    dense = torch.optim.SGD(reference.parameters(), lr=0.5)
    for step in range(STEPS):
        run_micro_batches(model, step)
        run_micro_batches(reference, step)
        if hook:
            modeling.allreduce_sequence_parallel_gradients(optimizer)
        optimizer.step()
        optimizer.zero_grad(set_to_none=step % 2 == 0)
        backend.mark_step()
        nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        dense.step()
        dense.zero_grad()
    require_equal(model, reference, f"ZeRO-1, hook {hook}", gradients=False)


def main() -> None:
    if not dist.is_initialized():
        backend.init_process_group()
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=2)
    assert dist.get_world_size() == parallel_state.get_tensor_model_parallel_size() == 2
    for recompute in (False, True):
        check_the_hook_alone(recompute=recompute)
    for hook in (False, True):
        check_the_hook_and_zero1(hook=hook)
    print(f"guide: rank {dist.get_rank()} agrees on {backend.name} by {modeling.layer_norm.__name__}", flush=True)


if __name__ == "__main__":
    main()
    dist.destroy_process_group()
    sys.exit(0)
