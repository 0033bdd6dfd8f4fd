"""`ServeSpecConfig`: all sections, and how to load them.

Precedence, lowest first: defaults, the file, `SERVE_SPEC_<SECTION>__<KEY>` in the environment,
keyword arguments. Relative paths start at the folder of the file that names them; those from the
environment, a mapping or a keyword start at the current directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, Self, TypeAlias

from pydantic import BaseModel, Field

from serve_spec.config.base import (
    ConfigError,
    StrictModel,
    anchored,
    dotted_keys,
    is_path,
    parse_yaml,
    read_text,
    section_model,
    unknown_key,
    validate,
)
from serve_spec.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from serve_spec.config.serving import ReplicaConfig, RouterConfig, StatsConfig
from serve_spec.config.speculative import SpeculativeConfig

Sections: TypeAlias = dict[str, Any]
"""Values by section, not yet validated: `{"model": {"path": ...}, ...}`."""

_ENV_PREFIX = "SERVE_SPEC_"


class ServeSpecConfig(StrictModel):
    """The whole configuration. A key's name is unique over all sections."""

    model: ModelConfig = Field(description="The target model.")
    speculative: SpeculativeConfig = Field(
        default_factory=SpeculativeConfig, description="Whether and how to speculate."
    )
    cache: CacheConfig = Field(default_factory=CacheConfig, description="The KV cache.")
    scheduler: SchedulerConfig = Field(
        default_factory=SchedulerConfig, description="How much work runs at once."
    )
    router: RouterConfig = Field(default_factory=RouterConfig, description="The HTTP frontend.")
    replica: ReplicaConfig = Field(default_factory=ReplicaConfig, description="Engine replicas.")
    stats: StatsConfig = Field(default_factory=StatsConfig, description="Fleet statistics.")

    @classmethod
    def load(
        cls,
        source: str | os.PathLike[str] | Mapping[str, Any] | ServeSpecConfig,
        /,
        **overrides: Any,
    ) -> Self:
        """Read, merge, validate and resolve a configuration into a new object.

        Args:
            source: a YAML file, the mapping it would hold, or a configuration. The environment
                applies to the first two only.
            overrides: leaf keys, such as `speculative_num_steps=3`; they win.

        Raises:
            ConfigError: all problems, each with field, value and remedy.
        """
        here = Path.cwd()
        folder = here
        if isinstance(source, ServeSpecConfig):
            fields = source.explicit_fields()
        else:
            if isinstance(source, Mapping):
                given: object = source
            else:
                file = Path(source)
                given, folder = parse_yaml(read_text(file), str(file)), file.absolute().parent
            fields = _sections(given)
            _merge(fields, _from_environment(os.environ), here)
        _merge(fields, _by_section(overrides), here)
        return validate(cls, fields, folder=folder)


def parse_override(text: str) -> tuple[str, Any]:
    """Parse a `key=value` argument; the value is YAML.

    Raises:
        ConfigError: no `=`, or the value is not YAML.
    """
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: write key=value, for example speculative_num_steps=3")
    return key, parse_yaml(value, key)


@cache
def leaf_sections() -> dict[str, str]:
    """Return the section of each key."""
    return {key: section for section, model in _models().items() for key in model.model_fields}


def _models() -> dict[str, type[BaseModel]]:
    models = {name: section_model(field) for name, field in ServeSpecConfig.model_fields.items()}
    return {name: model for name, model in models.items() if model is not None}


def _sections(given: object) -> Sections:
    """Return a copy to merge into: sections as dicts, an empty one (YAML null) as `{}`."""
    if given is None:
        given = {}
    if not isinstance(given, Mapping):
        sections = ", ".join(_models())
        raise ConfigError(f"configuration={given!r}: give a mapping of sections ({sections})")
    fields: Sections = {"model": {}}  # so that a missing path is reported as model.path
    for name, section in given.items():
        if isinstance(section, StrictModel):
            section = section.explicit_fields()
        fields[str(name)] = dict(section) if isinstance(section, Mapping) else section or {}
    return fields


def _merge(merged: Sections, changes: Mapping[str, Mapping[str, Any]], folder: Path) -> None:
    for section, values in changes.items():
        fields = _models()[section].model_fields
        known = merged.setdefault(section, {})
        if isinstance(known, dict):  # anything else is refused by validation
            known.update(
                (key, anchored(value, folder) if is_path(fields[key], value) else value)
                for key, value in values.items()
            )


def _from_environment(environ: Mapping[str, str]) -> Sections:
    changes: Sections = {}
    problems = []
    variables = {
        _ENV_PREFIX + key.replace(".", "__").upper(): key.split(".")
        for key in dotted_keys(ServeSpecConfig)
        if "." in key
    }
    for name, text in environ.items():
        # Other SERVE_SPEC_ variables (the log level) have no section, hence no double underscore.
        if not name.startswith(_ENV_PREFIX) or "__" not in name:
            continue
        if name not in variables:
            problems.append(unknown_key(name, variables))
            continue
        section, key = variables[name]
        changes.setdefault(section, {})[key] = parse_yaml(text, name)
    if problems:
        raise ConfigError(*problems)
    return changes


def _by_section(overrides: Mapping[str, Any]) -> Sections:
    homes = leaf_sections()
    unknown = [key for key in overrides if key not in homes]
    if unknown:
        raise ConfigError(*(unknown_key(key, homes) for key in unknown))
    changes: Sections = {}
    for key, value in overrides.items():
        changes.setdefault(homes[key], {})[key] = value
    return changes
