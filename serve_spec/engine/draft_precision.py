"""Precision of draft weights and activations. It affects how many drafts are accepted only."""

from __future__ import annotations

import torch

from serve_spec.core.context import torch_dtype
from serve_spec.core.machine import is_hopper
from serve_spec.models.draft import DraftWeights

# Default compute dtype for quantized weights.
_QUANTIZED_DTYPES = {"fp8": torch.float16, "int8": torch.float32, "int4": torch.bfloat16}


def draft_weights(name: str, device: torch.device) -> DraftWeights:
    """Return the weight format for `speculative_draft_model_quantization`.

    Raises:
        ValueError: the device has no fast products of the format; names the field.
    """
    if name == "none":
        return "plain"
    if name == "int4":
        return "int4"
    if name == "int8" and device.type != "cpu":
        raise ValueError(
            "speculative_draft_model_quantization='int8': only CPUs are supported, and this is "
            f"{device}; use 'auto' (fp8 if that is faster), 'int4' or 'none'"
        )
    if name == "int8":
        return "int8"
    is_faster = device.type == "cuda" and is_hopper(device)
    if name == "fp8" and not is_faster:
        raise ValueError(
            "speculative_draft_model_quantization='fp8': only GPUs of compute capability 9 are "
            f"supported, and this is {device}; use 'auto' or 'none'"
        )
    return "fp8" if is_faster else "plain"


def draft_dtype(
    name: str, target_dtype: torch.dtype, device: torch.device, weights: DraftWeights
) -> torch.dtype:
    """Return the dtype for `speculative_draft_dtype`.

    auto: for quantized weights the dtype of their products (float16 for fp8, float32 for int8,
    bfloat16 for int4); else bfloat16 for a float32 target if it is native, else the target's dtype.
    """
    if name != "auto":
        return torch_dtype(name)
    if weights != "plain":
        return _QUANTIZED_DTYPES[weights]
    on_cpu = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    is_native = device.type == "cuda" or on_cpu()
    return torch.bfloat16 if is_native and target_dtype == torch.float32 else target_dtype
