"""Masters of bf16 weights and 16-bit remainders: exact for every bit pattern but a tie that rounds down."""

from __future__ import annotations

import torch

from nxd_memopt.ops.param_remainders import join, remainder_of

# Numbers of all exponents, of both signs, with every low half next to a rounding boundary.
HIGH = torch.arange(-(2**15), 2**15, 7, dtype=torch.int32)
LOW = torch.tensor([0, 1, 0x7FFE, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)


def masters() -> torch.Tensor:
    bits = (HIGH[:, None] << 16) + LOW
    values = bits.flatten().view(torch.float32)
    return values[values.isfinite()]


def test_the_parts_are_the_master_or_one_bit_less_at_a_tie() -> None:
    master = masters()
    weight = master.to(torch.bfloat16)
    again = join(weight, remainder_of(master, weight))
    is_tie = (master.view(torch.int32) & 0xFFFF) == 0x8000
    rounds_down = is_tie & (weight.float().abs() < master.abs())
    assert rounds_down.any()
    assert torch.equal(again[~rounds_down].view(torch.int32), master[~rounds_down].view(torch.int32))
    assert torch.equal(again[rounds_down].view(torch.int32), master[rounds_down].view(torch.int32) - 1)
    # The parts stay consistent: the master still rounds to the weight.
    assert torch.equal(again.to(torch.bfloat16), weight)


def test_a_weight_alone_is_its_own_master() -> None:
    weight = torch.randn(100).to(torch.bfloat16)
    assert torch.equal(join(weight, torch.zeros(100, dtype=torch.int16)), weight.float())


def test_infinities_and_nans_stay_so() -> None:
    master = torch.tensor([float("inf"), -float("inf"), float("nan")])
    weight = master.to(torch.bfloat16)
    again = join(weight, remainder_of(master, weight))
    assert torch.equal(again[:2], master[:2])
    assert again[2].isnan()
