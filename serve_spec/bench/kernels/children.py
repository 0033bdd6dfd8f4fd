"""The best children of a tree's level: this package's draw of them, and torch's topk."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

import numpy as np
import torch
from torch import Tensor

from serve_spec.bench.kernels.setting import Row, Section, Setting
from serve_spec.bench.kernels.times import graph_times_ms
from serve_spec.ops import draw
from serve_spec.ops.draw import DrawParams

# By device: widths of the logits, and rows.
_SIZES = {"cuda": ((32_000, 128_256), (4, 32, 128, 256)), "cpu": ((500,), (4,))}
_TOPKS = (4, 8)
_CALLS = 20
"""One after the other: a single one is over before a clock sees it."""


@torch.inference_mode()
def children(setting: Setting) -> Section:
    """Microseconds a call over the same random logits, ids mapped to a target's.

    greedy_us and random_us: the whole draw, tempering and noise included. torch_us: topk and
    logsumexp alone, of scores that are there already. draft_us: a chain's draw, random.
    """
    device = setting.device
    widths, counts = _SIZES[device.type]
    rows = [_row(*sizes, device) for sizes in product(widths, counts, _TOPKS)]
    on_gpu = device.type == "cuda"
    left_out = [] if on_gpu else ["kernels and CUDA graphs: need a GPU; draws were the plain law's"]
    return Section(rows, left_out=left_out)


def _row(width: int, num_rows: int, topk: int, device: torch.device) -> Row:
    logits = torch.randn(num_rows, width, device=device)
    owners = torch.zeros(num_rows, dtype=torch.int32, device=device)
    positions = torch.arange(num_rows, device=device)
    sharpness = torch.ones(1, device=device)
    target_ids = torch.arange(width, device=device)

    def draw_us(draw: Callable[..., object], inverse_temperature: float, *more: int) -> float:
        params = _params(inverse_temperature, device)
        law = logits, owners, positions, params, sharpness, target_ids
        return _call_us(lambda: draw(*law, *more), device)

    return {
        "width": width,
        "rows": num_rows,
        "topk": topk,
        "greedy_us": draw_us(draw.draw_children, 0.0, topk),
        "random_us": draw_us(draw.draw_children, 1.0, topk),
        "torch_us": _call_us(lambda: _by_torch(logits, topk, target_ids), device),
        "draft_us": draw_us(draw.draw_drafts, 1.0),
    }


def _params(inverse_temperature: float, device: torch.device) -> DrawParams:
    """Of one sequence, without filters."""
    return DrawParams(
        inverse_temperature=torch.full((1,), inverse_temperature, device=device),
        seeds=torch.zeros(1, 2, dtype=torch.int32, device=device),
        top_k=torch.zeros(1, dtype=torch.int32, device=device),
        top_p=torch.ones(1, device=device),
        min_p=torch.zeros(1, device=device),
    )


def _by_torch(scores: Tensor, topk: int, target_ids: Tensor) -> tuple[Tensor, Tensor]:
    best, columns = scores.topk(topk, dim=1)
    likely = best - scores.logsumexp(dim=1, keepdim=True)
    return target_ids[columns].where(likely.isfinite(), -1), likely


def _call_us(call: Callable[[], object], device: torch.device) -> float:
    """The median, in microseconds."""

    def calls() -> None:
        for _ in range(_CALLS):
            call()

    return float(np.median(graph_times_ms(calls, device))) / _CALLS * 1e3
