"""N-gram drafts: when a round has them, and when it waits for them."""

import json

import numpy as np
import pytest

from serve_spec.core.request import SamplingParams
from serve_spec.scheduler import requests
from tests.helpers.engines import recorded_plans, switch_every_round, texts

BRANCHING = {"speculative_eagle_topk": 3, "speculative_num_draft_tokens": 11}
CHAIN = {"speculative_ngram_min_match_window_size": 1}
TREE = {**CHAIN, **BRANCHING}
FIRST = {"speculative_ngram_first": True}
SHAPES = pytest.mark.parametrize("shape", [CHAIN, TREE], ids=["chain", "tree"])
AHEAD = {"async_scheduling": True}


def prompts_and_params():
    """Prompts that went on in two ways, as code does, and every temperature."""
    prompts = [[5 + i, 7, 9 + i, 5 + i, 7, 11] * (2 + i % 3) + [5 + i, 7] for i in range(8)]
    params = [
        SamplingParams(max_tokens=16 + 2 * i, temperature=(0.0, 0.4, 1.0)[i % 3], seed=i)
        for i in range(8)
    ]
    return prompts, params


def sources(plan):
    """Return what drafted for the requests of a step."""
    return {"text" if req.draft_ids else "model" for req in plan.requests if req.num_steps}


def num_kept(outputs):
    return sum(output.speculation.num_correct_drafts for output in outputs)


@pytest.mark.parametrize(
    ("algorithm", "keys"),
    [
        ("NGRAM", {"speculative_ngram_min_match_window_size": 5}),
        ("NGRAM", {"speculative_ngram_min_match_window_size": 5, **BRANCHING}),
        ("EAGLE3", FIRST),
        ("EAGLE3", {**BRANCHING, **FIRST}),
    ],
)
def test_if_nothing_matches_no_round_drafts_from_the_text_or_waits(make_llm, algorithm, keys):
    params = SamplingParams(max_tokens=16, temperature=1.0, seed=1, ignore_eos=True)
    llm = make_llm(algorithm, 3, **AHEAD, **keys)
    plans = recorded_plans(llm)
    llm.generate([list(range(20, 40))], params)
    decoding = [plan for plan in plans if plan.batch_size]
    assert "text" not in set().union(*map(sources, decoding))
    assert all(plan.follows for plan in decoding[1:])
    if algorithm == "NGRAM":
        requests = [req for plan in plans for req in plan.requests]
        assert all(req.query_len == len(req.token_ids) for req in requests)


@SHAPES
@pytest.mark.parametrize(("algorithm", "first"), [("NGRAM", {}), ("EAGLE3", FIRST)])
def test_only_rounds_that_draft_from_the_text_wait_for_it(make_llm, algorithm, first, shape):
    llm = make_llm(algorithm, 3, **AHEAD, **first, **shape)
    plans = recorded_plans(llm)
    assert num_kept(llm.generate(*prompts_and_params())) > 0
    decoding = [plan for plan in plans if plan.batch_size]
    drafted = ["text" in sources(plan) for plan in decoding]
    assert not any(plan.follows for plan, drafts in zip(decoding, drafted, strict=True) if drafts)
    assert any(drafted)
    assert first or any(plan.follows for plan in decoding)


def test_replayed_answers_are_all_accepted_and_the_texts_stay(make_llm, tmp_path):
    prompts, params = prompts_and_params()
    plain = make_llm().generate(prompts, params)
    file = tmp_path / "answers.jsonl"
    answers = (
        {"prompt_token_ids": prompt, "token_ids": output.token_ids}
        for prompt, output in zip(prompts, plain, strict=True)
    )
    file.write_text("".join(json.dumps(answer) + "\n" for answer in answers))
    for ahead in (False, True):
        keys = {"speculative_replay_answers": str(file), "async_scheduling": ahead}
        found = make_llm("REPLAY", 3, **keys).generate(prompts, params)
        assert texts(found) == texts(plain)
        for output in found:
            stats, num_tokens = output.speculation, len(output.token_ids)
            drafts = sum(k * count for k, count in stats.rounds_by_num_steps.items())
            assert stats.num_correct_drafts == drafts > 0, "every draft is right"
            assert stats.num_rounds <= 1 + num_tokens // 4 + 1


def test_nor_does_anything_wait_for_a_text_while_the_policy_wants_no_drafts(make_llm):
    llm = make_llm("NGRAM", 3, **AHEAD, **CHAIN)
    switch_every_round(llm, [0])
    plans = recorded_plans(llm)
    llm.generate(*prompts_and_params())
    alone = [plan for plan in plans if plan.batch_size == len(plan.requests)]
    assert len(alone) > 8
    assert all(plan.follows for plan in alone[1:])


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_drafts_from_a_corpus_are_kept_where_it_knows_the_text_and_never_change_it(
    make_llm, tmp_path, algorithm
):
    prompts = [[30 + 5 * i, 90 - i, 17] for i in range(4)]
    params = [SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)] * 4
    plain = texts(make_llm().generate(prompts, params))
    np.save(tmp_path / "answers.npy", np.concatenate([*map(np.array, plain[:2])]))
    llm = make_llm(
        algorithm,
        4,
        max_num_seqs=4,
        speculative_ngram_corpus=str(tmp_path / "answers.npy"),
        speculative_ngram_first=algorithm != "NGRAM",
        speculative_ngram_min_match_window_size=3,
    )
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    for output in outputs[:2]:
        assert output.speculation.num_correct_drafts > 0


@pytest.mark.parametrize("algorithm", ["NGRAM", "EAGLE3"])
def test_a_step_reads_a_bounded_part_of_new_texts_and_texts_stay_the_same(
    make_llm, monkeypatch, algorithm
):
    """Also after preemptions, when texts are read anew."""
    monkeypatch.setattr(requests, "LEARNED_TOKENS", 10)
    monkeypatch.setattr(requests, "MAX_TREE_TOKENS", 4)
    keys = {**CHAIN, "num_pages": 40, "max_num_seqs": 4, "prefix_caching": False}
    llm = make_llm(algorithm, 3, **keys, speculative_ngram_first=algorithm != "NGRAM")
    drafter, learned = llm.engine.scheduler.drafts.ngrams.drafter, []
    learn, find = drafter.learn, llm.engine.scheduler.drafts.ngrams.find

    def counted_learn(*args):
        learned[-1].append(learn(*args))
        return learned[-1][-1]

    def counted_find(*args):
        learned.append([])
        return find(*args)

    monkeypatch.setattr(drafter, "learn", counted_learn)
    monkeypatch.setattr(llm.engine.scheduler.drafts.ngrams, "find", counted_find)
    prompts = [[i, 7, 8, 9] * 10 for i in range(6)]
    params = SamplingParams(max_tokens=40, temperature=0.0, ignore_eos=True)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == texts(make_llm().generate(prompts, params))
    assert llm.engine.scheduler.queue.num_preemptions > 0
    assert all(sum(of_step) <= 10 + 4 * 4 for of_step in learned)
    assert sum(map(sum, learned)) > sum(map(len, prompts)), "all are read"
    assert sum(output.speculation.num_draft_tokens for output in outputs) > 0
