"""Mixtures of experts: a router chooses a few of many feed-forward layers for every token.

Every row of a result is a function of its own token: products are those of one expert with rows
whose bits do not depend on their number, and the chosen experts are added in the router's order.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats, Matrix, WeightFormat
from serve_spec.layers.formats.fp16 import Fp16Weight
from serve_spec.layers.formats.onednn import OneDnnWeight, onednn_works
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer, Span, parameter
from serve_spec.ops.elementwise import sigmoid
from serve_spec.ops.linear import silu_and_mul
from serve_spec.parallel.group import SINGLE, TensorParallel


class Routing(NamedTuple):
    """The experts of every token, `ids` int64 [T, k], and their `weights` float32 [T, k].

    `shared`: the weight of the shared expert, float32 [T, 1]; None: it has none.
    """

    ids: Tensor
    weights: Tensor
    shared: Tensor | None = None


@dataclass(frozen=True)
class Router:
    """Chooses `num_chosen` experts of every token by their scores, and weighs them by these.

    Scores are the softmax of the logits over all experts; with `is_sigmoid` the sigmoid of each,
    and a correction, one number per expert in the checkpoint, is added for the choice alone.
    `renormalises`: weights are divided by their sum. `scale` multiplies them. Of `num_groups` equal
    groups of experts only the `num_kept_groups` are chosen from whose two best experts have the
    largest sums (DeepSeek-V3, arXiv 2412.19437).
    """

    num_chosen: int
    renormalises: bool = True
    is_sigmoid: bool = False
    scale: float = 1.0
    num_groups: int = 1
    num_kept_groups: int = 1

    def choose(self, logits: Tensor, correction: Tensor | None = None) -> Routing:
        """Return the experts of logits float32 [T, E]. correction: float32 [E], of sigmoids."""
        scores = sigmoid(logits) if self.is_sigmoid else logits.softmax(dim=-1)
        preference = scores if correction is None else scores + correction
        if self.num_kept_groups < self.num_groups:
            preference = self._of_kept_groups(preference)
        ids = preference.topk(self.num_chosen, dim=-1).indices
        weights = scores.gather(1, ids)
        if self.renormalises:
            weights = weights / (weights.sum(dim=-1, keepdim=True) + _LEAST_SUM)
        return Routing(ids, weights if self.scale == 1.0 else weights * self.scale)

    def _of_kept_groups(self, preference: Tensor) -> Tensor:
        """Return the preference, -inf for the experts of groups that are not kept."""
        grouped = preference.unflatten(-1, (self.num_groups, -1))
        best = grouped.topk(2, dim=-1).values.sum(dim=-1)
        kept = best.topk(self.num_kept_groups, dim=-1).indices
        is_left_out = torch.ones_like(best, dtype=torch.bool).scatter(1, kept, False)
        left: Tensor = grouped.masked_fill(is_left_out.unsqueeze(-1), float("-inf"))
        return left.flatten(1)


_LEAST_SUM = 1e-20
# Rows of grouped products begin at multiples of 16 bytes.
_GROUPED_MULTIPLE = 8


class Gate(Layer):
    """The router of a layer, and with `gates_shared` the weight of its shared expert.

    Both are one product, which every rank computes whole.
    """

    def __init__(
        self,
        router: Router,
        hidden_size: int,
        num_experts: int,
        *,
        bias: bool = False,
        gates_shared: bool = False,
    ) -> None:
        super().__init__()
        self._router, self._num_experts = router, num_experts
        parts = {"gate": num_experts, **({"shared_expert_gate": 1} if gates_shared else {})}
        self.product = Linear(hidden_size, parts, bias, formats=STABLE)
        self.product.out_dtype = torch.float32
        self.correction: nn.Parameter | None = None
        if router.is_sigmoid:
            correction = torch.empty(num_experts, dtype=torch.float32)
            self.correction = nn.Parameter(correction, requires_grad=False)

    def forward(self, x: Tensor) -> Routing:
        """Return the experts of every token of x [T, H]."""
        logits, *shared = self.product(x).split(self._num_experts, dim=1)
        routing = self._router.choose(logits, self.correction)
        return routing._replace(shared=sigmoid(shared[0])) if shared else routing

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return `gate.*`, and the gate of the shared expert if any."""
        tensors = dict(self.product.tensors())
        if self.correction is not None:
            tensors["gate.e_score_correction_bias"] = self.correction
        return tensors


class StableFormats(Formats):
    """Floats; on a CPU in a layout in which a row has the same bits among any number of others."""

    def of(self, paths: Sequence[str], matrix: Matrix) -> WeightFormat:
        """See `Formats`."""
        return PlainWeight(matrix, (Fp16Weight.convert, _onednn))


def _onednn(plain: PlainWeight) -> WeightFormat | None:
    """Return `plain` in oneDNN's layout, however small; None on a GPU and without oneDNN."""
    if plain.weight.device.type != "cpu" or not onednn_works(plain.weight.dtype):
        return None
    return OneDnnWeight(plain.weight, plain.bias)


STABLE = StableFormats()


