"""Server-sent events: how a JSON value becomes bytes of a stream."""

from __future__ import annotations

import json
from collections.abc import Mapping
from json.encoder import encode_basestring_ascii

MEDIA_TYPE = "text/event-stream"
HEADERS = {
    "Cache-Control": "no-cache",
    # nginx and friends collect small chunks unless told not to.
    "X-Accel-Buffering": "no",
}
DONE = b"data: [DONE]\n\n"


def frame(payload: Mapping[str, object]) -> bytes:
    """One event. Pure ASCII: some clients take U+2028 or U+0085 inside text for a line end."""
    return b"data: " + json.dumps(payload, separators=(",", ":")).encode("ascii") + b"\n\n"


def encode_text(text: str) -> bytes:
    """Return a text as it stands in a `frame`."""
    return encode_basestring_ascii(text).encode("ascii")
