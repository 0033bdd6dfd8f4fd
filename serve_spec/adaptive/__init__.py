"""How far to speculate: plain arithmetic. No torch, no clock, no files, no Ray."""

from serve_spec.adaptive.controller import AdaptiveController
from serve_spec.adaptive.params import AdaptiveSpeculativeParams
from serve_spec.adaptive.policy import Reason, StaticPolicy, StepPolicy
from serve_spec.adaptive.slot import AdaptiveStepSlot

__all__ = [
    "AdaptiveController",
    "AdaptiveSpeculativeParams",
    "AdaptiveStepSlot",
    "Reason",
    "StaticPolicy",
    "StepPolicy",
]
