"""Strategy goodput, and how the logprobs of drafts become probabilities."""

import math
import random
from collections import Counter
from dataclasses import replace
from itertools import accumulate
from operator import and_
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulator import Phase, Simulator, admitted
from serve_spec.adaptive.candidates import AllowedShapes
from serve_spec.adaptive.costs import Costs, Work
from serve_spec.adaptive.drafts import DraftCalibration, PositionRates, logits
from serve_spec.adaptive.exploration import SpeedGuard
from serve_spec.adaptive.goodput import GoodputPolicy
from serve_spec.adaptive.planner import Planner
from serve_spec.adaptive.policy import StaticPolicy
from serve_spec.adaptive.prompts import Load, PromptLoad
from serve_spec.bench.trace import load_traces
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.record import StepTimes
from serve_spec.core.round import AS_DRAWN, FROM_NGRAM, GREEDY, SAMPLED, Reason
from serve_spec.ops.admission import admit_drafts
from tests.helpers.rounds import decode_batch, verified_round
from tests.helpers.simulated_costs import GPU_8B, MIXTURE, TWO_CPU_CORES, noisy, recorded_table

TRACES = load_traces(Path("tests/data/logprob_traces.json"))
SIZES = (1, 8, 32, 64, 128, 256)
COUNTS = (*range(8, 512, 8), *range(512, 2049, 64))
CHAIN = DraftShape.chain


def goodput(**fields):
    fields = {"min_dwell_rounds": 0, "token_counts": COUNTS, **fields}
    return GoodputPolicy(recorded_table(GPU_8B, SIZES), **fields)


def play(policy, size, num, rate, prompt_ms=0.0):
    """Play rounds in which each request keeps up to `rate` drafts; return how often what ran.

    prompt_ms: what prompts add to rounds that explore.
    """
    ran = Counter()
    for _ in range(num):
        steps = policy.choose(decode_batch(size))
        rows = steps.steps_per_req or [steps.shape.depth] * size
        kept = [min(rate, k) for k in rows]
        has_prompts = steps.notes.is_probe and prompt_ms > 0.0
        ms = 5.0 + 0.5 * steps.shape.depth + has_prompts * prompt_ms
        times = StepTimes(0.0, ms, ms)
        ran[steps.shape] += 1
        record = verified_round(kept, size, steps.shape.depth, steps_per_req=rows, times=times)
        record = replace(record, num_prefill_tokens=64 * has_prompts)
        policy.observe(replace(record, shape=steps.shape, notes=steps.notes))
    return ran


@pytest.mark.parametrize("prompts", ["predictable", "heated", "unpredictable"])
def test_a_large_batch_is_faster_than_at_every_fixed_depth(prompts):
    phase = Phase(prompts, 128, 256, 64, 0.4)

    def speed(policy):
        return Simulator(policy, TRACES, noisy(GPU_8B, 0.02)).run(phase).tokens_per_ms

    best = max(speed(StaticPolicy(CHAIN(depth))) for depth in range(8))
    assert speed(goodput()) > 1.01 * best


def answers(policy, *phases, costs=GPU_8B):
    rounds = []
    simulator = Simulator(
        policy, TRACES, costs, on_round=lambda batch, steps, _: rounds.append((batch.size, steps))
    )
    for phase in phases:
        simulator.run(phase)
    return rounds


@pytest.mark.parametrize(
    ("policy", "phase"),
    [
        (goodput(), Phase("predictable", 1, 4, 64)),
        (goodput(per_sequence=False), Phase("heated", 128, 256, 64, 0.4)),
    ],
    ids=["a small batch", "without differences between requests"],
)
def test_all_drafts_are_verified_in(policy, phase):
    assert {steps.budget for _, steps in answers(policy, phase)} == {None}


def test_experts_make_drafts_dear_for_one_request_and_cheap_for_many():
    """Few tokens wake few experts, so each draft wakes more; many tokens wake all of them."""

    def drafting(size, num_requests):
        policy = GoodputPolicy(recorded_table(MIXTURE, SIZES))
        phase = Phase("unpredictable", size, num_requests, 64, 0.4)
        rounds = answers(policy, phase, costs=noisy(MIXTURE, 0.02))
        return sum(steps.shape != PLAIN for _, steps in rounds) / len(rounds)

    assert drafting(1, 12) < 0.3
    assert drafting(64, 256) > 0.7


