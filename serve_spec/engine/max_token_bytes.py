"""The most bytes of a text that one token of a tokenizer can cover."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from serve_spec.engine.token_bytes import BYTE_CHARACTERS

# Steps that never drop or shorten text. Split and Replace depend on their settings.
_HARMLESS = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend"})
_BYTE_TOKEN = re.compile(r"<0x[0-9A-F]{2}>")


def max_token_bytes(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the bound, or None for a tokenizer that may drop or merge text without a bound.

    tokenizer: the content of tokenizer.json, as the `tokenizers` library writes it.
    """
    model = tokenizer["model"]
    added = tokenizer["added_tokens"]
    steps = [*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))]
    if not all(map(_keeps_text, steps)):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token takes the white space around it
    vocab = model.get("vocab", ())
    names = vocab if isinstance(vocab, Mapping) else [name for name, _ in vocab]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    every_byte = is_byte_level and set(BYTE_CHARACTERS).issubset(names)
    if not (model.get("byte_fallback") or every_byte):
        return None  # one token, or none, may stand for any unknown text
    lengths = [len(name) if is_byte_level else _num_bytes(name) for name in names]
    return max([*lengths, *(len(token["content"].encode()) for token in added)], default=None)


def _num_bytes(name: str) -> int:
    return 1 if _BYTE_TOKEN.fullmatch(name) else len(name.encode())


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return a normalizer or pre-tokenizer as the list of its parts."""
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    parts = step.get("normalizers") or step.get("pretokenizers") or []
    return [inner for part in parts for inner in _steps(part)]


def _keeps_text(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    if part["type"] == "Replace":
        found = part["pattern"].get("String")
        return found is not None and len(part["content"].encode()) >= len(found.encode())
    return part["type"] in _HARMLESS
