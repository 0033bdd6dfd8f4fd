"""Server-sent events."""

from __future__ import annotations

import json
from collections.abc import Mapping

STREAM_TYPE = "text/event-stream"
STREAM_HEADERS = {
    "Cache-Control": "no-cache",
    # nginx and other proxies buffer small chunks by default.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def event(payload: Mapping[str, object]) -> bytes:
    """Encode an event as ASCII, as some clients treat U+2028 or U+0085 as line ends."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode("ascii") + b"\n\n"