def test_budgets_fill_captured_graphs():
    rounds = answers(goodput(), Phase("heated", 128, 256, 64, 0.4))
    budgets = {steps.budget for size, steps in rounds if size == 128} - {None}
    assert budgets
    assert all(128 + budget in COUNTS for budget in budgets)
    policy = goodput()
    play(policy, 128, 100, 3)
    assert policy.choose(decode_batch(128)).budget is None, "drafts have no logprobs"


@pytest.mark.parametrize("prompt_ms", [0.0, 40.0])
def test_drafts_that_fail_are_given_up_and_tried_again_for_good(prompt_ms):
    policy = goodput()
    ran = play(policy, 64, 400, 0, prompt_ms)
    assert ran[PLAIN] > 350
    ran = play(policy, 64, 2000, 0, prompt_ms)
    assert 4 <= sum(n for shape, n in ran.items() if shape != PLAIN) <= 150
    ran = play(policy, 64, 2000, 7, prompt_ms)
    assert ran[PLAIN] < 1000, "drafts are worth it again"


def test_one_trial_of_a_few_requests_brings_drafts_back_to_a_large_batch():
    hard, easy = Phase("unpredictable", 256, 512, 48, 0.4), Phase("predictable", 128, 1024, 48, 0.4)
    rounds = answers(goodput(), hard, easy, costs=noisy(GPU_8B, 0.02))
    shapes = [steps.shape for _, steps in rounds]
    assert shapes[40:80].count(PLAIN) > 30
    first = next(n for n, (size, _) in enumerate(rounds) if size == 128)
    shapes = shapes[first:]
    trial = next(n for n, shape in enumerate(shapes) if shape != PLAIN)
    assert shapes[trial : trial + 100].count(PLAIN) < 20


def test_exploration_keeps_to_its_share_of_the_time():
    policy = goodput()
    play(policy, 8, 3000, 3)
    assert 0 < policy.snapshot()["explored_share"] <= 0.002


@pytest.mark.parametrize("prompt_ms", [0.0, 15.0])
def test_trials_of_drafts_keep_to_their_share_of_the_time(prompt_ms):
    table = recorded_table(TWO_CPU_CORES, (1, 4, 8, 16))
    policy, costs = GoodputPolicy(table), Costs(table)
    lost_ms = total_ms = 0.0
    for _ in range(4000):
        steps = policy.choose(decode_batch(16))
        rows = steps.steps_per_req or [steps.shape.depth] * 16
        ms = costs.ms(Work(16, 128.0, 0.0, steps.shape, sum(rows)))
        lost_ms += ms - costs.ms(Work(16, 128.0))
        total_ms += ms + prompt_ms
        times = StepTimes(0.0, ms, ms + prompt_ms)
        ended = {"num_prefill_tokens": 16, "num_ended": 1} if prompt_ms else {}
        ended |= {"num_ended_prompt_tokens": 64, "num_ended_tokens": 64} if prompt_ms else {}
        depth = steps.shape.depth
        record = verified_round([0] * 16, 16, depth, steps_per_req=rows, times=times, **ended)
        policy.observe(replace(record, notes=steps.notes))
    assert lost_ms < 2 * 0.002 * total_ms


@pytest.mark.parametrize("bound", [0, 3])
def test_slots_and_room_bound_the_drafts(bound):
    policy = goodput(allowed=AllowedShapes(bounds={1: 7, 32: bound}))
    assert max(shape.depth for shape in play(policy, 32, 200, 7)) <= bound
    policy = goodput()
    play(policy, 8, 50, 7)
    assert policy.choose(decode_batch(8, max_draft_tokens=0)).shape == PLAIN
    policy = goodput()
    assert policy.choose(decode_batch(2, max_steps=0)).shape == PLAIN, "at their last token"
    assert policy.choose(decode_batch(2)).shape != PLAIN, "which decided nothing"


