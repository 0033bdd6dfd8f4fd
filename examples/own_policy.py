"""Run a policy of your own, which drafts while few requests run.

python examples/own_policy.py [MODEL]

A server takes it as well, if the module can be imported:
serve-spec serve MODEL --set speculative_adaptive_strategy=own_policy:SmallBatches
docs/adding-a-policy.md explains the methods.
"""

import sys

from serve_spec import LLM, SamplingParams
from serve_spec.adaptive import PolicyContext, StepPolicy
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.record import StepRecord
from serve_spec.core.round import DecodeBatch, RoundSteps

MAX_REQUESTS = 2


class SmallBatches(StepPolicy):
    """Draft as deep as the configuration allows, but for small batches only."""

    def __init__(self, context: PolicyContext) -> None:
        self.shapes = (PLAIN, DraftShape.chain(context.max_steps))
        self.rounds = {"drafted": 0, "plain": 0}

    def choose(self, batch: DecodeBatch) -> RoundSteps:
        """Return the shape of the next round."""
        return RoundSteps(self.shapes[batch.size <= MAX_REQUESTS])

    def observe(self, record: StepRecord) -> None:
        """Count the rounds."""
        self.rounds["plain" if record.shape == PLAIN else "drafted"] += 1

    def snapshot(self) -> dict[str, object]:
        """Return what the status page shows."""
        return dict(self.rounds)


def main(model: str = "asset:tiny") -> None:
    """Print the accept length of small and of large batches."""
    llm = LLM(model, speculative_adaptive_strategy="own_policy:SmallBatches")
    for size in (1, MAX_REQUESTS, 2 * MAX_REQUESTS):
        params = SamplingParams(max_tokens=32, temperature=0, ignore_eos=True)
        outputs = llm.generate(["def fibonacci(n):"] * size, params)
        lengths = [output.speculation.accept_length for output in outputs]
        print(f"{size} requests: {sum(lengths) / size:.2f} tokens a round")


if __name__ == "__main__":
    main(*sys.argv[1:])
