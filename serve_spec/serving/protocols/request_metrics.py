"""Speculation figures of one request, in the fields of vLLM and SGLang."""

from __future__ import annotations

from collections import Counter

from serve_spec.core.stats import SpeculationStats


def vllm_speculation(stats: SpeculationStats, depth: int) -> dict[str, object]:
    """Return vLLM's `metrics.speculative_decoding`; depth: most drafts of a round."""
    accepted, verified = _histograms(stats)
    num_rounds, num_accepted = sum(accepted.values()), _total(accepted)
    by_length = {
        str(length): _dense(Counter(rounds), length)
        for length, rounds in sorted(stats.rounds_by_correct.items())
        if length
    }
    steps = (
        {}
        if stats.rounds is None
        else {
            "per_step_accepted": [num_correct for _, num_correct in stats.rounds],
            "per_step_drafted": [num_drafts for num_drafts, _ in stats.rounds],
        }
    )
    return {
        "mean_acceptance_length": _mean_length(accepted),
        "draft_acceptance_rate": _ratio(num_accepted, stats.num_draft_tokens),
        "acceptance_histogram": _dense(accepted, max(depth, *verified, 0)),
        "acceptance_histogram_by_draft_length": by_length,
        "num_spec_steps": num_rounds,
        "num_accepted_draft_tokens": num_accepted,
        "num_draft_tokens": stats.num_draft_tokens,
        "num_spec_tokens": depth,
        **steps,
    }


def sglang_speculation(stats: SpeculationStats, depth: int) -> dict[str, object]:
    """Return SGLang's `sglext.spec_tokens_details`; depth: most drafts of a round."""
    accepted, verified = _histograms(stats)
    num_rounds, num_accepted = sum(accepted.values()), _total(accepted)
    longest = max(depth, *verified, 0)
    return {
        "spec_accept_rate": _ratio(num_accepted, stats.num_draft_tokens),
        "spec_accept_length": _mean_length(accepted),
        "spec_cap_length": _ratio(_total(verified), num_rounds),
        "spec_num_correct_drafts": num_accepted,
        "spec_num_proposed_drafts": stats.num_draft_tokens,
        "spec_verify_ct": num_rounds,
        "spec_correct_drafts_histogram": _dense(accepted, longest),
        "spec_cap_lens_histogram": _dense(verified, longest),
    }


def _histograms(stats: SpeculationStats) -> tuple[Counter[int], Counter[int]]:
    """Return the rounds with drafts by accepted and by verified drafts; of trees, by levels."""
    accepted: Counter[int] = Counter()
    verified: Counter[int] = Counter()
    for length, rounds in stats.rounds_by_correct.items():
        if length:
            accepted.update(rounds)
            verified[length] += sum(rounds.values())
    return accepted, verified


def _dense(counts: Counter[int], longest: int) -> list[int]:
    return [counts[length] for length in range(longest + 1)]


def _total(counts: Counter[int]) -> int:
    return sum(length * num for length, num in counts.items())


def _mean_length(accepted: Counter[int]) -> float:
    """Return the tokens of a round with drafts: those accepted and the bonus token."""
    return round(1.0 + _total(accepted) / max(1, sum(accepted.values())), 4)


def _ratio(part: float, whole: float) -> float:
    return round(part / whole, 4) if whole else 0.0
