"""The rule of strategy `per_request`: one sequence follows its own acceptance."""

from __future__ import annotations

INITIAL_STEPS = 5
RAISE_ABOVE = 0.85
LOWER_BELOW = 0.55
INITIAL_STEPS = 5


class AdaptiveSpeculator:
    """One sequence's number of steps, moved by the share of its drafts that were kept so far.

    After each verification: above 0.85 one step more, below 0.55 one less, within the bounds.
    Belongs to its request and ends with it.
    """

    def __init__(
        self, initial_steps: int = INITIAL_STEPS, min_steps: int = 1, max_steps: int = 8
    ) -> None:
        """Starts at `initial_steps`.

        Raises:
            ValueError: `min_steps` below 1, or `initial_steps` outside the bounds.
        """
        if min_steps < 1:
            fix = "use an integer ≥ 1: a sequence that drafts nothing never learns to draft again"
            raise ValueError(f"min_steps={min_steps}: {fix}")
        if max_steps < min_steps:
            raise ValueError(f"max_steps={max_steps}: use at least min_steps={min_steps}")
        if not min_steps <= initial_steps <= max_steps:
            raise ValueError(f"initial_steps={initial_steps}: must lie in {min_steps}..{max_steps}")
        self.min_steps = min_steps
        self.max_steps = max_steps
        self.num_steps = initial_steps
        """Drafts the sequence should try next."""
        self.num_draft_tokens = 0
        """Drafts verified since the beginning."""
        self.num_correct_drafts = 0
        """Of these, kept."""

    @property
    def accept_rate(self) -> float | None:
        """Share of all drafts so far that were kept; None before the first."""
        if not self.num_draft_tokens:
            return None
        return self.num_correct_drafts / self.num_draft_tokens

    def update(self, num_draft_tokens: int, num_correct_drafts: int) -> bool:
        """Learns one verification; whether `num_steps` changed.

        num_draft_tokens: drafts really verified, the root excluded; fewer than `num_steps` when
            few tokens remain. A round without drafts verified nothing and changes nothing.

        Raises:
            ValueError: drafts outside 0..max_steps, or more kept than drafted; nothing was counted.
        """
        if not 0 <= num_correct_drafts <= num_draft_tokens <= self.max_steps:
            raise self._refused(num_draft_tokens, num_correct_drafts)
        if num_draft_tokens == 0:
            return False
        # One call a row and round: hundreds of them have to fit into a tenth of a millisecond.
        self.num_draft_tokens = drafted = self.num_draft_tokens + num_draft_tokens
        self.num_correct_drafts = correct = self.num_correct_drafts + num_correct_drafts
        rate, before = correct / drafted, self.num_steps
        if rate > RAISE_ABOVE and before < self.max_steps:
            self.num_steps = before + 1
        elif rate < LOWER_BELOW and before > self.min_steps:
            self.num_steps = before - 1
        else:
            return False
        return True

    def _refused(self, num_draft_tokens: int, num_correct_drafts: int) -> ValueError:
        if not 0 <= num_draft_tokens <= self.max_steps:
            fix = f"must lie in 0..{self.max_steps}, the drafts verified in one round"
            return ValueError(f"num_draft_tokens={num_draft_tokens}: {fix}")
        fix = f"must lie in 0..{num_draft_tokens}, the drafts, without the final token"
        return ValueError(f"num_correct_drafts={num_correct_drafts}: {fix}")
