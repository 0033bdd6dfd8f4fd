"""A draft that gives NaN or invalid ids, or a broken clock, costs speed at most."""

import json
import math
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from serve_spec.config.drafts import METHODS, DraftMethod
from serve_spec.core.draft import NgramDrafts
from serve_spec.core.errors import BrokenLogits
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams
from serve_spec.engine import build, engine
from serve_spec.metrics import readings
from tests.helpers.engines import recorded_steps, texts


def break_draft(llm, index, forwards):
    """Let the head give NaN for one request of its batch, in some of its forwards."""
    worker = llm.engine.worker
    head = worker.drafter.head
    whole, calls = head.logits, count()

    def broken(hidden, step=0):
        logits = whole(hidden, step)
        if next(calls) in forwards:
            logits[index] = torch.nan
        return logits

    head.logits = broken


@pytest.mark.parametrize(
    ("topk", "first", "ahead"), [(1, 0, False), (1, 7, True), (3, 1, True), (3, 7, False)]
)
def test_a_sequence_whose_draft_breaks_goes_on_without_speculation(make_llm, topk, first, ahead):
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    plain = texts(make_llm().generate(prompts, params))
    llm = make_llm("EAGLE3", 3, speculative_eagle_topk=topk, async_scheduling=ahead)
    steps = recorded_steps(llm)
    break_draft(llm, 1, range(first, first + 3))
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    # A round that was planned ahead may draft for the sequence, and break, once more.
    assert 1 <= sum(step.num_broken_drafts for step in steps) <= 1 + ahead
    assert outputs[1].speculation.num_draft_tokens < outputs[0].speculation.num_draft_tokens
    assert outputs[1].speculation.rounds_by_num_steps[0] > 2
    assert outputs[0].speculation.num_correct_drafts > 0


class InvalidDrafter:
    """Drafts the newest token, then ids that no vocabulary has, of texts that
    begin with an odd one."""

    def learn(self, request_id, token_ids, most):
        return 0

    def propose(self, request_id, token_ids, most, first=()):
        if token_ids[0] % 2 == 0:
            return (token_ids[-1],) * min(most, 2)
        return (token_ids[-1], 10**6, -7)[:most]

    def match_length(self, request_id):
        return 0

    def propose_tree(self, request_id, token_ids, shape, first=()):
        chain = self.propose(request_id, token_ids, shape.depth)
        return NgramDrafts(chain, tuple(range(len(chain))))

    def forget(self, request_id):
        pass


def build_invalid(config, encode, max_steps):
    return InvalidDrafter()


@pytest.mark.parametrize(("topk", "grammar"), [(2, None), (1, Grammar.regex("[a-z ]*"))])
def test_a_draft_that_is_no_id_of_the_target_ends_speculation_for_its_sequence(
    make_llm, monkeypatch, topk, grammar
):
    invalid = DraftMethod("INVALID", f"{__name__}:build_invalid", is_ngram=True)
    monkeypatch.setitem(METHODS, "INVALID", invalid)
    prompts = [[100, 101, 102], [101, 103, 104]]
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, grammar=grammar)
    plain = texts(make_llm().generate(prompts, params))
    llm = make_llm("INVALID", 3, speculative_eagle_topk=topk)
    steps = recorded_steps(llm)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    assert sum(step.num_broken_drafts for step in steps) == 1
    drafted = [output.speculation.num_draft_tokens for output in outputs]
    assert drafted[0] > 10 > drafted[1] > 0


PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
PARAMS = SamplingParams(max_tokens=100, temperature=0.8, seed=3, ignore_eos=True)


class Exporter:
    """Checks the numbers that an exporter would get."""

    def observe(self, stats):
        for reading in readings(stats):
            assert 0.0 <= reading.value < math.inf, reading.metric.name


class Misread:
    """A round whose stages were timed by a broken clock."""

    def __init__(self, pending, read):
        self.pending = pending
        self.read = read

    def result(self):
        result = self.pending.result()
        draft_ms, verify_ms = self.read(result.draft_ms), self.read(result.verify_ms)
        return replace(result, draft_ms=draft_ms, verify_ms=verify_ms)


def break_clock(llm, clock, monkeypatch):
    """Replace all times of the engine's rounds from now on.

    clock: returns what is read instead of a time, at a number of readings.
    """
    readings_so_far, perf_counter = count(), engine.time.perf_counter
    submit = llm.engine.worker.submit

    def read(time):
        return clock(time, next(readings_so_far))

    def misread(plan):
        return Misread(submit(plan), read)

    llm.engine.worker.submit = misread
    broken = SimpleNamespace(perf_counter=lambda: read(perf_counter()))
    monkeypatch.setattr(engine, "time", broken)


