"""Prompts begin beside texts that decode, cost their rounds little, and share pages."""

import time

import pytest

from serve_spec.core.request import SamplingParams


def test_newcomers_do_not_make_the_whole_batch_catch_up_wider(make_llm, monkeypatch):
    """What is left of a prompt's entries is one, and those of the round under way."""
    num_steps = 3
    llm = make_llm("EAGLE3", num_steps, async_scheduling=True, max_num_seqs=3)
    worker = llm.engine.worker
    extend, widths = worker.drafter.extend, []

    def noted(buffers, num_requests, length):
        widths.append(length)
        extend(buffers, num_requests, length)

    monkeypatch.setattr(worker.drafter, "extend", noted)
    prompts = [[(37 * i * i + n) % 256 for i in range(n)] for n in (17, 18, 33, 47, 30)]
    assert min(map(len, prompts)) > worker.max_missing
    params = [
        SamplingParams(max_tokens=12 + 7 * (i % 3), temperature=0.4 * (i % 3), seed=i)
        for i in range(len(prompts))
    ]
    llm.generate(prompts, params)
    assert 1 <= max(widths) <= num_steps + 2


@pytest.mark.parametrize(("algorithm", "num_left"), [("NGRAM", 0), ("NGRAM", 1), ("NONE", 2)])
def test_a_text_whose_last_token_alone_is_left_to_compute_goes_on_from_it(
    make_llm, algorithm, num_left
):
    """A preempted text of a chunk and so many tokens more; one is what decoding begins with."""
    params = SamplingParams(max_tokens=40, temperature=1.0, seed=3, ignore_eos=True)
    prompt = [(37 * i * i) % 256 for i in range(15)]
    plain = make_llm().generate([prompt], params)[0]
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 24 - num_left}
    engine = make_llm(algorithm, 2, async_scheduling=False, **sizes).engine
    engine.add(seq := engine.new_sequence("a", prompt, params))
    emitted = []
    while engine.has_work:
        if len(seq) == 24 and not engine.scheduler.queue.num_preemptions:
            engine.scheduler.queue.preempt(seq)
        emitted += [token for delta in engine.step() for token in delta.token_ids]
    assert emitted == list(plain.token_ids)
    assert engine.scheduler.queue.num_preemptions == 1


def test_the_first_tokens_say_how_long_their_prefill_took_and_later_ones_nothing(make_llm):
    """From the first admission: a preemption begins no other prefill."""
    engine = make_llm("EAGLE3", 4).engine
    before = time.perf_counter()
    engine.add(seq := engine.new_sequence("a", list(range(40)), SamplingParams(max_tokens=8)))
    deltas = []
    while engine.has_work:
        if deltas and not engine.scheduler.queue.num_preemptions:
            engine.drain()
            engine.scheduler.queue.preempt(seq)
        deltas += engine.step()
    assert before < seq.admitted_at < seq.admitted_at + deltas[0].prefill_s < time.perf_counter()
    assert not any(delta.prefill_s for delta in deltas[1:])


def test_bad_words_are_banned_as_they_are_and_after_a_space(make_llm):
    """A byte is a token here; one that is a whole word is a bad token."""
    llm = make_llm("EAGLE3", 4)
    params = SamplingParams(bad_words=[" ab", "c", [5, 6]], bad_token_ids=[7])
    asked = llm.engine.new_sequence("1", [1], params).params
    assert asked.bad_token_ids == (7, ord("c"))
    assert asked.bad_words == ((5, 6), tuple(b" ab"), tuple(b" c"), tuple(b"ab"))


PAGE = 4


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
