"""How many prompt tokens a step computes, and what they cost."""

import math
import random
from dataclasses import replace
from statistics import quantiles

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.prompt_plans import Gpu, Trace, settings_of, simulate
from serve_spec.adaptive import AdaptiveController
from serve_spec.adaptive.costs import Work
from serve_spec.adaptive.prompt_costs import PromptCosts
from serve_spec.adaptive.prompts import Load, PromptLimits, PromptSizer, pairs_of
from serve_spec.config import SchedulerConfig
from serve_spec.core.record import StepTimes
from serve_spec.core.round import DecodeBatch, PendingPrompt
from serve_spec.scheduler import queue as queue_module
from tests.helpers.rounds import verified_round

MANY = 1 << 20


def line(size, drafts, prompts):
    return 0.02 * prompts


class TestPromptCosts:
    def learned(self, costs, num=200, seed=0, spikes=0.0):
        """Let rounds of 10 ms teach what 0.3 of a round, 0.03 ms a token and 1e-6 a pair cost."""
        rng = random.Random(seed)
        for _ in range(num):
            prompts, start = rng.randint(50, 3000), rng.randint(0, 9000)
            entries = rng.choice([0, 0, 2000])
            pairs = pairs_of([PendingPrompt(start, prompts)], prompts)
            ms = 13.0 + 0.03 * prompts + 1e-6 * pairs + 0.002 * entries
            ms *= math.exp(rng.gauss(0, 0.02)) * (20 if rng.random() < spikes else 1)
            costs.learn((16, 32, prompts, pairs, entries), 10.0, ms)
        return costs

    @pytest.mark.parametrize("curve", [line, None], ids=["with a table", "without"])
    @pytest.mark.parametrize("spikes", [0.0, 0.02])
    def test_rounds_tell_what_a_round_a_token_a_pair_and_an_entry_cost(self, curve, spikes):
        costs = self.learned(PromptCosts(curve), spikes=spikes)
        tokens = costs.curve_ms(16, 32, np.array(2000.0))
        more = float(costs.more_ms(np.array(10.0), tokens, np.array(4e6)))
        assert more == pytest.approx(3.0 + 60.0 + 4.0, rel=0.05 if not spikes else 0.3)
        if not spikes:
            assert costs.pair_ms == pytest.approx(1e-6, rel=0.3)
            assert costs.entry_ms == pytest.approx(0.002, rel=0.3)

    def test_most_rounds_keep_within_the_factor_that_they_are_said_to(self):
        costs, rng, late = self.learned(PromptCosts(line)), random.Random(1), 0
        for _ in range(4000):
            ms = 13.0 + 0.03 * 1000 + 1e-6 * 500_500
            predicted = 10.0 + float(
                costs.more_ms(np.array(10.0), np.array(20.0), np.array(500_500.0))
            )
            ms *= math.exp(rng.gauss(0, 0.1))
            late += ms > costs.margin * predicted
            costs.learn((16, 32, 1000, 500_500, 0), 10.0, ms)
        assert 0.002 < late / 4000 < 0.03

    def test_what_was_learned_outlives_a_restart(self):
        costs, restarted = self.learned(PromptCosts()), PromptCosts()
        assert not restarted.is_known
        restarted.restore(costs.state())
        assert restarted.state() == costs.state()
        assert restarted.weights == pytest.approx(costs.weights)


def batch(size, prompts, most=None):
    pending = [PendingPrompt(*each) for each in prompts]
    total = sum(prompt.num_tokens for prompt in pending)
    return DecodeBatch(
        request_ids=[str(i) for i in range(size)],
        max_steps=[7] * size,
        num_tokens=100 * size,
        num_sampled=0,
        max_draft_tokens=8 * size,
        num_missing_entries=[3] * size,
        prompts=pending,
        max_prompt_tokens=total if most is None else min(total, most),
    )


def load(size, prompt, emitted, pairs=0.0):
    return Load(Work(size, 500.0), prompt / emitted, 0.0, prompt, pairs)


def sized(load=None, num_prompts=0, counts=(), **bounds):
    limits = SchedulerConfig(max_num_batched_tokens=MANY, **bounds)
    sizer = PromptSizer(PromptCosts(line), PromptLimits(limits, counts))
    sizer.plan(load or Load(Work(8, 500.0)), num_prompts, 10.0, 20.0)
    return sizer


