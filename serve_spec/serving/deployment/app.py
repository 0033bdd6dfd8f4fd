"""`build_app`: build the Ray Serve application from a configuration, and its ingress `Router`."""

# No `from __future__ import annotations` here: Serve reads the annotation of the builder.

import os
from collections.abc import Collection, Mapping
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
from serve_spec.config.base import parse_yaml, read_text, unknown_key
from serve_spec.config.flags import engine_keys, read_value
from serve_spec.config.root import is_file, leaf_sections
from serve_spec.log import get_logger
from serve_spec.serving.deployment.engine_actor import placement_of
from serve_spec.serving.deployment.replica import EngineReplica
from serve_spec.serving.deployment.versions import versioned
from serve_spec.serving.protocols.api import create_api
from serve_spec.serving.proxy.settings import CALLBACK, CALLBACK_VARIABLE
from serve_spec.serving.router.admission import Admission
from serve_spec.serving.router.fleet import RayFleet
from serve_spec.serving.statistics.telemetry import RouterTelemetry

logger = get_logger(__name__)

APPLICATION = "serve_spec.serving:application"
DEFAULT_ARGS = {"config": {"model": {"path": "asset:tiny"}}}
"""Arguments of `application`; the environment has precedence."""

ENGINE_LOOP = "serve_spec.serving.deployment.engine_actor:start_engine"

# Serve may build the app in another directory; relative paths are looked up here too.
_CHECKOUT = Path(serve_spec.__file__).parents[1]
# `Admission` limits requests in the router; Serve's own limit must not apply before it.
_NO_LIMIT = 1_000_000
_DRAIN_POLL_S = 0.5
_MAX_REPLICAS = 100
"""Serve's default of `max_replicas` with `num_replicas: auto`."""


def build_app(args: dict[str, Any]) -> Application:
    """Return the application: `Router` in front of `EngineReplica`s.

    args: `model`, a hub id, a checkpoint's folder or asset:NAME, or `config`, a configuration file
    (absolute, or relative to the current directory or the checkout) or a mapping with its content.
    Any leaf key of the configuration overrides it. `engine_loop` is an import path that replaces
    the engine.

    Raises ConfigError: the configuration is missing or invalid.
    """
    options = dict(args)
    engine_loop = options.pop("engine_loop", ENGINE_LOOP)
    return _application(load_config(options), engine_loop)


def build_openai_app(args: dict[str, Any]) -> Application:
    """Return the application for the arguments of `ray.serve.llm.build_openai_app`.

    args: `llm_configs`, a list of one LLMConfig, mapping or YAML file, and optionally
    `ingress_deployment_config`, options of the deployment `Router`. docs/deploy.md has the keys.
    """
    config, engines, router = openai_config(args)
    return _application(config, ENGINE_LOOP, engines, router)


def _application(
    config: ServeSpecConfig,
    engine_loop: str,
    engine_options: Mapping[str, Any] | None = None,
    router_options: Mapping[str, Any] | None = None,
) -> Application:
    config = with_gpus(config.pinned())
    replica = config.replica
    # Replicas do not know how many there are: scaling starts and stops some and leaves the others.
    unscaled = ServeSpecConfig.load(config, num_replicas=1)
    version = (unscaled.model_dump_json(), engine_loop)
    shared: dict[str, Any] = {
        # Requests arrive over sockets, which Serve does not count; the router limits them.
        "max_ongoing_requests": _NO_LIMIT,
        "health_check_period_s": replica.health_check_period_s,
        "health_check_timeout_s": replica.health_check_timeout_s,
        # Streams pass through the router, so it has to outlive them, too.
        "graceful_shutdown_timeout_s": replica.graceful_shutdown_timeout_s,
        "graceful_shutdown_wait_loop_s": _DRAIN_POLL_S,
    }
    engine_options = {"num_replicas": replica.num_replicas, **(engine_options or {})}
    engines = serve.deployment(
        name="EngineReplica", **engine_options, **placement_of(config), **shared
    )(EngineReplica)
    router_options = {
        # On GPUs a second one costs the engine nothing, and one may die.
        "num_replicas": 2 if replica.num_gpus else 1,
        # It mostly waits, so it must not reserve a core that an engine needs.
        "ray_actor_options": {"num_cpus": 0},
        **(router_options or {}),
    }
    router = serve.deployment(name="Router", **router_options, **shared)(serve.ingress()(Router))
    replicas = versioned(engines, *version).bind(unscaled, engine_loop)
    return versioned(router, *version).bind(replicas, unscaled)


def with_gpus(config: ServeSpecConfig) -> ServeSpecConfig:
    """Return the configuration with `num_gpus` as a number."""
    if config.replica.num_gpus is not None:
        return config
    resources = ray.cluster_resources() if ray.is_initialized() else {}  # type: ignore[no-untyped-call]
    has_gpus = resources.get("GPU", 0) >= 1
    wants = config.model.device == "cuda" or config.replica.accelerator_type is not None
    uses = wants or (config.model.device == "auto" and has_gpus)
    return ServeSpecConfig.load(
        config, num_gpus=float(config.model.tensor_parallel_size) if uses else 0.0
    )


def config_of(app: Mapping[str, Any]) -> ServeSpecConfig:
    """Return the configuration of our application in a Serve config, or raise ConfigError."""
    args = {key: value for key, value in app.get("args", {}).items() if key != "engine_loop"}
    if app["import_path"] == "serve_spec.serving:build_openai_app":
        return openai_config(args)[0]
    return load_config(DEFAULT_ARGS if app["import_path"] == APPLICATION else args)


