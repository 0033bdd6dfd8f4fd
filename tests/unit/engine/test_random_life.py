"""A real engine under everything at once: arrivals, cancellations, preemption, tier changes."""

import random
from collections import defaultdict

import pytest

from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.request import FinishReason, SamplingParams, SpeculativeOptions
from tests.helpers.engines import MakeLLM, switch_every_round

TIERS = {
    1: [0, 1, 3, 7],
    3: [0, 3, DraftShape(2, 5, 3), DraftShape(4, 12, 3), DraftShape(4, 30, 3)],
}


@pytest.mark.parametrize("execution", ["eager", "lanes"])
@pytest.mark.parametrize(("topk", "text_first"), [(1, False), (1, True), (3, False), (3, True)])
def test_requests_that_survive_random_traffic_say_what_they_say_alone(
    make_llm: MakeLLM, execution: str, topk: int, text_first: bool
) -> None:
    rng = random.Random(0)
    sizes = {"num_pages": 32, "max_num_seqs": 5, "max_num_batched_tokens": 24}
    shape = {"speculative_eagle_topk": topk, "execution": execution}
    by = {"speculative_ngram_first": text_first, "speculative_ngram_min_match_window_size": 1}
    llm = make_llm("EAGLE3", 3, max_model_len=96, **shape, **sizes, **by)
    switch_every_round(llm, [rng.choice(TIERS[topk]) for _ in range(97)])
    engine = llm.engine
    prompts: dict[str, tuple[list[int], SamplingParams]] = {}
    tokens: dict[str, list[int]] = defaultdict(list)
    reasons: dict[str, FinishReason] = {}
    beginnings = [[rng.randrange(256) for _ in range(40)] for _ in range(3)]
    arrivals = 0
    while arrivals < 40 or engine.has_work:
        if arrivals < 40 and rng.random() < 0.3:
            name = str(arrivals)
            arrivals += 1
            params = SamplingParams(
                max_tokens=rng.randint(1, 40),
                temperature=rng.choice([0.0, 0.8, 1.2]),
                seed=arrivals,
                speculative=SpeculativeOptions(max_steps=rng.choice([None, 0, 2])),
            )
            begin = rng.choice(beginnings)[: rng.randint(0, 40)]
            prompt = [*begin, *(rng.randrange(256) for _ in range(rng.randint(1, 12)))]
            prompts[name] = (prompt, params)
            engine.add(engine.new_sequence(name, prompt, params))
        if engine.has_work and rng.random() < 0.04:
            victim = rng.choice(list(engine.scheduler.sequences())).request_id
            assert engine.abort(victim) is not None
            reasons[victim] = FinishReason.ABORT
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
            if delta.finish_reason is not None:
                reasons[delta.request_id] = delta.finish_reason
    assert engine.scheduler.cache.num_free_pages == 32
    assert engine.scheduler.num_preemptions > 5
    assert engine.scheduler.cache.tree.num_evicted > 5
    assert engine.counters.num_prefix_hit_tokens > 50
    plain = make_llm(max_model_len=96)
    survivors = [name for name, reason in reasons.items() if reason is not FinishReason.ABORT]
    assert len(survivors) + sum(r is FinishReason.ABORT for r in reasons.values()) == 40
    for name in survivors:
        prompt, params = prompts[name]
        alone = plain.generate([prompt], params)[0]
        assert tuple(tokens[name]) == alone.token_ids
        assert reasons[name] is alone.finish_reason
