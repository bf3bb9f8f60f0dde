"""Adapters (LoRA) on all linear layers: ours with a bf16 and a float8 base, and PEFT, in one run on one device.

    python -m scripts.bench.races.lora --model llama3-8b --tokens 4096 --sequences 2 --append

Random weights, bf16 adapters, gradients and AdamW states (torch's fused AdamW for PEFT), one micro-batch of
``--sequences`` a step. PEFT's are transformers' models with Liger-Kernel. ``ours, fp8 base`` creates its weights in
float8, one matmul after the other, so that no device needs room for them in bf16.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig, ParallelConfig
from nxd_memopt.lora_config import LoraConfig
from nxd_memopt.memory import GraphedLoss
from nxd_memopt.models import model_class
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.fp8 import float8_groups, use_fp8
from nxd_memopt.modules.lora import add_adapters
from nxd_memopt.ops.fp8 import FORWARD_DTYPE, Fp8Recipe, as_rows, magnitudes
from nxd_memopt.optimizer import AdamW
from nxd_memopt.parallel_layers import parallel_state
from nxd_memopt.parallel_layers.random import model_parallel_manual_seed
from scripts.bench.harness.configs import CONFIGS
from scripts.bench.harness.steps import (
    LossFunction,
    Row,
    limit_device_memory,
    random_tokens,
    recompute_of_all_layers,
    record_rows,
    step_parser,
    synchronized_steps,
    with_figures,
    with_options,
)
from scripts.bench.races.peers import Builder, build_liger, dtype, with_flash4

TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
_STD = 0.02  # of the weights of untrained models


def build_ours(
    config: Any, memory: MemoryConfig, rank: int, *, in_float8: bool = False, graph: bool = False
) -> tuple[nn.Module, LossFunction]:
    """Return our model with adapters, and its loss or, as a graph, its forward and backward."""
    parallel = ParallelConfig(use_cpu_initialization=False)
    device = torch.device("meta") if in_float8 else backend.device
    model = model_class(config.model_type)(config, parallel=parallel, memory=memory, dtype=dtype(), device=device)
    model = cast(ParallelCausalLM, model)
    if in_float8:
        fill_in_float8(model)
    add_adapters(model, LoraConfig(rank, 2 * rank, target_modules=TARGETS))
    if in_float8:
        use_fp8(model, Fp8Recipe())

    def loss_of(ids: Tensor) -> Tensor:
        return cast(Any, model(ids, labels=ids)).loss

    return model, GraphedLoss(model.parameters(), loss_of) if graph else loss_of


def fill_in_float8(model: ParallelCausalLM) -> None:
    """Give a model on the meta device random weights, in float8 as ``load_pretrained`` stores them."""
    created: dict[nn.Parameter, nn.Parameter] = {}

    def create(parameter: nn.Parameter, values: Tensor) -> None:
        created[parameter] = nn.Parameter(values, requires_grad=False)
        vars(created[parameter]).update(vars(parameter))

    for group in float8_groups(model):
        rows = sum(weight.size(0) for weight in group)
        values = torch.empty(rows, group[0].size(1), dtype=dtype(), device=backend.device).normal_(std=_STD)
        data, scale = as_rows(values, magnitudes(values, Fp8Recipe()), FORWARD_DTYPE)
        for weight, part in zip(group, data.split([weight.size(0) for weight in group]), strict=True):
            weight.scale = scale  # pyright: ignore[reportAttributeAccessIssue]
            create(weight, part)
    for parameter in model.parameters():
        if parameter not in created:
            values = torch.ones(parameter.shape, dtype=dtype(), device=backend.device)
            create(parameter, values.normal_(std=_STD) if values.dim() > 1 else values)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                module._parameters[name] = created[parameter]


def build_peft(build: Builder, config: Any, memory: MemoryConfig, rank: int) -> tuple[nn.Module, LossFunction]:
    """Return a peer with PEFT's adapters, in the dtype of the weights as ours."""
    import peft

    model, loss_of = build(config, memory)
    options = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=list(TARGETS), lora_dropout=0.0)
    model.requires_grad_(False)
    peft.inject_adapter_in_model(options, model)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.data = parameter.data.to(dtype())
            parameter.requires_grad_(True)
    return model, loss_of


BUILDERS: dict[str, Any] = {
    "ours": build_ours,
    "ours, CUDA graph": partial(build_ours, graph=True),
    "ours, fp8 base": partial(build_ours, in_float8=True),
    "ours, fp8 base, CUDA graph": partial(build_ours, in_float8=True, graph=True),
    "peft, liger": partial(build_peft, build_liger),
    "peft, liger, flash4": partial(build_peft, with_flash4(build_liger)),
}


def optimizer_of(variant: str, parameters: Iterable[nn.Parameter]) -> Any:
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if variant.startswith("ours"):
        return AdamW(trained, lr=1e-4)
    return torch.optim.AdamW(trained, lr=1e-4, fused=True)


def measure(variant: str, memory: MemoryConfig, tokens: int, args: Any) -> Row:
    """Return the median step time, peak memory and losses of one variant."""
    config = CONFIGS[args.model]()
    model_parallel_manual_seed(7)
    model, loss_of = BUILDERS[variant](config, memory, args.lora_rank)
    model.train()
    optimizer = optimizer_of(variant, model.parameters())
    ids = random_tokens(config, args.sequences, tokens).squeeze(1)

    def step() -> Tensor:
        loss = loss_of(ids)
        # a graph runs backward itself
        if loss.requires_grad:
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    return synchronized_steps(step, ids.numel(), args)


def main() -> None:
    parser = step_parser(__doc__, "lora", BUILDERS, model="llama3-8b", tokens=[4096], variants=list(BUILDERS))
    parser.add_argument("--sequences", type=int, default=1, help="of a micro-batch")
    parser.add_argument("--lora-rank", type=int, default=16)
    parser.add_argument("--recompute", choices=("none", "full"), default="none")
    args = parser.parse_args()
    backend.init_process_group()
    parallel_state.initialize_model_parallel(1)
    limit_device_memory(args.cap_gib)

    def measured(variant: str, tokens: int) -> Row:
        memory = recompute_of_all_layers(args.recompute)
        own = variant.startswith("ours")
        row: Row = {"model": args.model, "variant": variant, "sequences": args.sequences, "tokens": tokens}
        row |= {"lora_rank": args.lora_rank, "recompute": " ".join([args.recompute, *(args.memory if own else ())])}
        memory = with_options(memory, args.memory) if own else memory
        return with_figures(row, lambda: measure(variant, memory, tokens, args))

    record_rows(args, measured)


if __name__ == "__main__":
    main()
