"""The drafters. A new one needs a builder and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Algorithm:
    """A drafter; `builder` is "module:function", imported on first use.

    Of a model: (folder of the draft, target, DraftOptions, dtype) -> `models.draft.DraftHead`.
    Of a text drafter, with `from_text`: (SpeculativeConfig, encode, most drafts at a time) ->
    `core.draft.TextDrafter`, where encode makes token ids of a text.
    """

    builder: str
    from_text: bool = False

    def load(self) -> Callable[..., Any]:
        """Return the builder."""
        module, name = self.builder.split(":")
        build: Callable[..., Any] = getattr(import_module(module), name)
        return build


ALGORITHMS = {
    "EAGLE": Algorithm("serve_spec.models.eagle:load_eagle"),
    "EAGLE3": Algorithm("serve_spec.models.eagle:load_eagle3"),
    "MEDUSA": Algorithm("serve_spec.models.medusa:load_medusa"),
    "STANDALONE": Algorithm("serve_spec.models.standalone:load_standalone"),
    "NGRAM": Algorithm("serve_spec.worker.ngram:build_ngram", from_text=True),
}
