"""One rank of small programs that show neuronx-distributed's faults, run on either library.

    torchrun --nproc_per_node 2 tests/nxd_upstream/nxd_faults.py --source DIR [--library neuronx_distributed]

Prints the result of each fault's program; docs/migrating_from_nxd.md describes the faults.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812
from nxd_test_driver import parser_of_library, set_up
from torch import Tensor, nn

FAULTS: list[Callable[[], object]] = []


def fault(function: Callable[[], object]) -> Callable[[], object]:
    """Register a program; a decorator."""
    FAULTS.append(function)
    return function


def main() -> None:
    """Run all programs on this rank; rank 0 prints their results or errors."""
    args = parser_of_library().parse_args()
    set_up(args.library, args.source)
    dist.init_process_group("xla")
    from neuronx_distributed.parallel_layers import parallel_state

    parallel_state.initialize_model_parallel(dist.get_world_size())
    for function in FAULTS:
        torch.manual_seed(0)
        try:
            result = function()
        except Exception as error:
            result = f"{type(error).__name__}: {error}"
        if dist.get_rank() == 0:
            print(function.__name__, result, flush=True)


def error(actual: Tensor, expected: Tensor) -> str:
    """Return the relative error in the 2-norm as text."""
    return f"{float((actual.double() - expected.double()).norm() / expected.double().norm()):.1e}"


@fault
def bf16_input_gradient_of_a_column_layer() -> object:
    from neuronx_distributed.parallel_layers.layers import ColumnParallelLinear

    # dY is all ones, so dX is the sum of the weight's rows. The reference uses the fp32 master
    # weight of the full layer, of which each rank has a shard in bf16.
    layer = ColumnParallelLinear(
        64,
        64,
        bias=False,
        gather_output=False,
        dtype=torch.bfloat16,
        keep_master_weight=True,
    )
    x = torch.randn(4, 8, 64).bfloat16().requires_grad_()
    layer(x).float().sum().backward()
    return error(x.grad, torch.ones(4, 8, 64) @ layer.master_weight.float())  # pyright: ignore[reportArgumentType]


@fault
def label_smoothing_and_the_callers_logits() -> object:
    from neuronx_distributed.parallel_layers.loss_functions import parallel_cross_entropy

    # The seed is the same on all ranks: each computes the reference from the full logits.
    size = dist.get_world_size()
    rank = dist.get_rank()
    logits = torch.randn(60, 32, requires_grad=True)
    target = torch.randint(0, 32, (60,))
    expected = F.cross_entropy(logits, target, reduction="none", label_smoothing=0.1)
    (full_grad,) = torch.autograd.grad(expected.sum(), logits)
    expected_grad = full_grad.chunk(size, -1)[rank]
    # ``shard * 1`` is a tensor that may be overwritten, so that the first part of the program is
    # about smoothing alone. The second part passes a tensor that must not change.
    shard = logits.detach().chunk(size, -1)[rank].clone().requires_grad_()
    loss = parallel_cross_entropy(shard * 1, target, label_smoothing=0.1)
    (grad,) = torch.autograd.grad(loss.sum(), shard)
    caller_logits = shard.detach().clone()
    parallel_cross_entropy(caller_logits, target)
    overwritten = not torch.equal(caller_logits, shard)
    difference = float((loss - expected).abs().max())
    errors = f"loss off {difference:.1e}, gradient {error(grad, expected_grad)}"
    return f"{errors}, logits overwritten {overwritten}"


@fault
def embedding_along_sequence_dimension_1() -> object:
    from neuronx_distributed.parallel_layers.layers import ParallelEmbedding

    # Correct is [1, 8 / T, 4].
    layer = ParallelEmbedding(8, 4, sequence_parallel_enabled=True, sequence_dimension=1)
    output = layer(torch.arange(8).view(1, 8))
    return f"shape of this rank's part of [1, 8, 4]: {list(output.shape)}"


@fault
def gradient_shared_with_a_residual_branch() -> object:
    from neuronx_distributed.parallel_layers.mappings import copy_to_tensor_model_parallel_region

    # The copy's gradient is the sum of T ones over the ranks, the residual branch adds one. An
    # all-reduce in place changes the gradient that the residual branch shares.
    hidden = torch.ones(1, requires_grad=True)
    (copy_to_tensor_model_parallel_region(hidden) + hidden).backward(torch.ones(1))
    return f"{hidden.grad}, expected {dist.get_world_size() + 1}"


@fault
def source_rank_of_tensor_parallel_groups_of_4() -> object:
    from neuronx_distributed.parallel_layers import parallel_state

    if dist.get_world_size() != 4:
        return "needs 4 ranks"
    sources: list[int | None] = [None] * 4
    dist.all_gather_object(sources, parallel_state.get_tensor_model_parallel_src_rank())
    return f"group [0, 1, 2, 3]: {sources}"


def _gradient_of_ones() -> nn.Parameter:
    """Return a parameter ``[3]`` with a gradient of ones."""
    param = nn.Parameter(torch.ones(3))
    param.grad = torch.ones(3)
    return param


@fault
def infinity_norm() -> object:
    from neuronx_distributed.parallel_layers.grads import clip_grad_norm

    return clip_grad_norm([_gradient_of_ones()], 1.0, torch.inf)


@fault
def norm_of_a_generator() -> object:
    from neuronx_distributed.parallel_layers.grads import clip_grad_norm

    return clip_grad_norm((param for param in [_gradient_of_ones()]), 1.0)


@fault
def bias_of_the_qkv_layer() -> object:
    from neuronx_distributed.modules.qkv_linear import GQAQKVColumnParallelLinear

    layer = GQAQKVColumnParallelLinear(8, [16, 8], bias=True, gather_output=False)
    # [16, 8] are the features of query and of key and value; each rank has its T-th part.
    return [list(output.shape) for output in layer(torch.randn(2, 3, 8))]


@fault
def gather_in_a_group_of_the_callers() -> object:
    from neuronx_distributed.parallel_layers import mappings, parallel_state

    group = parallel_state.get_data_parallel_group()  # of size 1 here
    x = torch.ones(2, 3, requires_grad=True)
    mappings.gather_from_sequence_parallel_region(x, 0, False, group).sum().backward()
    return f"gradient of [2, 3]: {list(x.grad.shape)}"  # pyright: ignore[reportOptionalMemberAccess]


if __name__ == "__main__":
    sys.exit(main())
