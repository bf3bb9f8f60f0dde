"""Compiled layers on a real device: the losses and gradients of eager ones."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from nxd_memopt.config import MemoryConfig
from nxd_memopt.memory import apply_memory
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]


@pytest.mark.parametrize(
    ("attention_backend", "dtype"),
    [("math", torch.float32), ("auto", torch.bfloat16)],
)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
@pytest.mark.parametrize("recompute", [None, "full"])
def test_compiled_layers_give_eager_gradients(recompute, config, attention_backend, dtype):
    """As far from float64's as eager's are: other orders of sums, and Inductor's fewer roundings."""
    torch._dynamo.reset()
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "num_hidden_layers": 2}
    settings = config(**sizes, initializer_range=0.05)
    model = parallel_model(settings, attention_backend=attention_backend).to(backend.device, dtype)
    exact = parallel_model(settings, attention_backend="math").to(backend.device, torch.float64)
    exact.load_state_dict(model.state_dict())
    ids = torch.randint(VOCAB, (2, 256), generator=torch.Generator().manual_seed(1)).to(backend.device)

    def gradients(model: torch.nn.Module) -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return [loss.detach().double(), *(parameter.grad.double() for parameter in model.parameters())]

    eager, wanted = gradients(model), gradients(exact)
    apply_memory(model, MemoryConfig(recompute_granularity=recompute), compile="layer")
    digits = torch.finfo(dtype).eps
    for a, b, c in zip(gradients(model), eager, wanted, strict=True):
        assert (a - c).norm() <= 1.5 * (b - c).norm() + 4 * digits * c.norm()