@pytest.mark.parametrize("ms", [math.nan, math.inf, 0.0, -1.0])
def test_a_broken_clock_teaches_nothing(ms):
    policy = goodput()
    before = policy.costs.snapshot()
    for _ in range(20):
        shape = policy.choose(decode_batch(1)).shape
        record = verified_round([0], 1, shape.depth, times=StepTimes(0.0, ms, ms))
        policy.observe(replace(record, shape=shape))
    assert policy.costs.snapshot() == before


def test_what_planning_takes_and_one_slow_round_among_many_are_no_cost_of_shapes():
    slow = goodput()
    for _ in range(200):
        steps = slow.choose(decode_batch(8))
        times = slow.costs.table_ms(Work(8, 128.0, 0.0, steps.shape, 8 * steps.shape.depth))
        times += 9.0 * (steps.notes.begins_plan or slow._rounds_left == 3)
        record = verified_round([2] * 8, 8, steps.shape.depth, times=StepTimes(0.0, times, times))
        slow.observe(replace(record, shape=steps.shape, notes=steps.notes))
    factors = slow.costs.snapshot()["factors"]
    assert factors
    assert all(x == pytest.approx(1.0, abs=0.01) for row in factors.values() for x in row)


def test_plain_rounds_come_first_unless_drafts_promise_too_much():
    policy = goodput()
    assert play(policy, 128, 3, 1) == {PLAIN: 3}
    assert PLAIN not in play(policy, 128, 20, 3)
    assert PLAIN not in play(goodput(), 1, 20, 3)


def test_greedy_texts_teach_nothing_about_sampled_ones():
    drafts = goodput().drafts
    sampled, greedy = drafts.survivals(32, 1.0), drafts.survivals(32, 0.0)
    drafts.learn([verified_round([0] * 32, 32, 3)] * 9)
    assert (drafts.survivals(32, 1.0) == sampled).all()
    assert (drafts.survivals(32, 0.0)[:, :3] < 0.5 * greedy[:, :3]).all()
    half = drafts.survivals(32, 0.5)
    assert half[:16] == pytest.approx(drafts.survivals(16, 0.0)[:16])
    assert half[16:] == pytest.approx(sampled[:16])


def flattered(costs):
    """Costs that make plain rounds look slower, and drafts cheaper, than they are."""

    def verify(row):
        return tuple(1.05 * row[0] + 0.7 * (ms - row[0]) for ms in row)

    draft_ms = tuple(tuple(0.85 * ms for ms in row) for row in costs.draft_ms)
    return replace(costs, verify_ms=tuple(map(verify, costs.verify_ms)), draft_ms=draft_ms)


@pytest.mark.parametrize("prompts", ["heated", "unpredictable"])
def test_a_short_load_begins_no_slower_after_easier_texts_though_drafts_look_cheap(prompts):
    table = recorded_table(flattered(TWO_CPU_CORES), (1, 2, 4))

    def speed(policy, prompts, seed):
        simulator = Simulator(policy, TRACES, noisy(TWO_CPU_CORES, 0.04, seed))
        return simulator.run(Phase(prompts, 4, 12, 94)).tokens_per_ms

    plain = cold = warm = 0.0
    for seed in range(6):
        policy = GoodputPolicy(table)
        speed(policy, "predictable", 50 + seed)
        warm += speed(policy, prompts, seed)
        cold += speed(GoodputPolicy(table), prompts, seed)
        plain += speed(StaticPolicy(PLAIN), prompts, seed)
    assert warm > 0.99 * cold
    assert warm > 0.925 * plain


@pytest.mark.parametrize("num_prefill_tokens", [0, 500])
def test_a_closed_guard_opens_again_whatever_runs(num_prefill_tokens):
    policy = goodput()
    policy.choose(decode_batch(8))
    policy._guards.of(policy._at or 0).rounds_left = 20
    reasons = []
    for _ in range(64):
        steps = policy.choose(decode_batch(8))
        reasons.append(policy.last_reason)
        record = verified_round([0] * 8, 8, steps.shape.depth, times=StepTimes(0.0, 6.0, 6.0))
        record = replace(record, shape=steps.shape, num_prefill_tokens=num_prefill_tokens)
        policy.observe(record)
    assert Reason.GUARD in reasons
    assert reasons[-1] != Reason.GUARD


