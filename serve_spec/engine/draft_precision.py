"""In which numbers a draft computes. They touch how many tokens a round commits, never which."""

from __future__ import annotations

import torch

from serve_spec.core.context import torch_dtype
from serve_spec.core.gpu import is_hopper


def keeps_eight_bit(name: str, device: torch.device) -> bool:
    """Whether drafts read their weights in eight bits, for `speculative_draft_model_quantization`.

    Raises:
        ValueError: fp8 asked for where it would bring nothing; names the field.
    """
    if name == "none":
        return False
    is_faster = device.type == "cuda" and is_hopper(device)
    if name == "fp8" and not is_faster:
        raise ValueError(
            "speculative_draft_model_quantization='fp8': products with eight-bit weights are made "
            f"for GPUs of compute capability 9, and this is {device}; use 'auto' or 'none'"
        )
    return is_faster


def draft_dtype(
    name: str, target_dtype: torch.dtype, device: torch.device, *, eight_bit: bool
) -> torch.dtype:
    """Resolves `speculative_draft_dtype`.

    auto: float16 beside eight-bit weights, which go into it in one instruction; else bfloat16 for
    a float32 target where it is native, else the target's dtype.
    """
    if name != "auto":
        return torch_dtype(name)
    if eight_bit:
        return torch.float16
    on_cpu = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    is_native = device.type == "cuda" or on_cpu()
    return torch.bfloat16 if is_native and target_dtype == torch.float32 else target_dtype
