"""Reading a buffer assignment: which temporary tensors exist at once, wherever XLA has put them."""

from __future__ import annotations

from nxd_memopt.certify.measure import buffers
from nxd_memopt.certify.measure.measurement import LiveTensor
from tests.reference import assert_says, error_message

ASSIGNMENT = """BufferAssignment:
allocation 0: size 4096, maybe-live-out:
 value: <1 dot.9 @0> (size=4096,offset=0): f32[32,32]{1,0}
 value: <7 kept.1 @0> (size=2048,offset=0): f16[4,256]{1,0}
 value: <8 kept.2 @0> (size=4096,offset=0): f16[8,256]{1,0}
 value: <9 zeros.1 @0> (size=4096,offset=0): f32[32,32]{1,0}
allocation 1: size 1536, preallocated-temp:
 value: <2 fusion.1 @0> (size=1024,offset=0): f32[16,16]{1,0}
 value: <3 fusion.2 @0> (size=1024,offset=512): f32[16,16]{1,0}
 value: <4 mask.1 @0> (size=64,offset=0): pred[2,32]{1,0}
 value: <5 tuple @0> (size=16,offset=64): (f32[2]{0}, f32[2]{0})
 value: <6 fusion.3 @0> (size=1024,offset=512): f32[16,16]{1,0}
allocation 2: size 512, parameter 0, shape |f32[128]| at ShapeIndex {}:
 value: <10 p0 @0> (size=512,offset=0): f32[128]{0}

Total bytes used: 6144
HloLiveRange (max 20):
  InstructionSequence:
    0:p0
    1:fusion.1
  BufferLiveRange:
    p0{}:0-20
    fusion.1{}:1-2
    fusion.2{}:3-9
    fusion.3{}:9-12
    mask.1{}:4-13
    kept.1{}:1-5
    kept.2{}:6-14
    zeros.1{}:15-18
    dot.9{}:18-20
  Live ranges at 6 (peak):
    kept.2: 4096 bytes
"""


def test_temporary_tensors_in_the_memory_of_a_result_count():
    # At steps 6 to 12: kept.2, the mask and fusion.2, whose memory fusion.3 takes over in step 9.
    # The zeros into which dot.9 is written are the result's memory.
    assert buffers.temporary_bytes(ASSIGNMENT) == 4096 + 64 + 1024
    # Without them the scratch memory is most, with the gaps between its values.
    without = "\n".join(line for line in ASSIGNMENT.splitlines() if "kept" not in line)
    assert buffers.temporary_bytes(without) == 1536
    assert buffers.largest_temporaries(ASSIGNMENT) == (
        LiveTensor("f16", (8, 256), 4096, "kept.2"),
        LiveTensor("f16", (4, 256), 2048, "kept.1"),
        LiveTensor("f32", (16, 16), 1024, "fusion.3"),
        LiveTensor("pred", (2, 32), 64, "mask.1"),
    )


def test_an_array_without_a_live_range_is_refused():
    """In memory that is read; the parameter's has none."""
    text = ASSIGNMENT.partition("HloLiveRange")[0]
    assert_says(error_message(lambda: buffers.temporary_bytes(text)), "no live ranges", "torch_xla 2.9")
    for name, kind in (("kept.2", "maybe-live-out"), ("fusion.1", "preallocated-temp")):
        renamed = ASSIGNMENT.replace(f"    {name}{{}}:", f"    {name}.clone{{}}:")
        message = error_message(lambda renamed=renamed: buffers.temporary_bytes(renamed))
        assert_says(message, name, kind, "no live range", "torch_xla 2.9")
    without = ASSIGNMENT.replace("    p0{}:0-20\n", "")
    assert buffers.temporary_bytes(without) == buffers.temporary_bytes(ASSIGNMENT)
