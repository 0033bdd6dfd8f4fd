"""Speculation of one request in the fields that clients of vLLM and SGLang read."""

import json

import pytest

from serve_spec.core.request import FinishReason
from serve_spec.core.stats import SpeculationStats
from serve_spec.serving.protocols.answers import AnswerHead, CompletionFormat, Details, usage
from serve_spec.serving.protocols.request_metrics import sglang_speculation, vllm_speculation
from serve_spec.serving.router.resume import FleetSpeculation
from tests.serving.fakes import delta

# Verified and accepted drafts of each round; the round without drafts counts nowhere.
ROUNDS = ((3, 2), (3, 0), (1, 1), (0, 0))


def counted(rounds=ROUNDS, listed=None):
    stats = SpeculationStats(rounds=listed)
    for round_ in rounds:
        stats.observe(*round_)
    return stats


def test_vllms_figures_are_of_the_rounds_with_drafts():
    assert vllm_speculation(counted(), 4) == {
        "mean_acceptance_length": 2.0,
        "draft_acceptance_rate": pytest.approx(3 / 7, abs=1e-4),
        "acceptance_histogram": [1, 1, 1, 0, 0],
        "acceptance_histogram_by_draft_length": {"1": [0, 1], "3": [1, 0, 1, 0]},
        "num_spec_steps": 3,
        "num_accepted_draft_tokens": 3,
        "num_draft_tokens": 7,
        "num_spec_tokens": 4,
    }


def test_every_round_with_drafts_is_listed_if_wanted_also_of_several_replicas():
    """A tree of two levels and five drafts counts by its drafts."""
    stats, other, total = counted(listed=[]), SpeculationStats(rounds=[]), FleetSpeculation()
    other.observe(2, 1, 5)
    total.add(stats.copy())
    stats.observe(4, 4)
    total.add(other)
    found = vllm_speculation(total, 4)
    assert found["per_step_drafted"] == [3, 3, 1, 5]
    assert found["per_step_accepted"] == [2, 0, 1, 1]
    assert sum(found["per_step_drafted"]) == found["num_draft_tokens"]
    assert sum(found["per_step_accepted"]) == found["num_accepted_draft_tokens"]
    assert len(found["per_step_drafted"]) == found["num_spec_steps"]


def test_sglangs_figures_are_of_the_rounds_with_drafts():
    assert sglang_speculation(counted(), 4) == {
        "spec_accept_rate": pytest.approx(3 / 7, abs=1e-4),
        "spec_accept_length": 2.0,
        "spec_cap_length": pytest.approx(7 / 3, abs=1e-4),
        "spec_num_correct_drafts": 3,
        "spec_num_proposed_drafts": 7,
        "spec_verify_ct": 3,
        "spec_correct_drafts_histogram": [1, 1, 1, 0, 0],
        "spec_cap_lens_histogram": [0, 1, 0, 2, 0],
    }


@pytest.mark.parametrize("figures", [vllm_speculation, sglang_speculation])
def test_a_request_without_drafts_has_zeros(figures):
    found = figures(SpeculationStats(), 0)
    lengths = {found.pop(n, None) for n in ("mean_acceptance_length", "spec_accept_length")}
    assert lengths == {None, 1.0}
    assert not any(value for value in found.values() if value not in ([0], {}))


def test_figures_of_several_replicas_are_those_of_all_rounds():
    total = FleetSpeculation()
    total.add(counted(ROUNDS[:2]))
    total.add(counted(ROUNDS[2:]))
    assert vllm_speculation(total, 4) == vllm_speculation(counted(), 4)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "asked", [{}, {"has_metrics"}, {"has_sglext"}, {"has_metrics", "has_sglext"}]
)
def test_answers_and_the_usage_chunk_hold_what_was_asked_for(asked, stream):
    form = CompletionFormat(AnswerHead("i", "m", 0, "f", include_usage=True))
    form.details = Details(depth=4, **dict.fromkeys(asked, True))
    last = delta("a", 1, finish=FinishReason.STOP)
    form.describe(counted())
    if stream:
        frames = form.ending(usage(1, 1, counted())).decode().split("\n\n")
        body = json.loads(frames[0].removeprefix("data: "))
    else:
        body = form.complete([[last]], usage(1, 1, counted()))
    names = {"has_metrics": "metrics", "has_sglext": "sglext"}
    assert body.keys() & set(names.values()) == {names[each] for each in asked}
    if "has_metrics" in asked:
        assert body["metrics"]["speculative_decoding"]["num_spec_steps"] == 3
    if "has_sglext" in asked:
        assert body["sglext"]["spec_tokens_details"]["spec_verify_ct"] == 3
