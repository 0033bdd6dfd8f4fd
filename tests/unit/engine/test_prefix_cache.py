"""Texts that begin alike share pages: the text is the same, and so is what the draft is worth."""

import random
from dataclasses import replace

from serve_spec.core.request import SamplingParams
from tests.helpers.engines import switch_every_round

PAGE = 4


def prompts_and_params():
    """Two beginnings, each gone on with in several ways: within a page, at its end, not at all."""
    rng = random.Random(5)
    beginnings = [[rng.randrange(256) for _ in range(40)] for _ in range(2)]
    prompts = []
    for i in range(10):
        shared = beginnings[i % 2][: 40 - 3 * (i // 4)]
        prompts.append([*shared, *(rng.randrange(256) for _ in range(i % 5))])
    params = [
        SamplingParams(
            max_tokens=14 + i,
            temperature=(0.0, 0.7, 1.0)[i % 3],
            seed=i // 2,
            ignore_eos=True,
            frequency_penalty=0.5 * (i % 4 == 3),
        )
        for i in range(10)
    ]
    return prompts, params


def test_a_draft_that_knows_the_text_knows_it_after_a_hit_too(make_llm):
    """Some pages have no draft entries yet, for they were computed without drafts."""
    llm = make_llm("STANDALONE", 3)
    prompts, params = prompts_and_params()
    greedy = [replace(p, temperature=0.0, frequency_penalty=0.0) for p in params]
    switch_every_round(llm, [0, 0, 0, 3, 0, 2], ragged=False)
    llm.generate(prompts[:2], SamplingParams(max_tokens=2))
    for _ in range(2):
        for output in llm.generate(prompts, greedy):
            stats = output.speculation
            assert stats.num_correct_drafts == stats.num_draft_tokens > 0
            assert output.num_cached_tokens > 0


def test_hits_are_counted_and_a_cache_that_is_off_has_none(make_llm):
    prompt = list(range(30))
    params = SamplingParams(max_tokens=2, temperature=0.0)
    for prefix_caching, expected in ((True, 28), (False, 0)):
        llm = make_llm(prefix_caching=prefix_caching)
        outputs = [llm.generate([prompt], params)[0] for _ in range(2)]
        assert [output.num_cached_tokens for output in outputs] == [0, expected]
        shown = llm.engine.snapshot()["prefix_cache"]
        assert isinstance(shown, dict)
        assert (shown["query_tokens"], shown["hit_tokens"]) == (60, expected)
        assert shown["pages"] == shown["idle_pages"] == expected // PAGE
