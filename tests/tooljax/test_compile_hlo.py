"""Communication and traffic read from HLO text, on programs that are small enough to count by hand."""

import pytest

from tooljax.compile.hlo import group_size, parse, shape_bytes, traffic

LOOP = """HloModule loop

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add.1 = f32[] add(%a, %b)
}

%body (p: (s32[], f32[2,4])) -> (s32[], f32[2,4]) {
  %p = (s32[], f32[2,4]{1,0}) parameter(0)
  %one = s32[] constant(STEP)
  %i = s32[] get-tuple-element(%p), index=0
  %x = f32[2,4]{1,0} get-tuple-element(%p), index=1
  %whole = f32[8,4]{1,0} all-gather(%x), channel_id=1, replica_groups={{0,1,2,3},{4,5,6,7}}, dimensions={0}
  %part = f32[2,4]{1,0} reduce-scatter(%whole), channel_id=2, replica_groups=[2,4]<=[8], dimensions={0}, to_apply=%sum
  %next = s32[] add(%i, %one)
  ROOT %out = (s32[], f32[2,4]{1,0}) tuple(%next, %part)
}

%condition (p.1: (s32[], f32[2,4])) -> pred[] {
  %p.1 = (s32[], f32[2,4]{1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%p.1), index=0
  %n = BOUND
  ROOT %less = pred[] compare(%i.1, %n), direction=LT
}

ENTRY %main (x.2: f32[2,4]) -> f32[2,4] {
  %x.2 = f32[2,4]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %start = (s32[], f32[2,4]{1,0}) tuple(%zero, %x.2)
  %loop = (s32[], f32[2,4]{1,0}) while(%start), condition=%condition, body=%body
  %y = f32[2,4]{1,0} get-tuple-element(%loop), index=1
  ROOT %total = f32[2,4]{1,0} all-reduce(%y), channel_id=3, replica_groups={{0,1,2,3,4,5,6,7}}, to_apply=%sum
}
"""


def loop(bound: str = "s32[] constant(6)", step: int = 1) -> str:
    return LOOP.replace("BOUND", bound).replace("STEP", str(step))


def test_a_loops_collectives_count_as_often_as_it_runs():
    found = traffic(loop()).collectives
    # Six times f32[8,4], 128 bytes, of which a device sends 3/4 in a ring of four.
    assert (found["all-gather"].count, found["all-gather"].payload_bytes) == (6, 768)
    assert found["all-gather"].sent_bytes == 576
    # The operand of a reduce-scatter is four times its result of 32 bytes.
    assert (found["reduce-scatter"].count, found["reduce-scatter"].payload_bytes) == (6, 768)
    assert found["reduce-scatter"].sent_bytes == 576
    # 32 bytes over eight devices: 7/8 of them twice.
    assert (found["all-reduce"].count, found["all-reduce"].sent_bytes) == (1, 56)
    assert traffic(loop()).sent_bytes == 576 + 576 + 56


def test_an_unrolled_loop_runs_less_often():
    assert traffic(loop(step=2)).collectives["all-gather"].count == 3
    # 0, 4: twice below 6.
    assert traffic(loop(step=4)).collectives["all-gather"].count == 2


def test_a_known_trip_count_is_believed():
    text = loop(bound="s32[] get-tuple-element(%p.1), index=0").replace(
        "body=%body", 'body=%body, backend_config={"known_trip_count":{"n":"5"}}'
    )
    assert traffic(text).collectives["all-gather"].count == 5


def test_a_loop_of_unknown_length_is_told():
    text = loop(bound="s32[] get-tuple-element(%p.1), index=0")
    found = traffic(text, unknown_trips=4)
    assert (found.unknown_loops, found.collectives["all-gather"].count) == (1, 4)
    assert traffic(loop()).unknown_loops == 0


def test_bytes_of_memory_are_operands_and_results():
    # The body: 32 + 128 of the gather, 128 + 32 of the scatter, and 4 + 4 + 4 of the counter, six times; the condition
    # is left out; then 32 + 32 of the last sum.
    assert traffic(loop()).hbm_bytes == 6 * (160 + 160 + 12) + 64


