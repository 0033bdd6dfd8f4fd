"""Objects of other packages that a configuration names as MODULE:NAME."""

from __future__ import annotations

import re
from importlib import import_module
from typing import Any

from serve_spec.config.base import ConfigError

_NAME = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")


def is_plugin_name(text: str) -> bool:
    """Return whether a text has the form MODULE:NAME."""
    return _NAME.fullmatch(text) is not None


def load_plugin(field: str, name: str) -> Any:
    """Return the object called MODULE:NAME; the module is imported.

    field: the dotted key that names it, for messages.
    Raises ConfigError: the module cannot be imported, or lacks the name.
    """
    module, _, attribute = name.partition(":")
    try:
        return getattr(import_module(module), attribute)
    except Exception as error:  # whatever the module's own code raises
        reason = " ".join(str(error).split()) or type(error).__name__
        fix = "correct the name, or add the folder of its package to PYTHONPATH"
        raise ConfigError(f"{field}={name!r}: cannot be imported ({reason}); {fix}") from error
