"""How far to speculate: arithmetic. No torch, no clock, no files, no Ray."""

from serve_spec.adaptive.controller import AdaptiveController, PolicySettings
from serve_spec.adaptive.params import AdaptiveSpeculativeParams
from serve_spec.adaptive.policy import Reason, StaticPolicy, StepPolicy
from serve_spec.adaptive.slot import AdaptiveStepSlot
from serve_spec.adaptive.speculator import AdaptiveSpeculator

__all__ = [
    "AdaptiveController",
    "AdaptiveSpeculativeParams",
    "AdaptiveSpeculator",
    "AdaptiveStepSlot",
    "PolicySettings",
    "Reason",
    "StaticPolicy",
    "StepPolicy",
]