FUSIONS = """HloModule fusions

%slice (stack: bf16[24,8,128], i: s32[]) -> bf16[8,128] {
  %stack = bf16[24,8,128]{2,1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  %cut = bf16[1,8,128]{2,1,0} dynamic-slice(%stack, %i, %zero, %zero), dynamic_slice_sizes={1,8,128}
  ROOT %flat = bf16[8,128]{1,0} bitcast(%cut)
}

%begin (x: bf16[8,128]) -> (bf16[8,128], bf16[16,128]) {
  %x = bf16[8,128]{1,0} parameter(0)
  %gather = bf16[16,128]{1,0} all-gather(%x), channel_id=7, replica_groups=mesh['data'=1,'fsdp'=2] {'fsdp'}
  ROOT %custom = (bf16[8,128], bf16[16,128]) custom-call(%gather), custom_call_target="AsyncCollectiveStart"
}

%beside (x.1: bf16[8,128]) -> bf16[16,128] {
  %x.1 = bf16[8,128]{1,0} parameter(0)
  ROOT %gather.1 = bf16[16,128]{1,0} all-gather(%x.1), channel_id=7, replica_groups=mesh['data'=1,'fsdp'=2] {'fsdp'}
}

ENTRY %main (p0: bf16[24,8,128], p1: s32[]) -> bf16[16,128] {
  %p0 = bf16[24,8,128]{2,1,0} parameter(0)
  %p1 = s32[] parameter(1)
  %layer = bf16[8,128]{1,0:T(8,128)(2,1)S(1)} fusion(%p0, %p1), kind=kLoop, calls=%slice
  %started = (bf16[8,128]{1,0:S(1)}, bf16[16,128]{1,0:S(1)}) fusion(%layer), kind=kCustom, calls=%begin
  %sent = (bf16[8,128]{1,0}, bf16[8,128]{1,0}, u32[], u32[]) collective-permute-start(%layer), channel_id=8, source_target_pairs={{0,1},{1,0}}
  %got = bf16[8,128]{1,0} collective-permute-done(%sent)
  ROOT %end = bf16[16,128]{1,0} fusion(%layer), kind=kCustom, calls=%beside
}
"""  # noqa: E501


def test_a_collective_that_runs_beside_fusions_counts_once():
    found = traffic(FUSIONS).collectives
    # bf16[16,128] is 4096 bytes; one of two devices sends half.
    assert (found["all-gather"].count, found["all-gather"].sent_bytes) == (1, 2048)
    assert (found["collective-permute"].count, found["collective-permute"].sent_bytes) == (1, 2048)


def test_a_fusion_reads_the_slice_and_fast_memory_is_free():
    # The slice of 2048 bytes and the index; the permute's result; the 4096 of the end, written.
    assert traffic(FUSIONS).hbm_bytes == 2048 + 4 + 2048 + 4096


@pytest.mark.parametrize(
    ("shape", "size"),
    [
        ("f32[]", 4),
        ("(bf16[8,128]{1,0:T(8,128)}, pred[7]{0}, s4[10]{0})", 2048 + 7 + 5),
        ("f8e4m3fn[3,5]{1,0}", 15),
        ("token[]", 0),
    ],
)
def test_bytes_of_types(shape, size):
    assert shape_bytes(shape) == size


@pytest.mark.parametrize(
    ("attributes", "size"),
    [
        ("replica_groups={{0,1},{2,3}}", 2),
        ("replica_groups=[4,16]<=[64]", 16),
        ("replica_groups=mesh['data'=2,'fsdp'=8,'tensor'=4] {'data','fsdp'}", 16),
    ],
)
def test_sizes_of_groups(attributes, size):
    assert group_size(attributes) == size


def test_text_without_an_entry_is_refused():
    with pytest.raises(ValueError, match="no ENTRY computation; it must be compiled.as_text"):
        parse("HloModule nothing\n")
