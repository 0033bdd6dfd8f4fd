"""Large JSON bodies are parsed one after the other, beside the event loop."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

from fastapi import Request, Response
from fastapi.routing import APIRoute

from serve_spec.engine.encoding import encode_async


class LargeBodyRoute(APIRoute):
    """A route that many large bodies at once do not keep from its other requests."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler, with another way to parse the body."""
        handle = super().get_route_handler()

        async def handle_beside(request: Request) -> Response:
            return await handle(_LargeBody(request.scope, request.receive))

        return handle_beside


class _LargeBody(Request):
    async def json(self) -> Any:
        """Return the body, parsed; large ones are parsed in a thread, one at a time."""
        body = await self.body()
        return await encode_async(len(body), partial(json.loads, body))
