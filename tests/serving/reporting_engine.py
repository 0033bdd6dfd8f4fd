"""A fake engine that reports rounds and acceptance as a real one does."""

from serve_spec.core.record import StepTimes
from serve_spec.core.round import RoundNotes
from tests.helpers.rounds import verified_round
from tests.serving.fake_engine import FakeLoop

RATES = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
"""What it reports of acceptance, by position."""

ROUND = verified_round(
    [3, 1],
    batch_size=2,
    num_steps=3,
    times=StepTimes(1.0, 2.0, 4.0, idle_ms=0.2),
    num_running_seqs=3,
    num_waiting_seqs=1,
    num_used_pages=5,
    switch_reason="gain",
    drafted_per_req=[3, 4],
    budget=6,
    notes=RoundNotes(
        is_probe=True, predicted_ms=3.5, slot="1", ema_accept_length=2.5, expected_drafts=3.5
    ),
    speedup=1.5,
    num_broken_drafts=1,
)
PREFILL = verified_round(
    [],
    batch_size=0,
    num_steps=0,
    times=StepTimes(0.0, 2.0, 3.0),
    num_prefill_tokens=7,
    num_running_seqs=1,
    num_used_pages=1,
    num_prefix_query_tokens=7,
    num_prefix_hit_tokens=4,
)


class ReportingLoop(FakeLoop):
    """Reports two rounds with every request."""

    async def submit(self, *request, **options):
        self.metrics.observe(PREFILL)
        self.metrics.observe(ROUND)
        return await super().submit(*request, **options)

    def snapshot(self):
        positions = [
            {"position": position, "accept_rate": rate, "trials": 50.0}
            for position, rate in enumerate(RATES, start=1)
        ]
        return {
            **super().snapshot(),
            "candidate_steps": list(range(len(RATES) + 1)),
            "acceptance": {"positions": positions},
            "slot": "1",
            "last_reason": "gain",
            "synthetic_acceptance": None,
            "break_even": {"tokens_per_ms": {"0": 1.0, "3": 1.5}},
            "started_from": self.accept_rates,
        }
