"""What prompts add to a round, beyond what the table says so many rows would.

The table has no prompts, and a row of theirs is no row of a draft: other sequences, other stages,
other places to pad to. Where nearly every round computes some, that decides what drafts cost
beside them; so it is measured, in plain rounds and in those that draft.
"""

from __future__ import annotations

from serve_spec.adaptive.baseline import MovingAverage

_DECAY = 1 - 1 / 64


class PromptExcess:
    """ms by buckets of batch sizes, for plain rounds and for rounds that draft.

    What was never measured is taken for what the other of the two has, and else for nothing.
    """

    def __init__(self, num_buckets: int, table_rounds: int) -> None:
        """table_rounds: the table says as much as so many rounds."""
        self._table_rounds = table_rounds
        # Of fixed size: another thread may read them for a snapshot.
        self._plain: list[MovingAverage | None] = [None] * num_buckets
        self._drafting: list[MovingAverage | None] = [None] * num_buckets

    def of(self, bucket: int) -> tuple[float, float]:
        """Of plain rounds, and of rounds that draft."""
        plain, drafting = self._plain[bucket], self._drafting[bucket]
        known = plain or drafting
        if known is None:
            return 0.0, 0.0
        return (plain or known).mean, (drafting or known).mean

    def learn(self, bucket: int, excess_ms: float, *, drafts: bool) -> None:
        """Prompts added so much more than the table says."""
        averages = self._drafting if drafts else self._plain
        average = averages[bucket]
        if average is None:
            known_ms = self.of(bucket)[drafts]
            average = averages[bucket] = MovingAverage(_DECAY, known_ms, self._table_rounds)
        average.observe(excess_ms)

    def snapshot(self) -> dict[str, dict[str, float]]:
        """By the largest batch size of a bucket."""
        return {
            kind: {
                str(1 << bucket): round(average.mean, 4)
                for bucket, average in enumerate(averages)
                if average is not None
            }
            for kind, averages in (("plain", self._plain), ("drafting", self._drafting))
        }
