"""The adaptive config: candidate depths per batch-size slot, and how fast a slot adapts.

Both generations of SGLang's JSON file work unchanged:

    flat   {"candidate_steps": [1, 3, 7], "ema_alpha": 0.2}            one slot for all sizes
    slots  {"1": {"candidate_steps": [1, 3, 7]}, "8": {"candidate_steps": [1, 3]},
            "ema_alpha": 0.2}          integer keys are lower bounds, the rest are shared defaults
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, Literal, Self, TypeAlias

from pydantic import Field, field_validator, model_validator

from serve_spec.config import base
from serve_spec.config.base import ConfigError, Refusal, StrictModel

Preset: TypeAlias = Literal["conservative", "aggressive"]

PRESETS: Mapping[str, Mapping[str, Any]] = {
    # Few steps at large batch sizes; the default.
    "conservative": {
        "1": {"candidate_steps": [1, 3, 7], "down_hysteresis": -0.25},
        "8": {"candidate_steps": [1, 3], "down_hysteresis": 0.0},
        "32": {"candidate_steps": [1], "down_hysteresis": 0.0},
    },
    # Deep drafts also at large batch sizes, limited by recent acceptance.
    "aggressive": {
        "down_hysteresis": -0.25,
        "1": {"candidate_steps": [1, 3, 7]},
        "8": {"candidate_steps": [1, 3, 7], "ceiling_coeff": 3.0},
        "64": {"candidate_steps": [1, 3], "ceiling_coeff": 1.67},
        "128": {"candidate_steps": [1, 3], "ceiling_coeff": 1.2},
    },
}
"""The adaptive configs that SGLang publishes; `configs/adaptive/` holds the same as files."""

MAX_TREE_TOKENS = 64
"""Most tokens of a tree or chain, root included; as `core.draft.MAX_TREE_TOKENS`."""
MAX_STEPS = MAX_TREE_TOKENS - 1
"""Maximum depth of a chain or tree; deeper drafts are rarely accepted."""

_TREES_FIX = (
    "give pairs [num_steps, num_draft_tokens], root included, such as [[4, 16], [2, 6]]; []: "
    "chains only"
)
# Keys of a slot that a strategy reads, if not all.
READ_BY: Mapping[str, tuple[str, ...]] = {
    "goodput": ("candidate_steps", "candidate_trees"),
    "per_request": ("candidate_steps",),
    "static": (),
}
_STEPS_FIX = f"give a non-empty list of integers from 0 to {MAX_STEPS}, for example [1, 3, 7]"


class SlotConfig(StrictModel):
    """Settings of one batch-size slot. Keys and defaults are those of SGLang's file."""

    candidate_steps: tuple[int, ...] = (1, 3, 7)
    """Speculation depths the slot may use, ascending; 0: no speculation."""
    candidate_trees: tuple[tuple[int, int], ...] | None = None
    """Trees that may be drafted if speculative_eagle_topk > 1, as [num_steps, num_draft_tokens]
    with the root counted; []: chains only; null: the configured tree and smaller ones (ema: one of
    each depth)."""
    ema_alpha: float = Field(0.2, gt=0, le=1)
    """Weight of the newest round in the moving average of accepted drafts."""
    update_interval: int = Field(5, ge=1)
    """Rounds between two decisions."""
    warmup_batches: int = Field(10, ge=0)
    """Rounds before the first decision."""
    down_hysteresis: float = -0.25
    """Accepted drafts added to the threshold for a smaller depth."""
    up_hysteresis: float = 0.0
    """Accepted drafts added to the threshold for a larger depth."""
    ceiling_coeff: float = 0.0
    """Limit a depth that does not rise to ceil(average * ceiling_coeff); 0 or less: no limit."""

    @field_validator("candidate_steps", mode="before")
    @classmethod
    def _ladder(cls, value: object) -> object:
        if not isinstance(value, list | tuple) or not value or not all(map(_is_depth, value)):
            raise Refusal("candidate_steps", value, _STEPS_FIX)
        return tuple(sorted(set(value)))

    @field_validator("candidate_trees", mode="before")
    @classmethod
    def _shapes(cls, value: object) -> object:
        if value is None:
            return None
        if not isinstance(value, list | tuple) or not all(map(_is_shape, value)):
            raise Refusal("candidate_trees", value, _TREES_FIX)
        return tuple(sorted({(steps, tokens) for steps, tokens in value}))

    @model_validator(mode="after")
    def _within_bounds(self) -> Self:
        most = self.candidate_steps[-1]
        depth, tokens = max(self.candidate_trees or ((0, 0),))
        if depth > most:
            fix = f"candidate_steps end at {most}; add {depth} there or remove the tree"
            raise Refusal("candidate_trees", [depth, tokens], fix)
        return self


