"""`Router`: the ingress deployment. It joins the HTTP face to the replicas and decides nothing."""

# No `from __future__ import annotations` here: see `api`.

import os
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_spec.config import ServeSpecConfig
from serve_spec.log import get_logger
from serve_spec.serving.admission import Admission
from serve_spec.serving.api import create_api
from serve_spec.serving.fleet import RayFleet
from serve_spec.serving.proxy import CALLBACK, CALLBACK_VARIABLE
from serve_spec.serving.telemetry import RouterTelemetry, fleet_metrics

logger = get_logger(__name__)


class Router:
    """One HTTP app over all engine replicas; `engines` is a handle on their deployment."""

    def __init__(self, engines: Any, config: ServeSpecConfig) -> None:
        if CALLBACK_VARIABLE not in os.environ:
            logger.warning(
                "%s is not set: there is no time limit for headers, and the answers of a killed "
                "router break off; set it to %s before Ray starts",
                CALLBACK_VARIABLE,
                CALLBACK,
            )
        context = serve.get_replica_context()
        self._config = config
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        name = context.replica_id.unique_id
        self._fleet = RayFleet(engines, context.app_name, name, host, config)
        self._fleet.start()
        self._admission = Admission(
            max_in_flight=config.replica.num_replicas * requests_per_replica(config),
            max_queued=config.router.max_queued_requests,
            max_client_share=config.router.max_client_share,
        )
        self._telemetry = RouterTelemetry(context, self._show)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The hook with which Serve asks for the app, in the replica's own process."""
        api = create_api(
            self._config, self._fleet, self._admission, self._telemetry.record, fleet_metrics
        )
        api.add_middleware(FailedReads)
        return api

    def _show(self) -> dict[str, object]:
        return {**self._admission.snapshot(), **self._fleet.batching()}


def requests_per_replica(config: ServeSpecConfig) -> int:
    """Return the most requests the router gives a replica: what it runs, and a few to follow.

    In a replica requests wait in order of arrival; here they are shared out between clients.
    """
    num_places = config.scheduler.max_num_seqs
    return min(config.replica.max_ongoing_requests, num_places + max(1, num_places // 8))


class FailedReads:
    """Report a read from the proxy that Ray fails as what it means: the client has left.

    Serve cancels such a read when a client leaves, and Ray raises an error of its own for it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass everything on."""

        async def read() -> Message:
            try:
                return await receive()
            except RayError:
                return {"type": "http.disconnect"}

        await self._app(scope, read if scope["type"] == "http" else receive, send)
