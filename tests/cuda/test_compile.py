"""Compiled layers on a real device: the losses and gradients of eager ones."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.backends import backend
from tests.reference_models import VOCAB, gpt_neox_config, llama_config, parallel_model

pytestmark = [
    pytest.mark.cuda,
    pytest.mark.skipif(backend.name != "cuda", reason="needs NXD_MEMOPT_BACKEND=cuda and a GPU"),
]


@pytest.mark.parametrize(
    ("attention_backend", "dtype", "bound"),
    [("math", torch.float32, 1e-4), ("efficient", torch.float32, 1e-4), ("auto", torch.bfloat16, 5e-2)],
)
@pytest.mark.parametrize("config", [llama_config, gpt_neox_config])
def test_compiled_layers_give_eager_gradients(config, attention_backend, dtype, bound):
    """Other orders of sums, and Inductor's fewer roundings, are far below the bounds; a lost gradient is not."""
    torch._dynamo.reset()
    settings = config(hidden_size=256, intermediate_size=512, num_attention_heads=8, num_hidden_layers=2)
    model = parallel_model(settings, attention_backend=attention_backend).to(backend.device, dtype)
    ids = torch.randint(VOCAB, (2, 256), generator=torch.Generator().manual_seed(1)).to(backend.device)

    def gradients() -> list[torch.Tensor]:
        model.zero_grad()
        loss = model(ids, labels=ids).loss
        loss.backward()
        return [loss.detach(), *(parameter.grad for parameter in model.parameters())]

    expected = gradients()
    for layer in model.decoder_layers():
        layer.compile(fullgraph=True)
    for found, wanted in zip(gradients(), expected, strict=True):
        assert (found - wanted).norm() <= bound * wanted.norm()
