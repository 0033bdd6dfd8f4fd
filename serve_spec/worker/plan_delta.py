"""Plans as differences to the last one: what rank 0 sends to the other ranks every step."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from serve_spec.core.plan import EditedText, ScheduledBatch, ScheduledRequest


class _Longer(NamedTuple):
    """A tuple that keeps the first `num_kept` entries of the one before it."""

    num_kept: int
    added: tuple[Any, ...]


# Fields that grow by a few entries a step, and may be long.
_GROWING = frozenset({"page_ids", "generated_ids"})


@dataclass(frozen=True)
class PlanDelta:
    """A plan without its rows; `rows` holds new requests in full, of others the changed fields."""

    plan: ScheduledBatch
    rows: tuple[ScheduledRequest | dict[str, Any], ...]


class PlanEncoder:
    """Encodes plans for a `PlanDecoder` that has decoded all plans before."""

    def __init__(self) -> None:
        self._known: dict[str, ScheduledRequest] = {}

    def encode(self, plan: ScheduledBatch) -> PlanDelta:
        """Return the difference to the last plan."""
        rows = tuple([self._encode(row) for row in plan.rows])
        self._known = {row.request_id: row for row in plan.rows}
        return PlanDelta(replace(plan, rows=()), rows)

    def _encode(self, row: ScheduledRequest) -> ScheduledRequest | dict[str, Any]:
        known = self._known.get(row.request_id)
        if known is None:
            return row
        changes: dict[str, Any] = {"request_id": row.request_id}
        pairs: list[tuple[str, Any, Any]] = [
            *zip(ScheduledRequest._fields, known, row, strict=True)
        ]
        for name, old, new in pairs:
            if old is new or old == new:
                continue
            changes[name] = new
            if name in _GROWING:
                changes[name] = _longer(old, new)
            elif name == "edited" and old is not None and new is not None:
                longer = _longer(old.token_ids, new.token_ids)
                changes[name] = new.num_prompt_tokens, longer, new.held_ids
        return changes


class PlanDecoder:
    """Restores plans from their differences, in order."""

    def __init__(self) -> None:
        self._known: dict[str, ScheduledRequest] = {}

    def decode(self, delta: PlanDelta) -> ScheduledBatch:
        """Return the plan that was encoded."""
        rows = tuple(
            [row if isinstance(row, ScheduledRequest) else self._decode(row) for row in delta.rows]
        )
        self._known = {row.request_id: row for row in rows}
        return replace(delta.plan, rows=rows)

    def _decode(self, changes: dict[str, Any]) -> ScheduledRequest:
        known = self._known[changes["request_id"]]
        for name, value in changes.items():
            if isinstance(value, _Longer):
                changes[name] = _grown(getattr(known, name), value)
            elif name == "edited" and known.edited is not None and value is not None:
                num_prompt_tokens, longer, held_ids = value
                token_ids = _grown(known.edited.token_ids, longer)
                changes[name] = EditedText(num_prompt_tokens, token_ids, held_ids)
        return known._replace(**changes)


def _longer(old: tuple[Any, ...], new: tuple[Any, ...]) -> _Longer:
    """Return how `new` continues `old`, compared from the start."""
    same = min(len(old), len(new))
    if old[:same] != new[:same]:
        same = next(i for i in range(same) if old[i] != new[i])
    return _Longer(same, new[same:])


def _grown(old: tuple[Any, ...], change: _Longer) -> tuple[Any, ...]:
    return old[: change.num_kept] + change.added
