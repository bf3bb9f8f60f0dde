"""Gradients of a linear layer that contains a norm's affine part, from the kernel, against plain operators."""

from __future__ import annotations

import pytest
import torch

from nxd_memopt.ops.folded_norm import folded_gradients
from tests.reference import relative_error, tensors

pytestmark = [pytest.mark.cuda, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")]


@pytest.mark.parametrize("shape", [(4, 47), (257, 1040), (9216, 512)], ids=str)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 4e-3)], ids=str)
def test_folded_gradients(shape, dtype, bound):
    rows, columns = shape
    shapes = (shape, (rows,), shape, (columns,), (columns,))
    inputs = [tensors(*each, seed=i).to("cuda", dtype) for i, each in enumerate(shapes)]
    expected = folded_gradients(*(each.double() for each in inputs))
    found = folded_gradients(*inputs)
    for each, exact in zip(found, expected, strict=True):
        assert relative_error(each.double(), exact) < bound
