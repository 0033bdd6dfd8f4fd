"""The interface of draft models, their precision, and how one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import torch
from torch import Tensor

from serve_spec.config.algorithms import ALGORITHMS
from serve_spec.core.context import ForwardContext, torch_dtype
from serve_spec.core.machine import is_hopper
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN, ConvertedFormats
from serve_spec.layers.formats.fp8_draft import Fp8DraftWeight
from serve_spec.layers.formats.int4 import Int4Weight, int4_works
from serve_spec.layers.formats.int8 import Int8Weight, int8_works
from serve_spec.layers.module import Layer
from serve_spec.log import get_logger
from serve_spec.models.draft_checkpoint import DraftOptions
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.models.shape import DecoderShape
from serve_spec.parallel.group import SINGLE, TensorParallel

_log = get_logger(__name__)

DraftWeights = Literal["plain", "fp8", "int8", "int4"]
"""Format of a draft's matrices. fp8: an extra copy for products of few tokens; int8, int4: instead
of the stored matrices."""


class DraftHead(Layer):
    """A small autoregressive model over (next token, feature) pairs.

    Draft KV entry j pairs token j+1 with the feature of position j, is at position j of the draft's
    KV pool, and predicts token j+2. Features of computed positions come from the target, through
    `encode`; further drafts read the hidden state that `forward` returned.

    A whole model (`standalone`) reads no features. Its entry j is at the position of token j+1, so
    entry -1 is that of the first token. Medusa heads read only a feature: their drafts do not
    depend on each other, and their pool is empty.

    shape: of this rank's part of its layers, for its KV pool and attention. capture: the hidden
    states that the target's forward records (None: none). feature_dim: width of a target feature, F
    (0 without). hidden_size: width of the recurrent hidden state, H. dtype: of it and of the pool.
    """

    drafter = "autoregressive"
    """How it drafts: see `worker.drafters.base.DRAFTERS`."""
    shift = 0
    """The position of entry j minus j: 0, or 1 for whole models."""
    target_ids: Tensor | None = None
    """The target's id of each draft id, int64 [Vd]; None if both are the same."""
    max_steps: int | None = None
    """The most drafts it can make from one feature; None: no limit."""
    read_elsewhere: tuple[str, ...] = ()
    """Tensors of its checkpoint that `tensors` does not name."""

    def __init__(
        self, shape: DecoderShape, capture: FeatureCapture | None, feature_dim: int
    ) -> None:
        super().__init__()
        self.shape = shape
        self.capture = capture
        self.feature_dim = feature_dim
        self.hidden_size = shape.hidden_size
        self.dtype = torch.get_default_dtype()
        # Real draft ids; logits of others are -inf. None: all are real.
        self.num_ids = shape.num_ids
        # Whether `forward` may compute some tokens only: it has at most one layer.
        self.ends_early = shape.num_layers <= 1

    def encode(self, features: Tensor) -> Tensor:
        """Return hidden [T, H] of target features [T, F]: by default the features themselves."""
        return features.to(self.dtype)

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return next hidden [R, H] of target ids [T] and hidden [T, H], at positions of `ctx`.

        R: the queries of `ctx`, fewer than T only for a head that `ends_early`.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits float32 [R, Vd] of draft `step` from hidden [R, H]."""
        raise NotImplementedError


def load_draft(
    path: Path | str,
    target: Target,
    algorithm: str,
    options: DraftOptions | None = None,
    dtype: torch.dtype | None = None,
    *,
    weights: DraftWeights | Formats = "plain",
) -> DraftHead:
    """Load the draft head in `path` for `target`, on its device and in `dtype` (None: its own).

    weights: formats of its own matrices, by their names in the file, or the name of one for all.
    Those that it shares with the target stay the target's. algorithm: one of `ALGORITHMS`; must
    agree with the files. Raises ValueError for an unknown algorithm or products that this machine
    lacks, CheckpointError for files that cannot be used.
    """
    models = {name: known for name, known in ALGORITHMS.items() if not known.is_ngram}
    if algorithm not in models:
        raise ValueError(
            f"speculative_algorithm={algorithm!r}: has no draft model; use one of {sorted(models)}"
        )
    theirs = target.embed_tokens.weight
    formats = weights if isinstance(weights, Formats) else draft_formats(weights, theirs.device)
    head: DraftHead = models[algorithm].load()(
        path, target, options or DraftOptions(), dtype or theirs.dtype, formats
    )
    if weights in ("int8", "int4") and isinstance(formats, ConvertedFormats):
        _log_conversion(path, weights, formats)
        if theirs.device.type == "cuda":
            torch.cuda.empty_cache()  # the freed memory holds KV pages
    return head


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


def sharing_ranks(shape: DecoderShape, target: Target) -> TensorParallel:
    """Return the ranks that share a draft: the target's, or one if it cannot be split."""
    return target.parallel if shape.divides(target.parallel.size) else SINGLE


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
