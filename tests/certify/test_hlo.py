"""Reading HLO text and buffer assignments: a hand-written module whose every figure is counted by hand."""

from __future__ import annotations

from collections import Counter

import pytest

from nxd_memopt.certify.measure import hlo
from nxd_memopt.certify.measure.measurement import LiveTensor, is_logits, is_square_in
from nxd_memopt.planner.timing.collectives import Collective
from tests.reference import assert_says, error_message

MODULE = """HloModule SyncTensorsGraph.7, entry_computation_layout={(f32[4,8]{1,0})->f32[4,8]{1,0}}

%add (x: f32[], y: f32[]) -> f32[] {
  %x = f32[] parameter(0)
  ROOT %sum = f32[] add(%x, %y)
}

ENTRY %main (p0: f32[4,8]) -> f32[4,8] {
  %p0.1 = f32[4,8]{1,0} parameter(0), metadata={op_name="dot(" source_file="a = b dot(c)"}
  %dot.2 = f32[4,4]{1,0} dot(%p0.1, %p0.1), lhs_contracting_dims={1}, rhs_contracting_dims={1}
  %all-gather.3 = bf16[16,8]{1,0} all-gather(%p0.1), replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %reduce-scatter.4 = bf16[2,8]{1,0} reduce-scatter(%p0.1), replica_groups=[4,2]<=[8], dimensions={0}, to_apply=%add
  %all-reduce.5 = (f32[3]{0}, s64[2]{0}) all-reduce(%p0.1, %p0.1), replica_groups={{0,1}}, to_apply=%add
  %all-reduce.6 = f32[3]{0} all-reduce(%p0.1), replica_groups={{0,1}}, to_apply=%add
  %call.7 = f32[4,4]{1,0} custom-call(%p0.1, %p0.1), custom_call_target="__onednn$matmul"
  %call.8 = f32[4,4]{1,0} custom-call(%p0.1), custom_call_target="Sharding"
  ROOT %dot.9 = f32[4,8]{1,0} dot(%dot.2, %p0.1), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
"""


def test_matmuls_and_collectives():
    """Matmuls are dots and calls of libraries."""
    assert hlo.matmul_count(MODULE) == 3
    assert hlo.collectives(MODULE) == Counter(
        {
            Collective("all_gather", 16 * 8 * 2, 4): 1,
            Collective("reduce_scatter", 2 * 8 * 2 * 2, 2): 1,  # its result is one shard of two
            Collective("all_reduce", 3 * 4 + 2 * 8, 2): 1,
            Collective("all_reduce", 3 * 4, 2): 1,
        }
    )


def test_a_collective_over_everyone_is_refused():
    line = "  %ag = f32[4]{0} all-gather(%p), replica_groups={}, dimensions={0}"
    assert_says(error_message(lambda: hlo.collectives(line)), "replica_groups", "dimensions={0}")


def test_fingerprint_ignores_the_modules_name_alone():
    renamed = MODULE.replace("SyncTensorsGraph.7", "IrToHlo.9")
    assert hlo.fingerprint(renamed) == hlo.fingerprint(MODULE)
    assert hlo.fingerprint(MODULE.replace("{{0,1}}", "{{1,0}}")) != hlo.fingerprint(MODULE)


@pytest.mark.parametrize(("dtype", "bits"), [("pred", 8), ("bf16", 16), ("f8e4m3fn", 8), ("s64", 64)])
def test_element_bits(dtype, bits):
    assert hlo.element_bits(dtype) == bits


def test_shapes_of_scores_and_logits():
    scores, hidden = LiveTensor("f32", (2, 4, 64, 64), 0, ""), LiveTensor("f32", (64, 3, 16), 0, "")
    assert is_square_in(scores, 64) and not is_square_in(hidden, 64)
    logits = LiveTensor("f32", (64, 3, 50), 0, "")
    assert is_logits(logits, 192, {100, 50}) and not is_logits(hidden, 192, {100, 50})
    assert not is_logits(logits, 64, {50})
    assert is_logits(LiveTensor("f32", (50, 192), 0, ""), 192, {100, 50})  # vocabulary first
