"""`build_app`: build the Ray Serve application from a configuration."""

# No `from __future__ import annotations` here: Serve reads the annotation of the builder.

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve
from ray.serve import Application

import serve_spec
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.root import parse_override
from serve_spec.serving.engine_actor import placement_of
from serve_spec.serving.ingress import Router
from serve_spec.serving.replica import EngineReplica

ENGINE_LOOP = "serve_spec.serving.engine_actor:start_engine"

# Serve may build the app in another directory; relative paths are looked up here too.
_CHECKOUT = Path(serve_spec.__file__).parents[1]
# `Admission` limits requests in the router; Serve's own limit must not apply before it.
_NO_LIMIT = 1_000_000
_DRAIN_POLL_S = 0.5


def build_app(args: dict[str, Any]) -> Application:
    """Return the application: `Router` in front of `EngineReplica`s.

    args: `config`, a configuration file (absolute, or relative to the current directory or the
    checkout) or a mapping with its content. Any leaf key of the configuration overrides it.
    `engine_loop` is an import path that replaces the engine.

    Raises:
        ConfigError: the configuration is missing or invalid.
    """
    options = dict(args)
    engine_loop = options.pop("engine_loop", ENGINE_LOOP)
    config = load_config(options)
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
    source = overrides.pop("config", None)
    if source is None:
        raise ConfigError("config: missing; give a file, for example config=configs/tiny.yaml")
    for key, value in overrides.items():
        # `serve run ... speculative_num_steps=1` passes strings.
        overrides[key] = parse_override(f"{key}={value}")[1] if isinstance(value, str) else value
    config = ServeSpecConfig.load(
        source if isinstance(source, Mapping) else _find(str(source)), **overrides
    )
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
