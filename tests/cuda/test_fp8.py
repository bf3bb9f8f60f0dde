"""Float8 kernels on a GPU against the same operators on the CPU, bit by bit, and products against float64."""

from __future__ import annotations

import pytest
import torch
from transformers import GPTNeoXConfig, LlamaConfig

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import GraphedLoss
from nxd_memopt.models.gpt_neox import GPTNeoXForCausalLM
from nxd_memopt.models.llama import LlamaForCausalLM
from nxd_memopt.modules.causal_lm import ParallelCausalLM
from nxd_memopt.modules.fp8 import use_fp8
from nxd_memopt.ops import fp8
from nxd_memopt.ops.fp8 import Fp8Recipe
from tests.reference import relative_error, tensors

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.fp8_refusal() is not None, reason="needs a GPU of compute capability 9.0"),
]
SHAPES = [(64, 256), (33, 48), (1, 16), (257, 1040), (4096, 512)]
GRANULARITIES = pytest.mark.parametrize("granularity", fp8.GRANULARITIES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)


def uneven(*shape: int, seed: int) -> torch.Tensor:
    x = tensors(*shape, seed=seed) * 2.0 ** (tensors(shape[-1], seed=seed + 50) * 2)
    return (x * 2.0 ** tensors(shape[0], 1, seed=seed + 70)).bfloat16()


def assert_same(on_gpu: fp8.Operand, on_cpu: fp8.Operand) -> None:
    assert torch.equal(on_gpu.scale.cpu(), on_cpu.scale)
    assert torch.equal(on_gpu.data.view(torch.uint8).cpu(), on_cpu.data.contiguous().view(torch.uint8))


@GRANULARITIES
@DTYPES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("layout", ["contiguous", "half of longer rows", "transposed"])
def test_casts_equal_the_cpus_bit_by_bit(shape, layout, dtype, granularity):
    x = uneven(*shape, seed=1)
    if layout == "half of longer rows":
        x = torch.cat([x, x], 1)[:, : shape[1]]
    elif layout == "transposed":
        x = x.t().contiguous().t()
    recipe = Fp8Recipe(granularity=granularity)
    on_gpu = x.cuda() if layout == "contiguous" else torch.empty_strided(x.shape, x.stride(), dtype=x.dtype).cuda()
    on_gpu.copy_(x)
    sizes, expected_sizes = fp8.magnitudes(on_gpu, recipe), fp8.magnitudes(x, recipe)
    for found, expected in zip(sizes, expected_sizes, strict=True):
        assert torch.equal(found.cpu(), expected)
    rows, columns = fp8.as_both(on_gpu, sizes, dtype)
    assert_same(rows, fp8.as_rows(x, expected_sizes, dtype))
    assert_same(columns, fp8.as_columns(x, expected_sizes, dtype))
    assert_same(fp8.as_rows(on_gpu, sizes, dtype), rows._replace(data=rows.data.cpu(), scale=rows.scale.cpu()))
    assert_same(
        fp8.as_columns(on_gpu, sizes, dtype), columns._replace(data=columns.data.cpu(), scale=columns.scale.cpu())
    )
    if granularity == "tensorwise":
        assert_same(fp8.transposed(rows), columns._replace(data=columns.data.cpu(), scale=columns.scale.cpu()))


@GRANULARITIES
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_columns_with_factors_equal_the_cpus_bit_by_bit(shape, granularity):
    x, factors = uneven(*shape, seed=1), uneven(1, shape[1], seed=2)[0]
    recipe = Fp8Recipe(granularity=granularity)
    found = fp8.magnitudes(x.cuda(), recipe, factors=factors.cuda())
    expected = fp8.magnitudes(x, recipe, factors=factors)
    for each, of_cpu in zip(found, expected, strict=True):
        assert torch.equal(each.cpu(), of_cpu)
    for cast in (fp8.as_rows, fp8.as_columns):
        operand = cast(x.cuda(), found, fp8.FORWARD_DTYPE, factors.cuda())
        assert_same(operand, cast(x, expected, fp8.FORWARD_DTYPE, factors))


@GRANULARITIES
@pytest.mark.parametrize("value", [0.0, float("nan"), float("inf"), -float("inf")])
def test_special_values_equal_the_cpus(value, granularity):
    x = torch.zeros(32, 64, dtype=torch.bfloat16) if value == 0 else uneven(32, 64, seed=2)
    x[3, 5] = value
    recipe = Fp8Recipe(granularity=granularity)
    found = fp8.as_both(x.cuda(), fp8.magnitudes(x.cuda(), recipe), fp8.FORWARD_DTYPE)
    expected = fp8.as_both(x, fp8.magnitudes(x, recipe), fp8.FORWARD_DTYPE)
    for on_gpu, on_cpu in zip(found, expected, strict=True):
        values = on_gpu.data.float().cpu() * on_gpu.scale.cpu()
        assert torch.equal(values.isnan(), (on_cpu.data.float() * on_cpu.scale).isnan())
        assert torch.equal(values.nan_to_num(), (on_cpu.data.float() * on_cpu.scale).nan_to_num())


