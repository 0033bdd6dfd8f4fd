"""Ray Serve and HTTP: the only room that knows either. `build_app` is the import path of the app.

It loads on first use, so that the parts of this room that need no Ray can be used without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from serve_spec.serving.app import build_app as build_app

__all__ = ["build_app"]


def __getattr__(name: str) -> object:
    if name != "build_app":
        raise AttributeError(f"module 'serve_spec.serving' has no attribute {name!r}")
    return import_module("serve_spec.serving.app").build_app
