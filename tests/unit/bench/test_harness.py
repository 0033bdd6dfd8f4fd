"""Closed loops and steady-state batches: variants share a worker without affecting each other."""

import copy
import random
from itertools import count, pairwise
from operator import attrgetter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.steady import SteadyLoad, figures, run_variants
from serve_spec.bench.harness import (
    WARM_UP_STEPS,
    ClosedLoop,
    engine_beside,
    equal_prefixes,
    full_batch_speed,
)
from serve_spec.bench.variants import make_variants
from serve_spec.bench.workload import TextKind, TextRequest
from serve_spec.config import ConfigError
from serve_spec.core.draft import DraftShape
from serve_spec.core.record import StepTimes
from tests.helpers.engines import llm_maker, make_pair, switching_controller
from tests.helpers.rounds import verified_round

POLICIES = {"off": [0], "K=4": [4], "ragged": [3, 0, 4, 1]}
BATCH_SIZE = 3
LENGTHS = [20, 9, 31, 14, 25, 18, 22]


def request(number):
    """Half of them sampled."""
    prompt = [(7 * number + 3 * j) % 250 for j in range(9)]
    return TextRequest(TextKind("code", number % 2), prompt, number)


@pytest.fixture(scope="module", params=[False, True], ids=["in step", "ahead"])
def engine(request, tmp_path_factory):
    llm = llm_maker(make_pair(tmp_path_factory.mktemp("pair")), "cpu")(
        "EAGLE3", 4, prefix_caching=False, async_scheduling=request.param
    )
    llm.engine.worker.init_states(map(DraftShape.chain, range(5)))
    return llm.engine


def controller(name):
    """A policy whose rounds depend on no clock."""
    return switching_controller(POLICIES[name], ragged=name == "ragged")


def loop_beside(engine, name):
    requests = [(request(number), length) for number, length in enumerate(LENGTHS)]
    return ClosedLoop(engine_beside(engine, controller(name)), requests, BATCH_SIZE)


FIGURES = attrgetter("shape.depth", "batch_size", "num_draft_tokens", "num_output_tokens")


def shapes(rounds):
    return [FIGURES(r.record) for r in rounds]


def test_an_engine_beside_another_has_room_for_the_same_trees(tmp_path_factory):
    """A beam of the last levels lies behind a text whose page would be full without it."""
    path = make_pair(tmp_path_factory.mktemp("trees"))
    tree = {"speculative_eagle_topk": 4, "speculative_num_draft_tokens": 16}
    engine = llm_maker(path, "cpu")("EAGLE3", 4, prefix_caching=False, **tree).engine
    beside = engine_beside(engine, copy.deepcopy(engine.controller))
    requests = [request(number) for number in range(7)]
    loops = [
        ClosedLoop(each, [(request, 25) for request in requests], BATCH_SIZE)
        for each in (beside, engine)
    ]
    for loop in loops:
        loop.advance(25 * len(requests))
    assert loops[0].texts == loops[1].texts
    assert loops[0].num_emitted == 25 * len(requests)


