"""Floats in oneDNN's blocked layout, for products of few rows on CPUs.

1 to 8 rows cost about the same, and 3 to 5 times less than with plain floats, which is what
verification lives on.
"""

from __future__ import annotations

from functools import cache

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.layers.formats.base import WeightFormat
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.log import get_logger

_log = get_logger(__name__)

# oneDNN's call costs about 12 µs whatever its size; below this many weights plain torch is faster.
_MIN_ELEMENTS = 1 << 16
# Rows the blocked weights are laid out for: those of a verification step.
_PACKED_FOR_ROWS = 8


class OneDnnWeight(WeightFormat):
    """A weight [out, in] on a CPU and its bias [out], laid out for products of few rows."""

    def __init__(self, weight: Tensor, bias: Tensor | None = None) -> None:
        super().__init__()
        self._num_bytes = weight.nbytes
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        self._bias = bias
        # A row has the same bits among any number of others, but on some processors not alone: a
        # long sum is then made in another order, and a near-tie may differ without drafts.
        pair = weight[:1].expand(2, -1).contiguous()
        both = _product(pair, self._packed, None)
        alone = _product(pair[:1], self._packed, None)
        self._fewest_rows = 1 if torch.equal(alone, both[:1]) else 2

    @classmethod
    def convert(cls, plain: PlainWeight) -> OneDnnWeight | None:
        """Return `plain` in this layout; None if plain products are as fast or oneDNN lacks it."""
        weight = plain.weight
        if weight.device.type != "cpu" or weight.numel() < _MIN_ELEMENTS:
            return None
        return cls(weight, plain.bias) if onednn_works(weight.dtype) else None

    @property
    def num_bytes(self) -> int:
        """Return the memory of the weight."""
        return self._num_bytes

    def linear(self, x: Tensor, out_dtype: torch.dtype | None = None) -> Tensor:
        """Return x·Wᵀ + b, rounded to x's dtype first."""
        out = _product(x, self._packed, self._bias, self._fewest_rows)
        return out if out_dtype is None else out.to(out_dtype)


def onednn_rows(num_rows: int) -> int:
    """Return the rows of oneDNN's product: at most an eighth more, of few different sizes.

    For every size it has not seen oneDNN generates code, which takes milliseconds for each shape of
    weights, as long as a whole step; and it keeps a thousand of them, fewer than ragged rounds and
    prompts would ask for.
    """
    unit = 1 << max(0, (num_rows - 1).bit_length() - 4)
    return -(-num_rows // unit) * unit


def _product(x: Tensor, packed: Tensor, bias: Tensor | None, fewest_rows: int = 1) -> Tensor:
    num_rows = x.shape[0]
    padding = onednn_rows(max(num_rows, fewest_rows)) - num_rows
    if padding:
        x = F.pad(x, (0, 0, 0, padding))
    # The operator torch's own compiler emits for a frozen CPU linear ("none": nothing fused on).
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out[:num_rows]


@cache
def onednn_works(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's packed product exists here and is right for `dtype`; tried once."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).to("cpu", dtype) for n in (3, 16))
    why = "wrong results"
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        found = _product(x, packed, None)
        expected = x.float() @ weight.float().T
        if torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-1):
            return True
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        why = str(error)
    _log.warning("no oneDNN product for %s on this CPU (%s): plain torch products", dtype, why)
    return False
