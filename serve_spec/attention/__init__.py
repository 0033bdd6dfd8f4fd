"""Attention over a paged pool, behind the contract of `core/context.py`."""

from __future__ import annotations

from serve_spec.attention.torch_backend import HeadShape, TorchAttention
from serve_spec.core.context import AttentionBackend

__all__ = ["HeadShape", "TorchAttention", "create_attention_backend"]

_BACKENDS = {"torch": TorchAttention}


def create_attention_backend(name: str, shape: HeadShape) -> AttentionBackend:
    """The backend called `name` for a model of `shape` (a `ModelShape` will do).

    Raises:
        ValueError: no backend of that name.
    """
    if name not in _BACKENDS:
        raise ValueError(f"attention_backend={name!r} is unknown; use one of {sorted(_BACKENDS)}")
    return _BACKENDS[name](shape)