def test_taking_turns_changes_neither_texts_nor_steps(engine):
    """Where steps are launched ahead, texts only: a turn ends with none in flight."""
    ahead, num_turns = engine.worker.settings.async_scheduling, 25
    loops = {name: loop_beside(engine, name) for name in POLICIES}
    rounds = {name: [] for name in POLICIES}
    rng = random.Random(num_turns)
    for turn in range(1, num_turns + 1):
        for name in rng.sample(list(loops), len(loops)):
            rounds[name] += loops[name].advance(sum(LENGTHS) * turn // num_turns)
    for name, loop in loops.items():
        alone = loop_beside(engine, name)
        rounds_alone = alone.advance(sum(LENGTHS))
        assert loop.texts == alone.texts == loops["off"].texts
        assert [len(text) for text in loop.texts] == LENGTHS
        assert ahead or shapes(rounds[name]) == shapes(rounds_alone)
        assert ahead == any(r.record.follows for r in rounds_alone)
        assert {r.record.shape.depth for r in rounds[name]} >= set(POLICIES[name])


def test_an_endless_loop_stays_full_and_leaves_nothing_behind(engine):
    endless = ((request(number), 10) for number in count())
    loop = ClosedLoop(engine_beside(engine, controller("K=4")), endless, BATCH_SIZE)
    filled = loop.fill()
    assert all(loop.texts)
    assert len(loop.texts) >= BATCH_SIZE
    assert sum(r.record.num_prefill_tokens for r in filled) >= 9 * BATCH_SIZE
    loop.advance(200)
    assert 200 <= loop.num_emitted == sum(map(len, loop.texts)) < 200 + 2 * 5 * BATCH_SIZE
    assert sum(len(text) < 10 for text in loop.texts) <= BATCH_SIZE
    loop.close()
    assert not loop.engine.has_work
    cache = engine.scheduler.cache
    assert cache.num_free_pages == cache.num_pages


def a_round(tokens, ms=10.0, prompt=0):
    kept = [count - 1 for count in tokens]
    times = StepTimes(1.0, 2.0, ms)
    return verified_round(kept, len(tokens), 3, times=times, num_prefill_tokens=prompt)


def settled(size):
    return [a_round([9] * size, ms=1000.0)] * WARM_UP_STEPS


@given(st.lists(st.tuples(st.integers(1, 8), st.floats(1, 100)), min_size=1, max_size=50))
def test_the_speed_of_single_requests_is_tokens_over_time(rounds):
    batch = [*settled(1), *(a_round([tokens], ms) for tokens, ms in rounds)]
    tokens, ms = sum(r[0] for r in rounds), sum(r[1] for r in rounds)
    assert full_batch_speed(1, [batch]) == pytest.approx(tokens / ms * 1e3)


@given(st.lists(st.integers(1, 8), min_size=1, max_size=8), st.integers(1, 20))
def test_full_batches_have_the_speed_of_a_refilled_batch(paces, num_rounds):
    """Requests of 840 tokens, each at its own pace, in a server where one follows another."""
    batch = [*settled(len(paces)), *[a_round(paces, ms=5.0)] * num_rounds]
    rounds_of_a_request = sum(840 / pace for pace in paces) / len(paces)
    tokens_per_ms = len(paces) * 840 / rounds_of_a_request / 5.0
    assert full_batch_speed(len(paces), [batch]) == pytest.approx(tokens_per_ms * 1e3)


def test_prompts_and_shrinking_batches_do_not_count():
    full = [*settled(2), *[a_round([2, 4])] * 5]
    prompts, end = [a_round([], prompt=7), a_round([1, 1], prompt=7)], [a_round([8])] * 9
    assert full_batch_speed(2, [[*prompts, *full, *end]]) == full_batch_speed(2, [full])
    never_full = [[*settled(3), a_round([2, 2, 2])], settled(4)]
    assert full_batch_speed(4, never_full) is None


LOAD = SteadyLoad(batch_size=3, prompt_tokens=10, output_tokens=60)


@pytest.fixture(scope="module", params=[False, True], ids=["sync", "async"])
def llm(request, tmp_path_factory):
    make = llm_maker(make_pair(tmp_path_factory.mktemp("waves")), "cpu")
    how = {"async_scheduling": request.param, "max_num_seqs": 4, "max_model_len": 160}
    return make("EAGLE3", 3, synthetic_acceptance=2.0, **how)


def fixed(llm, num_steps):
    return make_variants(llm.engine.controller, [num_steps], [])[-1].controller


def test_a_full_step_is_counted_for_its_variant_and_the_engine_is_left_as_it_was(llm):
    engine = llm.engine
    before = engine.controller, engine.metrics
    off, on = fixed(llm, 0), fixed(llm, 3)
    rounds = run_variants(engine, LOAD, off, {"off": [off], "on": [on]})
    for name, num_steps in (("off", 0), ("on", 3)):
        assert rounds[name], f"{name} had a turn"
        for stats in rounds[name]:
            assert stats.decodes_only
            assert stats.num_draft_tokens == num_steps * LOAD.batch_size
            assert stats.steps_per_req == (num_steps,) * LOAD.batch_size
    shown = figures(rounds["on"])
    assert shown["rounds"] == len(rounds["on"])
    assert shown["p10_ms"] <= shown["ms"] <= shown["p90_ms"]
    tokens = len(rounds["on"]) * LOAD.batch_size * shown["accept_length"]
    seconds = sum(stats.step_ms for stats in rounds["on"]) / 1e3
    assert shown["tokens_per_second"] == pytest.approx(tokens / seconds)
    assert 1 <= shown["accept_length"] <= 4
    assert (engine.controller, engine.metrics) == before
    assert not engine.has_work
    assert engine.scheduler.cache.num_free_pages == engine.scheduler.cache.num_pages


def test_controllers_of_a_variant_alternate_and_texts_too_short_for_all_are_refused(llm):
    off, on = fixed(llm, 0), fixed(llm, 3)
    (rounds,) = run_variants(llm.engine, LOAD, off, {"both": [off, on]}).values()
    assert all(a.shape != b.shape for a, b in pairwise(rounds))
    assert {stats.shape.depth for stats in rounds} == {0, 3}
    off, on = fixed(llm, 0), fixed(llm, 3)
    with pytest.raises(ConfigError, match=r"--output-tokens=12: at batch size 3 .* raise it"):
        run_variants(llm.engine, SteadyLoad(3, 10, 12), off, {"off": [off], "on": [on]})
    assert not llm.engine.has_work


def test_texts_are_compared_as_far_as_both_were_generated():
    expected = [[1, 2, 3], [4, 5], [6], [7]]
    assert equal_prefixes([[1, 2], [4, 5, 6], [9]], expected) == 2