@pytest.mark.parametrize("kept", [5, 0])
def test_grammar_drafts_are_learned_apart_and_verified_as_far_as_they_are_accepted(kept):
    policies = goodput(), goodput()
    for policy in policies:
        for number in range(300):
            steps = policy.choose(replace(decode_batch(16), grammar_steps=[0] * 8 + [5] * 8))
            times = StepTimes(0.0, 5.0, 5.0)
            record = verified_round([number % 2] * 8, 16, steps.shape.depth, times=times)
            if policy is policies[0]:  # the other one sees the same rounds without them
                forced = {"grammar_drafts": [(5, kept)] * 8, "num_grammar_tokens": 8 * kept}
                record = replace(record, **forced)
            policy.observe(replace(record, notes=steps.notes))
    with_them, without = (policy.snapshot() for policy in policies)
    assert with_them["acceptance"] == without["acceptance"]
    assert with_them["calibration"] == without["calibration"]
    assert with_them["text_acceptance"] is without["grammar_acceptance"] is None
    rates = [each["accept_rate"] for each in with_them["grammar_acceptance"]][:5]
    assert min(rates) > 0.95 if kept else rates[0] < 0.05
    chosen = policies[0].choose(replace(decode_batch(16), grammar_steps=[5] * 16))
    assert None not in (chosen.grammar_steps, chosen.grammar_room)
    assert chosen.grammar_steps >= 5 if kept else chosen.grammar_steps == 1
    # Those behind a model's drafts survive with these alone.
    assert chosen.grammar_room < chosen.grammar_steps
    assert policies[0].choose(decode_batch(16)).grammar_steps is None


def test_texts_are_verified_while_a_model_does_not_draft():
    policy = goodput()
    play(policy, 64, 400, 0)
    batch = replace(decode_batch(64), ngram_steps=[5] * 64)
    seen = [policy.choose(batch) for _ in range(200)]
    assert any(steps.shape == PLAIN and any(steps.ngram_steps or []) for steps in seen)
    assert all(max(steps.ngram_steps or [0]) <= 5 for steps in seen)


class TestCosts:
    @pytest.fixture(autouse=True)
    def table(self):
        self.costs = Costs(recorded_table(TWO_CPU_CORES))

    def ms(self, depth=3):
        return self.costs.ms(self.work(depth))

    def work(self, depth=3, **changes):
        return Work(16, 128, 0.0, CHAIN(depth), 16 * depth)._replace(**changes)

    def test_the_table_is_met_at_its_points(self):
        table = self.costs.table
        verify = table.verify_ms[table.num_tokens.index(64)]
        assert self.ms() == pytest.approx(table.draft_ms[4][2] + verify)
        drafts = np.array([0.0, 48.0])
        assert self.costs.chains_ms(self.work(), drafts)[3, 1] == pytest.approx(self.ms())

    def test_a_slower_machine_is_learned_also_for_shapes_that_do_not_run(self):
        before, deeper = self.ms(), self.ms(7)
        for _ in range(50):
            self.costs.learn(self.work(), 1.3 * before)
        assert self.ms() == pytest.approx(1.3 * before, rel=0.05)
        assert 1.1 * deeper < self.ms(7) < 1.45 * deeper

    def test_slow_drafts_tell_more_of_deeper_ones_than_of_plain_rounds(self):
        before = [self.ms(depth) for depth in range(8)]
        self.costs.learn(self.work(), 1.2 * before[3], 50)
        factors = [self.ms(depth) / ms for depth, ms in enumerate(before)]
        assert 1.0 < factors[0] < 1.1 < factors[2] < factors[7] < 1.35
        self.costs.learn(self.work(0), before[0], 4)
        assert self.ms(0) < 1.04 * before[0], "a few rounds of its own say more"

    def test_one_spike_is_forgotten_though_the_shape_does_not_run(self):
        before = self.ms()
        self.costs.learn(self.work(), 2.0 * before)
        self.costs.age(16, 5000)
        assert self.ms() == pytest.approx(before, rel=0.04)

    def test_no_time_diverges(self):
        rng, before = np.random.default_rng(0), [self.ms(depth) for depth in range(8)]
        for _ in range(500):
            work = self.work(int(rng.integers(0, 8)))
            self.costs.learn(work, float(rng.lognormal(3, 2)))
        assert all(0.49 < self.ms(k) / ms < 2.02 for k, ms in enumerate(before))

    @pytest.mark.parametrize("also", [{"prompts": 200}, {"entries": 2000}])
    def test_rounds_with_prompts_teach_nothing_about_shapes(self, also):
        before, work = self.ms(), self.work(**also)
        assert not self.costs.is_usual(work)
        for _ in range(20):
            self.costs.learn_prompts(work, 5.0 * before)
        assert self.ms() == before


