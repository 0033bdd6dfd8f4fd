"""What travels arrives, whoever wrote it."""

from __future__ import annotations

import pickle

from serve_spec.serving.reports import Figures, Report, Snapshot, decode_part


def test_the_figures_are_those_of_the_snapshot():
    snapshot: Snapshot = {
        "speculative_num_steps": 3,
        "batch_size": 4,
        "num_waiting": 5,
        "kv": {"free_pages": 6},
        "counters": {"decode_tokens": 7},
        "speculation": {
            "effective_speedup": 1.5,
            "draft_budget": 9,
            "window": {
                "tokens_per_step": 2,
                "busy_s": 8,
                "observed_to_expected_drafts": 0.9,
                "measured_to_predicted_ms": 1.1,
            },
        },
    }
    expected = Figures(
        num_steps=3, batch_size=4, tokens_per_step=2, decode_tokens=7, draft_budget=9,
        observed_to_expected=0.9, measured_to_predicted=1.1, num_waiting=5, free_pages=6,
        speedup=1.5, busy_s=8,
    )  # fmt: skip
    assert Report.of("a", snapshot).figures == expected
    assert Report.of("a", {}).figures == Figures(*[0] * len(Figures._fields))


def test_figures_of_another_version_go_by_their_names():
    sent = pickle.dumps(("a", {"new": 9.0, "busy_s": 2.0, "batch_size": "many"}, b"", b""))
    assert Report.unpacked(sent).figures == Figures(*[0] * (len(Figures._fields) - 1), busy_s=2.0)


def test_the_summary_holds_averages_of_slots_and_nothing_bulky():
    slots = {"1": {"ema_accept_len": 2.5, "candidate_steps": [0, 1]}, "8": {"speedup": 1.2}}
    bulky: dict[str, object] = {"speculation": {}, "costs": {}, "acceptance": {}}
    counters = {"steps": 1, "decode_rows": 32, "decode_tokens": 80}
    summary = decode_part(Report.of("a", {**bulky, "counters": counters, "slots": slots}).summary)
    assert summary["slots"] == {"1": {"ema_accept_len": 2.5}}
    assert summary["counters"] == counters
    assert not bulky.keys() & set(summary)
