"""Root-mean-square normalisation, alone and together with the residual addition before it."""

from __future__ import annotations

import torch
from torch import Tensor

from serve_spec.layers.module import Destination, Layer, Span, parameter
from serve_spec.ops.elementwise import rms_norm
from serve_spec.ops.linear import sum_partials
from serve_spec.parallel.group import SINGLE, TensorParallel


def stream_of(x: Tensor, residual: Tensor, parallel: TensorParallel = SINGLE) -> Tensor:
    """Return x + residual [T, width], where x is the sum of all ranks' x; see `RMSNorm.add`."""
    if not len(residual):
        return residual
    return residual + parallel.all_reduce(sum_partials(x, residual))


class RMSNorm(Layer):
    """x / sqrt(mean(x²) + eps) · w over the last dimension; float32 inside, x's dtype outside.

    parallel: the ranks whose partial sums `add` sums up.
    """

    def __init__(self, width: int, eps: float, parallel: TensorParallel = SINGLE) -> None:
        super().__init__()
        self.parallel = parallel
        self.weight = parameter(width)
        self.eps = eps
        # Set by `finish` on CPUs: (w · sqrt(n), sqrt(n · eps)) for the rewritten form.
        self._scaled: tuple[Tensor, Tensor] | None = None

    def forward(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        """Normalise [..., width] -> [..., width], into `out` if given (see `rms_norm`)."""
        if self._scaled is None:
            return rms_norm(x, self.weight, self.eps, out)
        gain, floor = self._scaled
        norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True, dtype=torch.float32)
        normed = (x / torch.hypot(norm, floor)).mul_(gain).to(x.dtype)
        return normed if out is None else out.copy_(normed)

    __call__ = forward

    def add(self, x: Tensor, residual: Tensor) -> tuple[Tensor, Tensor]:
        """Return (norm(x + residual), x + residual), where x is the sum of all ranks' x.

        x: [T, width] as `residual`, or its partial sums (see `ops.linear.sum_partials`). A single
        rank changes neither input: callers may share them.
        """
        if self._scaled is None:
            return self.parallel.add_norm(x, residual, self.weight, self.eps)
        residual = stream_of(x, residual, self.parallel)
        return self.forward(residual), residual

    def tensors(self) -> dict[str, Tensor]:
        """Return the gain."""
        return {"weight": self.weight}

    def finish(self) -> None:
        """Prepare the norm for CPUs, where `F.rms_norm` is a dozen kernels: the same value in five.

        x · w / sqrt(|x|²/n + eps) = x / hypot(|x|, sqrt(n·eps)) · (w·sqrt(n)).
        """
        if self.weight.device.type != "cpu":
            return
        width = self.weight.numel()
        floor = torch.tensor((width * self.eps) ** 0.5, dtype=torch.float32)
        self._scaled = (self.weight.float() * width**0.5, floor)


class JointNorm(Layer):
    """Normalises the queries of all heads together, and the keys of all heads together.

    Otherwise as `RMSNorm` (MiniMax-M2). Of `num_heads` query heads and `num_kv_heads` key heads:
    those of one of the ranks `parallel`, which share all.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        eps: float,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        super().__init__()
        self._counts = num_heads, num_kv_heads
        self._eps, self._parallel = eps, parallel
        self.gain = parameter(num_heads + num_kv_heads, head_dim)
        self._kind_of_head = torch.tensor([0] * num_heads + [1] * num_kv_heads)
        counts = torch.tensor(self._counts, dtype=torch.float32)
        self._num_numbers = parallel.size * head_dim * counts

    def forward(self, heads: Tensor) -> None:
        """Normalise queries and keys [T, num_heads + num_kv_heads, d] in place."""
        parts = (part.flatten(1) for part in heads.split(self._counts, dim=1))
        norms = [torch.linalg.vector_norm(part, dim=1, dtype=torch.float32) for part in parts]
        squares = self._parallel.all_reduce(torch.stack(norms, dim=1).square_())
        scale = torch.rsqrt(squares / self._num_numbers + self._eps)
        normed = (heads * scale[:, self._kind_of_head, None]).to(heads.dtype)
        torch.mul(normed, self.gain, out=heads)

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return the gains of queries and of keys, `q_norm.weight` and `k_norm.weight`."""
        gains = zip(("q_norm", "k_norm"), self.gain.split(self._counts), strict=True)
        return {f"{name}.weight": self._shard(gain.view(-1)) for name, gain in gains}

    def _shard(self, gain: Tensor) -> Destination:
        return Span.shard_of(len(gain), self._parallel).of(gain, 0)
