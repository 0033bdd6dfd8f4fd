"""Laws of watching a server: every account of a replica once, at the time it was given."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.online.record import Sample
from serve_spec.bench.online.watch import accounts, news


def state(replica: str, age_s: float, **said: Any) -> dict[str, Any]:
    return {"replica": replica, "age_s": age_s, **said}


def test_an_account_is_as_old_as_the_server_says() -> None:
    info = {"internal_states": [state("a", 0.4, batch_size=3, speculative_num_steps=5)]}
    (account,) = accounts(info, 2.0)
    assert account == {
        "time_s": 1.6, "replica": "a", "batch_size": 3, "num_waiting": None, "num_steps": 5,
    }  # fmt: skip
    assert accounts({"anything": "else"}, 2.0) == []


@given(
    st.lists(st.floats(0.6, 5), min_size=1, max_size=8),
    st.floats(0.06, 0.5),
    st.floats(0, 0.04),
)
def test_however_often_it_is_polled_every_account_counts_once(
    gaps: list[float], every_s: float, jitter_s: float
) -> None:
    """Replica "a" reports at the sums of `gaps`, and once before the run."""
    reports = [-0.5]
    for gap in gaps:
        reports.append(reports[-1] + 0.5 + gap)
    end_s = reports[-1] + 2 * every_s
    samples: list[Sample] = []
    for poll in range(int(end_s / every_s) + 1):
        now_s = poll * every_s
        told_at = max(time for time in reports if time <= now_s)
        # The answer arrives a little later than the server computed the age.
        late_s = jitter_s * (poll % 2)
        info = {"internal_states": [state("a", now_s - told_at, batch_size=1)]}
        samples += news(accounts(info, now_s + late_s), samples)
    assert len(samples) == len(gaps), "none twice, none missed, none from before the run"
