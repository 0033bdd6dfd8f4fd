"""Objects of other packages that a configuration names as MODULE:NAME."""

from __future__ import annotations

import re
from typing import Any

from serve_spec.config.base import ConfigError
from serve_spec.core.errors import PluginError
from serve_spec.core.registry import import_object

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_plugin_name(text: str) -> bool:
    """Return whether a text has the form MODULE:NAME."""
    return _NAME.fullmatch(text) is not None


def load_plugin(field: str, name: str) -> Any:
    """Return the object called MODULE:NAME; the module is imported.

    field: the dotted key that names it, for messages.
    Raises ConfigError: the module does not import, or lacks the name.
    """
    try:
        return import_object(name)
    except PluginError as error:
        fix = "correct the name, or install its package where engines run"
        raise ConfigError(f"{field}={name!r}: {error}; {fix}") from error
