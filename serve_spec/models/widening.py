"""Making one tensor of a Llama-like model wider without changing what the model computes.

Every hidden vector of the wide model is k copies of the small one's, [h, h, ..., h]. Root mean
squares stay, heads and neurons are repeated whole, and a matrix W becomes k column blocks whose sum
is W, so that W_wide [h, ..., h] = W h. (Net2Net, arXiv 1511.05641, with copies on the residual
stream too.)

The blocks need not be W/k each. Equal blocks would make the weights repeat, which no real weights
do and which changes what tensor cores draw and how fast they run. So pairs of blocks hold
W/k + n and W/k - n with random n: noise that cancels. In bfloat16 that works only if every block
is representable, so all blocks are whole multiples, at most 256, of a power of two that suits the
entry of W (bfloat16 holds 8 significant bits, hence every integer up to 256). Where W itself is in
bfloat16 their sum is then W exactly, for every k. What is left is the rounding of sums.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

# All integers up to this magnitude are exact in bfloat16.
_LARGEST = 256


@dataclass(frozen=True)
class Widening:
    """How one tensor grows. The default changes nothing.

    A vector counts as a matrix of one row. `num_rows`: rows are added up to this many (the rows of
    a vocabulary). `row_factor`: then all rows are repeated. The columns consist of `num_blocks`
    equal parts (concatenated inputs), each repeated `column_factor` times: as blocks that sum to
    the original if `is_product`, else as plain copies.
    """

    num_rows: int | None = None
    row_factor: int = 1
    num_blocks: int = 1
    column_factor: int = 1
    is_product: bool = False

    def shape(self, small: tuple[int, ...]) -> tuple[int, ...]:
        """The wide shape of a tensor of shape `small`, [n] or [o, i]."""
        columns = small[-1] * self.column_factor
        return (columns,) if len(small) == 1 else (self._rows(small[0]) * self.row_factor, columns)

    def _rows(self, small: int) -> int:
        return small if self.num_rows is None else self.num_rows


def widen(
    small: Tensor,
    wide: Tensor,
    how: Widening,
    *,
    noise: float = 0.0,
    generator: torch.Generator | None = None,
    silent: bool = False,
) -> None:
    """Fills `wide` (contiguous, of `how.shape(small.shape)`) from `small`, in wide's dtype.

    noise: from 0, equal blocks, to 1, as much as fits; see `block_noise`. generator: where it comes
    from, on wide's device. silent: the blocks sum to zero instead of to `small` (all zero without
    noise), and copies are zero.
    """
    matrix = small.to(device=wide.device, dtype=wide.dtype).reshape(-1, small.shape[-1])
    if how.num_rows is not None:
        matrix = with_more_rows(matrix, how.num_rows)
    width = matrix.shape[1] // how.num_blocks
    parts = matrix.view(matrix.shape[0], how.num_blocks, width)
    copies = wide.view(how.row_factor, *parts.shape[:2], how.column_factor, width)
    if not how.is_product or how.column_factor == 1:
        copies.copy_(parts.unsqueeze(2).mul(not silent))
    elif not noise:
        copies.copy_(parts.unsqueeze(2).mul(0.0 if silent else 1.0 / how.column_factor))
    else:
        _fill_blocks(copies, parts, noise, generator, silent)


def with_more_rows(matrix: Tensor, num_rows: int) -> Tensor:
    """[o, i] -> [num_rows, i]: the rows again and again, each time shifted by one column more.

    What follows the first o rows is as large as real rows and has nothing to do with them.
    """
    num_pages = -(-num_rows // matrix.shape[0])
    return torch.cat([matrix.roll(page, dims=1) for page in range(num_pages)])[:num_rows]


def block_noise(num_blocks: int, noise: float) -> tuple[int, int]:
    """(fineness, amplitude) of the noise in blocks that sum to an entry w.

    Blocks are multiples of u = 2^-fineness units in the last place of w (as a bfloat16), and the
    noise is uniform over the multiples in [-amplitude, amplitude]. At noise 1 the largest block
    just reaches 256 u. The finer u, the smaller the noise beside w. For 8 blocks its standard
    deviation is 0.07 to 0.14 of |w|, about as much as the equal shares w/8. (In bfloat16 copies
    round apart, and what differs between them meets the noise. At this size that is nothing beside
    the rounding every model has; three times the noise, in 4 blocks, made it three times as large.)
    """
    fineness = num_blocks.bit_length() - 2
    share = _LARGEST * 2**fineness / num_blocks
    room = _LARGEST - share - num_blocks / 2
    return fineness, int(noise * room)


def _fill_blocks(
    copies: Tensor, parts: Tensor, noise: float, generator: torch.Generator | None, silent: bool
) -> None:
    """Blocks [r, o, n, k, i] that sum over k to `parts` [o, n, i], or to zero if silent."""
    num_blocks = copies.shape[3]
    fineness, amplitude = block_noise(num_blocks, noise)
    wide_type = torch.promote_types(copies.dtype, torch.float32)
    total = parts.to(wide_type)
    unit = _last_place(total) * 2.0**-fineness
    share = (total / (unit * num_blocks)).round() * unit
    if silent:
        share, total = torch.zeros_like(share), torch.zeros_like(total)
    drawn = torch.zeros((), dtype=wide_type, device=copies.device)
    for block in range(num_blocks):
        is_last = block == num_blocks - 1
        plain = total - share * (num_blocks - 1) if is_last else share
        if block % 2:
            drawn = -drawn
        elif is_last:
            drawn = torch.zeros_like(drawn)
        else:
            drawn = torch.randint(
                -amplitude, amplitude + 1, copies[:, :, :, 0].shape,
                generator=generator, dtype=wide_type, device=copies.device,
            ).mul_(unit)  # fmt: skip
        copies[:, :, :, block] = plain + drawn


def _last_place(values: Tensor) -> Tensor:
    """Units in the last place of `values` as bfloat16, without rounding them; never below 2^-100.

    Taken from the bits: powers of two from a device's `pow` need not be exact.
    """
    exponents = values.float().view(torch.int32).bitwise_and(0x7F800000).view(torch.float32)
    return (exponents * 2.0**-7).clamp_min(2.0**-100).to(values.dtype)
