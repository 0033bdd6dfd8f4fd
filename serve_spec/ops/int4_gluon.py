"""The product of a few rows with codes of four bits, on the tensor cores of Hopper.

Words are copied as `linear_gluon` copies weights. In the registers of a thread they become the
numbers that its instruction takes: the codes of a word are 16 columns apart, which are those of one
instruction, and 16 neighbouring words lie among threads as 16 columns of numbers do.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.int4_linear import PLANE
from serve_spec.ops.linear import Tiles
from serve_spec.ops.linear_gluon import (
    PAIRS_TOGETHER,
    WARPS,
    fetch_weights,
    grid_of,
    input_blocks,
    load,
    places,
    weight_blocks,
    write,
)

__all__ = ["PAIRS_TOGETHER", "multiply"]

_PLANE = gl.constexpr(PLANE)
_PLANES = gl.constexpr(8)

# PTX for two words of neighbouring columns. The codes of a plane become the lowest bits of a large
# number, from which that number and the zero point are taken: exactly. The scale is the sum of two
# numbers, so that the result is as if it were computed in float32, to a unit in the last place.
_NUMBERS = """{
.reg .b32 x, y, large;
mov.b32 large, LARGE;
prmt.b32 x, $1, $2, HALVES;
shr.b32 x, x, SHIFT;
lop3.b32 x, x, 0x000f000f, large, 0xea;
sub.rn.KINDx2 x, x, $3;
fma.rn.KINDx2 y, x, $5, $6;
fma.rn.KINDx2 $0, x, $4, y;
}"""


def _of_planes(kind: str, large: str) -> tuple[str, ...]:
    """Return the PTX of every plane."""
    text = _NUMBERS.replace("KIND", kind).replace("LARGE", large)
    halves = ["0x5410"] * 4 + ["0x7632"] * 4
    return tuple(
        text.replace("HALVES", half).replace("SHIFT", str(4 * (plane % 4)))
        for plane, half in enumerate(halves)
    )


_IN_BFLOAT16 = gl.constexpr(_of_planes("bf16", "0x43004300"))
_IN_FLOAT16 = gl.constexpr(_of_planes("f16", "0x64006400"))


def multiply(
    x: Tensor,
    codes: Tensor,
    scale: Tensor,
    zeros: Tensor,
    factors: Tensor | None,
    bias: Tensor | None,
    out: Tensor,
    tiles: Tiles,
) -> None:
    """Write out [T, out], or [splits, T, out] if several programs share a sum.

    codes, scale, zeros, factors: see `int4_linear.int4_linear`. Twice as many rows as outputs are
    gates and ups, see `linear.small_gate_up`; the outputs are then a multiple of PAIRS_TOGETHER.
    """
    if not x.numel():
        return
    num_outputs, (num_rows, in_features) = out.shape[-1], x.shape
    num_super = 1 if factors is None else factors.shape[1]
    is_gated = num_outputs < len(codes)
    _int4_product_kernel[grid_of(out, in_features, tiles)](
        weight_blocks(codes, tiles, is_gated, PLANE), input_blocks(x, tiles),
        scale, zeros, factors, bias, out, num_rows, num_outputs, in_features, tiles.columns,
        GROUP=in_features // len(scale), SUPER=in_features // num_super,
        STAGES=tiles.stages, GATED=is_gated, num_warps=WARPS, **dependent_launch(x.device),
    )  # fmt: skip


# Not specialized: kernels for 1 and for 16 rows would only take longer to compile.
@gluon.jit(do_not_specialize=["num_rows"])
def _int4_product_kernel(
    codes, x, scale, zeros, factors, bias, out, num_rows, num_outputs, in_features, columns,
    GROUP: gl.constexpr, SUPER: gl.constexpr, STAGES: gl.constexpr, GATED: gl.constexpr,
    DEPENDENT: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """out[split, row, output] = Σ over the split's columns of x[row] · W[output]."""
    ROWS: gl.constexpr = x.block_shape[0]
    DEPTH: gl.constexpr = x.block_shape[1]
    WEIGHTS: gl.constexpr = codes.block_type.numel // _PLANE
    BYTES: gl.constexpr = codes.block_type.nbytes + x.block_type.nbytes
    first_row = gl.program_id(0) * ROWS
    tile = gl.program_id(1)
    split = gl.program_id(2)
    first = split * columns
    num_blocks = gl.cdiv(gl.minimum(columns, in_features - first), DEPTH)

    words = gl.allocate_shared_memory(codes.dtype, [STAGES] + codes.block_shape, codes.layout)  # noqa: RUF005
    inputs = gl.allocate_shared_memory(x.dtype, [STAGES, ROWS, DEPTH], x.layout)
    arrivals = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(arrivals.index(stage), count=1)
    if DEPENDENT:
        gdc_launch_dependents()
    for stage in gl.static_range(STAGES):
        fetch_weights(codes, words, arrivals, stage, tile, first // _PLANES + stage * _PLANE,
                      stage < num_blocks, BYTES)  # fmt: skip
    if DEPENDENT:
        gdc_wait()
    for stage in gl.static_range(STAGES):
        load(
            x, [first_row, first + stage * DEPTH], arrivals.index(stage), inputs.index(stage),
            pred=stage < num_blocks,
        )  # fmt: skip

    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, ROWS, 16]
    )
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, k_width=2)
    sums = gl.zeros((WEIGHTS, ROWS), gl.float32, layout)
    _, weight_row = places(sums, tile, num_outputs, GATED)
    num_all = num_outputs * (2 if GATED else 1)
    groups = _groups(
        scale, zeros, factors, weight_row, num_all, in_features, first, x.dtype, operand,
        GROUP, SUPER,
    )  # fmt: skip
    for block in range(num_blocks):
        # Those of the next block are under way while this one is multiplied.
        following_groups = _groups(
            scale, zeros, factors, weight_row, num_all, in_features,
            first + (block + 1) * DEPTH, x.dtype, operand, GROUP, SUPER,
        )  # fmt: skip
        slot = block % STAGES
        mbarrier.wait(arrivals.index(slot), (block // STAGES) & 1)
        block_words = words.index(slot).reshape((WEIGHTS, _PLANE)).load(operand)
        numbers = _numbers(block_words, groups, x.dtype, operand)
        sums = warpgroup_mma(numbers, inputs.index(slot).permute((1, 0)), sums, is_async=True)
        sums = warpgroup_mma_wait(0, deps=(sums,))
        following = block + STAGES
        column = first + following * DEPTH
        is_inside = following < num_blocks
        fetch_weights(codes, words, arrivals, slot, tile, column // _PLANES, is_inside, BYTES)
        load(x, [first_row, column], arrivals.index(slot), inputs.index(slot), pred=is_inside)
        groups = following_groups

    out += split.to(gl.int64) * num_rows * num_outputs
    write(sums, bias, out, first_row, tile, num_rows, num_outputs, GATED)


@gluon.jit
def _groups(
    scale, zeros, factors, row, num_rows, in_features, column, dtype: gl.constexpr,
    layout: gl.constexpr, GROUP: gl.constexpr, SUPER: gl.constexpr,
):  # fmt: skip
    """Return what the numbers of rows are made with, four for each group of a block of columns.

    The zero point with the large number, the scale as two numbers, and what code 0 stands for.
    """
    LARGE: gl.constexpr = 128.0 if dtype == gl.bfloat16 else 1024.0
    STEP: gl.constexpr = GROUP if GROUP < _PLANE * _PLANES else _PLANE * _PLANES
    found: gl.tuple = ()
    for start in gl.static_range(0, _PLANE * _PLANES, STEP):
        at = (column + start) // GROUP * num_rows + row
        is_group = (row < num_rows) & (column + start < in_features)
        factor = gl.load(scale + at, mask=is_group, other=0).to(gl.float32)
        zero = gl.load(zeros + at, mask=is_group, other=0).to(gl.float32)
        if factors is not None:
            at = (column + start) // SUPER * num_rows + row
            factor *= gl.load(factors + at, mask=is_group, other=0).to(gl.float32)
            minima = factors + in_features // SUPER * num_rows
            zero *= gl.load(minima + at, mask=is_group, other=0).to(gl.float32)
        coarse = factor.to(dtype)
        fine = (factor - coarse.to(gl.float32)).to(dtype)
        if zeros.dtype.element_ty == gl.uint8 and factors is None:
            found += (_beside(zero + LARGE, dtype, layout), _beside(coarse, dtype, layout),
                      _beside(fine, dtype, layout), _beside(zero * 0.0, dtype, layout))  # fmt: skip
        else:
            found += (_beside(zero * 0.0 + LARGE, dtype, layout), _beside(coarse, dtype, layout),
                      _beside(fine, dtype, layout), _beside(zero, dtype, layout))  # fmt: skip
    return found


@gluon.jit
def _beside(of_row, dtype: gl.constexpr, layout: gl.constexpr):
    """Return numbers of rows where the words of the rows are, [N, 1]."""
    return gl.convert_layout(of_row.to(dtype), gl.SliceLayout(1, layout))[:, None]


@gluon.jit
def _numbers(words, groups, dtype: gl.constexpr, layout: gl.constexpr):
    """Return the numbers [N, 128] that words [N, 16] stand for."""
    planes: gl.tuple = ()
    for plane in gl.static_range(_PLANES):
        planes += (_numbers_of_plane(words, groups, plane, dtype),)
    even = gl.join(gl.join(planes[0], planes[4]), gl.join(planes[2], planes[6]))
    odd = gl.join(gl.join(planes[1], planes[5]), gl.join(planes[3], planes[7]))
    # The number of a plane in binary digits, before the columns of it.
    numbers = gl.join(even, odd).permute((0, 2, 3, 4, 1))
    return gl.convert_layout(numbers.reshape((words.shape[0], _PLANES * _PLANE)), layout)


@gluon.jit
def _numbers_of_plane(words, groups, plane: gl.constexpr, dtype: gl.constexpr):
    """Return the numbers [N, 16] of the codes in bits 4·plane .. 4·plane + 3 of words."""
    first: gl.constexpr = plane * (len(groups) // 4) // _PLANES * 4
    return gl.inline_asm_elementwise(
        _IN_BFLOAT16[plane] if dtype == gl.bfloat16 else _IN_FLOAT16[plane],
        "=r,r,r,r,r,r,r",
        [words, groups[first], groups[first + 1], groups[first + 2], groups[first + 3]],
        dtype=gl.bfloat16 if dtype == gl.bfloat16 else gl.float16,
        is_pure=True,
        pack=2,
    )
