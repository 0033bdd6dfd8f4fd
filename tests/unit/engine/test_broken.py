"""A draft that gives NaN or invalid ids, or a broken clock, costs speed at most."""

import json
import math
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch

from serve_spec.config.algorithms import ALGORITHMS, Algorithm
from serve_spec.core.draft import TextDrafts
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

    def propose(self, request_id, token_ids, most):
        if token_ids[0] % 2 == 0:
            return (token_ids[-1],) * min(most, 2)
        return (token_ids[-1], 10**6, -7)[:most]

    def match_length(self, request_id):
        return 0

    def propose_tree(self, request_id, token_ids, shape):
        chain = self.propose(request_id, token_ids, shape.depth)
        return TextDrafts(chain, tuple(range(len(chain))))

    def forget(self, request_id):
        pass


def build_invalid(config, encode, max_steps):
    return InvalidDrafter()


@pytest.mark.parametrize(("topk", "grammar"), [(2, None), (1, Grammar.regex("[a-z ]*"))])
def test_a_draft_that_is_no_id_of_the_target_ends_speculation_for_its_sequence(
    make_llm, monkeypatch, topk, grammar
):
    invalid = Algorithm(f"{__name__}:build_invalid", from_text=True)
    monkeypatch.setitem(ALGORITHMS, "INVALID", invalid)
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
