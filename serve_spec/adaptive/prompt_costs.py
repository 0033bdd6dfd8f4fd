"""What prompts add to a round, beyond what the table says so many rows would.

The table has no prompts, and a row of theirs is no row of a draft: other sequences, other stages,
other places to pad to. Where nearly every round computes some, that decides what drafts cost
beside them; so it is measured, in plain rounds and in those that draft.
"""

from __future__ import annotations

from dataclasses import dataclass

TABLE_ROUNDS = 4
"""The table says as much as so many rounds."""
GAIN = 1 / 64
"""Weight of the newest round at least."""


@dataclass
class _Mean:
    """Of all rounds at first, then of the newest."""

    excess_ms: float
    num_rounds: int = 0

    def learn(self, excess_ms: float) -> None:
        self.num_rounds += 1
        weight = max(GAIN, 1 / (TABLE_ROUNDS + self.num_rounds))
        self.excess_ms += weight * (excess_ms - self.excess_ms)


class PromptExcess:
    """ms by buckets of batch sizes, for plain rounds and for rounds that draft.

    What was never measured is taken for what the other of the two has, and else for nothing.
    """

    def __init__(self, num_buckets: int) -> None:
        # Of fixed size: another thread may read them for a snapshot.
        self._plain: list[_Mean | None] = [None] * num_buckets
        self._drafting: list[_Mean | None] = [None] * num_buckets

    def of(self, bucket: int) -> tuple[float, float]:
        """Of plain rounds, and of rounds that draft."""
        plain, drafting = self._plain[bucket], self._drafting[bucket]
        known = plain or drafting
        if known is None:
            return 0.0, 0.0
        return (plain or known).excess_ms, (drafting or known).excess_ms

    def learn(self, bucket: int, excess_ms: float, *, drafts: bool) -> None:
        """Prompts added so much more than the table says."""
        means = self._drafting if drafts else self._plain
        mean = means[bucket]
        if mean is None:
            mean = means[bucket] = _Mean(self.of(bucket)[drafts])
        mean.learn(excess_ms)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """By the largest batch size of a bucket."""
        return {
            kind: {
                str(1 << bucket): round(mean.excess_ms, 4)
                for bucket, mean in enumerate(means)
                if mean is not None
            }
            for kind, means in (("plain", self._plain), ("drafting", self._drafting))
        }
