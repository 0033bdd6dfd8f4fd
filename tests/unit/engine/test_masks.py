"""Masks that take long: their requests wait or fail, and no step waits for them."""

import threading

import pytest

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams
from serve_spec.structured import masks
from serve_spec.structured.compiler import Matcher
from tests.helpers.engines import recorded_plans, texts

RULES = Grammar.regex("[a-z ]{60}", "guided_regex")
OTHER = SamplingParams(max_tokens=60, temperature=0.8, seed=1, ignore_eos=True)
MASKED = SamplingParams(max_tokens=30, temperature=0.8, seed=2, grammar=RULES)
PROMPTS = [[1, 2, 3], [4, 5]]


def run(engine, on_step=lambda tokens: None):
    """Return the tokens of both requests, and why they failed."""
    tokens, failed = {"other": [], "masked": []}, {}
    engine.add(engine.new_sequence("other", PROMPTS[0], OTHER))
    engine.add(engine.new_sequence("masked", PROMPTS[1], MASKED))
    while engine.has_work:
        for delta in engine.step():
            tokens[delta.request_id] += delta.token_ids
        failed |= engine.take_failed()
        on_step(tokens)
    return tokens, failed


def block_masks(monkeypatch, is_blocked):
    """Let masks wait if `is_blocked(number)`; return what ends the wait."""
    go_on, lock, mask = threading.Event(), threading.Lock(), Matcher.mask
    numbers = iter(range(10**6))

    def wait_first(self):
        with lock:
            number = next(numbers)
        if is_blocked(number):
            assert go_on.wait(60), "the wait was not ended"
        return mask(self)

    monkeypatch.setattr(Matcher, "mask", wait_first)
    return go_on


LIVES = {
    "plain": {},
    "chains": {"algorithm": "EAGLE3", "num_steps": 3},
    "ahead": {"algorithm": "EAGLE3", "num_steps": 3, "async_scheduling": True},
    "trees": {"algorithm": "EAGLE3", "num_steps": 3, "speculative_eagle_topk": 2},
    "two ranks": {"algorithm": "EAGLE3", "num_steps": 3, "tensor_parallel_size": 2},
}


@pytest.mark.parametrize("first", [3, 4, 6, 9, 14])
@pytest.mark.parametrize("overrides", LIVES.values(), ids=LIVES)
def test_a_request_waits_for_its_mask_and_the_others_do_not(
    make_llm, threads, monkeypatch, overrides, first
):
    """The mask that blocks is one of a committed text, or one after drafts."""
    monkeypatch.setattr(masks, "PATIENCE_S", 0.01)
    plain = make_llm()
    expected = [plain.generate([p], q)[0] for p, q in zip(PROMPTS, (OTHER, MASKED), strict=True)]
    llm = make_llm(**overrides)
    llm.engine.check_grammar(RULES)
    go_on = block_masks(monkeypatch, lambda number: number >= first)
    longest = []

    def end_wait_with_the_other(tokens):
        longest.append(len(tokens["masked"]))
        if len(tokens["other"]) == OTHER.max_tokens:
            go_on.set()

    tokens, failed = run(llm.engine, end_wait_with_the_other)
    assert [tuple(tokens["other"]), tuple(tokens["masked"])] == texts(expected)
    assert not failed
    assert go_on.is_set()
    assert longest[-1] == MASKED.max_tokens
    llm.shutdown()


@pytest.mark.parametrize("overrides", [LIVES["plain"], LIVES["chains"]], ids=["plain", "chains"])
def test_a_request_whose_masks_are_slow_drafts_no_more_and_has_the_same_text(
    make_llm, monkeypatch, overrides
):
    expected = run(make_llm().engine)
    monkeypatch.setattr(masks, "SLOW_MASK_S", 0.0)
    llm = make_llm(**overrides)
    plans = recorded_plans(llm)
    assert run(llm.engine) == expected
    reqs = [req for plan in plans for req in plan.decode_requests]
    masked, other = (
        [req.num_steps for req in reqs if req.request_id == name] for name in ("masked", "other")
    )
    assert not any(masked[masks.MOST_SLOW_MASKS :])
    assert any(masked) == any(other[masks.MOST_SLOW_MASKS :]) == bool(overrides)


def test_a_request_whose_mask_takes_too_long_fails_and_the_other_does_not(make_llm, monkeypatch):
    (expected,) = make_llm().generate(PROMPTS[:1], OTHER)
    llm = make_llm("EAGLE3", 3)
    monkeypatch.setattr(masks, "MOST_MASK_S", 0.0)
    tokens, failed = run(llm.engine)
    assert tuple(tokens["other"]) == expected.token_ids
    assert isinstance(failed["masked"], InvalidRequest)
    assert failed["masked"].field == "guided_regex"
    assert "a mask of it takes" in str(failed["masked"])


def test_a_text_that_exceeds_the_limits_of_its_grammar_fails(make_llm):
    heavy = Grammar.regex("x((a{1,100}){1,100}){1,100}", "guided_regex")
    params = SamplingParams(max_tokens=100, temperature=0.0, grammar=heavy, min_tokens=99)
    with pytest.raises(InvalidRequest, match="too complex for this text"):
        make_llm().generate([[1, 2]], params)
