"""The shipped adaptive configs, as SGLang publishes them; `configs/adaptive/` shows the same."""

from __future__ import annotations

from types import MappingProxyType
from typing import Any

from serve_spec.config.adaptive_file import SlotConfig, load_slots

CONSERVATIVE: MappingProxyType[str, Any] = MappingProxyType(
    {
        "1": {"candidate_steps": [1, 3, 7], "down_hysteresis": -0.25},
        "8": {"candidate_steps": [1, 3], "down_hysteresis": 0.0},
        "32": {"candidate_steps": [1], "down_hysteresis": 0.0},
    }
)
"""Few steps for large batches; used when no config is named."""

AGGRESSIVE: MappingProxyType[str, Any] = MappingProxyType(
    {
        "down_hysteresis": -0.25,
        "1": {"candidate_steps": [1, 3, 7]},
        "8": {"candidate_steps": [1, 3, 7], "ceiling_coeff": 3.0},
        "64": {"candidate_steps": [1, 3], "ceiling_coeff": 1.67},
        "128": {"candidate_steps": [1, 3], "ceiling_coeff": 1.2},
    }
)
"""Deep drafts also for large batches, capped by what was accepted of late."""


def conservative_slots(max_steps: int | None) -> dict[int, SlotConfig]:
    """The slots of `CONSERVATIVE`, none deeper than whoever drafts can go; None: any depth."""
    slots = load_slots(CONSERVATIVE)
    if max_steps is None:
        return slots

    def within(slot: SlotConfig) -> SlotConfig:
        steps = tuple(sorted({min(each, max_steps) for each in slot.candidate_steps}))
        return slot.model_copy(update={"candidate_steps": steps})

    return {key: within(slot) for key, slot in slots.items()}