def load_config(args: Mapping[str, Any]) -> ServeSpecConfig:
    """Return the configuration for the arguments of `build_app`, or raise ConfigError."""
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


def openai_config(
    args: Mapping[str, Any],
) -> tuple[ServeSpecConfig, dict[str, Any], dict[str, Any]]:
    """Return configuration, and options of both deployments, for `build_openai_app`'s `args`."""
    _refuse_unknown("", args, ("llm_configs", "ingress_deployment_config"))
    models = args.get("llm_configs")
    if not isinstance(models, list | tuple) or len(models) != 1:
        fix = "give a list of one LLMConfig; another model is another application"
        raise ConfigError(f"llm_configs={models!r:.80}: {fix}")
    (given,) = models
    if isinstance(given, str):
        given = parse_yaml(read_text(_find(given)), given)
    elif hasattr(given, "model_dump"):  # ray.serve.llm.LLMConfig
        given = given.model_dump(exclude_unset=True)
    place = "llm_configs.0."
    _refuse_unknown(place, given, _LLM_CONFIG)
    if given.get("log_engine_metrics") is False:
        raise ConfigError(f"{place}log_engine_metrics=False: metrics are always on; leave it out")
    engines, scaled = _deployment(f"{place}deployment_config.", given.get("deployment_config", {}))
    overrides = {
        **_loading(f"{place}model_loading_config.", given.get("model_loading_config", {})),
        **engine_keys(f"{place}engine_kwargs.", given.get("engine_kwargs", {})),
        **scaled,
    }
    if given.get("accelerator_type") is not None:
        overrides["accelerator_type"] = given["accelerator_type"]
    config = load_config({"config": {}, **overrides})
    if scaling := engines.get("autoscaling_config"):
        # Below max_num_seqs, so that a replica is added before requests wait.
        target = max(1, config.scheduler.max_num_seqs * 3 // 4)
        scaling.setdefault("target_ongoing_requests", target)
    return config, engines, dict(args.get("ingress_deployment_config", {}))


_LLM_CONFIG = (
    *("model_loading_config", "engine_kwargs", "deployment_config", "accelerator_type"),
    "log_engine_metrics",
)
# Options of the deployment that are keys of `replica` here.
_OF_REPLICA = (
    *("num_replicas", "max_ongoing_requests", "health_check_period_s", "health_check_timeout_s"),
    "graceful_shutdown_timeout_s",
)
_OF_DEPLOYMENT = ("autoscaling_config", "user_config", "logging_config")
_POLICY = {"policy_function": "serve_spec.serving.autoscaling:replicas_for_requests"}


def _loading(place: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return our keys for `model_loading_config`."""
    _refuse_unknown(place, given, ("model_id", "model_source", "tokenizer_source"))
    name, source = given.get("model_id"), given.get("model_source")
    if not isinstance(name, str):
        raise ConfigError(f"{place}model_id={name!r}: give the name of the model in requests")
    if not isinstance(source, str | None):
        fix = "mirrors are not supported; give a hub id or a folder"
        raise ConfigError(f"{place}model_source={source!r}: {fix}")
    tokenizer = given.get("tokenizer_source")
    return {
        "path": source or name,
        "served_model_name": name,
        **({} if tokenizer is None else {"tokenizer_path": tokenizer}),
    }


def _deployment(place: str, given: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return options of the deployment `EngineReplica`, and our keys, for `deployment_config`."""
    _refuse_unknown(place, given, (*_OF_REPLICA, *_OF_DEPLOYMENT))
    options = {key: given[key] for key in _OF_DEPLOYMENT if given.get(key) is not None}
    keys = {key: given[key] for key in _OF_REPLICA if given.get(key) is not None}
    if "autoscaling_config" in options or keys.get("num_replicas") == "auto":
        most = _MAX_REPLICAS if keys.get("num_replicas") == "auto" else 1
        scaling = {"policy": _POLICY, "max_replicas": most, **options.get("autoscaling_config", {})}
        options |= {"num_replicas": "auto", "autoscaling_config": scaling}
        keys["num_replicas"] = scaling["max_replicas"]
    return options, keys


def _refuse_unknown(place: str, given: Mapping[str, Any], known: Collection[str]) -> None:
    if not isinstance(given, Mapping):
        raise ConfigError(f"{place.rstrip('.')}={given!r:.80}: give a mapping")
    names = [f"{place}{key}" for key in known]
    if unknown := [unknown_key(f"{place}{key}", names) for key in given if key not in known]:
        raise ConfigError(*unknown)


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
        self._app_name = context.app_name
        host = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        name = context.replica_id.unique_id
        self._fleet = RayFleet(engines, context.app_name, name, host, config)
        self._admission = Admission(
            max_in_flight=requests_per_replica(config),
            max_queued=config.router.max_queued_requests,
            max_client_fraction=config.router.max_client_share,
        )
        self._fleet.start(self._admission.resize)
        self._telemetry = RouterTelemetry(context, self._show)

    def __serve_build_asgi_app__(self) -> FastAPI:
        """The hook with which Serve asks for the app, in the replica's own process."""
        record = self._telemetry.record
        api = create_api(self._config, self._fleet, self._admission, record, self._app_name)
        api.add_middleware(FailedReads)
        return api

    def _show(self) -> dict[str, object]:
        return {**self._admission.snapshot(), **self._fleet.batching()}


def requests_per_replica(config: ServeSpecConfig) -> int:
    """Return the most requests the router gives a replica: what it runs, and a few to follow."""
    num_places = config.scheduler.max_num_seqs
    return min(config.replica.max_ongoing_requests, num_places + max(1, num_places // 8))


class FailedReads:
    """Report a read from the proxy that Ray fails as what it means: the client has left."""

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
