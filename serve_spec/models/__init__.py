"""Targets and draft heads, loaded from published checkpoints."""

from serve_spec.models.draft import DraftHead, load_draft
from serve_spec.models.draft_checkpoint import DraftOptions
from serve_spec.models.llama import TARGETS, FeatureCapture, Llama, TargetOutput, load_target
from serve_spec.models.shape import ModelShape

__all__ = [
    "TARGETS",
    "DraftHead",
    "DraftOptions",
    "FeatureCapture",
    "Llama",
    "ModelShape",
    "TargetOutput",
    "load_draft",
    "load_target",
]
