"""Fields of the OpenAI API that this version cannot honour."""

from __future__ import annotations

from serve_spec.core.errors import InvalidRequest


class Unavailable:
    """A field that this version cannot honour: the values that ask for nothing, and a way out."""

    def __init__(self, *neutral: object, instead: str = "") -> None:
        self._neutral = neutral
        shown = " or ".join(_shown(value) for value in (neutral or (None,)))
        self._fix = f"not available in this version; leave it out or use {shown}"
        if instead:
            self._fix = f"{self._fix}; {instead}"

    def check(self, name: str, value: object) -> None:
        """Raise InvalidRequest unless `value` asks for nothing."""
        if value is not None and value not in self._neutral:
            raise InvalidRequest(name, _summary(value), self._fix)


def _shown(value: object) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def _summary(value: object) -> object:
    """Of a value that may be long or deep, its kind."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)}>"
    return value[:80] if isinstance(value, str) else value
