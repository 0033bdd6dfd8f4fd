"""Which waiting requests move: from a replica that has a queue to one that has free places."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from serve_spec.serving.routing_policy import is_short_of_pages


def requests_to_move(
    not_begun: Mapping[str, Sequence[str]],
    stats: Mapping[str, Mapping[str, Any]],
    num_places: int,
) -> list[str]:
    """Return the requests to withdraw, so that they are routed anew.

    Args:
        not_begun: by replica, requests without a token yet, oldest first.
        stats: by replica, `EngineReplica.record_routing_stats`.
        num_places: requests that a replica runs at once.
    """
    num_free = sum(_free_places(state, num_places) for state in stats.values())
    moving: list[str] = []
    for replica, request_ids in not_begun.items():
        state = stats.get(replica, {})
        num_waiting = state.get("num_waiting") or 0
        # The engine starts requests in order of arrival: the oldest may be computing their prompts.
        num_started = max(len(request_ids) - num_waiting, _num_in_prefill(state))
        taken = request_ids[num_started:][:num_free]
        num_free -= len(taken)
        moving += taken
    return moving


def _num_in_prefill(state: Mapping[str, Any]) -> int:
    return max(0, (state.get("num_running") or 0) - (state.get("batch_size") or 0))


def _free_places(state: Mapping[str, Any], num_places: int) -> int:
    if not state.get("is_healthy", True) or is_short_of_pages(state):
        return 0
    taken = (state.get("num_running") or 0) + (state.get("num_waiting") or 0)
    return max(0, num_places - taken)
