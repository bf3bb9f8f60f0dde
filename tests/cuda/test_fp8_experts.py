"""Float8 kernels of experts on a GPU: operands against the CPU bit by bit, products against float64, whole layers."""

from __future__ import annotations

from functools import partial
from itertools import pairwise

import pytest
import torch
from torch import Tensor

from nxd_memopt.architectures.experts import TILE_ROWS
from nxd_memopt.backends import backend
from nxd_memopt.memory import GraphedLoss
from nxd_memopt.modules.moe.assignment import Assignment, assign
from nxd_memopt.modules.moe.experts import Experts
from nxd_memopt.ops import fp8, fp8_grouped
from nxd_memopt.ops.cuda.grouped_matmul import ExpertRows
from nxd_memopt.ops.fp8 import Fp8Recipe, Magnitudes, Operand
from nxd_memopt.ops.fp8_experts import fp8_routed_experts
from tests.reference import relative_error, tensors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.fp8_refusal() is not None, reason="needs a GPU of compute capability 9.0"),
]
GRANULARITIES = pytest.mark.parametrize("granularity", fp8.GRANULARITIES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
# tokens, H, E, F, k
SIZES = {
    "full tiles": (512, 128, 4, 256, 2),
    "odd": (203, 144, 5, 80, 3),
    "many experts": (300, 64, 96, 32, 8),
    "several tiles": (1500, 528, 3, 1040, 2),
}
SHAPES = pytest.mark.parametrize("shape", SIZES)
NAN = float("nan")


def uneven(*shape: int, seed: int) -> Tensor:
    x = tensors(*shape, seed=seed) * 2.0 ** (tensors(shape[-1], seed=seed + 50) * 2)
    return (x * 2.0 ** tensors(*shape[:-1], 1, seed=seed + 70)).bfloat16()


def expert_rows(shape: str, *, cuts: bool) -> tuple[ExpertRows, ExpertRows, int]:
    """Return rows on the CPU and on the GPU, and their number: expert 1 has none, with cuts the last one neither."""
    tokens, _, num_experts, _, top_k = SIZES[shape]
    generator = torch.Generator().manual_seed(1)
    chosen = torch.rand(tokens, num_experts, generator=generator).topk(top_k).indices
    assignment = assign(torch.where(chosen == 1, 0, chosen), None, num_experts, None)
    offsets = assignment.offsets
    assert offsets is not None
    if cuts:
        offsets = offsets.clamp(max=int(offsets[-2]))
    choices = assignment.choices.to(torch.int32)
    on_cpu = ExpertRows.of(choices, offsets.to(torch.int32), top_k)
    return on_cpu, ExpertRows.of(choices.cuda(), offsets.to(torch.int32).cuda(), top_k), int(offsets[-1])


def assert_bits(found: Tensor, expected: Tensor, what: str) -> None:
    found, expected = found.cpu().contiguous().view(torch.uint8), expected.contiguous().view(torch.uint8)
    differing = int((found != expected).sum()) if found.shape == expected.shape else -1
    assert differing == 0, f"{what}: {differing} of {expected.numel()} bytes differ, {found.shape} {expected.shape}"


def column_segments(columns: Operand, rows: ExpertRows) -> list[Tensor]:
    """Return the columns of each expert with the zeros at their end, from the kernels' tiles."""
    first = rows.tiles[3 * rows.most_tiles + 1 :].tolist()
    return [columns.data[:, a * TILE_ROWS : b * TILE_ROWS] for a, b in pairwise(first)]


@pytest.fixture(autouse=True)
def poisoned_memory(monkeypatch):
    """NaN in all memory that is not initialized."""
    empty = torch.empty

    def poisoned(*args, **options):
        tensor = empty(*args, **options)
        if tensor.is_floating_point() and tensor.element_size() == 1:
            tensor.view(torch.uint8).fill_(0x7F)
            return tensor
        return tensor.fill_(NAN) if tensor.is_floating_point() else tensor.fill_(-(2**30))

    monkeypatch.setattr(torch, "empty", poisoned)


@GRANULARITIES
@DTYPES
@SHAPES
@pytest.mark.parametrize("gathers", [False, True])
@pytest.mark.parametrize("cuts", [False, True])
def test_operands_equal_the_cpus_bit_by_bit(cuts, gathers, shape, dtype, granularity):
    on_cpu, on_gpu, end = expert_rows(shape, cuts=cuts)
    tokens, hidden, *_ = SIZES[shape]
    x = uneven(tokens if gathers else on_cpu.choices.numel(), hidden, seed=1)
    if not gathers:
        x[end:] = NAN  # rows of no expert
    recipe = Fp8Recipe(granularity=granularity)
    sizes = fp8_grouped.magnitudes(x, on_cpu, recipe, gathers=gathers)
    found = fp8_grouped.magnitudes(x.cuda(), on_gpu, recipe, gathers=gathers)
    is_rowwise = granularity == "rowwise"
    assert_bits(found.rows[:end] if is_rowwise else found.rows, sizes.rows, "magnitudes of rows")
    assert_bits(found.columns, sizes.columns, "magnitudes of columns")
    rows, columns = fp8_grouped.as_both(x.cuda(), on_gpu, found, dtype, gathers=gathers)
    wanted_rows, wanted_columns = fp8_grouped.as_both(x, on_cpu, sizes, dtype, gathers=gathers)
    assert_bits(rows.data[:end], wanted_rows.data, "rows")
    assert_bits(rows.scale[:end], wanted_rows.scale, "scales of rows")
    begin = 0
    for expert, segment in enumerate(column_segments(columns, on_gpu)):
        stop = int(on_cpu.offsets[expert])
        assert_bits(segment[:, : stop - begin], wanted_columns.data[:, begin:stop], f"columns of expert {expert}")
        assert not segment[:, stop - begin :].contiguous().view(torch.uint8).any(), f"no zeros after expert {expert}"
        if stop > begin:
            assert_bits(columns.scale[expert], wanted_columns.scale[expert], f"scales of columns of expert {expert}")
        begin = stop
    alone = fp8_grouped.as_rows(x.cuda(), on_gpu, found, dtype, gathers=gathers)
    assert_bits(alone.data[:end], wanted_rows.data, "rows alone")
    alone = fp8_grouped.as_columns(x.cuda(), on_gpu, found, dtype, gathers=gathers)
    for one, other in zip(column_segments(alone, on_gpu), column_segments(columns, on_gpu), strict=True):
        assert_bits(one, other.cpu(), "columns alone")


@GRANULARITIES
@pytest.mark.parametrize("value", [0.0, NAN, float("inf"), 1e-38])
def test_special_values_equal_the_cpus(value, granularity):
    on_cpu, on_gpu, end = expert_rows("odd", cuts=True)
    x = uneven(on_cpu.choices.numel(), 144, seed=1)
    if value in (0.0, 1e-38):
        x[: int(on_cpu.offsets[0])] = value  # all rows of expert 0
    x[2, 5] = value
    recipe = Fp8Recipe(granularity=granularity)
    values = []
    for device, rows in (("cpu", on_cpu), ("cuda", on_gpu)):
        own = x.to(device)
        a, b = fp8_grouped.as_both(own, rows, fp8_grouped.magnitudes(own, rows, recipe), fp8.FORWARD_DTYPE)
        segments = [b.data] if device == "cpu" else column_segments(b, rows)
        first = segments[0][:, : int(on_cpu.offsets[0])].float() * b.scale[0].unsqueeze(1)
        values.append([(a.data.float() * a.scale.unsqueeze(1))[:end].cpu(), first.cpu()])
    for found, expected in zip(*values[::-1], strict=True):
        assert torch.equal(found.isnan(), expected.isnan())
        assert torch.equal(found.nan_to_num(), expected.nan_to_num())


@GRANULARITIES
@SHAPES
def test_weights_equal_the_cpus_bit_by_bit(shape, granularity):
    _, hidden, num_experts, width, _ = SIZES[shape]
    weight = uneven(num_experts, width, hidden, seed=2)
    recipe = Fp8Recipe(granularity=granularity)
    sizes, found = fp8_grouped.magnitudes(weight, None, recipe), fp8_grouped.magnitudes(weight.cuda(), None, recipe)
    for name, a, b in zip(Magnitudes._fields, found, sizes, strict=True):
        assert_bits(a, b, f"magnitudes of {name}")
    for form in (fp8_grouped.weight_rows, fp8_grouped.weight_columns):
        on_gpu, on_cpu = form(weight.cuda(), found), form(weight, sizes)
        assert_bits(on_gpu.data, on_cpu.data, form.__name__)
        assert_bits(on_gpu.scale, on_cpu.scale, f"scales of {form.__name__}")


@GRANULARITIES
@DTYPES
@SHAPES
@pytest.mark.parametrize("cuts", [False, True])
@pytest.mark.parametrize("fast", [False, True])
def test_products_of_rows_equal_the_cpus(fast, cuts, shape, dtype, granularity):
    on_cpu, on_gpu, end = expert_rows(shape, cuts=cuts)
    _, hidden, num_experts, width, _ = SIZES[shape]
    x = uneven(on_cpu.choices.numel(), hidden, seed=1)
    x[end:] = NAN
    recipe = Fp8Recipe(granularity=granularity)
    shapes = {fp8_grouped.weight_rows: (width, hidden), fp8_grouped.weight_columns: (hidden, width)}
    for form, weight_shape in shapes.items():
        weight = uneven(num_experts, *weight_shape, seed=2)
        results = []
        for device, rows in (("cpu", on_cpu), ("cuda", on_gpu)):
            values, own = x.to(device), weight.to(device)
            operand = fp8_grouped.as_rows(values, rows, fp8_grouped.magnitudes(values, rows, recipe), dtype)
            weights = form(own, fp8_grouped.magnitudes(own, None, recipe))
            product = fp8_grouped.product_of_rows(operand, weights, rows, torch.bfloat16, fast=fast)
            results.append(product[:end].double().cpu())
        error = relative_error(results[1], results[0])
        # The tensor cores keep 14 bits of a sum, which precise sums do for 512 products each; and bf16 keeps 8 of both
        # results. A row of a tile that is another one's is an error above 0.05.
        assert error < (6e-3 if fast else 4e-3), f"{form.__name__}: {error:.2e}"


@GRANULARITIES
@DTYPES
@SHAPES
@pytest.mark.parametrize("cuts", [False, True])
def test_products_over_rows_equal_the_cpus(cuts, shape, dtype, granularity):
    on_cpu, on_gpu, end = expert_rows(shape, cuts=cuts)
    tokens, hidden, _, width, _ = SIZES[shape]
    x, grad = uneven(tokens, hidden, seed=1), uneven(on_cpu.choices.numel(), width, seed=2)
    grad[end:] = NAN
    recipe = Fp8Recipe(granularity=granularity)
    results = []
    for device, rows in (("cpu", on_cpu), ("cuda", on_gpu)):
        left, right = grad.to(device), x.to(device)
        a = fp8_grouped.as_columns(left, rows, fp8_grouped.magnitudes(left, rows, recipe), dtype)
        sizes = fp8_grouped.magnitudes(right, rows, recipe, gathers=True)
        b = fp8_grouped.as_columns(right, rows, sizes, fp8.FORWARD_DTYPE, gathers=True)
        results.append(fp8_grouped.product_over_rows(a, b, rows, torch.bfloat16).double().cpu())
    error = relative_error(results[1], results[0])
    assert error < 4e-3, f"{error:.2e}"
    counts = on_cpu.offsets.diff(prepend=on_cpu.offsets.new_zeros(1))
    assert not results[1][counts == 0].any(), "an expert without rows has a gradient"


def layer(shape: str, device: str, recipe: Fp8Recipe | None, *, cuts: bool = False) -> list[Tensor]:
    """Return output and gradients of ``routed_experts`` in bf16."""
    tokens, hidden, num_experts, width, top_k = SIZES[shape]
    on_cpu, _, _ = expert_rows(shape, cuts=cuts)
    experts = Experts(
        num_experts, hidden, width, "silu", init_method=torch.nn.init.zeros_, dtype=torch.bfloat16, device=device
    )
    with torch.no_grad():
        for number, weight in enumerate((experts.gate_up_proj, experts.down_proj)):
            weight.copy_(uneven(*weight.shape, seed=3 + number) * 0.1)
    x = uneven(tokens, hidden, seed=1).to(device).requires_grad_()
    weights = tensors(tokens, top_k, seed=6).float().abs().to(device).requires_grad_()
    choices, offsets = on_cpu.choices.long().to(device), on_cpu.offsets.to(device)
    upstream = uneven(tokens, hidden, seed=5).to(device)
    if recipe is None:
        output = experts.routed(x, weights, Assignment(choices, None, offsets, has_rest=True))
    else:
        both = (experts.gate_up_proj, experts.down_proj)
        output = fp8_routed_experts(x, weights, choices, offsets, *both, "silu", recipe)
    leaves = (x, weights, experts.gate_up_proj, experts.down_proj)
    return [each.detach().double().cpu() for each in (output, *torch.autograd.grad(output, leaves, upstream))]


NAMES = ("output", "dx", "dweights", "dgate_up", "ddown")


@GRANULARITIES
@pytest.mark.parametrize("format", fp8.FORMATS)
@SHAPES
@pytest.mark.parametrize("cuts", [False, True])
def test_layers_equal_the_cpus_within_bf16_roundings(cuts, shape, format, granularity):
    recipe = Fp8Recipe(format, granularity)
    on_gpu, on_cpu = layer(shape, "cuda", recipe, cuts=cuts), layer(shape, "cpu", recipe, cuts=cuts)
    exact = layer(shape, "cuda", None, cuts=cuts)
    found = []
    for name, a, b, c in zip(NAMES, on_gpu, on_cpu, exact, strict=True):
        found.append((name, float(relative_error(a, b)), float(relative_error(b, c))))
    # bf16 roundings between the matmuls move operands to a neighbour on the float8 grid, a part of all errors
    assert all(distance < error < 0.2 for _, distance, error in found), found


@GRANULARITIES
def test_equal_on_every_run(granularity):
    """No sum depends on the order in which programs end."""
    recipe = Fp8Recipe(granularity=granularity)
    first, second = layer("several tiles", "cuda", recipe), layer("several tiles", "cuda", recipe)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@GRANULARITIES
def test_the_host_reads_nothing(granularity, monkeypatch):
    monkeypatch.undo()  # the poison would be written by more kernels, all of them asynchronous too
    on_cpu, _, _ = expert_rows("odd", cuts=False)
    tokens, hidden, num_experts, width, top_k = SIZES["odd"]
    options = {"dtype": torch.bfloat16, "device": "cuda", "requires_grad": True}
    leaves = [torch.randn(num_experts, *shape, **options) for shape in ((2 * width, hidden), (hidden, width))]
    x, weights = torch.randn(tokens, hidden, **options), torch.rand(tokens, top_k, device="cuda", requires_grad=True)
    choices, offsets = on_cpu.choices.long().cuda(), on_cpu.offsets.cuda()

    def run() -> None:
        recipe = Fp8Recipe(granularity=granularity)
        fp8_routed_experts(x, weights, choices, offsets, *leaves, "silu", recipe).sum().backward()

    run()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@GRANULARITIES
def test_a_graph_replays_the_eager_step(granularity, monkeypatch):
    monkeypatch.undo()
    tokens, hidden, num_experts, width, top_k = SIZES["odd"]
    recipe = Fp8Recipe(granularity=granularity)
    models = []
    for _ in range(2):
        torch.manual_seed(3)
        options = {"init_method": partial(torch.nn.init.normal_, std=0.1), "dtype": torch.bfloat16, "device": "cuda"}
        models.append(Experts(num_experts, hidden, width, "silu", use_cpu_initialization=False, **options))
        models[-1].fp8 = recipe
    eager, graphed = models

    def loss_of(experts: Experts, x: Tensor) -> Tensor:
        scores, chosen = (x.float() @ router).topk(top_k)
        return experts.routed(x, scores.softmax(-1), assign(chosen, None, num_experts, None)).float().pow(2).mean()

    router = torch.randn(hidden, num_experts, device="cuda")
    with_graph = GraphedLoss(graphed.parameters(), lambda x: loss_of(graphed, x))
    for step in range(4):
        x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(step)).bfloat16().cuda()
        losses = []
        for model, function in ((eager, lambda x: loss_of(eager, x)), (graphed, with_graph)):
            model.zero_grad()
            loss = function(x)
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach().clone())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        assert losses[0].isfinite() and torch.equal(*losses), f"step {step}: {losses}"
    assert all(torch.equal(a, b) for a, b in zip(eager.parameters(), graphed.parameters(), strict=True))
