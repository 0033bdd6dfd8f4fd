"""Ray Serve deployments and the HTTP API. `build_app` is the import path of the application.

It is imported on first use, so that the modules that do not need Ray work without it.
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
