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

from pydantic import BaseModel, Field, model_validator

from serve_spec.config import base
from serve_spec.config.base import ConfigError, Refusal, StrictModel
from serve_spec.config.checkpoint import with_detected
from serve_spec.config.engine import CacheConfig, ModelConfig, SchedulerConfig
from serve_spec.config.hub import pinned
from serve_spec.config.serving import ReplicaConfig, RouterConfig, StatsConfig
from serve_spec.config.speculative import SpeculativeConfig
from serve_spec.core.registry import load_plugins

Sections: TypeAlias = dict[str, Any]
"""Values by section, not yet validated: `{"model": {"path": ...}, ...}`."""

_ENV_PREFIX = "SERVE_SPEC_"
_DRAFT = "speculative.speculative_draft_model_path"
_ONE_RANK = "the target has one rank; use 1, or set tensor_parallel_size to as many"


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
    def load(cls, source: Source, /, **overrides: Any) -> Self:
        """Read, merge, validate and resolve a configuration into a new object.

        source: a YAML file, the mapping it would hold, the name of a checkpoint, or a
        configuration, to which the environment does not apply.
        overrides: leaf keys, such as `speculative_num_steps=3`; they win.
        Raises ConfigError: all problems, each with field, value and remedy. PluginError: a plug-in
        does not load.
        """
        load_plugins()
        folder = Path.cwd()
        if isinstance(source, ServeSpecConfig):
            sections = source.explicit_fields()
        else:
            given: object = source
            if isinstance(source, Mapping):
                pass
            elif is_file(source):
                file = Path(source)
                given = base.parse_yaml(base.read_text(file), str(file))
                folder = file.absolute().parent
            else:
                given, overrides = {}, {"path": str(source), **overrides}
            sections = _sections(given)
            _override(sections, _environment())
        _override(sections, overrides)
        try:
            sections = with_detected(_with_shipped(sections), folder)
        except Refusal as error:
            raise ConfigError(str(error)) from None
        return base.validate(cls, sections, folder=folder)

    @model_validator(mode="after")
    def _splits_the_draft(self) -> Self:
        key, ranks = "speculative_draft_tp_size", self.model.tensor_parallel_size
        size = self.speculative.speculative_draft_tp_size
        if size not in (None, 1, ranks):
            fix = f"use 1, or {ranks} (tensor_parallel_size)" if ranks > 1 else _ONE_RANK
            raise Refusal(f"speculative.{key}", size, fix)
        return self

    @property
    def draft_folder(self) -> Path | None:
        """Local folder of the draft, downloaded if necessary; raises ConfigError."""
        name = self.speculative.speculative_draft_model_path
        return None if name is None else self.model.local(_DRAFT, name)

    def pinned(self) -> Self:
        """Return the configuration with every hub id at its present commit, or raise ConfigError.

        A replica that starts later runs the same weights, so requests continue there exactly.
        """
        model, names = self.model, self._names
        exact = {
            key: pinned(field, name, model.download_dir) for key, (field, name) in names.items()
        }
        if exact == {key: name for key, (_, name) in names.items()}:
            return self
        found = self.load(self, **exact, **({} if model.revision is None else {"revision": None}))
        # A draft that was given as the model has become the draft of its target.
        return found if found.model.path == exact["path"] else found.pinned()

    def download(self) -> Self:
        """Return `pinned` and download what the cache lacks, with progress bars on stderr."""
        exact = self.pinned()
        for key, (field, name) in exact._names.items():
            exact.model.local(field, name, weights=key != "tokenizer_path", progress=True)
        return exact

    @property
    def _names(self) -> dict[str, tuple[str, str]]:
        """Return the dotted key and the name of each checkpoint, by leaf key."""
        named = {
            "path": ("model.path", self.model.source),
            "tokenizer_path": ("model.tokenizer_path", self.model.tokenizer_path),
            "speculative_draft_model_path": (_DRAFT, self.speculative.speculative_draft_model_path),
        }
        return {key: (field, name) for key, (field, name) in named.items() if name is not None}


