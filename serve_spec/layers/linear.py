"""Matrix products, several checkpoint matrices stacked into one where they share their input."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from serve_spec.layers.module import Destination, Layer, Shard, parameter
from serve_spec.layers.quantized import Int4Weight, Int8Weight
from serve_spec.log import get_logger
from serve_spec.ops import linear
from serve_spec.ops.linear import Fp8Weight
from serve_spec.parallel.group import SINGLE, TensorParallel

_log = get_logger(__name__)

# oneDNN's call costs about 12 µs whatever its size; below this many weights plain torch is faster.
_MIN_PACKED_ELEMENTS = 1 << 16
# Rows the blocked weights are laid out for: those of a verification step.
_PACKED_FOR_ROWS = 8


class Linear(Layer):
    """y = x·Wᵀ + b, where W stacks the rows of one or more checkpoint matrices.

    `parts` names these matrices and their numbers of rows, in order: `{"q_proj": 64, "k_proj": 32,
    "v_proj": 32}` makes one [128, in] product of three.

    Over several ranks (Megatron-LM, arXiv 1909.08053) sizes are this rank's own. A rank has its
    share of the rows of every part, or if `reads_share` of the columns: then its result is an
    addend of the whole one, and the norm that follows adds up what all ranks made of theirs. One
    after the other they exchange one [T, H] tensor.
    """

    def __init__(
        self,
        in_features: int,
        parts: Mapping[str, int],
        bias: bool = False,
        parallel: TensorParallel = SINGLE,
        reads_share: bool = False,
    ) -> None:
        super().__init__()
        self.parallel, self.reads_share = parallel, reads_share
        self.parts = dict(parts)
        self.weight = parameter(sum(parts.values()), in_features)
        self.bias = parameter(sum(parts.values())) if bias else None
        # Of the result, if not that of the input: a head's logits leave it in float32.
        self.out_dtype: torch.dtype | None = None
        self._packed: Tensor | None = None
        self._fewest_rows = 1  # of a packed product
        self.fp8: Fp8Weight | None = None
        self.integers: Int4Weight | Int8Weight | None = None

    def forward(self, x: Tensor) -> Tensor:
        """Return the product: [T, in] -> [T, out]."""
        if self.integers is not None:
            return self.integers.linear(x, self.out_dtype or x.dtype)
        if self._packed is None:
            return linear.linear(x, self.weight, self.bias, self.out_dtype, self.fp8)
        out = _onednn_linear(x, self._packed, self.bias, self._fewest_rows)
        return out if self.out_dtype is None else out.to(self.out_dtype)

    __call__ = forward

    def partials(self, x: Tensor) -> Tensor:
        """Return `forward`, possibly as partial sums: see `linear.partials`."""
        is_plain = self.integers is None and self._packed is None and self.bias is None
        if is_plain and self.out_dtype is None:
            return linear.partials(x, self.weight, self.fp8)
        return self.forward(x)

    def tensors(self) -> dict[str, Destination]:
        """Return `<part>.weight` and `<part>.bias`: the rows of each part."""
        if self.parallel.size == 1:
            return {**self.views()}
        tensors: dict[str, Destination] = {}
        for name, view in self.views().items():
            if self.reads_share and view.dim() == 1:
                tensors[name] = view
                continue
            dim = int(self.reads_share)
            length = view.shape[dim]
            start, whole = self.parallel.rank * length, self.parallel.size * length
            tensors[name] = Shard(view, dim, start, whole)
        return tensors

    def views(self) -> dict[str, Tensor]:
        """Return the rows of each part, by the name of its checkpoint tensor."""
        views = {}
        start = 0
        for name, rows in self.parts.items():
            views[f"{name}.weight"] = self.weight.narrow(0, start, rows)
            if self.bias is not None:
                views[f"{name}.bias"] = self.bias.narrow(0, start, rows)
            start += rows
        return views

    def add_fp8(self) -> None:
        """Keep the loaded weight in eight bits too, for products of few rows that take it.

        These read half as much and so take less time; all others go on with the exact weight.
        """
        assert self._packed is None, "oneDNN has taken the plain weight"
        self.fp8 = Fp8Weight.of(self.weight)

    def turn_into(self, integers: type[Int4Weight | Int8Weight]) -> int:
        """Keep the loaded weight in such integers only; the bytes they take.

        0: they do not take its shape, and it stays as it is.
        """
        weight = self.weight if self._packed is None else self._packed.to_dense()
        if not integers.takes(weight):
            return 0
        self.integers, self._packed = integers(weight, self.bias), None
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)
        return self.integers.num_bytes

    def finish(self) -> None:
        """Lay the loaded weight out for small products on this processor; free the plain one.

        On CPUs oneDNN's blocked layout makes 1 to 8 rows cost about the same (and 3 to 5 times less
        than a plain product), which is what verification lives on. Elsewhere nothing happens.
        """
        if self.reads_share and self.bias is not None and self.parallel.rank:
            self.bias.zero_()  # rank 0 adds it once
        if self.weight.device.type != "cpu" or self.weight.numel() < _MIN_PACKED_ELEMENTS:
            return
        if not onednn_works(self.weight.dtype):
            return
        self._packed = torch.ops.mkldnn._reorder_linear_weight(self.weight, _PACKED_FOR_ROWS)
        # A row has the same bits among any number of others, but on some processors not alone: a
        # long sum is then made in another order, and a near-tie may differ without drafts.
        pair = self.weight[:1].expand(2, -1).contiguous()
        both = _onednn_linear(pair, self._packed, None)
        alone = _onednn_linear(pair[:1], self._packed, None)
        self._fewest_rows = 1 if torch.equal(alone, both[:1]) else 2
        self.weight = nn.Parameter(self.weight.new_empty(0), requires_grad=False)


def onednn_rows(num_rows: int) -> int:
    """Return the rows of oneDNN's product: at most an eighth more, of few different sizes.

    For every size it has not seen oneDNN generates code, which takes milliseconds for each shape of
    weights, as long as a whole step; and it keeps a thousand of them, fewer than ragged rounds and
    prompts would ask for.
    """
    unit = 1 << max(0, (num_rows - 1).bit_length() - 4)
    return -(-num_rows // unit) * unit


def _onednn_linear(x: Tensor, packed: Tensor, bias: Tensor | None, fewest_rows: int = 1) -> Tensor:
    num_rows = x.shape[0]
    padding = onednn_rows(max(num_rows, fewest_rows)) - num_rows
    if padding:
        x = nn.functional.pad(x, (0, 0, 0, padding))
    # The operator torch's own compiler emits for a frozen CPU linear ("none": nothing fused on).
    out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, bias, "none", [], "")
    return out[:num_rows]


_onednn_works: dict[torch.dtype, bool] = {}


def onednn_works(dtype: torch.dtype) -> bool:
    """Return whether oneDNN's packed product exists here and is right for `dtype`; tried once."""
    if dtype not in _onednn_works:
        _onednn_works[dtype] = _try_onednn(dtype)
        if not _onednn_works[dtype]:
            _log.warning("no oneDNN product for %s on this CPU: plain torch products", dtype)
    return _onednn_works[dtype]


def _try_onednn(dtype: torch.dtype) -> bool:
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 32, generator=generator).to("cpu", dtype) for n in (3, 16))
    try:
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _PACKED_FOR_ROWS)
        found = _onednn_linear(x, packed, None)
    except (AttributeError, NotImplementedError, RuntimeError) as error:
        _log.info("oneDNN refused %s: %s", dtype, error)
        return False
    expected = x.float() @ weight.float().T
    return torch.allclose(found.float(), expected, rtol=2e-2, atol=2e-1)
