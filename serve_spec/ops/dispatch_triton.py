"""What kernels share: waiting for each other (`dispatch.dependent_launch`), and wider floats."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Let the next kernel start; it waits itself before it reads what this one writes."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait for the kernel before. Waiting again costs nothing."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_read(DEPENDENT: tl.constexpr):
    """Let the next kernels start; they may read what this one wrote before they wait."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        tl.extra.cuda.gdc_launch_dependents()


# PTX for a register of four numbers of e4m3, which become two pairs of bfloat16. Moved into the
# places of bfloat16, sign, exponent and mantissa stand for the number times 2^-120. Hopper's own
# conversion goes through float32, at an eighth of the speed.
_TO_BFLOAT16 = tl.constexpr(
    """{
.reg .b32 a, b, c, d, up;
mov.b32 up, 0x7b807b80;
prmt.b32 a, $2, 0, 0x1404;
prmt.b32 b, $2, 0, 0x3424;
shr.b32 c, a, 4;
shr.b32 d, b, 4;
and.b32 c, c, 0x07f007f0;
and.b32 d, d, 0x07f007f0;
lop3.b32 a, a, 0x80008000, c, 0xea;
lop3.b32 b, b, 0x80008000, d, 0xea;
mul.rn.bf16x2 $0, a, up;
mul.rn.bf16x2 $1, b, up;
}"""
)
_IS_COMPILED = tl.constexpr(not triton.knobs.runtime.interpret)


@triton.jit
def widened(numbers, dtype: tl.constexpr):
    """Return numbers, NaN excepted, in a wider dtype, exactly."""
    if _IS_COMPILED and numbers.dtype == tl.float8e4nv and dtype == tl.bfloat16:
        return tl.inline_asm_elementwise(
            _TO_BFLOAT16, "=r,=r,r", [numbers], dtype=tl.bfloat16, is_pure=True, pack=4
        )
    return numbers.to(dtype)
