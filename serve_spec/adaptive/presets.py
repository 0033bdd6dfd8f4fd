"""The preset that decides when no adaptive config is named."""

from __future__ import annotations

from serve_spec.config.adaptive_file import SlotConfig, load_slots


def conservative_slots(max_steps: int | None) -> dict[int, SlotConfig]:
    """Return the slots of preset `conservative`, none deeper than `max_steps` (None: any depth)."""
    slots = load_slots("conservative")
    if max_steps is None:
        return slots

    def within(slot: SlotConfig) -> SlotConfig:
        steps = tuple(sorted({min(each, max_steps) for each in slot.candidate_steps}))
        return slot.model_copy(update={"candidate_steps": steps})

    return {key: within(slot) for key, slot in slots.items()}
