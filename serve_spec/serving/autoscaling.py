"""Autoscaling policy for Ray Serve, based on the number of requests."""

from __future__ import annotations

from typing import Any

from ray.serve.config import AutoscalingContext

NUM_REQUESTS = "num_requests"
"""Metric that replicas report: running and waiting requests."""


def replicas_for_requests(context: AutoscalingContext) -> tuple[float, dict[str, Any]]:
    """Return the replicas needed for `target_ongoing_requests` on each, and an unused state.

    Serve's own policy counts calls, but requests here arrive over sockets. Serve still applies the
    bounds, delays and factors of `autoscaling_config`.
    """
    reported = (context.aggregated_metrics or {}).get(NUM_REQUESTS)
    if not reported:  # no replica has reported yet
        return context.target_num_replicas, {}
    assert context.config is not None, "Serve calls this only with an autoscaling_config"
    return sum(reported.values()) / context.config.get_target_ongoing_requests(), {}
