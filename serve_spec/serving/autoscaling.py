"""Ray Serve's extension point for autoscaling: how many replicas the requests ask for."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

NUM_REQUESTS = "num_requests"
"""What replicas report: requests that are with them, running or waiting."""


def replicas_for_requests(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Replicas for `target_ongoing_requests` on each, and a state that is not used.

    Serve's own policy counts calls, and a call of ours holds many requests. Bounds, delays and
    factors of the `autoscaling_config` are Serve's to apply.
    """
    reported = (context.aggregated_metrics or {}).get(NUM_REQUESTS)
    if not reported:  # no replica has reported yet
        return context.target_num_replicas, {}
    assert context.config is not None, "Serve asks where there is an autoscaling_config"
    return sum(reported.values()) / context.config.get_target_ongoing_requests(), {}
