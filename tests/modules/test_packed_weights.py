"""Tensors side by side in one memory: seen as one, and one matmul for several weights gives what several give."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.ops.parts import Layout, packed_view, split_sizes
from nxd_memopt.parallel_layers.layers import ColumnParallelLinear, column_parallel_linears
from tests.reference_models import llama_config, parallel_model


def test_consecutive_parts_are_seen_as_one():
    whole = torch.randn(3, 5, 12)
    for dim, sizes in ((-1, [6, 3, 3]), (0, [1, 2]), (1, [4, 1])):
        found = packed_view(whole.split(sizes, dim), dim)
        assert found is not None and found.data_ptr() == whole.data_ptr() and torch.equal(found, whole)
    assert packed_view([whole], 0) is whole


def test_strides_of_single_elements_do_not_matter():
    whole = torch.randn(5, 1, 12)
    parts = [part.as_strided(part.shape, (12, part.size(-1), 1)) for part in whole.split([6, 2, 4], -1)]
    found = packed_view(parts, -1)
    assert found is not None and torch.equal(found, whole)
    heads = [part.unflatten(-1, (-1, 2)).permute(1, 2, 0, 3) for part in whole.split([6, 2, 4], -1)]
    memory = Layout.of(*heads).empty(whole)
    gradients = [each.permute(2, 0, 1, 3).flatten(-2) for each in memory]
    assert len({gradient.stride() for gradient in gradients}) > 1 and packed_view(gradients, -1) is not None


def test_others_are_not():
    whole = torch.randn(4, 12)
    a, b, c = whole.split(4, -1)
    for parts in ((b, a), (a, c), (a, b.clone()), (a, a), (a, b[:2]), (a.clone(), b.clone()), (a, b.contiguous())):
        assert packed_view(parts, -1) is None
    rows = torch.randn(28)
    assert packed_view((rows.as_strided((1, 4), (8, 1)), rows.as_strided((5, 4), (4, 1), 8)), 0) is None
    assert packed_view((torch.empty(2, 3, device="meta"), torch.empty(2, 3, device="meta")), 0) is None


def test_a_layout_is_one_memorys_only_where_nothing_overlaps():
    whole = torch.randn(3, 4)
    for parts in ((whole[0], whole[2], whole[2]), (whole[0], whole[2], whole[0]), (whole[0], whole.view(-1)[2:6])):
        layout = Layout.of(*parts)
        assert layout.span is None and len({x.data_ptr() for x in layout.empty(whole)}) == len(parts)
    assert Layout.of(*whole).span == 12
    apart = torch.randn(5, 2, 4).transpose(0, 1)
    assert Layout.of(apart, apart.clone()).empty(whole)[0].stride() == apart.stride()
    heads = torch.randn(1, 5, 6 * 8).unflatten(-1, (6, 8)).transpose(1, 2)
    for parts in (
        (heads[:, :2], heads[:, 4:5].expand(1, 2, 5, 8), heads[:, 5:6].expand(1, 2, 5, 8)),
        (heads[:, :2], heads[:, 1:3], heads[:, 4:6]),
        (heads[:, :2], heads[:, 2:4]),
    ):
        assert Layout.of(*parts).span is None
    assert Layout.of(heads[:, 5:], heads[:, :4], heads[:, 4:5]).span == heads.numel()
    repeated = whole[:1].expand(3, 4)
    assert [x.stride() for x in Layout.of(repeated, whole).empty(whole)] == [(4, 1), (4, 1)]


@pytest.mark.parametrize("frozen", [None, 1])
@pytest.mark.parametrize("bias", [True, False])
def test_one_matmul_for_joined_weights(bias, frozen):
    torch.manual_seed(0)
    sizes, x = [6, 2, 4], torch.randn(5, 3, 8, dtype=torch.float64)
    layers = [ColumnParallelLinear(8, n, bias=bias, gather_output=False, dtype=torch.float64) for n in sizes]
    if frozen is not None:
        layers[frozen].weight.requires_grad_(False)
    upstream = torch.randn(5, 3, 12, dtype=torch.float64).split(sizes, -1)
    apart = _outputs_and_gradients(layers, x, upstream)
    for layer, part in zip(layers, torch.cat([layer.weight.detach() for layer in layers]).split(sizes), strict=True):
        layer.weight.data = part
    joint = _outputs_and_gradients(layers, x, upstream)
    outputs = joint[: len(layers)]
    assert packed_view(outputs, -1) is not None and packed_view(apart[: len(layers)], -1) is None
    for found, expected in zip(joint, apart, strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-14)


def _outputs_and_gradients(layers, x, upstream):
    x = x.clone().requires_grad_()
    outputs = column_parallel_linears(x, layers)
    wanted = [p for layer in layers for p in layer.parameters() if p.requires_grad]
    return [*outputs, *torch.autograd.grad(outputs, [x, *wanted], upstream)]


def test_split_gives_the_gradient_of_chunk():
    x = torch.randn(3, 4, 6, requires_grad=True)
    upstream = [torch.randn(3, 4, 2) for _ in range(3)]
    (expected,) = torch.autograd.grad(x.chunk(3, -1), x, upstream)
    (copied,) = torch.autograd.grad(split_sizes(x, [2, 2, 2], -1), x, upstream)
    whole = torch.cat(upstream, -1)
    (viewed,) = torch.autograd.grad(split_sizes(x, [2, 2, 2], -1), x, whole.chunk(3, -1))
    assert torch.equal(copied, expected) and torch.equal(viewed, expected) and viewed.data_ptr() == whole.data_ptr()


def test_a_model_with_a_replaced_projection_can_be_converted():
    """As low-rank adapters do: the replacement has no weight of its own."""

    class Adapter(torch.nn.Module):
        def __init__(self, base):
            super().__init__()
            self.base = base

        def forward(self, hidden):
            return self.base(hidden)

    model = parallel_model(llama_config())
    attention = model.decoder_layers()[0].self_attn
    ids = torch.arange(6).unsqueeze(0)
    expected = model(ids).logits
    with pytest.warns(UserWarning, match="k_proj is a Adapter instead of a ColumnParallelLinear"):
        attention.k_proj = Adapter(attention.k_proj)
    torch.testing.assert_close(model.double()(ids).logits, expected.double(), rtol=1e-4, atol=1e-5)
