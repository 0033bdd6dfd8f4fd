"""What travels arrives, whoever wrote it."""

from __future__ import annotations

import pickle

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.serving.reports import Figures, Report, opened
from serve_spec.serving.snapshots import Snapshot

VALUES = st.recursive(
    st.none() | st.integers(-(10**6), 10**6) | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner),
    max_leaves=8,
)
FIELDS = ["batch_size", "kv", "counters", "slots", "switches", "speculation", "other"]


@given(st.text(), st.dictionaries(st.sampled_from(FIELDS), VALUES))
def test_a_snapshot_arrives_as_it_was(replica: str, snapshot: dict[str, object]) -> None:
    report = Report.of(replica, snapshot)
    assert Report.unpacked(report.packed()) == report
    assert opened(report.whole) == snapshot


def test_the_figures_are_those_of_the_snapshot() -> None:
    snapshot: Snapshot = {
        "speculative_num_steps": 3,
        "batch_size": 4,
        "num_waiting": 5,
        "kv": {"free_pages": 6},
        "counters": {"decode_tokens": 7},
        "speculation": {"effective_speedup": 1.5, "window": {"tokens_per_step": 2, "busy_s": 8}},
    }
    expected = Figures(
        num_steps=3, batch_size=4, tokens_per_step=2, decode_tokens=7, num_waiting=5,
        free_pages=6, speedup=1.5, busy_s=8,
    )  # fmt: skip
    assert Report.of("a", snapshot).figures == expected
    assert Report.of("a", {}).figures == Figures(0, 0, 0, 0, 0, 0, 0, 0)


def test_figures_of_another_version_go_by_their_names() -> None:
    sent = pickle.dumps(("a", {"new": 9.0, "busy_s": 2.0, "batch_size": "many"}, b"", b""))
    assert Report.unpacked(sent).figures == Figures(0, 0, 0, 0, 0, 0, 0, busy_s=2.0)


def test_the_summary_holds_averages_of_slots_and_nothing_bulky() -> None:
    slots = {"1": {"ema_accept_len": 2.5, "candidate_steps": [0, 1]}, "8": {"speedup": 1.2}}
    bulky: dict[str, object] = {"speculation": {}, "costs": {}, "positions": [], "acceptance": {}}
    counters = {"steps": 1, "decode_rows": 32, "decode_tokens": 80}
    summary = opened(Report.of("a", {**bulky, "counters": counters, "slots": slots}).summary)
    assert summary["slots"] == {"1": {"ema_accept_len": 2.5}}
    assert summary["counters"] == counters
    assert not bulky.keys() & set(summary)