def test_the_guard_closes_at_a_loss_alone_for_longer_each_time():
    guard = SpeedGuard()
    guard.observe_plain(1.0)
    closed = []
    for _ in range(2):
        while not guard.rounds_left:
            guard.observe(1.2, 1.5)
        closed.append(guard.rounds_left)
        guard.rounds_left = 0
    assert closed[1] == 2 * closed[0], "it waits longer after every loss"
    for _ in range(500):
        guard.observe(2.0, 1.5)
    assert not guard.rounds_left, "a gain passes"
    assert guard.speedup == pytest.approx(4 / 3, rel=1e-3)


def test_rates_follow_the_text_and_start_from_the_fleet():
    rates = PositionRates(3, [0.9, 0.8, 0.7])
    assert rates.rates == pytest.approx([0.9, 0.8, 0.7])
    for _ in range(100):
        rates.learn([50, 25, 0], [25, 10, 0])
    assert rates.rates[:2] == pytest.approx([0.5, 0.4], abs=0.03)
    assert rates.rates[2] < 0.5, "a position that does not run follows those before it"


@given(st.lists(st.floats(0.01, 0.99), min_size=3, max_size=3), st.integers(0, 100))
def test_rates_stay_probabilities(prior, kept):
    rates = PositionRates(3, prior)
    rates.learn([100, kept, 0], [kept, 0, 0])
    assert all(0 < rate < 1 for rate in rates.rates)


def weighed(survivals, **load):
    planner, of_each = Planner(Costs(recorded_table(GPU_8B, SIZES))), 256 / len(survivals)
    weights = np.full(len(survivals[0]), of_each)
    given = Load(Work(256, 128), **load)
    return planner.chains(given, np.array(survivals), weights, 10_000, may_admit=True)


def test_sure_drafts_are_admitted_before_doubtful_ones():
    best = max(weighed([[0.95] * 3, [0.01] * 3]), key=lambda each: each.tokens_per_ms)
    assert best.budget is not None
    assert best.budget <= 128 * 3 + 48


def test_prompts_make_drafts_less_gainful_by_the_draft_kv_that_they_need():
    planner = Planner(Costs(recorded_table(GPU_8B, SIZES)))
    for _ in range(20):
        work = Work(8, 128.0, 0.0, CHAIN(3), 24, entries=2000)
        planner.costs.learn_prompts(work, planner.costs.ms(work) + 2.0)
    loads = PromptLoad()
    loads.observe(
        verified_round([], 0, 0, num_ended=1, num_ended_prompt_tokens=512, num_ended_tokens=64)
    )
    loads.observe(verified_round([0], 8, 0, num_prefill_tokens=96))
    without, found = Load(Work(8, 128.0)), loads.load(Work(8, 128.0))
    assert (found.prompts, found.chunk) == (8.0, 96.0)
    drafts = expected = np.array([[0.0], [12.0]])
    ms = np.array([[12.0], [12.0]])
    plain, with_prompts = (
        (8 + expected) / planner._speeds(load, expected, drafts, ms) for load in (without, found)
    )
    tokens = 8.0 * (8 + expected)
    chunks = np.maximum(tokens, 96.0)
    added = tokens / chunks * planner.costs.prompts_ms(8, drafts, ms, chunks, found.pairs)
    assert with_prompts[0] == pytest.approx(plain[0] + added[0])
    assert planner.costs.prompts.entry_ms == pytest.approx(0.001, rel=0.1)
    of_entries = 20 * 8.0 * planner.costs.prompts.entry_ms
    assert with_prompts[1] == pytest.approx(plain[1] + added[1] + of_entries)


