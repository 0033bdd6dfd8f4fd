"""How a product of few rows is cut into programs: a pure function of its shape.

The weights pass through once, so what counts is bytes in flight: a program for every
multiprocessor, all of them resident at once, each with a deep pipeline. Constants: measured on one
H200 with the products of an 8B model and its draft (docs/results/kernels-h200).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Tiles:
    """What one program of `linear_triton` does.

    It multiplies `outputs` weight rows (with a gate: that many pairs) by `rows` rows of x, both
    powers of two, and sums `columns` of them, a multiple of `depth`; the sums of the next columns
    belong to another program. `stages` blocks of `depth` columns are in flight. Results under equal
    `columns` are equal bit for bit: only they change the order of a sum.
    """

    outputs: int
    rows: int
    depth: int
    columns: int
    warps: int
    stages: int


@dataclass(frozen=True)
class _Block:
    """A kind of tile, and how many programs of it a device takes at once."""

    outputs: int
    depth: int
    warps: int
    stages: int
    programs: int


# Instead of the first below where that would leave some multiprocessors with twice the work.
_FINE = _Block(outputs=32, depth=128, warps=4, stages=6, programs=384)
# By the rows of x they are for, at most.
_PLAIN = {
    16: _Block(outputs=64, depth=128, warps=4, stages=5, programs=192),
    32: _Block(outputs=128, depth=128, warps=8, stages=3, programs=128),
    64: _Block(outputs=128, depth=128, warps=8, stages=4, programs=128),
}
_GATED = {
    16: _Block(outputs=32, depth=128, warps=4, stages=5, programs=1),
    32: _Block(outputs=64, depth=128, warps=4, stages=2, programs=1),
    64: _Block(outputs=64, depth=128, warps=8, stages=4, programs=1),
    128: _Block(outputs=128, depth=64, warps=8, stages=4, programs=1),
}
# Above this many rows the vendor's library is faster on all but large weights.
_ROWS_FOR_ALL = 32
_MANY_WEIGHTS = 48 << 20
_MULTIPROCESSORS = 132
_MAX_UNEVENNESS = 1.2
# The finest cut of a sum: a multiple of every depth.
_MIN_COLUMNS = 256


def is_ours(num_rows: int, num_weights: int, *, gated: bool = False) -> bool:
    """Whether these kernels are faster than the vendor's library for so many rows and weights."""
    if gated:
        return num_rows <= max(_GATED)
    return num_rows <= _ROWS_FOR_ALL or (num_rows <= max(_PLAIN) and num_weights >= _MANY_WEIGHTS)


def choose_tiles(num_outputs: int, in_features: int, num_rows: int, gated: bool = False) -> Tiles:
    """Tiles for x [num_rows, in] by num_outputs weight rows (with `gated`: that many pairs)."""
    blocks = _GATED if gated else _PLAIN
    rows = next((most for most in blocks if num_rows <= most), max(blocks))
    block = blocks[rows]
    if block is _PLAIN[16] and _unevenness(num_outputs, block) > _MAX_UNEVENNESS:
        block = _FINE
    cuts = _cuts(num_outputs, block)
    return Tiles(
        outputs=block.outputs,
        rows=rows,
        depth=block.depth,
        columns=_ceil(in_features, cuts * _MIN_COLUMNS) * _MIN_COLUMNS,
        warps=block.warps,
        stages=block.stages,
    )


def _cuts(num_outputs: int, block: _Block) -> int:
    """Programs that share a sum, a power of two: as many as the device takes at once.

    Pairs are not cut: the product of two sums needs both of them whole.
    """
    cuts = 1
    while 2 * cuts * _ceil(num_outputs, block.outputs) <= block.programs:
        cuts *= 2
    return cuts


def _unevenness(num_outputs: int, block: _Block) -> float:
    """The busiest multiprocessor's programs over the mean, from 1 on."""
    programs = _ceil(num_outputs, block.outputs) * _cuts(num_outputs, block)
    return _ceil(programs, _MULTIPROCESSORS) * _MULTIPROCESSORS / programs


def _ceil(a: int, b: int) -> int:
    return -(-a // b)
