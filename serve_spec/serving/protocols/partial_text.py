"""A text that arrives in parts, and generators that wait for the part they need."""

from __future__ import annotations

import re
from collections.abc import Generator, Iterable
from typing import TypeAlias

Steps: TypeAlias = Generator[None, None, None]
Found: TypeAlias = Generator[None, None, str]
Place: TypeAlias = Generator[None, None, int]

_STRUCTURE = re.compile(r'\\.|["{}\[\]]', re.DOTALL)
_SPACE = re.compile(r"\s*")


class NoCall(Exception):
    """The text is no call of a function that was offered."""


class CutCall(Exception):
    """The text ends before it is clear that it is a call."""


class PartialText:
    """A text of which some has been read. Its generators yield where they wait for more."""

    def __init__(self) -> None:
        self._text = ""
        """What has not been read yet."""
        self._has_ended = False
        """Whether no more text follows."""

    def _more(self) -> Steps:
        """Wait for more text of what may be a call."""
        if self._has_ended:
            raise CutCall
        yield

    def _find(self, text: str, start: int) -> Place:
        """Return where `text` comes first, from `start` on."""
        place = start
        while (found := self._text.find(text, place)) < 0:
            place = max(start, len(self._text) - len(text) + 1)
            yield from self._more()
        return found

    def _tag(
        self, place: int, *tags: str, may_end: bool = False
    ) -> Generator[None, None, tuple[str, int]]:
        """Return which of `tags` comes next, after whitespace, and where it ends.

        may_end: the answer may also end; then the tag is empty.
        """
        while True:
            start = _space_end(self._text, place)
            found = next((tag for tag in tags if self._text.startswith(tag, start)), "")
            if found or (may_end and self._has_ended and start == len(self._text)):
                return found, start + len(found)
            if not any(tag.startswith(self._text[start:]) for tag in tags):
                raise NoCall
            yield from self._more()

    def _value_end(self, start: int, end: str, *next_tags: str) -> Place:
        """Return the end of a value, which may hold `end` where no further tag follows it."""
        place = start
        while True:
            place = yield from self._find(end, place)
            behind = _space_end(self._text, place + len(end))
            if self._text.startswith(next_tags, behind):
                return place
            if any(tag.startswith(self._text[behind:]) for tag in next_tags):
                if self._has_ended:
                    return place
                yield
            else:
                place += 1

    def _next(self, *texts: str) -> Found:
        """Return which of `texts` comes next, after whitespace; "": none."""
        while True:
            rest = self._text.lstrip()
            found = next((text for text in texts if text and rest.startswith(text)), "")
            if found or self._has_ended or not any(t and t.startswith(rest) for t in texts):
                return found
            yield

    def _skip(self, *texts: str) -> Found:
        """Drop and return which of `texts` comes next, after whitespace; "": none."""
        found = yield from self._next(*texts)
        self._skip_now(found)
        return found

    def _skip_now(self, text: str) -> None:
        if text:
            self._text = self._text.lstrip()[len(text) :]


class Scanner:
    """Finds the end of a JSON value in a text that arrives in parts."""

    def __init__(self, depth: int = 0) -> None:
        self._depth = depth
        self._in_string = False
        self.has_ended = False

    def read(self, text: str) -> int:
        """Return how many characters of the next text are the value's."""
        for found in _STRUCTURE.finditer(text):
            if found[0] == '"':
                self._in_string = not self._in_string
            elif not self._in_string and found[0] in "{}[]":
                self._depth += 1 if found[0] in "{[" else -1
                if self._depth == 0:
                    self.has_ended = True
                    return found.end()
        # An odd backslash escapes the next character.
        return len(text) - (len(text) - len(text.rstrip("\\"))) % 2


def num_held_back(text: str, markers: Iterable[str]) -> int:
    """Return the length of the longest end of `text` that may become a marker."""
    longest = 0
    for marker in markers:
        place = text.find(marker[0], max(0, len(text) - len(marker) + 1))
        while place >= 0 and not marker.startswith(text[place:]):
            place = text.find(marker[0], place + 1)
        longest = max(longest, len(text) - place if place >= 0 else 0)
    return longest


def _space_end(text: str, place: int) -> int:
    """Return where the whitespace from `place` on ends."""
    found = _SPACE.match(text, place)
    return found.end() if found else place
