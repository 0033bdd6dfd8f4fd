"""Codes of four bits as operands of Hopper's tensor cores."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

# PTX for two words of neighbouring columns, and their zero point twice. Codes become the lowest
# bits of a large number, of which the zero point plus that number is taken: both exactly.
_STEPS = """{
.reg .b32 low, high, x, large;
mov.b32 large, LARGE;
prmt.b32 low, $8, $9, 0x5410;
prmt.b32 high, $8, $9, 0x7632;
PLANES
}"""
_PLANE = """SHIFT
lop3.b32 x, x, 0x000f000f, large, 0xea;
sub.rn.KINDx2 $INDEX, x, $10;
"""


def _steps_asm(kind: str, large: str) -> str:
    planes = [
        _PLANE.replace(
            "SHIFT",
            f"shr.b32 x, {'low' if plane < 4 else 'high'}, {4 * (plane % 4)};",
        )
        .replace("KIND", kind)
        .replace("INDEX", str(plane))
        for plane in range(8)
    ]
    return _STEPS.replace("LARGE", large).replace("PLANES", "".join(planes))


_IN_BFLOAT16 = gl.constexpr(_steps_asm("bf16", "0x43004300"))
_IN_FLOAT16 = gl.constexpr(_steps_asm("f16", "0x64006400"))
_CONSTRAINTS = gl.constexpr(",".join(["=r"] * 8 + ["r"] * 3))
_BFLOAT16S, _FLOAT16S = (gl.constexpr((dtype,) * 8) for dtype in (gl.bfloat16, gl.float16))


@gluon.jit
def steps_of_words(words, zero, dtype: gl.constexpr, layout: gl.constexpr):
    """Return code - zero of words [N, 16] (see `int4_linear`) as an operand [N, 128] of `dtype`.

    zero: uint8 [N]. The columns of a plane are those of one instruction, so that all codes of a
    thread's words are its own numbers.
    """
    LARGE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    base = gl.convert_layout(zero.to(gl.float32) + LARGE, gl.SliceLayout(1, layout)).to(dtype)
    pairs = gl.broadcast(base[:, None], words)[0]
    planes = gl.inline_asm_elementwise(
        _IN_BFLOAT16 if dtype == gl.bfloat16 else _IN_FLOAT16,
        _CONSTRAINTS,
        [words, pairs],
        dtype=_BFLOAT16S if dtype == gl.bfloat16 else _FLOAT16S,
        is_pure=True,
        pack=2,
    )
    even = gl.join(gl.join(planes[0], planes[4]), gl.join(planes[2], planes[6]))
    odd = gl.join(gl.join(planes[1], planes[5]), gl.join(planes[3], planes[7]))
    # [N, 16, 4's, 2's, 1's of the plane]
    steps = gl.join(even, odd).permute((0, 2, 3, 4, 1))
    return gl.convert_layout(steps.reshape((words.shape[0], 8 * words.shape[1])), layout)
