"""Attention over a paged pool, behind the contract of `core/context.py`."""

from __future__ import annotations

import logging
from functools import cache

import torch

from serve_spec.attention.flashinfer_backend import FlashInferAttention, why_not
from serve_spec.attention.torch_backend import HeadShape, TorchAttention
from serve_spec.core.context import AttentionBackend
from serve_spec.log import get_logger

__all__ = ["FlashInferAttention", "HeadShape", "TorchAttention", "create_attention_backend"]

logger = get_logger(__name__)


def create_attention_backend(
    name: str,
    shape: HeadShape,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
) -> AttentionBackend:
    """The backend called `name` for a model of `shape` (a `ModelShape` will do).

    dtype: of the keys and values. `auto` is FlashInfer where it runs, torch elsewhere.

    Raises:
        ValueError: no backend of that name, or one that can not serve this model here.
    """
    device = torch.device(device)
    if name == "torch":
        return TorchAttention(shape)
    if name == "auto":
        return _fastest(shape, device, dtype)
    if name != "flashinfer":
        raise ValueError(
            f"attention_backend={name!r} is unknown; use one of ['auto', 'flashinfer', 'torch']"
        )
    if reason := why_not(shape, device, dtype):
        raise ValueError(f"attention_backend='flashinfer': {reason}")
    return FlashInferAttention(shape, device, dtype)


def _fastest(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> AttentionBackend:
    reason = why_not(shape, device, dtype)
    level = logging.INFO
    if reason is None:
        try:
            backend = FlashInferAttention(shape, device, dtype)
        except Exception as error:  # no compiler, say; torch serves everybody
            reason, level = f"flashinfer fails on this machine: {error!r:.200}", logging.WARNING
        else:
            _say(level, "flashinfer", "the fastest one that runs here")
            return backend
    _say(level, "torch", reason)
    return TorchAttention(shape)


@cache
def _say(level: int, name: str, reason: str) -> None:
    """Logs a choice once, however many models make it."""
    logger.log(level, "attention_backend='auto': %s (%s)", name, reason)
