"""The live status page: an HTML file, its script and a charting library."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the routes.

import html
from importlib import resources

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response

_ASSETS = {
    "status.css": "text/css",
    "status.js": "text/javascript",
    "uplot.min.css": "text/css",
    "uplot.min.js": "text/javascript",
}
OPEN_PATHS = frozenset({"/", *(f"/static/{name}" for name in _ASSETS)})
"""Paths without API key. The data is in `/status.json`, for which the page asks for the key."""

# The content security policy allows no other host.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)


def add_status_page(api: FastAPI) -> None:
    """Add the routes of `/` and its assets."""
    page = _read("status.html").decode()
    assets = {name: _read(name) for name in _ASSETS}

    @api.get("/", include_in_schema=False)
    async def status_page(request: Request) -> Response:
        """Return the page, with the application's route prefix as base URL."""
        base = html.escape(request.scope.get("root_path", "").rstrip("/") + "/")
        headers = {"content-security-policy": _POLICY}
        return HTMLResponse(page.replace("{{base}}", base), headers=headers)

    for name, content in assets.items():
        _add_asset(api, name, content)


def _add_asset(api: FastAPI, name: str, content: bytes) -> None:
    @api.get(f"/static/{name}", include_in_schema=False)
    async def asset() -> Response:
        """Return one file."""
        headers = {"cache-control": "no-cache"}
        return Response(content, media_type=_ASSETS[name], headers=headers)


def _read(name: str) -> bytes:
    return (resources.files("serve_spec.serving") / "static" / name).read_bytes()
