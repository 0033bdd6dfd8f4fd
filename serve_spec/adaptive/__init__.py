"""How far to speculate: arithmetic. No torch, no clock, no files, no Ray."""

from serve_spec.adaptive.controller import AdaptiveController
from serve_spec.adaptive.ema import AdaptiveSpeculativeParams, AdaptiveStepSlot
from serve_spec.adaptive.per_request import AdaptiveSpeculator
from serve_spec.adaptive.policy import PolicyContext, StaticPolicy, StepPolicy
from serve_spec.adaptive.settings import PolicySettings

__all__ = [
    "AdaptiveController",
    "AdaptiveSpeculativeParams",
    "AdaptiveSpeculator",
    "AdaptiveStepSlot",
    "PolicyContext",
    "PolicySettings",
    "StaticPolicy",
    "StepPolicy",
]
