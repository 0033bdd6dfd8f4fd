"""Tile sizes of products of few rows: a pure function of the shape.

The weights are read once, so the speed depends on bytes in flight: a program for every
multiprocessor, all resident at once, each with a deep pipeline. Constants: measured on one H200
with the products of an 8B model and its draft.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """What one program of `linear_triton` does.

    It multiplies `outputs` weight rows (with a gate: that many pairs) by `rows` rows of x, both
    powers of two, and sums over `columns` columns, a multiple of `depth`. `stages` blocks of
    `depth` columns are in flight. Only `columns` changes the order of a sum, and so its bits.
    """

    outputs: int
    rows: int
    depth: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class _Block:
    """Constants of a tile; see `Tiles`."""

    outputs: int
    depth: int
    warps: int
    stages: int


# By the most rows of x. For products of more programs than multiprocessors.
_PLAIN = {
    16: _Block(outputs=64, depth=128, warps=4, stages=5),
    32: _Block(outputs=128, depth=128, warps=8, stages=3),
    64: _Block(outputs=128, depth=128, warps=8, stages=4),
}
# Replaces the first if that would leave some multiprocessors with twice the work.
_FINE = _Block(outputs=32, depth=128, warps=4, stages=6)
_GATED = {
    16: _Block(outputs=32, depth=128, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=4),
    64: _Block(outputs=64, depth=128, warps=4, stages=4),
    128: _Block(outputs=128, depth=64, warps=8, stages=4),
}
# For one program per multiprocessor.
_PLAIN_ALONE = {
    16: _Block(outputs=64, depth=128, warps=4, stages=7),
    32: _Block(outputs=64, depth=128, warps=4, stages=5),
    64: _Block(outputs=64, depth=128, warps=4, stages=5),
}
_GATED_ALONE = {
    16: _Block(outputs=64, depth=128, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=3),
    64: _Block(outputs=64, depth=64, warps=4, stages=5),
    128: _Block(outputs=64, depth=64, warps=8, stages=7),
}
# For fewer programs than multiprocessors: each keeps more bytes in flight.
_PLAIN_SPARSE = {
    16: _Block(outputs=128, depth=128, warps=4, stages=5),
    32: _Block(outputs=128, depth=128, warps=4, stages=5),
    64: _Block(outputs=128, depth=128, warps=8, stages=4),
}
_GATED_SPARSE = {
    16: _Block(outputs=64, depth=128, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=5),
    64: _Block(outputs=64, depth=64, warps=4, stages=7),
    128: _Block(outputs=64, depth=64, warps=8, stages=7),
}
# For eight-bit weights. At most 32 outputs use the older tensor core instructions, whose operands
# need less shuffling.
_PLAIN_EIGHT_BIT = {
    16: _Block(outputs=32, depth=512, warps=2, stages=3),
    32: _Block(outputs=128, depth=128, warps=4, stages=5),
    64: _Block(outputs=64, depth=128, warps=4, stages=5),
}
_GATED_EIGHT_BIT = {
    16: _Block(outputs=32, depth=256, warps=4, stages=5),
    32: _Block(outputs=64, depth=128, warps=4, stages=4),
    64: _Block(outputs=64, depth=128, warps=4, stages=4),
}
_MULTIPROCESSORS = 132
_MAX_UNEVENNESS = 1.2
# Sums are split while there is a multiprocessor for each program of so many outputs.
_CUT_OUTPUTS = 64
_CUT_OUTPUTS_EIGHT_BIT = 128
# A product is sparse if it uses less than this share of the multiprocessors.
_SPARSE = 0.75
# Sparse sums are split once more if the parts are at least this long.
_LONG_SUM = 2048
# Fewest columns of a part of a sum: a multiple of every depth.
_MIN_COLUMNS = 256


def is_ours(num_rows: int, *, gated: bool = False, eight_bit: bool = False) -> bool:
    """Return whether these kernels, and not the vendor's library, multiply so many rows.

    Up to 64 rows of a plain product they are faster, or a few percent slower, and the bits of a row
    do not depend on the batch. A gated product saves a kernel and is faster up to 128 rows.
    """
    if eight_bit:
        return num_rows <= max(_GATED_EIGHT_BIT if gated else _PLAIN_EIGHT_BIT)
    return num_rows <= max(_GATED if gated else _PLAIN)


def choose_tiles(
    num_outputs: int,
    in_features: int,
    num_rows: int,
    gated: bool = False,
    eight_bit: bool = False,
) -> Tiles:
    """Return the tiles for x [num_rows, in] by num_outputs weight rows (`gated`: pairs of them).

    `columns` does not depend on `num_rows`, so a row is summed in the same order in every batch,
    except for eight-bit weights, which only drafts have.
    """
    blocks, cuts = _blocks_and_cuts(num_outputs, in_features, gated, eight_bit)
    rows = next((most for most in blocks if num_rows <= most), max(blocks))
    block = blocks[rows]
    if block is _PLAIN[16] and _unevenness(num_outputs, block) > _MAX_UNEVENNESS:
        block = _FINE
    finest = max(_MIN_COLUMNS, block.depth)
    return Tiles(
        outputs=block.outputs,
        rows=rows,
        depth=block.depth,
        columns=_ceil(in_features, cuts * finest) * finest,
        warps=block.warps,
        stages=block.stages,
    )


def _blocks_and_cuts(
    num_outputs: int, in_features: int, gated: bool, eight_bit: bool
) -> tuple[dict[int, _Block], int]:
    """Return blocks by rows, and the number of programs that share a sum, a power of two."""
    if eight_bit:
        cuts = 1 if gated else _cuts(num_outputs, _CUT_OUTPUTS_EIGHT_BIT)
        return _GATED_EIGHT_BIT if gated else _PLAIN_EIGHT_BIT, cuts
    # The product of two sums needs both in one program.
    cuts = 1 if gated else _cuts(num_outputs, _CUT_OUTPUTS)
    share = _ceil(num_outputs, _CUT_OUTPUTS) * cuts / _MULTIPROCESSORS
    if share > 1:
        return _GATED if gated else _PLAIN, cuts
    if gated:
        return _GATED_SPARSE if share < _SPARSE else _GATED_ALONE, cuts
    if share < _SPARSE and in_features >= 2 * cuts * _LONG_SUM:
        return _PLAIN_SPARSE, 2 * cuts
    return _PLAIN_ALONE, cuts


def _cuts(num_outputs: int, outputs: int) -> int:
    """Return how many programs share a sum while each has a multiprocessor, a power of two."""
    cuts = 1
    while 2 * cuts * _ceil(num_outputs, outputs) <= _MULTIPROCESSORS:
        cuts *= 2
    return cuts


def _unevenness(num_outputs: int, block: _Block) -> float:
    """Return the busiest multiprocessor's programs over the mean, ≥ 1."""
    programs = _ceil(num_outputs, block.outputs)
    return _ceil(programs, _MULTIPROCESSORS) * _MULTIPROCESSORS / programs


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
