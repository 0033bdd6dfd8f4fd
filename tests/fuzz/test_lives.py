"""Whatever comes together, a request says what it says alone: a random life per example.

A life follows from the slice and its number alone, so a failure comes back, by itself.
`make test` runs slice 0, `make fuzz SLICES=40` as many as wanted, a few hundred requests each.

Lives are drawn independently, value by value: what hypothesis makes of so many values repeats
itself, and hardly ever runs short of pages.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from dataclasses import dataclass
from random import Random
from typing import Any

import pytest

from serve_spec import LLM
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.grammar import Grammar
from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import FinishReason, RequestOutput, SamplingParams, SpeculativeOptions
from tests.helpers.checkpoints import EOS_ID, make_eagle3
from tests.helpers.engines import (
    MakeLLM,
    heard_plans,
    llm_maker,
    make_pair,
    switch_every_round,
)
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
TREES = [
    DraftShape(1, 3, 3),
    DraftShape(2, 5, 3),
    DraftShape(3, 9, 3),
    DraftShape(4, 14, 3),
    DraftShape(4, 30, 3),
]


@dataclass(frozen=True)
class Engine:
    """How an engine is built, and which tiers its rounds take in turn."""

    pair: str
    algorithm: str
    keys: dict[str, Any]
    tiers: list[int | DraftShape]
    ragged: bool


@dataclass(frozen=True)
class Guest:
    """A request: after how many rounds it comes, and after how many more its client goes."""

    prompt: list[int]
    params: SamplingParams
    comes: int
    goes: int | None


def any_engine(rng: Random) -> Engine:
    algorithm = rng.choice(["EAGLE3", "EAGLE", "STANDALONE", "MEDUSA", "NGRAM"])
    keys: dict[str, Any] = {
        "execution": rng.choice(["eager", "lanes"]),
        "num_pages": rng.choice([24, 40, 400]),
        "max_num_seqs": rng.randint(1, 6),
        "max_num_batched_tokens": rng.choice([20, 40, 90]),
        "prefix_caching": rng.random() < 0.7,
    }
    tiers: list[int | DraftShape] = [0, 1, 2, 3, HEADS if algorithm == "MEDUSA" else 7]
    text_first = algorithm != "NGRAM" and rng.random() < 0.3
    if algorithm == "NGRAM" or text_first:
        keys["speculative_ngram_min_match_window_size"] = 1
        keys["speculative_ngram_first"] = text_first
    if rng.random() < 0.5:
        keys["speculative_eagle_topk"] = 3
        tiers += TREES
    turns = [rng.choice(tiers) for _ in range(rng.randint(2, 9))]
    return Engine(
        pair=rng.choice(["usual", "usual", "other"]),
        algorithm=algorithm,
        keys=keys,
        tiers=[*turns, rng.choice(tiers[1:])],  # some drafts in every life
        ragged=rng.random() < 0.5,
    )


def any_guests(rng: Random) -> list[Guest]:
    """Some lives are without what keeps rounds from being planned ahead."""
    grammars = [None] * 5 + GRAMMARS if rng.random() < 0.4 else [None]
    scored = [None] * 7 + [0] if rng.random() < 0.3 else [None]

    def guest() -> Guest:
        begin = rng.choice(BEGINNINGS)[: rng.randint(0, 36)]
        params = SamplingParams(
            max_tokens=rng.randint(5, 30),
            temperature=rng.choice([0.0, 0.6, 1.0]),
            top_k=rng.choice([0, 0, 12]),
            top_p=rng.choice([1.0, 1.0, 0.8]),
            min_p=rng.choice([0.0, 0.0, 0.05]),
            seed=rng.randrange(100),
            repetition_penalty=rng.choice([1.0, 1.0, 1.3]),
            frequency_penalty=rng.choice([0.0, 0.0, 0.9]),
            presence_penalty=rng.choice([0.0, 0.0, -0.6]),
            logit_bias=rng.choice([{}, {}, {9: 4.0, EOS_ID: 3.0}]),
            allowed_token_ids=rng.choice([None, None, None, tuple(range(40, 130))]),
            bad_token_ids=rng.choice([(), (), tuple(range(0, 256, 5))]),
            min_tokens=rng.choice([0, 0, 5]),
            stop_token_ids=rng.choice([(), (), (), tuple(range(0, 256, 17))]),
            stop=rng.choice([(), (), (), ("e", "AB", "~~"), tuple(map(chr, range(60, 90)))]),
            ignore_eos=rng.random() < 0.7,
            logprobs=rng.choice([None, None, 2]),
            prompt_logprobs=rng.choice(scored),
            grammar=rng.choice(grammars),
            speculative=SpeculativeOptions(
                enabled=rng.random() < 0.85, max_steps=rng.choice([None] * 5 + [0, 2])
            ),
        )
        return Guest(
            prompt=[*begin, *(rng.randrange(256) for _ in range(rng.randint(1, 8)))],
            params=params,
            comes=rng.randint(0, 25),
            goes=rng.randint(1, 12) if rng.random() < 0.2 else None,
        )

    return [guest() for _ in range(rng.randint(4, 9))]


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


@pytest.fixture(scope="module")
def met() -> Counter[str]:
    """How often the lives of the slice met what they are for."""
    return Counter()


@pytest.mark.parametrize("number", range(EXAMPLES))
def test_a_request_says_in_any_company_what_it_says_alone(
    makers: dict[str, MakeLLM], alone: dict[str, LLM], met: Counter[str], number: int
) -> None:
    rng = Random(f"{SLICE}/{number}")
    engine, guests = any_engine(rng), any_guests(rng)
    steps = HEADS if engine.algorithm == "MEDUSA" else 7
    make = makers[engine.pair]
    llm = make(engine.algorithm, steps, max_model_len=MAX_MODEL_LEN, **engine.keys)
    switch_every_round(llm, engine.tiers, ragged=engine.ragged)
    plans = heard_plans(llm)
    found = life(llm, guests)
    assert llm.engine.scheduler.cache.num_free_pages == engine.keys["num_pages"]
    for place, guest in enumerate(guests):
        if place in found:
            (expected,) = alone[engine.pair].generate([guest.prompt], guest.params)
            assert found[place][0] == expected.token_ids
            assert found[place][1] is expected.finish_reason
            assert_alike(found[place][2], expected)
    met["kept drafts"] += llm.engine.counters.num_correct_drafts > 0
    met["preemptions"] += llm.engine.scheduler.num_preemptions > 0
    met["prefix hits"] += llm.engine.counters.num_prefix_hit_tokens > 0
    met["rounds planned ahead"] += any(plan.follows for plan in plans)
    met["trees"] += any(row.tree_drafts for plan in plans for row in plan.rows)


def test_the_lives_above_met_what_they_are_for(met: Counter[str]) -> None:
    """Each in a tenth of them at least, of as many as say anything."""
    assert EXAMPLES < 40 or len(met) == 5
    assert EXAMPLES < 40 or min(met.values()) >= EXAMPLES / 10, met


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