class Experts(Layer):
    """The experts of a layer, `down(silu(gate(x)) · up(x))` each, in two stacks of matrices.

    `hidden_size`, `intermediate_size`: of one expert, the latter this rank's. Every rank has a part
    of all experts, and a result is its addend. On GPUs their products are `grouped_mm`, without a
    step on the host.
    """

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self._span = Span.shard_of(intermediate_size, parallel)
        self.gate_up: Tensor = parameter(num_experts, 2 * intermediate_size, hidden_size)
        self.down: Tensor = parameter(num_experts, hidden_size, intermediate_size)
        self.gate_up_bias: Tensor | None = None
        self.down_bias: Tensor | None = None
        check_device(self.down)
        self._num_experts = num_experts
        # Set by `finish` on CPUs, in place of the stacks: the matrices of every expert.
        self._matrices: list[tuple[WeightFormat, WeightFormat]] = []

    def forward(self, x: Tensor, routing: Routing) -> Tensor:
        """Return the weighted sum of the chosen experts' results: [T, H] -> float32 [T, H]."""
        num_tokens, num_chosen = routing.ids.shape
        ids, order = routing.ids.flatten().sort(stable=True)
        rows = x.index_select(0, order // num_chosen)
        # Where each expert's rows end.
        ends = torch.searchsorted(ids, self._all_ids(ids), right=True, out_int32=True)
        if x.is_cuda:
            results = self.grouped(rows, ids, ends)
        else:
            results = torch.cat([*self._by_expert(rows, ends.tolist())])
        results = torch.empty_like(results).index_copy(0, order, results)
        by_rank = results.view(num_tokens, num_chosen, -1).unbind(1)
        first, *others = zip(by_rank, routing.weights.split(1, dim=1), strict=True)
        total: Tensor = first[0] * first[1]
        for result, weight in others:
            total = total + result * weight
        return total

    __call__ = forward

    def grouped(self, rows: Tensor, ids: Tensor, ends: Tensor) -> Tensor:
        """Return the results of rows [S, H], sorted by their experts `ids` [S].

        ends: the end of each expert's rows, int32 [E]. Reads nothing on the host.
        """
        gate_up = F.grouped_mm(rows, self.gate_up.mT, offs=ends)
        if self.gate_up_bias is not None:
            gate_up = gate_up + self.gate_up_bias.index_select(0, ids)
        down = F.grouped_mm(self.activate(gate_up), self.down.mT, offs=ends)
        return down if self.down_bias is None else down + self.down_bias.index_select(0, ids)

    def activate(self, gate_up: Tensor) -> Tensor:
        """Return what enters the second product: [S, 2·I] -> [S, I]."""
        return silu_and_mul(gate_up)

    def tensors(self) -> dict[str, Destination]:
        """Return `K.gate_proj.weight`, `K.up_proj.weight` and `K.down_proj.weight` of expert K."""
        found: dict[str, Destination] = {}
        size = self._span.length
        for index, (gate_up, down) in enumerate(zip(self.gate_up, self.down, strict=True)):
            found[f"{index}.gate_proj.weight"] = self._span.of(gate_up[:size], 0)
            found[f"{index}.up_proj.weight"] = self._span.of(gate_up[size:], 0)
            found[f"{index}.down_proj.weight"] = self._span.of(down, 1)
        return found

    def finish(self) -> None:
        """Give every expert's matrices the fastest layout of this CPU, and free the stacks."""
        if self.gate_up.device.type != "cpu" or self._matrices:
            return
        self._matrices = [
            (
                _finished(self.gate_up[index], self.gate_up_bias, index),
                _finished(self.down[index], self.down_bias, index),
            )
            for index in range(self._num_experts)
        ]
        self.gate_up, self.down = parameter(0), parameter(0)

    def _all_ids(self, like: Tensor) -> Tensor:
        return torch.arange(self._num_experts, dtype=like.dtype, device=like.device)

    def _by_expert(self, rows: Tensor, ends: Sequence[int]) -> Iterator[Tensor]:
        start = 0
        for index, end in enumerate(ends):
            if end > start:
                yield self._result(index, rows[start:end])
            start = end

    def _result(self, index: int, rows: Tensor) -> Tensor:
        if self._matrices:
            gate_up, down = self._matrices[index]
            return down.linear(self.activate(gate_up.linear(rows)))
        biases = [None if b is None else b[index] for b in (self.gate_up_bias, self.down_bias)]
        inner = self.activate(F.linear(rows, self.gate_up[index], biases[0]))
        return F.linear(inner, self.down[index], biases[1])


def _finished(weight: Tensor, biases: Tensor | None, index: int) -> WeightFormat:
    """Return the format for products with one expert's matrix [out, in]."""
    out_features, in_features = weight.shape
    rows, columns = (Span(size, 0, size) for size in (out_features, in_features))
    plain = STABLE.of(["expert"], Matrix({"expert": rows}, columns, tied=weight))
    assert isinstance(plain, PlainWeight), "experts are floats"
    plain.bias = None if biases is None else biases[index]
    return plain.finish()


def check_device(down: Tensor) -> None:
    """Raise CheckpointError unless `grouped_mm` multiplies by `down` [E, H, I] on its device.

    Elsewhere torch refuses, or falls back to a loop that waits for the device.
    """
    if down.device.type != "cuda":
        return
    if down.dtype != torch.bfloat16:
        name = str(down.dtype).removeprefix("torch.")
        why = f"dtype={name}: experts on GPUs are multiplied in bfloat16"
        raise CheckpointError(f"{why}; set dtype: bfloat16")
    if torch.cuda.get_device_capability(down.device) < (9, 0):
        why = "device=cuda: experts need compute capability 9.0 (Hopper) or later"
        raise CheckpointError(f"{why}; use such a GPU, or a target without experts")
    uneven = [size for size in down.shape[1:] if size % _GROUPED_MULTIPLE]
    if uneven:
        need = f"GPUs need multiples of {_GROUPED_MULTIPLE}"
        why = f"experts have {uneven[0]} columns on a rank: {need}"
        raise CheckpointError(f"{why}; use another tensor_parallel_size")
