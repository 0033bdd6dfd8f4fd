"""What speculation did for a request."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Self


@dataclass
class SpeculationStats:
    """Speculation of one request, summed over its decode rounds.

    `num_draft_tokens` counts verified drafts, `num_correct_drafts` accepted and emitted ones, both
    without grammar drafts, whose emitted ones are `num_grammar_tokens`.
    `synthetic_acceptance`: the engine forces acceptance for a load test; the text is not real.
    """

    num_rounds: int = 0
    num_draft_tokens: int = 0
    num_correct_drafts: int = 0
    rounds_by_correct: dict[int, dict[int, int]] = field(default_factory=dict)
    """Rounds by `num_steps`, then by accepted drafts, also those behind a stop string."""
    synthetic_acceptance: bool = False
    rounds: list[tuple[int, int]] | None = None
    """Verified and accepted drafts of each round with drafts; None unless wanted."""
    num_grammar_tokens: int = 0
    newest: tuple[int, int] = (0, 0)
    """Of the last round: `num_correct_drafts`, and the `num_grammar_tokens` behind them."""

    @property
    def rounds_by_num_steps(self) -> dict[int, int]:
        """Return the rounds by verified drafts, of trees by levels."""
        return {n: sum(rounds.values()) for n, rounds in self.rounds_by_correct.items()}

    @property
    def accept_length(self) -> float:
        """Accepted drafts and the bonus token per decode round; 1.0 without speculation."""
        return 1.0 + self.num_correct_drafts / self.num_rounds if self.num_rounds else 1.0

    def observe(
        self,
        num_steps: int,
        num_correct_drafts: int,
        num_draft_tokens: int | None = None,
        *,
        grammar_tokens: tuple[int, int] = (0, 0),
    ) -> None:
        """Count one round of `num_steps` verified drafts, or of a tree of so many levels.

        grammar_tokens: grammar drafts emitted before and behind them, which do not count in the
        others.
        """
        self.num_grammar_tokens += sum(grammar_tokens)
        self.newest = num_correct_drafts, grammar_tokens[1]
        num_drafts = num_steps if num_draft_tokens is None else num_draft_tokens
        self.num_rounds += 1
        self.num_draft_tokens += num_drafts
        self.num_correct_drafts += num_correct_drafts
        rounds = self.rounds_by_correct.setdefault(num_steps, {})
        rounds[num_correct_drafts] = rounds.get(num_correct_drafts, 0) + 1
        if self.rounds is not None and num_drafts:
            self.rounds.append((num_drafts, num_correct_drafts))

    def without(self, num_tokens: int) -> Self:
        """Return the counts if the last `num_tokens` of the last round were not emitted."""
        correct, behind = self.newest
        guesses = min(max(0, num_tokens - behind), correct)
        return replace(
            self,
            num_correct_drafts=self.num_correct_drafts - guesses,
            num_grammar_tokens=self.num_grammar_tokens - (num_tokens - guesses),
        )

    def copy(self) -> Self:
        """Return the counts of now, which later rounds do not change."""
        sums = {n: dict(by_correct) for n, by_correct in self.rounds_by_correct.items()}
        rounds = None if self.rounds is None else [*self.rounds]
        return replace(self, rounds_by_correct=sums, rounds=rounds)

    def as_dict(self) -> dict[str, object]:
        """Return the JSON form, `usage.speculation` of the HTTP API."""
        label = {"synthetic_acceptance": True} if self.synthetic_acceptance else {}
        tokens = self.num_grammar_tokens
        return {
            **label,
            **({"num_grammar_tokens": tokens} if tokens else {}),
            "num_rounds": self.num_rounds,
            "num_draft_tokens": self.num_draft_tokens,
            "num_correct_drafts": self.num_correct_drafts,
            "accept_length": round(self.accept_length, 4),
            "rounds_by_num_steps": {str(k): n for k, n in sorted(self.rounds_by_num_steps.items())},
        }
