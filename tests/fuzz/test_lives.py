"""Whatever comes together, a request says what it says alone: a random life per example.

A slice is a number of examples that follows from its number alone, so a failure comes back.
`make test` runs slice 0, `make fuzz SLICES=40` as many as wanted, a few hundred requests each.
"""

from __future__ import annotations

import os
from collections import defaultdict
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis import strategies as st

from serve_spec import LLM
from serve_spec.core.grammar import Grammar
from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import FinishReason, RequestOutput, SamplingParams, SpeculativeOptions
from serve_spec.core.round import TreeShape
from tests.helpers.checkpoints import EOS_ID, make_eagle3
from tests.helpers.engines import MakeLLM, llm_maker, make_pair, switch_every_round
from tests.helpers.plain_logprobs import CLOSE
from tests.unit.engine.test_standalone import with_vocabulary

SLICE = int(os.environ.get("SERVE_SPEC_FUZZ_SLICE", "0"))
EXAMPLES = int(os.environ.get("SERVE_SPEC_FUZZ_EXAMPLES", "40"))
MAX_MODEL_LEN = 80
HEADS = 4
BEGINNINGS = [[(7 * i + 31 * n) % 256 for i in range(36)] for n in range(3)]
SCHEMA = {"type": "array", "items": {"enum": [1, "é", None]}, "maxItems": 4}
GRAMMARS = [
    Grammar.regex("(ab?|b)*c"),
    Grammar.choice(["yes", "no", "not sure"]),
    Grammar.json_schema(SCHEMA),
]
TREES = [TreeShape(1, 3), TreeShape(2, 5), TreeShape(3, 9), TreeShape(4, 14), TreeShape(4, 30)]
token_ids = st.integers(0, 255)


@dataclass(frozen=True)
class Engine:
    """How an engine is built, and which tiers its rounds take in turn."""

    pair: str
    algorithm: str
    keys: dict[str, Any]
    tiers: list[int | TreeShape]
    ragged: bool


@dataclass(frozen=True)
class Guest:
    """A request: after how many rounds it comes, and after how many more its client goes."""

    prompt: list[int]
    params: SamplingParams
    comes: int
    goes: int | None


@st.composite
def engines(draw: st.DrawFn) -> Engine:
    pair = draw(st.sampled_from(["usual", "usual", "other"]))
    algorithm = draw(st.sampled_from(["EAGLE3", "EAGLE", "STANDALONE", "MEDUSA", "NGRAM"]))
    keys: dict[str, Any] = {
        "execution": draw(st.sampled_from(["eager", "lanes"])),
        "num_pages": draw(st.sampled_from([24, 40, 400])),
        "max_num_seqs": draw(st.integers(1, 6)),
        "max_num_batched_tokens": draw(st.sampled_from([20, 40, 90])),
        "prefix_caching": draw(st.booleans()),
    }
    deepest = HEADS if algorithm == "MEDUSA" else 7
    tiers: st.SearchStrategy[int | TreeShape] = st.sampled_from([0, 0, 1, 2, 3, deepest])
    text_first = algorithm != "NGRAM" and draw(st.integers(0, 2)) == 0
    if algorithm == "NGRAM" or text_first:
        keys["speculative_ngram_min_match_window_size"] = 1
        keys["speculative_ngram_first"] = text_first
    if draw(st.booleans()):
        keys["speculative_eagle_topk"] = 3
        tiers = st.one_of(tiers, st.sampled_from(TREES))
    turns = draw(st.lists(tiers, min_size=1, max_size=8))
    return Engine(pair, algorithm, keys, turns, draw(st.booleans()))


@st.composite
def guests(draw: st.DrawFn) -> Guest:
    begin = draw(st.sampled_from(BEGINNINGS))[: draw(st.integers(0, 36))]
    prompt = [*begin, *draw(st.lists(token_ids, min_size=1, max_size=8))]
    params = draw(
        st.builds(
            SamplingParams,
            max_tokens=st.integers(5, 30),
            temperature=st.sampled_from([0.0, 0.6, 1.0]),
            top_k=st.sampled_from([0, 0, 12]),
            top_p=st.sampled_from([1.0, 1.0, 0.8]),
            min_p=st.sampled_from([0.0, 0.0, 0.05]),
            seed=st.integers(0, 99),
            repetition_penalty=st.sampled_from([1.0, 1.0, 1.3]),
            frequency_penalty=st.sampled_from([0.0, 0.0, 0.9]),
            presence_penalty=st.sampled_from([0.0, 0.0, -0.6]),
            logit_bias=st.sampled_from([{}, {}, {9: 4.0, EOS_ID: 3.0}]),
            allowed_token_ids=st.sampled_from([None, None, None, tuple(range(40, 130))]),
            bad_token_ids=st.sampled_from([(), (), tuple(range(0, 256, 5))]),
            min_tokens=st.sampled_from([0, 0, 5]),
            stop_token_ids=st.sampled_from([(), (), tuple(range(0, 256, 17))]),
            stop=st.sampled_from([(), (), ("e", "AB", "~~"), tuple(map(chr, range(60, 90)))]),
            ignore_eos=st.booleans(),
            logprobs=st.sampled_from([None, None, 2]),
            prompt_logprobs=st.sampled_from([None] * 7 + [0]),
            grammar=st.sampled_from([None] * 5 + GRAMMARS),
            speculative=st.builds(
                SpeculativeOptions,
                enabled=st.sampled_from([True, True, True, False]),
                max_steps=st.sampled_from([None, None, None, 0, 2]),
            ),
        )
    )
    return Guest(
        prompt, params, draw(st.integers(0, 25)), draw(st.none() | st.none() | st.integers(1, 12))
    )


