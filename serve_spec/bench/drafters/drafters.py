"""The drafters that are compared: data, one line each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class Drafter:
    """How one drafter is configured."""

    name: str
    algorithm: str
    draft: str | None
    """Its checkpoint for the shipped target; None: it needs none."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Other keys."""

    def keys(self, draft: str | None = None) -> dict[str, Any]:
        """What an engine with it is told. draft: another checkpoint than the shipped one."""
        return {
            "speculative_algorithm": self.algorithm,
            "speculative_draft_model_path": draft or self.draft,
            **self.settings,
        }


DRAFTERS = {
    drafter.name: drafter
    for drafter in (
        Drafter("EAGLE3", "EAGLE3", "asset:tiny/eagle3"),
        Drafter("EAGLE", "EAGLE", "asset:tiny/eagle"),
        Drafter("MEDUSA", "MEDUSA", "asset:tiny/medusa"),
        Drafter("STANDALONE", "STANDALONE", "asset:tiny/standalone"),
        *(
            Drafter(
                f"{numbers.upper()}-TARGET",
                "STANDALONE",
                "asset:tiny/target",
                settings={"speculative_draft_model_quantization": numbers},
            )
            for numbers in ("int8", "int4")
        ),
        Drafter("NGRAM", "NGRAM", None),
        Drafter(
            "NGRAM+EAGLE3",
            "EAGLE3",
            "asset:tiny/eagle3",
            settings={"speculative_ngram_first": True},
        ),
    )
}
