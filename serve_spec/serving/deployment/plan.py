"""What `serve-spec serve` runs: a Serve config, its configurations and the address."""

from __future__ import annotations

import math
import os
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from serve_spec.config import ConfigError, RouterConfig, ServeSpecConfig
from serve_spec.config.base import parse_yaml, read_text, unknown_key
from serve_spec.config.root import is_file, leaf_sections
from serve_spec.config.speculative import parse_update

APP_IMPORT_PATH = "serve_spec.serving:build_app"
_OUR_IMPORT_PATHS = (
    APP_IMPORT_PATH,
    "serve_spec.serving:build_openai_app",
    "serve_spec.serving:application",
)
APP_NAME = "serve_spec"
ENGINES = "EngineReplica"
"""The deployment whose `user_config` holds policy settings."""
_OTHERS_DRAIN_S = 3600.0
"""How long applications that are not ours may take to end their requests."""


@dataclass(frozen=True)
class Plan:
    """A Serve config, the configurations of its applications and the HTTP address."""

    deployment: Mapping[str, Any]
    configs: tuple[ServeSpecConfig, ...]
    host: str
    port: int
    route_prefix: str = "/"

    @property
    def url(self) -> str:
        """Base URL for a client on this machine."""
        host = "127.0.0.1" if self.host in ("0.0.0.0", "::") else self.host
        return f"http://{host}:{self.port}{self.route_prefix.rstrip('/')}"

    @property
    def is_open_to_all(self) -> bool:
        """Whether other machines can send requests without an API key."""
        is_local = self.host in ("localhost", "::1") or self.host.startswith("127.")
        return not is_local and any(not c.router.api_keys for c in self.configs)

    @property
    def drain_s(self) -> float:
        """How long running requests may take after the order to end."""
        return max(
            (c.replica.graceful_shutdown_timeout_s for c in self.configs), default=_OTHERS_DRAIN_S
        )

    @property
    def num_cpus(self) -> int:
        """Logical CPUs that Ray needs to place every replica."""
        needed = sum(c.replica.num_cpus * c.replica.num_replicas for c in self.configs)
        return max(os.cpu_count() or 1, math.ceil(needed))


def read_plan(source: str | Path, overrides: Mapping[str, Any] | None = None) -> Plan:
    """Return the plan for a file or checkpoint, or raise ConfigError; `overrides`: leaf keys."""
    # Ray takes a second to import, so the arguments are checked first.
    from serve_spec.serving.deployment.app import config_of

    overrides = overrides or {}
    deployment = read_deployment(source, overrides)
    ours = _our_apps(deployment)
    configs = tuple(map(config_of, ours))
    for app, config in zip(ours, configs, strict=True):
        # With absolute paths, because Serve may build the app in another directory.
        if overrides and app["import_path"] == APP_IMPORT_PATH:
            app["args"] = {**app["args"], **_resolved(config, overrides)}
    router = configs[0].router if configs else RouterConfig()
    http = {"host": router.host, "port": router.port, **deployment.get("http_options", {})}
    http |= {key: overrides[key] for key in ("host", "port") if key in overrides}
    deployment = {**deployment, "http_options": http}
    prefix = ours[0].get("route_prefix", "/") if ours else "/"
    return Plan(deployment, configs, http["host"], http["port"], prefix)


def _resolved(config: ServeSpecConfig, keys: Collection[str]) -> dict[str, Any]:
    """Return the validated values of leaf keys, as in JSON."""
    sections = config.model_dump(mode="json")
    return {key: sections[section][key] for key, section in leaf_sections().items() if key in keys}


def check_model(config: ServeSpecConfig) -> None:
    """Raise what loading checkpoints and chat template would raise; reads no weights."""
    from serve_spec.engine.chat_template import ChatTemplate
    from serve_spec.engine.check import check_checkpoints  # takes seconds to import

    check_checkpoints(config)
    ChatTemplate.from_folder(config.model.tokenizer_folder, config.model.chat_template)


def read_deployment(
    source: str | Path, overrides: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """Return the Serve config for `source`, or raise ConfigError.

    source: a Serve config, or what becomes a single application: a serve_spec configuration or the
        name of a checkpoint.
    overrides: leaf keys for every application of ours.
    """
    args: dict[str, Any]
    if not is_file(source):
        is_folder = Path(source).expanduser().exists()
        args = {"model": os.path.abspath(Path(source).expanduser()) if is_folder else str(source)}
    else:
        file = Path(source)
        given = parse_yaml(read_text(file), str(file))
        if not isinstance(given, dict):
            raise ConfigError(
                f"{file}: not a mapping; give a Serve config or a serve_spec configuration"
            )
        if "applications" in given:
            check_deployment(given)
            _override(given, overrides or {})
            return given
        args = {"config": str(file.absolute())}
    app = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": APP_IMPORT_PATH,
        "args": {**args, **(overrides or {})},
    }
    return {"applications": [app]}


def _override(deployment: Mapping[str, Any], overrides: Mapping[str, Any]) -> None:
    for app in _our_apps(deployment) if overrides else ():
        if app["import_path"] == APP_IMPORT_PATH:
            app["args"] = {**app.get("args", {}), **overrides}
        elif others := overrides.keys() - {"host", "port"}:
            fix = f"{app['import_path']} takes no keys; set it in the Serve file"
            raise ConfigError(f"{min(others)}={overrides[min(others)]!r}: {fix}")


def _our_apps(deployment: Mapping[str, Any]) -> list[dict[str, Any]]:
    return [app for app in deployment["applications"] if app["import_path"] in _OUR_IMPORT_PATHS]


def check_deployment(given: Mapping[str, Any]) -> None:
    """Raise ConfigError unless a Serve config has valid keys, values and policy settings."""
    from ray.serve.schema import ServeDeploySchema  # Ray takes seconds to import, --help none

    unknown = list(_unknown_keys(ServeDeploySchema, given, ""))
    if unknown:
        raise ConfigError(*unknown)
    try:
        ServeDeploySchema.model_validate(given)
    except ValueError as error:
        raise ConfigError(str(error)) from None
    for place, settings in _policy_settings(given):
        try:
            parse_update(settings)
        except ConfigError as error:
            raise ConfigError(*(f"{place}: {problem}" for problem in error.problems)) from None


def _policy_settings(given: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, object]]]:
    """Yield the path and content of every `user_config` of our engines."""
    for i, app in enumerate(given["applications"]):
        is_ours = app["import_path"] in _OUR_IMPORT_PATHS
        deployments = app.get("deployments", []) if is_ours else []
        for j, deployment in enumerate(deployments):
            settings = deployment.get("user_config")
            if deployment["name"] == ENGINES and settings is not None:
                yield f"applications.{i}.deployments.{j}.user_config", settings


def _unknown_keys(model: Any, given: object, place: str) -> Iterator[str]:
    """Yield an error message for each key of `given` that Ray's pydantic class does not have."""
    if isinstance(given, list):
        for index, item in enumerate(given):
            yield from _unknown_keys(model, item, f"{place}{index}.")
    elif isinstance(given, Mapping):
        known = [f"{place}{key}" for key in model.model_fields]
        for key, value in given.items():
            field = model.model_fields.get(key)
            if field is None:
                yield unknown_key(f"{place}{key}", known)
                continue
            for nested in _models_in(field.annotation):
                yield from _unknown_keys(nested, value, f"{place}{key}.")


def _models_in(annotation: object) -> Iterator[object]:
    """Yield the pydantic classes inside `Optional[X]`, `List[X]` and the like."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
