"""Targets and draft heads, loaded from published checkpoints."""

from serve_spec.models.drafts.base import DraftHead as DraftHead
from serve_spec.models.drafts.base import DraftOptions as DraftOptions
from serve_spec.models.drafts.loader import load_draft as load_draft
from serve_spec.models.interfaces import FeatureCapture as FeatureCapture
from serve_spec.models.loader import load_target as load_target
