"""Ray Serve deployments and the HTTP API; the import paths of applications are here.

`build_app` and `build_openai_app` take arguments; `application` takes the environment, for
`serve build`. They are imported on first use, so that modules that do not need Ray work without it.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ray.serve import Application

    from serve_spec.serving.deployment.app import build_app as build_app
    from serve_spec.serving.deployment.app import build_openai_app as build_openai_app

    application: Application

__all__ = ["application", "build_app", "build_openai_app"]


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module 'serve_spec.serving' has no attribute {name!r}")
    app = import_module("serve_spec.serving.deployment.app")
    return app.build_app(app.DEFAULT_ARGS) if name == "application" else getattr(app, name)
