"""The times of a compiled program's instructions, by hand. test_program.py has what XLA makes of them."""

import jax
import pytest

from jaxoffload import compiler_options
from jaxoffload.proof import scheduling_options
from jaxoffload.proof._program.hlo import parse
from jaxoffload.proof._program.scheduling import times

PROGRAM = """HloModule jit_step
%fused_row (a: f32[8,1024,1024], b: s32[]) -> f32[1,1024,1024] {
  %a = f32[8,1024,1024]{2,1,0} parameter(0)
  %b = s32[] parameter(1)
  ROOT %row = f32[1,1024,1024]{2,1,0} dynamic-slice(%a, %b, %b, %b), dynamic_slice_sizes={1,1024,1024}
}
%fused_write (c: f32[8,1024,1024], d: f32[1,1024,1024], e: s32[]) -> f32[8,1024,1024] {
  %c = f32[8,1024,1024]{2,1,0} parameter(0)
  %d = f32[1,1024,1024]{2,1,0} parameter(1)
  %e = s32[] parameter(2)
  ROOT %write = f32[8,1024,1024]{2,1,0} dynamic-update-slice(%c, %d, %e, %e, %e)
}
%fused_dot (p: bf16[2048,1024], q: bf16[1024,4096]) -> bf16[2048,4096] {
  %p = bf16[2048,1024]{1,0} parameter(0)
  %q = bf16[1024,4096]{1,0} parameter(1)
  ROOT %dot = bf16[2048,4096]{1,0} dot(%p, %q), lhs_contracting_dims={1}, rhs_contracting_dims={0}
}
%body (s: (s32[], f32[8,1024,1024])) -> (s32[], f32[8,1024,1024]) {
  %s = (s32[], f32[8,1024,1024]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%s), index=0
  %stack = f32[8,1024,1024]{2,1,0} get-tuple-element(%s), index=1
  %take = f32[1,1024,1024]{2,1,0} fusion(%stack, %i), kind=kLoop, calls=%fused_row
  %put = f32[8,1024,1024]{2,1,0} fusion(%stack, %take, %i), kind=kLoop, calls=%fused_write
  ROOT %next = (s32[], f32[8,1024,1024]{2,1,0}) tuple(%i, %put)
}
ENTRY %main (x: bf16[2048,1024], w: bf16[1024,4096], v: bf16[8,1024,4096], q: bf16[2,8192,32,128]) -> bf16[2048,4096] {
  %x = bf16[2048,1024]{1,0} parameter(0)
  %w = bf16[1024,4096]{1,0} parameter(1)
  %v = bf16[8,1024,4096]{2,1,0} parameter(2)
  %q = bf16[2,8192,32,128]{3,2,1,0} parameter(3)
  %loop = (s32[], f32[8,1024,1024]{2,1,0}) while(%t), condition=%cond, body=%body
  %gemm = (bf16[2048,4096]{1,0}, s8[64]{0}) custom-call(%x, %w), custom_call_target="__cublas$lt$matmul", \
backend_config={"dot_dimension_numbers":{"lhs_contracting_dimensions":["1"]}}
  %fusion = bf16[2048,4096]{1,0} fusion(%x, %w), kind=kCustom, calls=%fused_dot
  %sizes = s32[8]{0} constant({})
  %grouped = bf16[2048,4096]{1,0} custom-call(%sizes, %x, %v), custom_call_target="mosaic_gpu_v2"
  %attended = bf16[2,8192,32,128]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax"
  %back = bf16[2,8192,32,128]{3,2,1,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmaxBackward"
  %other = bf16[2,8192,32,128]{3,2,1,0} custom-call(%q), custom_call_target="mosaic_gpu_v2"
  %exchange = ((bf16[2,8192,32,128]{3,2,1,0}), bf16[2,8192,32,128]{3,2,1,0}) all-to-all-start(%q), dimensions={0}
  %exchanged = bf16[2,8192,32,128]{3,2,1,0} all-to-all-done(%exchange)
  %alone = bf16[2,8192,32,128]{3,2,1,0} all-to-all(%q), metadata={scheduling_name="all-to-all-start.7"}
  %sum = ((bf16[2,8192,32,128]{3,2,1,0}), bf16[2,8192,32,128]{3,2,1,0}) all-reduce-start(%q), to_apply=%add
  %copy = (bf16[2048,1024]{1,0:S(5)}, bf16[2048,1024]{1,0}, u32[]) copy-start(%x)
  ROOT %result = bf16[2048,4096]{1,0} add(%gemm, %fusion)
}
"""


@pytest.fixture(scope="module")
def found():
    return times(parse(PROGRAM))


def test_what_is_scheduled_has_a_time_and_copies_have_none(found):
    kernels = {"gemm", "fusion", "grouped", "attended", "back", "other", "result"}
    assert found.keys() == kernels | {"take", "put", "exchange", "all-to-all-start.7", "sum"}
    assert all(seconds > 0 for seconds in found.values())


def test_kernels_take_as_long_as_their_flops(found):
    gemm = 2 * 2048 * 1024 * 4096 / 670e12
    assert found["gemm"] == found["fusion"] == pytest.approx(gemm)
    assert found["grouped"] == pytest.approx(max(gemm, (2048 * (1024 + 4096) + 8 * 1024 * 4096) * 2 / 3900e9), rel=0.01)
    attention = 2 * 2 * 2 * 32 * 8192**2 * 128 / 2
    assert found["attended"] == pytest.approx(attention / 580e12)
    assert found["back"] == pytest.approx(2.5 * attention / 530e12)


def test_other_kernels_take_as_long_as_what_they_move_of_a_stack_a_row(found):
    row, whole = 4 * 1024 * 1024, 2 * 2 * 8192 * 32 * 128
    assert found["take"] == pytest.approx(2 * row / 3900e9, rel=0.01)
    assert found["put"] == pytest.approx(2 * row / 3900e9, rel=0.01)
    assert found["other"] == pytest.approx(2 * whole / 3900e9)


def test_collectives_take_as_long_as_their_bytes_on_the_link_whether_or_not_anything_is_beside_them(found):
    size = 2 * 2 * 8192 * 32 * 128
    assert found["exchange"] == found["all-to-all-start.7"]
    assert size / 2 / 155e9 < found["exchange"] < size / 2 / 80e9
    assert 1.5 * found["exchange"] < found["sum"] < 2.5 * found["exchange"]  # a reduce-scatter and an all-gather


def test_the_options_are_the_others_with_a_longer_profile():
    program = jax.jit(lambda x: x + 1).lower(1.0).compile()
    before, after = compiler_options("gpu"), scheduling_options(program, "gpu")
    assert after["fdo_profile"].startswith(before["fdo_profile"]) and len(after["fdo_profile"]) > len(
        before["fdo_profile"]
    )
    assert after | {"fdo_profile": b""} == before | {"fdo_profile": b""}
    assert scheduling_options(program, "cpu") == {}
    late = scheduling_options(program, "gpu", copy_ms=2)["fdo_profile"]
    assert late.startswith(compiler_options("gpu", copy_ms=2)["fdo_profile"])


def test_what_is_not_compiled_is_refused():
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    with pytest.raises(TypeError, match=r"^scheduling_options: compiled must be what .*compile\(\) returns, got "):
        scheduling_options(lowered, "gpu")
    with pytest.raises(ValueError, match="backend 'gpus' is not one of"):
        scheduling_options(lowered.compile(), "gpus")