def test_prompts_count_where_drafts_leave_no_room_for_them():
    """The rounds of few tokens read weights meanwhile, those of many only compute."""
    costs = Costs(recorded_table(GPU_8B, SIZES))
    drafts, ms = np.array([0.0, 224.0]), np.array([5.0, 9.0])
    few, many = costs.prompts_ms(32, drafts, ms, np.full(2, 64.0), 0.0)
    assert many > 2 * few
    rare = costs.prompts_ms(32, drafts[:1], ms[:1], np.full(1, 256.0), 0.0)[0]
    assert rare / 4 > few, "a chunk of four rounds' prompts finds less room in one of them"
    survivals = np.tile(0.8 ** np.arange(1.0, 8.0), (4, 1))
    without, found = (
        max(
            Planner(costs).chains(load, survivals, np.full(7, 8.0), 300, may_admit=False),
            key=lambda each: each.tokens_per_ms,
        )
        for load in (Load(Work(32, 128.0)), Load(Work(32, 128.0), prompts=3.0, chunk=250.0))
    )
    assert found.shape.depth < without.shape.depth


TREE = DraftShape(4, 15, 4)


def ran_of(chain_rate, tree_rate, num_rounds):
    """Return what ran in the second half, where levels are accepted with these probabilities."""
    policy = GoodputPolicy(
        recorded_table(GPU_8B, SIZES, trees=(TREE,)),
        AllowedShapes(trees={1: (TREE,)}),
        token_counts=COUNTS,
    )
    rng, ran = random.Random(0), Counter()
    for number in range(num_rounds):
        steps = policy.choose(decode_batch(8))
        ran[steps.shape] += number >= num_rounds // 2
        rate = chain_rate if steps.shape.is_chain else tree_rate
        kept = [
            sum(accumulate((rng.random() < rate for _ in range(steps.shape.depth)), and_))
            for _ in range(8)
        ]
        ms = 5.0 + 0.2 * steps.shape.depth
        record = verified_round(kept, 8, steps.shape.depth, times=StepTimes(0.0, ms, ms))
        policy.observe(replace(record, shape=steps.shape, notes=steps.notes))
    return ran


def test_what_trees_gain_over_chains_is_learned_whatever_was_believed():
    assert ran_of(0.6, 0.8, 1000)[TREE] > 450
    assert ran_of(0.7, 0.7, 8000)[TREE] < 400
    assert ran_of(0.7, 0.2, 2000)[TREE] < 100


def test_a_failing_tree_lowers_the_estimate_of_chains_too():
    ran = ran_of(0.05, 0.1, 400)
    assert sum(num for shape, num in ran.items() if shape.depth > 1) <= 8


def test_a_tree_ends_when_the_batch_is_too_large_for_it():
    table = recorded_table(GPU_8B, SIZES, trees=(TREE,))
    policy = GoodputPolicy(table, AllowedShapes(trees={1: (TREE,), 9: ()}), token_counts=COUNTS)
    while policy.choose(decode_batch(8)).shape != TREE:
        record = verified_round([1] * 8, 8, 4, times=StepTimes(0.0, 9.0, 9.0))
        policy.observe(replace(record, shape=TREE, correct_per_req=(4,) * 8))
    assert policy.choose(decode_batch(8)).shape == TREE
    assert policy.choose(decode_batch(9)).shape.is_chain


def test_depths_are_kept_for_as_many_rounds_as_asked():
    policy = goodput(min_dwell_rounds=100)
    play(policy, 8, 90, 7)
    first = policy.choose(decode_batch(8)).shape
    ran = play(policy, 8, 8, 0)
    assert set(ran) <= {first, PLAIN}


DEPTH = 4


