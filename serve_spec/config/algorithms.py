"""Registry of draft methods. A new one needs a builder and a line here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class Algorithm:
    """A draft method; `builder` is "module:function", imported on first use.

    Draft model: (draft folder, target, DraftOptions, dtype, Formats) -> `models.draft.DraftHead`.
    N-gram drafter (`is_ngram`): (SpeculativeConfig, encode, maximum drafts) ->
    `core.draft.NgramDrafter`; `encode` converts text to token ids.
    """

    builder: str
    is_ngram: bool = False

    def load(self) -> Callable[..., Any]:
        """Return the builder."""
        module, name = self.builder.split(":")
        build: Callable[..., Any] = getattr(import_module(module), name)
        return build


ALGORITHMS = {
    "EAGLE": Algorithm("serve_spec.models.eagle:load_eagle"),
    "EAGLE3": Algorithm("serve_spec.models.eagle:load_eagle3"),
    "MTP": Algorithm("serve_spec.models.eagle:load_mtp"),
    "MEDUSA": Algorithm("serve_spec.models.medusa:load_medusa"),
    "STANDALONE": Algorithm("serve_spec.models.standalone:load_standalone"),
    "NGRAM": Algorithm("serve_spec.worker.drafters.ngram:build_ngram", is_ngram=True),
}
