"""How a draft is loaded, and its precision."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch

from serve_spec.core.context import torch_dtype
from serve_spec.core.machine import is_hopper
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN, ConvertedFormats
from serve_spec.layers.formats.fp8_draft import Fp8DraftWeight
from serve_spec.layers.formats.int4 import Int4Weight, int4_works
from serve_spec.layers.formats.int8 import Int8Weight, int8_works
from serve_spec.log import get_logger
from serve_spec.models.drafts.base import Draft, DraftOptions, load_family
from serve_spec.models.drafts.checkpoint import open_draft
from serve_spec.models.interfaces import Target

_log = get_logger(__name__)

DraftWeights = Literal["plain", "fp8", "int8", "int4"]
"""Format of a draft's matrices."""


def load_draft(
    path: Path | str,
    target: Target,
    algorithm: str,
    options: DraftOptions | None = None,
    dtype: torch.dtype | None = None,
    *,
    weights: DraftWeights | Formats = "plain",
) -> Draft:
    """Load the draft in `path` for `target`, on its device and in `dtype` (None: its own).

    weights: formats of its own matrices, by their names in the file, or the name of one for all,
    unless the file is quantized. Those that it shares with the target stay the target's. algorithm:
    that of a `DraftFamily`; must agree with the files. Raises ValueError for an unknown algorithm,
    or products that this machine lacks, CheckpointError for files that cannot be used.
    """
    family = load_family(algorithm)
    theirs = target.embed_tokens.weight
    formats = weights if isinstance(weights, Formats) else draft_formats(weights, theirs.device)
    options = options or DraftOptions()
    file = open_draft(path, algorithm, options.load_format)
    if file.formats is not None and not isinstance(weights, Formats):
        formats = file.formats
    options = replace(options, dtype=dtype or theirs.dtype, formats=formats)
    head = family.load(file, target, options)
    _log.info("%s draft %s: %s", algorithm, path, head.sizes)
    if weights in ("int8", "int4") and isinstance(formats, ConvertedFormats):
        _log_conversion(path, weights, formats)
        if theirs.device.type == "cuda":
            torch.cuda.empty_cache()  # the freed memory holds KV pages
    return head


def check_draft(path: Path | str, target: Target, algorithm: str, options: DraftOptions) -> Draft:
    """Return the head without weights; raise what `load_draft` would, from the files' headers.

    target: on the meta device.
    """
    file = open_draft(path, algorithm, options.load_format)
    options = replace(options, formats=file.formats or options.formats)
    return load_family(algorithm).check(file, target, options)


def draft_formats(weights: DraftWeights, device: torch.device) -> Formats:
    """Return the formats that store all matrices as `weights`; ValueError if torch lacks it."""
    if weights == "plain":
        return PLAIN
    if weights == "fp8":
        return ConvertedFormats(Fp8DraftWeight)
    if not (int4_works(device) if weights == "int4" else int8_works()):
        raise ValueError(
            f"speculative_draft_model_quantization={weights!r}: not supported by torch "
            f"{torch.__version__} on {device}; use 'none'"
        )
    return ConvertedFormats(Int4Weight.convert if weights == "int4" else Int8Weight.convert)


def _log_conversion(path: Path | str, name: str, formats: ConvertedFormats) -> None:
    _log.info(
        "%s: %d matrices in %s, %.1f MiB",
        path, formats.num_converted, name, formats.num_bytes / 2**20,
    )  # fmt: skip
    if formats.num_plain:
        _log.warning(
            "%s: %d of %d draft matrices keep their format: %s products do not support their shape",
            path, formats.num_plain, formats.num_plain + formats.num_converted, name,
        )  # fmt: skip


# Default compute dtype for quantized weights.
_QUANTIZED_DTYPES = {"fp8": torch.float16, "int8": torch.float32, "int4": torch.bfloat16}


def draft_weights(name: str, device: torch.device) -> DraftWeights:
    """Return the weight format for `speculative_draft_model_quantization`.

    Raises ValueError if the device has no fast products of it.
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