def outcomes(rng, weight, bias):
    """Return logprobs [512, DEPTH], drafts verified and drafts accepted."""
    logprobs = np.log(rng.uniform(0.02, 0.98, (512, DEPTH)))
    probabilities = 1 / (1 + np.exp(-(weight * logits(logprobs) + bias)))
    correct = np.cumprod(rng.random((512, DEPTH)) < probabilities, axis=1).sum(axis=1)
    return logprobs, np.full(512, DEPTH), correct


def test_a_draft_is_as_probable_as_when_drawn_before_anything_is_known_and_n_grams_go_by_rate():
    logprobs, fresh = np.log(np.array([[0.9, 0.5, 0.1, 0.01]])), DraftCalibration(DEPTH)
    assert fresh.probabilities(logprobs, np.array([SAMPLED])) == pytest.approx(
        np.exp(logprobs), rel=1e-3
    )
    weight, bias = fresh.pairs([0.8])[FROM_NGRAM][0]
    assert weight == 0
    assert 1 / (1 + np.exp(-bias)) == pytest.approx(0.8, abs=1e-4)


@pytest.mark.parametrize(("weight", "bias"), [(1.0, 0.0), (0.6, 0.8), (1.5, -1.0)])
def test_the_pairs_that_made_the_outcomes_of_a_kind_are_found_and_teach_the_other_nothing(
    weight, bias
):
    rng, fitted = np.random.default_rng(0), DraftCalibration(DEPTH)
    for _ in range(40):
        logprobs, verified, correct = outcomes(rng, weight, bias)
        fitted.learn(logprobs, np.full(len(logprobs), GREEDY), verified, correct)
    pairs = fitted.pairs([0.5])
    assert pairs[GREEDY][0] == pytest.approx((weight, bias), abs=0.2)
    assert pairs[SAMPLED] == AS_DRAWN[SAMPLED] * DEPTH


def test_drafts_that_were_not_verified_or_not_reached_do_not_count():
    fitted = DraftCalibration(DEPTH)
    logprobs = np.log(np.full((64, DEPTH), 0.5))
    fitted.learn(logprobs, np.zeros(64, int), np.full(64, 2), np.zeros(64, int))
    first, *others = fitted.snapshot()
    assert first["trials"] == pytest.approx(64, rel=0.01)
    assert not others


@settings(max_examples=50, deadline=None)
@given(st.lists(st.sampled_from([0.0, -0.5, -100.0, float("nan"), float("-inf")]), min_size=4))
def test_no_share_breaks_the_fit(row):
    fitted = DraftCalibration(DEPTH)
    logprobs = np.array([row[:DEPTH]] * 8)
    for correct in (0, DEPTH):
        fitted.learn(logprobs, np.zeros(8, int), np.full(8, DEPTH), np.full(8, correct))
    probabilities = fitted.probabilities(logprobs, np.zeros(8, int))
    assert np.isfinite(fitted.pairs([0.5])[GREEDY]).all()
    assert ((probabilities >= 0) & (probabilities <= 1)).all()
    assert not probabilities[~(logprobs > -np.inf)].any()


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 40), st.integers(0, 1000))
def test_the_simulator_admits_what_the_device_admits(budget, seed):
    rng = np.random.default_rng(seed)
    logprobs = np.log(rng.uniform(0.01, 0.99, (8, DEPTH)))
    drafted, kinds = rng.integers(0, DEPTH + 1, 8), rng.integers(0, 2, 8)
    calibration = (((0.8, 0.3), (1.1, -0.2)), ((1.0, 0.0),), ((1.0, 0.0),))
    mine = admitted(logprobs, drafted, kinds, calibration, budget)
    padded = [[*kind, *kind[-1:] * DEPTH][:DEPTH] for kind in calibration]
    device = admit_drafts(
        torch.tensor(logprobs, dtype=torch.float32),
        torch.tensor(drafted + 1, dtype=torch.int32),
        torch.full((8,), DEPTH, dtype=torch.int32),
        torch.tensor(kinds, dtype=torch.int32),
        torch.tensor(padded, dtype=torch.float32),
        torch.tensor([budget], dtype=torch.int32),
    )
    assert (device.query_lens - 1).tolist() == mine.tolist()
