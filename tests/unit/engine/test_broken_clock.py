"""A clock that breaks costs speed, at most: texts and figures stay what they are."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest

from serve_spec.core.request import SamplingParams
from serve_spec.engine import build, engine
from serve_spec.metrics import readings
from tests.helpers.engines import texts

Law = Callable[[float, int], float]

PROMPTS = [[1, 2, 3], [4, 5, 6, 7]]
PARAMS = SamplingParams(max_tokens=100, temperature=0.8, seed=3, ignore_eos=True)
CLOCKS = {
    "gives NaN": lambda time, reading: math.nan,
    "is endless": lambda time, reading: math.inf,
    "runs backwards": lambda time, reading: -time,
    "jumps an hour and back": lambda time, reading: time + 3600.0 * (reading // 5 % 2),
    "stands": lambda time, reading: 5.0,
}
"""What is read instead of a time, at the so manyth reading."""


class Exporter:
    """Takes what an exporter would."""

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


def break_clock(llm, law, monkeypatch):
    """All times of the engine's rounds are read off it from now on."""
    readings_so_far, perf_counter = count(), engine.time.perf_counter
    submit = llm.engine.worker.submit

    def read(time):
        return law(time, next(readings_so_far))

    def misread(plan):
        return Misread(submit(plan), read)

    llm.engine.worker.submit = misread
    broken = SimpleNamespace(perf_counter=lambda: read(perf_counter()))
    monkeypatch.setattr(engine, "time", broken)


@pytest.mark.parametrize(
    ("strategy", "clock"),
    [
        ("goodput", "gives NaN"),
        ("goodput", "jumps an hour and back"),
        ("ema", "runs backwards"),
        ("per_request", "is endless"),
        ("static", "stands"),
    ],
)
def test_under_a_broken_clock_texts_go_on_and_figures_stay_numbers(
    make_llm, tmp_path, monkeypatch, strategy, clock
):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    monkeypatch.setitem(build._PROFILE_BUDGET_S, "cpu", 0.5)
    plain = texts(make_llm().generate(PROMPTS, PARAMS))
    llm = make_llm("EAGLE3", 3, speculative_adaptive=True, speculative_adaptive_strategy=strategy)
    llm.engine.metrics = Exporter()
    break_clock(llm, CLOCKS[clock], monkeypatch)
    for _ in range(2):
        assert texts(llm.generate(PROMPTS, PARAMS)) == plain
    shown = llm.engine.snapshot()
    json.dumps(shown, allow_nan=False)
    assert shown["num_fallbacks"] == 0, "goodput goes by its table, others look at no clock"


def test_a_time_that_is_none_leaves_the_figures_of_other_rounds_alone(make_llm, monkeypatch):
    """Rates of acceptance count every round, times only those that were measured."""
    llm = make_llm("EAGLE3", 3)
    llm.generate(PROMPTS, PARAMS)
    before = llm.collector.snapshot()
    with monkeypatch.context() as broken:
        break_clock(llm, CLOCKS["gives NaN"], broken)
        llm.generate(PROMPTS, PARAMS)
    after = llm.collector.snapshot()
    assert after["since_start"]["rounds"] == 2 * before["since_start"]["rounds"]
    for known in ("busy_s", "overhead_ratio", "host_share", "accept_rate"):
        assert after["since_start"][known] == before["since_start"][known]
    assert after["by_batch_size"] == before["by_batch_size"]
    assert after["window"]["by_num_steps"] == before["window"]["by_num_steps"]
