"""The live status page and the page of the API: HTML files, scripts and a charting library."""

# No `from __future__ import annotations` here: FastAPI reads the annotations of the routes.

import html
from importlib import resources

import ray
from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response

# No other host is allowed.
_POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src data:; "
    "base-uri 'self'; form-action 'none'; frame-ancestors 'none'"
)


def add_pages(api: FastAPI) -> None:
    """Add `GET /`, `GET /docs` and their files; neither loads anything from another host."""
    files = resources.files("serve_spec.serving.statistics") / "static"

    def add_page(path: str, name: str) -> None:
        page = (files / name).read_text()

        @api.get(path, include_in_schema=False)
        async def show(request: Request) -> Response:
            """Return the page, with the application's route prefix as base URL."""
            base = html.escape(request.scope.get("root_path", "").rstrip("/") + "/")
            headers = {"content-security-policy": _POLICY}
            return HTMLResponse(page.replace("{{base}}", base), headers=headers)

    add_page("/", "status.html")
    add_page("/docs", "docs.html")

    def add_asset(name: str, media_type: str) -> None:
        content = (files / name).read_bytes()

        @api.get(f"/static/{name}", include_in_schema=False)
        async def asset() -> Response:
            """Return one file."""
            return Response(content, media_type=media_type, headers={"cache-control": "no-cache"})

    for name in ("status", "uplot.min"):
        add_asset(f"{name}.css", "text/css")
        add_asset(f"{name}.js", "text/javascript")
    for name in ("docs", "key"):
        add_asset(f"{name}.js", "text/javascript")


def ray_dashboard() -> str | None:
    """Return host and port of the dashboard of this process's Ray; None if there is none."""
    if not ray.is_initialized():
        return None
    return ray.init(ignore_reinit_error=True).dashboard_url or None
