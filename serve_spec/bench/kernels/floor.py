"""The floor of a step: its matrix products alone, and how fast memory can be copied."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import torch.nn.functional as F

from serve_spec.bench.kernels.aims import LINEARS_MS
from serve_spec.bench.kernels.setting import LeftOut, Row, Section, Setting
from serve_spec.bench.kernels.times import graph_times_ms, times_ms
from serve_spec.layers.linear import Linear

_COPIED_BYTES = {"cuda": 1 << 30, "cpu": 1 << 25}


@torch.inference_mode()
def floor(setting: Setting) -> Section:
    """Every product of the target, head included, on random rows: torch's, and this package's."""
    linears = [module for module in setting.target.modules() if isinstance(module, Linear)]
    if not all(linear.weight.numel() for linear in linears):
        raise LeftOut("weights are packed for this CPU; plain products need a GPU")
    num_bytes = sum(linear.weight.nbytes for linear in linears)
    bytes_per_ms = _copied_bytes_per_ms(setting.device)
    facts = {
        "weights_gb": num_bytes / 1e9,
        "copy_gb_per_s": bytes_per_ms / 1e6,
        "weights_at_copy_speed_ms": num_bytes / bytes_per_ms,
    }
    on_gpu = setting.device.type == "cuda"
    left_out = [] if on_gpu else ["CUDA graph of the products: they ran one by one"]
    rows = [_row(setting, linears, num_bytes, count) for count in setting.sizes.rows]
    return Section(rows, facts, left_out=left_out)


def _copied_bytes_per_ms(device: torch.device) -> float:
    """Of random data; a byte that is copied is read and written, and counts twice."""
    num_bytes = _COPIED_BYTES[device.type]
    source = torch.randint(256, (num_bytes,), dtype=torch.uint8, device=device)
    copy = torch.empty_like(source)
    return 2 * num_bytes / float(np.median(times_ms(lambda: copy.copy_(source), device)))


def _row(setting: Setting, linears: Sequence[Linear], num_bytes: int, num_rows: int) -> Row:
    weights = [linear.weight for linear in linears]
    inputs = {
        width: torch.randn(num_rows, width, dtype=weights[0].dtype, device=setting.device)
        for width in {weight.shape[1] for weight in weights}
    }

    def theirs() -> None:
        for weight in weights:
            F.linear(inputs[weight.shape[1]], weight)

    def ours() -> None:
        for linear in linears:
            linear(inputs[linear.weight.shape[1]])

    low, middle, high = np.percentile(graph_times_ms(theirs, setting.device), (10, 50, 90))
    earlier = LINEARS_MS.get(num_rows) if setting.is_reference else None
    return {
        "rows": num_rows,
        "torch_ms": float(middle),
        "p10_ms": float(low),
        "p90_ms": float(high),
        "torch_gb_per_s": num_bytes / middle / 1e6,
        "ours_ms": float(np.median(graph_times_ms(ours, setting.device))),
        "earlier_ms": earlier,
    }
