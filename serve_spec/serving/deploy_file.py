"""Serve's own configuration files, read strictly: Ray ignores a key it does not know."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from ray.serve.schema import ServeDeploySchema

from serve_spec.config import ConfigError
from serve_spec.config.base import parse_yaml, read_text, unknown_key
from serve_spec.config.speculative import parse_update

APP_IMPORT_PATH = "serve_spec.serving:build_app"
APP_NAME = "serve_spec"
ENGINES = "EngineReplica"
"""The deployment that takes policy settings as `user_config`."""


def read_deployment(file: Path) -> dict[str, Any]:
    """What `file` deploys, in the form of Serve's configuration files.

    file: such a file, or a configuration of ours, which is wrapped: one application on all nodes.

    Raises:
        ConfigError: the file is missing, no YAML, or holds an unknown key or a wrong value.
    """
    given = parse_yaml(read_text(file), str(file))
    if not isinstance(given, dict):
        raise ConfigError(f"{file}: give a mapping, a Serve config or a configuration of the model")
    if "applications" in given:
        check_deployment(given)
        return given
    app = {
        "name": APP_NAME,
        "route_prefix": "/",
        "import_path": APP_IMPORT_PATH,
        "args": {"config": str(file.absolute())},
    }
    return {"applications": [app]}


def check_deployment(given: Mapping[str, Any]) -> None:
    """Judges a Serve configuration by Ray's schema, by its keys, and by our `user_config`.

    Raises:
        ConfigError: unknown keys, all of them; or what Ray's schema says; or wrong policy settings.
    """
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
    """Every `user_config` of our engines, and where it stands."""
    for i, app in enumerate(given["applications"]):
        deployments = app.get("deployments", []) if app["import_path"] == APP_IMPORT_PATH else []
        for j, deployment in enumerate(deployments):
            settings = deployment.get("user_config")
            if deployment["name"] == ENGINES and settings is not None:
                yield f"applications.{i}.deployments.{j}.user_config", settings


def _unknown_keys(model: Any, given: object, place: str) -> Iterator[str]:
    """Sentences about the keys of `given` that `model`, a pydantic class of Ray, does not have."""
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
    """The pydantic classes inside `Optional[X]`, `List[X]` and the like."""
    if hasattr(annotation, "model_fields"):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)
