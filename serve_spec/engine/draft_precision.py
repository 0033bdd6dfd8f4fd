"""In which numbers a draft computes. They touch how many tokens a round commits, never which."""

from __future__ import annotations

import torch

from serve_spec.core.context import torch_dtype
from serve_spec.core.gpu import is_hopper
from serve_spec.models.draft import DraftWeights

# What drafts compute in by themselves beside such weights.
_BESIDE = {"fp8": torch.float16, "int8": torch.float32, "int4": torch.bfloat16}


def draft_weights(name: str, device: torch.device) -> DraftWeights:
    """What drafts read their weights in, for `speculative_draft_model_quantization`.

    Raises:
        ValueError: eight bits asked for where they would bring nothing; names the field.
    """
    if name == "none":
        return "plain"
    if name == "int4":
        return "int4"
    if name == "int8" and device.type != "cpu":
        raise ValueError(
            "speculative_draft_model_quantization='int8': products with eight-bit integers are "
            f"made for CPUs, and this is {device}; use 'auto', which takes fp8 where that is "
            "faster, 'int4' or 'none'"
        )
    if name == "int8":
        return "int8"
    is_faster = device.type == "cuda" and is_hopper(device)
    if name == "fp8" and not is_faster:
        raise ValueError(
            "speculative_draft_model_quantization='fp8': products with eight-bit weights are made "
            f"for GPUs of compute capability 9, and this is {device}; use 'auto' or 'none'"
        )
    return "fp8" if is_faster else "plain"


def draft_dtype(
    name: str, target_dtype: torch.dtype, device: torch.device, weights: DraftWeights
) -> torch.dtype:
    """Resolves `speculative_draft_dtype`.

    auto: float16 beside fp8 weights, which go into it in one instruction; float32 beside int8
    weights and bfloat16 beside int4, whose products take and give it; else bfloat16 for a float32
    target where it is native, else the target's dtype.
    """
    if name != "auto":
        return torch_dtype(name)
    if weights != "plain":
        return _BESIDE[weights]
    on_cpu = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    is_native = device.type == "cuda" or on_cpu()
    return torch.bfloat16 if is_native and target_dtype == torch.float32 else target_dtype