@pytest.fixture(scope="module")
def makers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, MakeLLM]:
    """Of a usual pair, and of one with windows, and drafts that do not know every token."""
    folder = tmp_path_factory.mktemp("pairs")
    window = {"sliding_window": 9, "layer_types": ["sliding_attention"]}
    other = make_pair(folder / "other", family="mistral", sliding_window=64)
    other.heads["EAGLE3"] = make_eagle3(
        folder / "few", other.target, mimic=True, draft_vocab=200, **window
    )
    other.heads["STANDALONE"] = with_vocabulary(other, folder / "short", 250)
    pairs = {"usual": make_pair(folder / "usual"), "other": other}
    return {name: llm_maker(pair, "cpu") for name, pair in pairs.items()}


@pytest.fixture(scope="module")
def alone(makers: dict[str, MakeLLM]) -> dict[str, LLM]:
    """Plain decoding, one request at a time, nothing known from before."""
    sizes = {"max_model_len": MAX_MODEL_LEN, "prefix_caching": False}
    return {name: make(**sizes) for name, make in makers.items()}


@seed(SLICE)
@settings(
    max_examples=EXAMPLES,
    database=None,
    phases=[Phase.explicit, Phase.generate],
    suppress_health_check=list(HealthCheck),
)
@given(engine=engines(), guests=st.lists(guests(), min_size=4, max_size=9))
def test_a_request_says_in_any_company_what_it_says_alone(
    makers: dict[str, MakeLLM], alone: dict[str, LLM], engine: Engine, guests: list[Guest]
) -> None:
    steps = HEADS if engine.algorithm == "MEDUSA" else 7
    llm = makers[engine.pair](engine.algorithm, steps, max_model_len=MAX_MODEL_LEN, **engine.keys)
    switch_every_round(llm, engine.tiers, ragged=engine.ragged)
    found = life(llm, guests)
    assert llm.engine.scheduler.cache.num_free_pages == engine.keys["num_pages"]
    for number, guest in enumerate(guests):
        if number in found:
            (expected,) = alone[engine.pair].generate([guest.prompt], guest.params)
            assert found[number][0] == expected.token_ids
            assert found[number][1] is expected.finish_reason
            assert_alike(found[number][2], expected)


def life(
    llm: LLM, guests: list[Guest]
) -> dict[int, tuple[tuple[int, ...], FinishReason, list[TokenLogprob]]]:
    """Tokens, end and log-probabilities of every guest that stays to its end."""
    tokens: dict[str, list[int]] = defaultdict(list)
    logprobs: dict[str, list[TokenLogprob]] = defaultdict(list)
    ends: dict[str, FinishReason] = {}
    round_number = 0
    while round_number <= 25 or llm.engine.has_work:
        for number, guest in enumerate(guests):
            name = str(number)
            if guest.comes == round_number:
                llm.engine.add(llm.engine.new_sequence(name, guest.prompt, guest.params))
            is_leaving = guest.goes is not None and guest.comes + guest.goes == round_number
            if is_leaving and llm.engine.abort(name) is not None:
                ends[name] = FinishReason.ABORT
        for delta in llm.engine.step():
            tokens[delta.request_id] += delta.token_ids
            logprobs[delta.request_id] += delta.logprobs or ()
            if delta.finish_reason is not None:
                ends[delta.request_id] = delta.finish_reason
        round_number += 1
    assert len(ends) == len(guests), "everybody leaves"
    return {
        int(name): (tuple(tokens[name]), reason, logprobs[name])
        for name, reason in ends.items()
        if reason is not FinishReason.ABORT
    }


def assert_alike(found: list[TokenLogprob], expected: RequestOutput) -> None:
    """Log-probabilities, up to rounding."""
    for one, other in zip(found, expected.logprobs or (), strict=True):
        assert one.logprob == pytest.approx(other.logprob, **CLOSE)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