Source: TypeAlias = str | os.PathLike[str] | Mapping[str, Any] | ServeSpecConfig


def is_file(source: str | os.PathLike[str]) -> bool:
    """Return whether `source` is a configuration file, and not the name of a checkpoint."""
    return Path(source).suffix in (".yaml", ".yml", ".json")


def _with_shipped(sections: Sections) -> Sections:
    """Return `sections` over the configuration that a shipped pair, such as asset:tiny, has."""
    model = sections["model"]
    name = model.get("path") if isinstance(model, dict) else None
    if not (isinstance(name, str) and name.startswith(base.ASSET)):
        return sections
    file = base.ASSETS / name.removeprefix(base.ASSET) / "config.yaml"
    if not file.is_file():
        return sections
    shipped = _sections(base.parse_yaml(base.read_text(file), str(file)))
    algorithm = sections.get("speculative", {}).get("speculative_algorithm")
    if algorithm not in (None, shipped["speculative"]["speculative_algorithm"]):
        del shipped["speculative"]["speculative_draft_model_path"]  # made for another algorithm
    for section, values in sections.items():
        of_target = {"path": shipped["model"]["path"]} if section == "model" else {}
        shipped[section] = {**shipped.get(section, {}), **values, **of_target}
    return shipped


def parse_override(text: str) -> tuple[str, Any]:
    """Parse a `key=value` argument, its value as YAML, or raise ConfigError."""
    key, equals, value = text.partition("=")
    if not equals or not key:
        raise ConfigError(f"{text!r}: write key=value, for example speculative_num_steps=3")
    return key, base.parse_yaml(value, key)


@cache
def leaf_sections() -> dict[str, str]:
    """Return the section of each key."""
    return {key: section for section, model in _models().items() for key in model.model_fields}


def _models() -> dict[str, type[BaseModel]]:
    models = {
        name: base.section_model(field) for name, field in ServeSpecConfig.model_fields.items()
    }
    return {name: model for name, model in models.items() if model is not None}


def _sections(given: object) -> Sections:
    """Return a copy to merge into: sections as dicts, an empty one (YAML null) as `{}`."""
    given = {} if given is None else given
    if not isinstance(given, Mapping):
        known = ", ".join(_models())
        raise ConfigError(f"configuration={given!r}: give a mapping of sections ({known})")
    sections: Sections = {"model": {}}  # so that a missing path is reported as model.path
    for name, section in given.items():
        if isinstance(section, StrictModel):
            section = section.explicit_fields()
        sections[str(name)] = dict(section) if isinstance(section, Mapping) else section or {}
    return sections


def _override(sections: Sections, values: Mapping[str, Any]) -> None:
    """Set leaf keys; relative paths start at the current directory."""
    homes = leaf_sections()
    if unknown := [base.unknown_key(key, homes) for key in values if key not in homes]:
        raise ConfigError(*unknown)
    for key, value in values.items():
        field = _models()[homes[key]].model_fields[key]
        known = sections.setdefault(homes[key], {})
        if isinstance(known, dict):  # anything else is refused by validation
            known[key] = (
                base.anchored(field, value, Path.cwd()) if base.is_path(field, value) else value
            )


def _environment() -> dict[str, Any]:
    keys = {f"{_ENV_PREFIX}{home}__{key}".upper(): key for key, home in leaf_sections().items()}
    # Other SERVE_SPEC_ variables (the log level) have no section, hence no double underscore.
    given = [name for name in os.environ if name.startswith(_ENV_PREFIX) and "__" in name]
    if unknown := [base.unknown_key(name, keys) for name in given if name not in keys]:
        raise ConfigError(*unknown)
    return {keys[name]: base.parse_yaml(os.environ[name], name) for name in given}