@GRANULARITIES
@DTYPES
def test_numbers_without_a_finite_inverse_scale_equal_the_cpus(dtype, granularity):
    x = torch.full((32, 64), 1e-38, dtype=torch.bfloat16)
    x[3], x[5, 7] = 0, 2.0**-90
    recipe = Fp8Recipe(granularity=granularity)
    found = fp8.as_both(x.cuda(), fp8.magnitudes(x.cuda(), recipe), dtype)
    for on_gpu, on_cpu in zip(found, fp8.as_both(x, fp8.magnitudes(x, recipe), dtype), strict=True):
        assert_same(on_gpu, on_cpu)


@GRANULARITIES
@DTYPES
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("has_bias", [False, True])
def test_products_equal_float64(has_bias, fast, dtype, granularity):
    recipe = Fp8Recipe(granularity=granularity)
    a, b = uneven(100, 512, seed=1).cuda(), uneven(48, 512, seed=2).cuda()
    bias = uneven(1, 48, seed=3)[0].cuda() if has_bias else None
    left = fp8.as_rows(a, fp8.magnitudes(a, recipe), dtype)
    right = fp8.as_rows(b, fp8.magnitudes(b, recipe), fp8.FORWARD_DTYPE)
    found = fp8.product(left, right, torch.bfloat16, bias, fast=fast)
    rows = torch.zeros(300, 48, dtype=torch.bfloat16, device="cuda")
    fp8.product(left, right, torch.bfloat16, bias, fast=fast, out=rows[100:200])
    assert torch.equal(rows[100:200], found) and not rows[:100].any() and not rows[200:].any()
    wide = (left.data.double() * left.scale.double()) @ (right.data.double() * right.scale.double()).t()
    expected = wide if bias is None else wide + bias.double()
    assert relative_error(found.double(), expected) < 4e-3  # a rounding to bf16


def small_model(recipe: Fp8Recipe | None, device: str, *, is_gpt_neox: bool = False) -> ParallelCausalLM:
    torch.manual_seed(3)
    memory = MemoryConfig(attention_backend="math")  # of both devices
    options = {"memory": memory, "dtype": torch.bfloat16, "device": torch.device(device)}
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4}
    if is_gpt_neox:
        model = GPTNeoXForCausalLM(GPTNeoXConfig(**sizes, vocab_size=128), **options)
    else:
        model = LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2, vocab_size=128), **options)
    if recipe is not None:
        use_fp8(model, recipe)
    return model


@GRANULARITIES
@pytest.mark.parametrize("format", fp8.FORMATS)
@pytest.mark.parametrize("is_gpt_neox", [False, True])
def test_model_equals_the_cpus_within_bf16_roundings(is_gpt_neox, format, granularity):
    ids = torch.randint(0, 128, (2, 71), generator=torch.Generator().manual_seed(0))
    recipe = Fp8Recipe(format, granularity)
    gradients = {}
    for device in ("cuda", "cpu"):
        model = small_model(recipe, device, is_gpt_neox=is_gpt_neox)
        model(ids.to(device), labels=ids.to(device)).loss.backward()
        gradients[device] = {name: p.grad.double().cpu() for name, p in model.named_parameters()}
    exact = small_model(None, "cuda", is_gpt_neox=is_gpt_neox)
    exact(ids.cuda(), labels=ids.cuda()).loss.backward()
    for name, parameter in exact.named_parameters():
        of_cpu = gradients["cpu"][name]
        # bf16 roundings between the layers move operands to a neighbour on the float8 grid: the same errors, drawn
        # again for a part of the operands
        distance = relative_error(gradients["cuda"][name], of_cpu)
        assert distance < relative_error(parameter.grad.double().cpu(), of_cpu), name


@GRANULARITIES
def test_a_graph_replays_the_eager_step(granularity):
    recipe = Fp8Recipe(granularity=granularity)
    eager, graphed = small_model(recipe, "cuda"), small_model(recipe, "cuda")
    loss_of = GraphedLoss(graphed.parameters(), lambda ids: graphed(ids, labels=ids).loss)
    for step in range(4):
        ids = torch.randint(0, 128, (2, 64), generator=torch.Generator().manual_seed(step)).cuda()
        losses = []
        for model, function in ((eager, lambda ids: eager(ids, labels=ids).loss), (graphed, loss_of)):
            model.zero_grad()
            loss = function(ids)
            if loss.requires_grad:
                loss.backward()
            losses.append(loss.detach().clone())
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter -= 0.1 * parameter.grad
        assert torch.equal(*losses)
    for a, b in zip(eager.parameters(), graphed.parameters(), strict=True):
        assert torch.equal(a, b)
