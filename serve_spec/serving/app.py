"""`build_app`: build the Ray Serve application from a configuration, and its ingress `Router`."""

# No `from __future__ import annotations` here: Serve reads the annotation of the builder.

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from fastapi import FastAPI
from ray import serve
from ray.exceptions import RayError
from ray.serve import Application
from starlette.types import ASGIApp, Message, Receive, Scope, Send

import serve_spec
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.flags import read_value
from serve_spec.config.root import is_file, leaf_sections
from serve_spec.log import get_logger
from serve_spec.serving.admission import Admission
from serve_spec.serving.api import create_api
from serve_spec.serving.engine_actor import placement_of
from serve_spec.serving.fleet import RayFleet
from serve_spec.serving.proxy import CALLBACK, CALLBACK_VARIABLE
from serve_spec.serving.replica import EngineReplica
from serve_spec.serving.telemetry import RouterTelemetry

logger = get_logger(__name__)

ENGINE_LOOP = "serve_spec.serving.engine_actor:start_engine"

# Serve may build the app in another directory; relative paths are looked up here too.
_CHECKOUT = Path(serve_spec.__file__).parents[1]
# `Admission` limits requests in the router; Serve's own limit must not apply before it.
_NO_LIMIT = 1_000_000
_DRAIN_POLL_S = 0.5


def build_app(args: dict[str, Any]) -> Application:
    """Return the application: `Router` in front of `EngineReplica`s.

    args: `model`, a hub id, a checkpoint's folder or asset:NAME, or `config`, a configuration file
    (absolute, or relative to the current directory or the checkout) or a mapping with its content.
    Any leaf key of the configuration overrides it. `engine_loop` is an import path that replaces
    the engine.

    Raises:
        ConfigError: the configuration is missing or invalid.
    """
    options = dict(args)
    engine_loop = options.pop("engine_loop", ENGINE_LOOP)
    config = load_config(options).pinned()
    replica = config.replica
    engines = serve.deployment(
        name="EngineReplica",
        num_replicas=replica.num_replicas,
        # Requests arrive over sockets, which Serve does not count; the router limits them.
        max_ongoing_requests=_NO_LIMIT,
        **placement_of(config),
        health_check_period_s=replica.health_check_period_s,
        health_check_timeout_s=replica.health_check_timeout_s,
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
    )(EngineReplica).bind(config, engine_loop)
    router = serve.deployment(
        name="Router",
        max_ongoing_requests=_NO_LIMIT,
        # It mostly waits, so it must not reserve a core that an engine needs.
        ray_actor_options={"num_cpus": 0},
        health_check_period_s=replica.health_check_period_s,
        health_check_timeout_s=replica.health_check_timeout_s,
        # Streams pass through the router, so it has to outlive them.
        graceful_shutdown_timeout_s=replica.graceful_shutdown_timeout_s,
        graceful_shutdown_wait_loop_s=_DRAIN_POLL_S,
    )(serve.ingress()(Router))
    return router.bind(engines, config)


def load_config(args: Mapping[str, Any]) -> ServeSpecConfig:
    """Return the configuration for the application's arguments; see `build_app`.

    Raises:
        ConfigError: it is missing or invalid.
    """
    overrides = dict(args)
    source, model = overrides.pop("config", None), overrides.pop("model", None)
    if source is None and model is None:
        raise ConfigError(
            "config: missing; give a checkpoint, for example model=asset:tiny, or a file, for "
            "example config=configs/tiny.yaml"
        )
    for key, value in overrides.items():
        # `serve run ... speculative_num_steps=1` passes strings.
        if isinstance(value, str) and key in leaf_sections():
            overrides[key] = read_value(key, value, key)
    if source is None:
        source = model if not is_file(model) else _find(str(model))
    else:
        source = source if isinstance(source, Mapping) else _find(str(source))
        overrides |= {} if model is None else {"path": model}
    config = ServeSpecConfig.load(source, **overrides)
    if not (config.router.api_keys or config.router.allow_anonymous):
        raise ConfigError(
            "router.allow_anonymous=false: router.api_keys is empty, so anyone could use the "
            "server; set api_keys (SERVE_SPEC_ROUTER__API_KEYS='[\"KEY\"]') or allow_anonymous=true"
        )
    return config


def _find(name: str) -> Path:
    path = Path(name).expanduser()
    places = [path] if path.is_absolute() else [Path.cwd() / path, _CHECKOUT / path]
    for place in places:
        if place.is_file():
            return place
    tried = ", ".join(str(place) for place in places)
    raise ConfigError(f"config={name!r}: no such file; looked for {tried}")


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
        api = create_api(self._config, self._fleet, self._admission, self._telemetry.record)
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
