"""Targets and draft heads, loaded from published checkpoints."""

from serve_spec.models.draft import DraftHead as DraftHead
from serve_spec.models.draft import load_draft as load_draft
from serve_spec.models.draft_checkpoint import DraftOptions as DraftOptions
from serve_spec.models.llama import TARGETS as TARGETS
from serve_spec.models.llama import FeatureCapture as FeatureCapture
from serve_spec.models.llama import Llama as Llama
from serve_spec.models.llama import TargetOutput as TargetOutput
from serve_spec.models.llama import load_target as load_target
from serve_spec.models.shape import ModelShape as ModelShape