@given(
    st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 20_000)), min_size=1, max_size=9),
    st.integers(1, 64),
    st.floats(1.1, 30),
    st.one_of(st.none(), st.floats(12, 300)),
    st.sampled_from([(), tuple(range(16, 2049, 32))]),
)
def test_a_step_keeps_within_its_bounds_or_computes_few_prompt_tokens(
    prompts, size, ratio, bound, counts
):
    sizer = sized(counts=counts, max_step_ratio=ratio, max_inter_token_ms=bound)
    given = batch(size, prompts)
    tokens = sizer.tokens(given, 2 * size, 10.0)
    assert 1 <= tokens <= given.max_prompt_tokens
    ms = 10.0 + 0.02 * tokens
    smallest = 16 if not counts else 64  # the least that fills a captured graph
    assert tokens <= smallest or ms <= min(10.0 * ratio, bound or math.inf) + 1e-6
    others = 3 * size + tokens
    if counts and others < 2048 and tokens < given.max_prompt_tokens and tokens > smallest:
        assert others in counts, "no row is padding"


def test_few_prompt_tokens_are_computed_in_passing_and_many_fill_the_step():
    few = sized(load(8, 100.0, 400.0), 1).goal
    many = sized(load(64, 4000.0, 100.0), 40).goal
    assert few < 200
    assert many > 1500


def test_draft_kv_that_a_step_has_to_make_leaves_less_room_for_prompts():
    sizer = sized(max_inter_token_ms=40.0)
    costs = sizer.costs
    for _ in range(50):
        costs.learn((8, 16, 0, 0, 4000), 10.0, 18.0)
    few, many = (sizer.tokens(batch(8, [(0, 9000)]), drafts, 10.0) for drafts in (0, 16))
    assert few >= many
    waiting = batch(8, [(0, 9000)])
    object.__setattr__(waiting, "num_missing_entries", [4000] + [3] * 7)
    assert sizer.tokens(waiting, 16, 10.0) < many


MID = Trace(96, 32, (256, 3840), (64, 320))
CHAT = Trace(96, 16, (32, 512), (32, 256))


@pytest.mark.parametrize("strategy", ["static", "goodput"])
def test_operators_see_the_goal_and_the_longest_step(strategy):
    limits = SchedulerConfig(max_step_ratio=5.0)
    settings = settings_of("3" if strategy == "static" else "adaptive", limits)
    controller = AdaptiveController(settings, Gpu().table())
    assert controller.snapshot()["prompt_tokens"] == {"goal": None, "max_step_ms": None}
    for _ in range(40):
        steps = controller.choose_steps(batch(8, [(0, 4000)], most=1000))
        assert 1 <= steps.prompt_tokens <= 1000
        depth, more = steps.shape.depth, 0.02 * steps.prompt_tokens
        ended = {"num_ended": 1, "num_ended_prompt_tokens": 900, "num_ended_tokens": 90}
        record = verified_round([1] * 8, 8, depth, num_prefill_tokens=steps.prompt_tokens, **ended)
        times = StepTimes(0.0, 10.0 + more, 10.0 + more)
        controller.on_verify_complete(replace(record, times=times, notes=steps.notes))
    shown = controller.snapshot()["prompt_tokens"]
    assert shown["goal"] > 100
    assert 20.0 < shown["max_step_ms"] < 80.0


def played(trace, chunk, depth, **bounds):
    limits = SchedulerConfig(
        max_num_seqs=64, max_num_batched_tokens=9216, chunked_prefill_size=chunk, **bounds
    )
    return simulate(trace, limits, settings_of(depth, limits), gpu=Gpu())


@pytest.mark.parametrize("trace", [MID, CHAT], ids=["long prompts", "chats"])
@pytest.mark.parametrize("depth", ["0", "3", "adaptive"])
def test_chunks_are_about_as_fast_as_the_best_that_is_held_fixed(trace, depth):
    best = min(played(trace, chunk, depth).total_ms for chunk in (512, 2048, 8192))
    assert played(trace, "auto", depth).total_ms < 1.05 * best


@pytest.mark.parametrize("depth", ["0", "3", "adaptive"])
def test_99_of_100_gaps_between_tokens_keep_within_their_bound(depth):
    def share(**bounds):
        gaps = played(MID, "auto", depth, **bounds).gaps_ms
        return sum(ms <= 40.0 for ms in gaps) / len(gaps)

    assert share(max_inter_token_ms=40.0) >= 0.99
    assert share() < 0.95, "the bound is needed"


def test_short_prompts_wait_half_as_long_behind_long_ones(monkeypatch):
    def p99_of_short():
        report = played(Trace(192, 16, (200, 12_000), (64, 128)), "auto", "0")
        waits = [ms for prompt, ms in report.firsts if prompt < 2000]
        return quantiles(waits, n=100)[-1]

    passing = p99_of_short()
    monkeypatch.setattr(queue_module, "in_turn", list)
    assert passing < 0.5 * p99_of_short()
