"""Targets and draft heads, loaded from published checkpoints."""

from serve_spec.models.draft import DraftHead as DraftHead
from serve_spec.models.draft import load_draft as load_draft
from serve_spec.models.draft_checkpoint import DraftOptions as DraftOptions
from serve_spec.models.interfaces import FeatureCapture as FeatureCapture
from serve_spec.models.loader import load_target as load_target
