"""torch.compile of layers over ranks: no graph break inside a layer, and the results of eager."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch._dynamo.utils import counters

from nxd_memopt.ops.rope import rope_tables
from nxd_memopt.parallel_layers import parallel_state
from tests.dist.pool import distributed
from tests.reference_models import batch, gpt_neox_config, llama_config, parallel_model

LENGTH, ROWS = 12, 3
CONFIGS = {"llama": llama_config, "gpt_neox": gpt_neox_config}
RECOMPUTE = {
    "none": {},
    "full": {"recompute_granularity": "full"},
    "selective": {"recompute_granularity": "selective", "recompute_modules": ("mlp", "norm")},
}


def passes(layer, forward, hidden, rope) -> list[torch.Tensor]:
    hidden = hidden.detach().requires_grad_()
    layer.zero_grad()
    output = forward(hidden, rope, None)
    output.backward(torch.linspace(-1, 1, output.numel()).view_as(output))
    return [output.detach(), hidden.grad, *(param.grad.clone() for param in layer.parameters())]


@distributed(world_size=[1, 2])
@pytest.mark.parametrize("recompute", RECOMPUTE)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_layer_is_one_graph(name, recompute):
    size = dist.get_world_size()
    parallel_state.initialize_model_parallel(size)
    for sequence_parallel in [False, True][:size]:
        torch._dynamo.reset()
        config = CONFIGS[name]()
        model = parallel_model(config, sequence_parallel=sequence_parallel, **RECOMPUTE[recompute])
        shape = (LENGTH // size, ROWS) if sequence_parallel else (ROWS, LENGTH)
        hidden = torch.randn(*shape, config.hidden_size, generator=torch.Generator().manual_seed(dist.get_rank()))
        rope = rope_tables(model.rope_frequencies, torch.arange(LENGTH).unsqueeze(0), torch.float32)
        layer = model.decoder_layers()[0]
        compiled = torch.compile(layer.forward, fullgraph=True, backend="aot_eager")  # raises at a graph break
        for found, expected in zip(
            passes(layer, compiled, hidden, rope), passes(layer, layer.forward, hidden, rope), strict=True
        ):
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


@distributed(world_size=2)
@pytest.mark.parametrize("name", CONFIGS)
def test_a_models_graph_breaks_do_not_grow_with_its_layers(name):
    """Outside the graphs are the CPU's checks of ids and labels, and the fused loss, which lays out memory by hand."""
    parallel_state.initialize_model_parallel(2)
    breaks, inputs = [], batch()
    for num_layers in (2, 4):
        torch._dynamo.reset()
        counters.clear()
        config = CONFIGS[name](num_hidden_layers=num_layers)
        model = parallel_model(config, sequence_parallel=True, recompute_granularity="full")
        expected = model(**inputs).loss
        found = torch.compile(model, backend="aot_eager")(**inputs).loss
        torch.testing.assert_close(found, expected, rtol=1e-6, atol=0)
        breaks.append(sum(counters["graph_break"].values()))
    assert breaks[0] == breaks[1], dict(counters["graph_break"])
    assert all("Tensor.item()" in reason or "torch.compiler.disable" in reason for reason in counters["graph_break"])
