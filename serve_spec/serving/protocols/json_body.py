"""JSON of request bodies, bounded before it is parsed, because parsing holds Python's lock."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any

import msgspec
import numpy as np
from fastapi import Request, Response
from fastapi.routing import APIRoute

from serve_spec.engine.messages import encode_async
from serve_spec.serving.errors import ApiError

MAX_VALUES = 2**20
"""Most values in arrays and objects: a prompt for the longest contexts, as token ids."""

MAX_STRINGS = 2**18
"""Most strings, the names of fields included."""

MAX_CONTAINERS = 2**16
"""Most arrays and objects."""

MAX_MEMBERS = 2**17
"""Most fields of all objects together."""

MAX_FIELDS = 1024
"""Most fields of a body itself."""

_SMALL_BYTES = 2**15
"""Shorter bodies have few enough values."""


class LargeBodyRoute(APIRoute):
    """A route that stays responsive while large bodies are parsed."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """Return FastAPI's handler with another body parser."""
        handle = super().get_route_handler()

        async def handle_beside(request: Request) -> Response:
            return await handle(_LargeBody(request.scope, request.receive))

        return handle_beside


class _LargeBody(Request):
    async def json(self) -> Any:
        """Return the parsed body; large ones are parsed in a thread, one at a time."""
        body = await self.body()
        return await encode_async(len(body), partial(parse_body, body))


def parse_body(body: bytes) -> Any:
    """Return the value of a body in UTF-8.

    Raises ApiError, 400: it has too many values. ValueError: it is no JSON. RecursionError: it is
    nested too deeply.
    """
    if len(body) > _SMALL_BYTES:
        _refuse_many(body)
    try:
        parsed = msgspec.json.decode(body)
    except (msgspec.MsgspecError, ValueError):
        # It accepts more, and names the place of an error.
        parsed = json.loads(body.decode())
    if isinstance(parsed, dict) and len(parsed) > MAX_FIELDS:
        raise _too_many(MAX_FIELDS, "fields")
    return parsed


def _refuse_many(body: bytes) -> None:
    """Raise ApiError if the body has too many values.

    Marks outside strings are counted: exactly up to the first error, where parsing ends.
    """
    text = body.replace(rb"\\", b"").replace(rb"\"", b"") if b"\\" in body else body
    characters = np.frombuffer(text, np.uint8)
    quotes = characters == ord('"')
    is_inside = np.bitwise_xor.accumulate(quotes.view(np.uint8)).view(bool)

    def count(marks: str) -> int:
        found = [(characters == ord(mark)) & ~is_inside for mark in marks]
        return sum(map(int, map(np.count_nonzero, found)))

    for number, most, what in (
        (count("[{"), MAX_CONTAINERS, "arrays and objects"),
        (count(":"), MAX_MEMBERS, "fields"),
        (count(","), MAX_VALUES, "values"),
        (int(np.count_nonzero(quotes)) // 2, MAX_STRINGS, "strings"),
    ):
        if number > most:
            raise _too_many(most, what)


def _too_many(most: int, what: str) -> ApiError:
    return ApiError(400, f"The body has more than {most} {what}; send several requests")