AdaptiveSource: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | Mapping[int, SlotConfig]
"""An adaptive config: a JSON file, a mapping, parsed slots or the name of a preset."""


def slot_of(keys: Collection[int], batch_size: int) -> int:
    """Return the slot of a batch size: the largest of `keys` not above it, or the smallest."""
    return max((key for key in keys if key <= batch_size), default=min(keys))


def load_slots(source: AdaptiveSource = "conservative") -> dict[int, SlotConfig]:
    """Return an adaptive config's slots by least batch size, ascending, or raise ConfigError."""
    if isinstance(source, str) and source in PRESETS:
        source = PRESETS[source]
    if isinstance(source, Mapping):
        return _parse_slots(source)
    file = Path(source)
    text = base.read_text(file)
    try:
        return _parse_slots(base.parse_json_object(text, "an adaptive config"))
    except ConfigError as error:
        raise ConfigError(*(f"{file}: {problem}" for problem in error.problems)) from None


def _parse_slots(config: Mapping[str, Any] | Mapping[int, SlotConfig]) -> dict[int, SlotConfig]:
    keyed = {str(key): value for key, value in config.items()}
    slots = {key: value for key, value in keyed.items() if key.isdecimal()}
    shared = {key: value for key, value in keyed.items() if key not in slots}
    if not keyed:
        example = '{"1": {"candidate_steps": [1, 3, 7]}}'
        raise ConfigError(f"adaptive config={dict(config)!r}: holds no slot; give one: {example}")
    defaults = base.validate(SlotConfig, shared)
    if not slots:
        return {1: defaults}
    parsed: dict[int, SlotConfig] = {}
    problems: list[str] = []
    for key in sorted(slots, key=int):
        try:
            if int(key) in parsed:
                raise ConfigError(f"{key}: batch size {int(key)} is given twice; keep one")
            parsed[int(key)] = parse_slot(slots[key], shared, where=key)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)
    return parsed


def parse_slot(
    own: object, shared: Mapping[str, Any] | None = None, *, where: str = ""
) -> SlotConfig:
    """Return a slot: its own keys over the shared defaults; raise ConfigError if invalid."""
    if isinstance(own, SlotConfig):
        return own
    if not isinstance(own, Mapping):
        example = '{"candidate_steps": [1, 3]}'
        raise ConfigError(f"{where}={own!r}: not an object; give a slot such as {example}")
    if "candidate_steps" not in own:
        name = ".".join(filter(None, [where, "candidate_steps"]))
        raise ConfigError(f"{name}: missing; {_STEPS_FIX}")
    return base.validate(SlotConfig, {**(shared or {}), **own}, where=where)


def _is_depth(value: object) -> bool:
    return type(value) is int and 0 <= value <= MAX_STEPS  # bool is an int, too


def _is_shape(value: object) -> bool:
    """Return whether `value` is [num_steps, num_draft_tokens] of a tree."""
    if not isinstance(value, list | tuple) or [type(n) for n in value] != [int, int]:
        return False
    num_steps, num_tokens = value
    return bool(1 <= num_steps < num_tokens)
