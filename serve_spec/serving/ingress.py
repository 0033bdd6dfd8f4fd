"""`Router`: the ingress deployment. It joins the HTTP face to the replicas and decides nothing."""

# No `from __future__ import annotations` here: see `api`.

from typing import Any

from fastapi import FastAPI
from ray import serve

from serve_spec.config import ServeSpecConfig
from serve_spec.serving.admission import Admission
from serve_spec.serving.api import create_api
from serve_spec.serving.fleet import RayFleet
from serve_spec.serving.prometheus import fleet_metrics
from serve_spec.serving.telemetry import DoorTelemetry


class Router:
    """One HTTP app over all engine replicas; `engines` is a handle on their deployment."""

    def __init__(self, engines: Any, config: ServeSpecConfig) -> None:
        context = serve.get_replica_context()
        self._config = config
        self._fleet = RayFleet(engines, context.app_name, context.replica_id.unique_id, config)
        self._fleet.start()
        self._admission = Admission(
            max_in_flight=config.replica.num_replicas * requests_per_replica(config),
            max_queued=config.router.max_queued_requests,
            max_client_share=config.router.max_client_share,
        )
        self._telemetry = DoorTelemetry(context, self._show)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The hook with which Serve asks for the app, in the replica's own process."""
        return create_api(
            self._config, self._fleet, self._admission, self._telemetry.record, fleet_metrics
        )

    def _show(self) -> dict[str, object]:
        return {**self._admission.snapshot(), **self._fleet.batching()}


def requests_per_replica(config: ServeSpecConfig) -> int:
    """Return the most requests the router gives a replica: what it runs, and a few to follow.

    In a replica requests wait in order of arrival; here they are shared out between clients.
    """
    num_places = config.scheduler.max_num_seqs
    return min(config.replica.max_ongoing_requests, num_places + max(1, num_places // 8))