@pytest.mark.parametrize(
    ("strategy", "clock"),
    [
        ("goodput", lambda time, reading: math.nan),
        ("goodput", lambda time, reading: time + 3600.0 * (reading // 5 % 2)),
        ("ema", lambda time, reading: -time),
        ("per_request", lambda time, reading: math.inf),
        ("static", lambda time, reading: 5.0),
    ],
    ids=["NaN", "jumps an hour and back", "runs backwards", "endless", "stands"],
)
def test_under_a_broken_clock_texts_and_figures_stay_what_they_are(
    make_llm, tmp_path, monkeypatch, strategy, clock
):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setitem(build._PROFILE_BUDGET_S, "cpu", 0.5)
    plain = texts(make_llm().generate(PROMPTS, PARAMS))
    llm = make_llm("EAGLE3", 3, speculative_adaptive=True, speculative_adaptive_strategy=strategy)
    llm.engine.metrics = Exporter()
    break_clock(llm, clock, monkeypatch)
    for _ in range(2):
        assert texts(llm.generate(PROMPTS, PARAMS)) == plain
    shown = llm.engine.snapshot()
    json.dumps(shown, allow_nan=False)
    assert shown["num_fallbacks"] == 0, "goodput uses its table, the others read no clock"


POISON = 101  # of the first rank's shard
"""A token whose KV is NaN, as after an overflow in float16."""


def poison(llm):
    """Give one token an embedding of NaN."""
    table = llm.engine.worker.target.model.embed_tokens
    weight = table.weight.detach().clone()  # the output matrix may be the same one
    weight[POISON] = torch.nan
    table.weight = torch.nn.Parameter(weight, requires_grad=False)


class PoisonDrafter(InvalidDrafter):
    """Drafts the poison behind every third token."""

    def propose(self, request_id, token_ids, most, first=()):
        return (POISON,) * min(most, 2) if len(token_ids) % 3 == 0 else ()


def run_beside(llm, prompts, bad, params):
    """Return the texts of prompts, and why each of the others, which come later, failed."""
    engine = llm.engine
    given = [engine.new_sequence(f"good{i}", prompt, params) for i, prompt in enumerate(prompts)]
    given += [engine.new_sequence(f"bad{i}", prompt, params) for i, prompt in enumerate(bad)]
    done, failed, num_steps = {seq.request_id: [] for seq in given}, {}, 0
    while engine.has_work or given:
        if given and num_steps % 2 == 0:
            engine.add(given.pop(0))
        for delta in engine.step():
            done[delta.request_id] += delta.token_ids
        failed |= engine.take_failed()
        engine.scheduler.queue.check_integrity()
        num_steps += 1
    good = [tuple(done[f"good{i}"]) for i in range(len(prompts))]
    assert all(not done[name] for name in failed)
    return good, {name: str(error) for name, error in failed.items()}


PREFIX = [(7 * i) % 100 for i in range(40)]
GOOD = [[*PREFIX, 1, 2], [3, 4, 5], [*PREFIX, 9], [6] * 30]
BAD = [[5, POISON, 9], [*PREFIX, POISON, *PREFIX], [*PREFIX, *[8] * 9, POISON]]
SOUND = SamplingParams(
    max_tokens=24, temperature=0.8, seed=3, ignore_eos=True, bad_token_ids=[POISON]
)


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"async_scheduling": True},
        {"algorithm": "EAGLE3", "num_steps": 3},
        {"algorithm": "EAGLE3", "num_steps": 3, "async_scheduling": True},
        {"algorithm": "EAGLE3", "num_steps": 3, "speculative_eagle_topk": 3},
        {"algorithm": "STANDALONE", "num_steps": 3, "tensor_parallel_size": 2},
    ],
)
def test_a_request_whose_logits_are_nan_fails_and_no_other_text_changes(
    make_llm, threads, overrides
):
    plain = texts(make_llm().generate(GOOD, SOUND))
    llm = make_llm(**overrides, chunked_prefill_size=8)
    poison(llm)
    good, failed = run_beside(llm, GOOD, BAD, SOUND)
    assert good == plain
    assert set(failed) == {"bad0", "bad1", "bad2"}
    assert all("target model produced NaN logits" in why for why in failed.values())
    for _, token_ids, _ in llm.engine.scheduler.cache.tree.page_texts():
        assert POISON not in token_ids[:-1], "a page of a failed request is cached"
    # Their pages are used anew, and what was cached before is sound.
    assert run_beside(llm, GOOD, BAD, SOUND)[0] == plain
    llm.shutdown()


@pytest.mark.parametrize("topk", [1, 2])
@pytest.mark.parametrize("ahead", [False, True])
def test_a_draft_whose_kv_is_nan_changes_no_text(make_llm, monkeypatch, topk, ahead):
    drafter = DraftMethod("POISON", f"{__name__}:build_poison", is_ngram=True)
    monkeypatch.setitem(METHODS, "POISON", drafter)
    plain = texts(make_llm().generate(GOOD, SOUND))
    llm = make_llm("POISON", 3, speculative_eagle_topk=topk, async_scheduling=ahead)
    poison(llm)
    assert run_beside(llm, GOOD, [], SOUND) == (plain, {})


def build_poison(config, encode, max_steps):
    return PoisonDrafter()


def test_a_prompt_whose_log_probabilities_are_nan_fails(make_llm):
    llm = make_llm()
    poison(llm)
    params = replace(SOUND, prompt_logprobs=1)
    _, failed = run_beside(llm, GOOD[:1], [[5, POISON, *[9] * 40]], params)
    assert set(failed) == {"bad0"}


def test_an_engine_is_broken_after_several_requests_with_nan_logits_in_a_row(make_llm):
    llm = make_llm()
    poison(llm)
    most = engine.MAX_BROKEN_REQUESTS
    run_beside(llm, [], BAD[:1] * (most - 1), SOUND)
    llm.engine.check_health()
    run_beside(llm, GOOD[:1], BAD[:1] * (most - 1), SOUND)
    llm.engine.check_health()
    run_beside(llm, [], BAD[:1] * most, SOUND)
    with pytest.raises(BrokenLogits):
        llm.engine.check_health()
