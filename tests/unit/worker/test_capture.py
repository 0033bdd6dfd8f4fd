"""Draft shapes are captured once, share what they can, and run at the smallest size that fits."""

import re
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.profiler import ProfilerActivity, profile

from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import ScheduledBatch, ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.engine import build
from serve_spec.worker.capture import MAX_CAPTURED_PROMPT_TOKENS, WIDE_EXTEND
from serve_spec.worker.graphs import (
    StageRunner,
    StepSize,
    batch_sizes,
    mixed_token_counts,
    token_counts,
)
from tests.helpers.engines import (
    llm_maker,
    make_pair,
    policy_with_small_trees,
    switch_every_round,
    texts,
)

TREES = [DraftShape(4, 12, 3), DraftShape(2, 4, 3)]


class FakeRecorder:
    """Captures stages without CUDA, as long as there is room: each runs as it is at its size."""

    def __init__(self, room=10_000):
        self.num_captured = 0
        self.room = room

    def start_over(self):
        pass

    def capture(self, run):
        if self.num_captured == self.room:
            raise torch.OutOfMemoryError("no memory")
        self.num_captured += 1
        return run

    def milliseconds(self, run):
        return 0.0


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return make_pair(tmp_path_factory.mktemp("pair"))


@pytest.fixture
def llm(pair):
    return llm_maker(pair, "cpu")("EAGLE3", 3, max_num_seqs=8, speculative_eagle_topk=3)


def chains(*depths):
    return list(map(DraftShape.chain, depths))


def captured(llm, shapes, room=10_000, **settings):
    """Return the stages of an engine, captured again with a fake recorder and other settings."""
    worker = llm.engine.worker
    worker.recorder = FakeRecorder(room)
    worker.settings = replace(worker.settings, **settings)
    worker.init_states(shapes)
    return worker.stages


def report(llm):
    return llm.engine.worker.captured.report


def plan(shape, num_requests=1, num_missing=1, *, prompts=0, budget=None):
    """Return a plan of equal requests that decode, and of prefill chunks."""
    request = ScheduledRequest("", (1,), 50, True, (), SamplingParams(), seed=0)
    decoding = request._replace(
        is_decode=True, shape=shape, extends=True, num_missing=num_missing, draft_start=0
    )
    reqs = (decoding,) * num_requests + (request,) * prompts
    return ScheduledBatch(reqs, shape, num_requests, max_missing=num_missing, budget=budget)


def test_an_out_of_memory_error_names_what_each_shape_takes_and_what_to_leave_out(llm):
    captured(llm, chains(1, 3))
    room = report(llm)[0].num_stages + 2
    message = r"num_steps=1, max_num_seqs=8: .*shape 1: 2 stages, .* MiB.*before: shape 3: \d+ "
    with pytest.raises(MemoryError, match=message + ".*leave 1 out of the candidate steps"):
        captured(llm, chains(1, 3), room)
    with pytest.raises(MemoryError, match=r"num_draft_tokens=13, num_steps=4.*topk=1\)"):
        captured(llm, [*chains(0, 2), *TREES], 4)
    captured(llm, chains(1))
    chains_alone = sum(taken.num_stages for taken in report(llm)[:-1])
    with pytest.raises(MemoryError, match=r"^max_num_batched_tokens=\d+: .*prompts: 0 stages"):
        captured(llm, chains(1), chains_alone)


def test_nothing_is_captured_after_the_start_whatever_shape_is_chosen(llm):
    shapes = [*chains(0, 1, 2, 3), *TREES]
    switch_every_round(llm, [3, 0, TREES[0], 2, TREES[1], 1])
    found = captured(llm, shapes)
    recorder = llm.engine.worker.recorder
    before = recorder.num_captured
    assert sum(taken.num_stages for taken in report(llm)) == before
    for shape in shapes:
        for batch_size in range(1, 9):
            stages = found.of(plan(shape, batch_size, num_missing=shape.depth + 1))
            state = found.states[shape]
            assert stages.shape == shape
            drafted = (state.draft, state.extend) if shape.depth else (None, None)
            assert (stages.verify, stages.draft, stages.extend) == (state.verify, *drafted)
            tokens = batch_size * (shape.size + 1)
            drafting = StepSize(batch_size, batch_size)
            for stage, size in (
                (stages.verify, StepSize(tokens, batch_size)),
                (stages.draft, drafting),
                (stages.extend, drafting),
            ):
                if stage is None:
                    assert not shape.depth
                    continue
                padded = next(held for held in stage.sizes if held.tokens >= size.tokens)
                assert size.requests <= padded.requests
    llm.generate([[1, 2, 3]] * 5)
    assert recorder.num_captured == before


@pytest.mark.parametrize("largest", [1, 3, 8])
def test_padded_steps_and_those_above_the_largest_captured_size_emit_what_exact_ones_do(
    llm, largest
):
    """Captured sizes have padding requests and tokens; steps without captures have none."""
    prompts = [[1, 2, 3, 4 + i] * (1 + i) for i in range(6)]
    params = [SamplingParams(temperature=0.8, seed=i, max_tokens=6 + 4 * i) for i in range(6)]
    turns = [3, 0, TREES[0], 2, TREES[1], 1]
    switch_every_round(llm, turns)
    exact = [output.token_ids for output in llm.generate(prompts, params)]
    switch_every_round(llm, turns)
    captured(llm, [*chains(0, 1, 2, 3), *TREES])
    usual = report(llm)
    switch_every_round(llm, turns)
    found = captured(llm, [*chains(0, 1, 2, 3), *TREES], max_captured=largest)
    num_found, num_usual = (sum(s.num_stages for s in r) for r in (report(llm), usual))
    assert num_found == num_usual if largest == 8 else num_found < num_usual
    for shape, state in found.states.items():
        assert state.verify.sizes[-1].tokens == largest * (shape.size + 1)
        assert {s.sizes[-1].requests for s in (state.draft, state.extend) if s} <= {largest}
    assert [output.token_ids for output in llm.generate(prompts, params)] == exact


def test_draft_extend_takes_the_narrowest_captured_stage_that_makes_the_missing_entries(llm):
    found = captured(llm, chains(0, 1, 3))
    assert found.max_extend == WIDE_EXTEND
    deepest, widths = DraftShape.chain(3), range(1, WIDE_EXTEND + 1)
    narrow = {length: found.of(plan(deepest, 8, length)).extend for length in widths}
    assert narrow[1] is narrow[2] is found.states[DraftShape.chain(1)].extend
    assert narrow[3] is narrow[4] is found.states[DraftShape.chain(3)].extend
    assert len({id(narrow[length]) for length in range(5, WIDE_EXTEND + 1)}) == 1
    assert narrow[5] not in (narrow[1], narrow[3])


def test_entries_beyond_the_widest_draft_extend_are_made_from_tokens_the_host_knows(llm):
    found = captured(llm, chains(0, 3))
    behind = plan(DraftShape.chain(3), 2, WIDE_EXTEND + 1)
    stages = found.of(behind)
    assert stages.behind == behind.decode_requests
    assert stages.extend_chunks is found.extend_chunks
    # One entry is left, beside those of a step in flight.
    assert stages.extend is found.states[DraftShape.chain(3)].extend
    assert not found.of(plan(DraftShape.chain(3), 2, WIDE_EXTEND)).behind


def test_steps_that_compute_prompts_run_captured_up_to_a_number_of_tokens(llm):
    found = captured(llm, [*chains(1, 2), *TREES])
    plain, single, chain, tree = (
        found.of(plan(shape, prompts=1)).verify for shape in (PLAIN, *chains(1, 2), TREES[0])
    )
    assert plain is single
    assert len({id(plain), id(chain), id(tree)}) == 3
    assert found.extend_chunks is not None
    for stage in (plain, chain, tree, found.extend_chunks):
        largest = stage.sizes[-1]
        assert largest.tokens <= MAX_CAPTURED_PROMPT_TOKENS
        assert (largest.requests, largest.chunks) == (8, 8)


def test_without_drafts_one_verification_more_is_captured_for_grammar_drafts(llm):
    """With drafts the deepest chain serves them."""

    def forced(depth, num_requests):
        usual = plan(DraftShape.chain(depth), num_requests)
        reqs = [
            r._replace(draft_ids=(5,) * depth, num_grammar_drafts=depth) for r in usual.requests
        ]
        return replace(usual, requests=tuple(reqs), shape=PLAIN)

    found, limits = captured(llm, chains(0)), llm.engine.worker.grammar_limits
    assert found.grammar is not None
    for depth in range(1, limits.steps + 1):
        assert found.of(forced(depth, 3)).verify is found.grammar.verify
    assert found.of(plan(PLAIN, 3)).verify is found.states[PLAIN].verify
    assert found.grammar.verify.sizes[-1].tokens == limits.tokens
    assert limits.steps_with_prompts == 0, "those steps have tiles for one token"
    found, limits = captured(llm, chains(0, 3)), llm.engine.worker.grammar_limits
    assert found.grammar is None
    assert limits == (3, 3, None)
    assert found.of(forced(2, 3)).verify is found.states[DraftShape.chain(3)].verify


def test_an_engine_without_drafts_that_captures_drafts_forced_text_and_keeps_texts(pair):
    llm = llm_maker(pair, "cpu")("NONE", 0, max_num_seqs=8)
    grammar = Grammar.regex("(a|b)second(c|d)third[xyz]{2}")
    params = [SamplingParams(temperature=0.8, seed=i, grammar=grammar) for i in range(6)]
    prompts = [[1, 2, 3, 4 + i] * (1 + i) for i in range(6)]
    exact = llm.generate(prompts, params)
    captured(llm, chains(0))
    scheduler, limits = llm.engine.scheduler, llm.engine.worker.grammar_limits
    scheduler.drafts = replace(scheduler.drafts, grammar_limits=limits)
    recorder = llm.engine.worker.recorder
    before = recorder.num_captured
    found = llm.generate(prompts, params)
    assert texts(found) == texts(exact)
    assert recorder.num_captured == before
    for outputs in (exact, found):
        assert all(output.speculation.num_grammar_tokens >= 5 for output in outputs)


def test_shapes_of_similar_width_share_their_verification(llm):
    """Both 2 and 3 drafts verify up to four tokens: depth 2 captures no verification of its own."""
    captured(llm, chains(2, 3))
    num_stages = {taken.shape and taken.shape.depth: taken.num_stages for taken in report(llm)}
    num_batch_sizes = 4  # 1, 2, 4, 8: a draft extend and a draft stage for each
    assert num_stages[2] == 2 * num_batch_sizes


def test_a_size_slower_than_a_larger_one_is_left_out(llm, monkeypatch):
    times = iter([5.0, 9.0, 4.0, 3.0] + [1.0] * 100)
    monkeypatch.setattr(FakeRecorder, "milliseconds", lambda *_: next(times))
    sizes = captured(llm, chains(0)).states[PLAIN].verify.sizes
    assert [size.tokens for size in sizes] == [1, 2, 8]


def test_a_shape_that_is_not_chosen_for_large_batches_is_captured_for_small_ones(pair):
    slots = {"1": {"candidate_steps": [1, 2, 3]}, "4": {"candidate_steps": [1]}}
    llm = llm_maker(pair, "cpu")("EAGLE3", 3, slots=slots, max_num_seqs=8)
    found = captured(llm, llm.engine.worker.states)
    largest = {
        shape.depth: state.draft.sizes[-1].requests
        for shape, state in found.states.items()
        if state.draft is not None
    }
    # The deepest stands in for all, so it is captured for every size.
    assert largest == {1: 8, 2: 3, 3: 8}
    chain = DraftShape.chain(2)
    assert [found.of(plan(chain, size)).shape.depth for size in (3, 4, 8)] == [2, 3, 3]


def test_small_trees_are_captured_for_the_batch_sizes_that_may_draft_them(pair, monkeypatch):
    monkeypatch.setattr(build, "_policy", policy_with_small_trees)
    monkeypatch.setitem(build._PROFILE_BUDGET_S, "cpu", 0.3)  # costs that are not used
    llm = llm_maker(pair, "cpu")("EAGLE3", 3, max_num_seqs=32, speculative_adaptive=True)
    found = captured(llm, llm.engine.worker.states)
    largest = {
        shape: state.draft.sizes[-1].requests
        for shape, state in found.states.items()
        if state.draft is not None and not shape.is_chain
    }
    assert {str(shape): size for shape, size in largest.items()} == {"4x15": 8, "6x31": 8}
    for shape, most in ((max(largest), 8), (DraftShape.chain(1), 32)):
        admit = found.of(plan(shape, budget=0)).admit
        assert admit is not None
        assert admit.sizes[-1].requests == most


def padded(sizes, count):
    captured = {StepSize(n, n): lambda n=n: n for n in sizes}
    return StageRunner(lambda size: 0, captured).run(StepSize(count, count))


@settings(max_examples=25)
@given(st.integers(1, 700))
def test_every_size_up_to_the_largest_has_a_place(largest):
    for sizes in (batch_sizes(largest), token_counts(largest), mixed_token_counts(largest)):
        assert sizes[-1] == largest
        assert list(sizes) == sorted(set(sizes))
        assert all(size <= padded(sizes, size) <= largest for size in range(1, largest + 1))


@given(st.integers(112, 2000))
def test_padding_wastes_at_most_a_quarter_where_tokens_are_expensive(tokens):
    """Below a hundred tokens a step mostly reads weights, above it each token costs."""
    assert padded(token_counts(2048), tokens) <= tokens * 5 / 4


def test_a_stage_runs_at_the_smallest_captured_size_that_holds_it_or_as_it_is():
    ran = []

    def captured(*sizes):
        return StageRunner(ran.append, {size: lambda size=size: ran.append(size) for size in sizes})

    runner = captured(StepSize(8, 8, 2), StepSize(1, 1), StepSize(4, 4, 1))
    asked = [StepSize(n, 1) for n in (1, 2, 4, 5, 8, 9)] + [StepSize(2, 1, 2), StepSize(2, 1, 3)]
    for size in asked:
        runner.run(size)
    assert [(size.tokens, size.chunks) for size in ran] == [
        *[(1, 0), (4, 1), (4, 1), (8, 2), (8, 2)],
        (9, 0),  # larger than any captured one
        (8, 2),  # the smaller ones have no room for the chunks
        (2, 3),
    ]
    runner = StageRunner(lambda size: torch.full((size.tokens,), 7.0))
    for count in (3, 5):
        output = runner.run(StepSize(count, 1))
        assert output is not None
        assert output.tolist() == [7.0] * count


@contextmanager
def recorded_ranges(names):
    """Add the names of all ranges in a profile of the body, those of torch apart."""
    with profile(activities=[ProfilerActivity.CPU]) as found:
        yield
    keys = {event.key for event in found.key_averages()}
    names |= {key for key in keys if "::" not in key and not key.startswith("[")}


def layer_ranges(owner, indices):
    parts = ("before_attention", "attend", "after_attention")
    return {f"{owner} layer {index} {part}" for index in indices for part in parts}


def test_a_profile_names_the_stages_and_layers_of_steps_if_asked_to(pair, monkeypatch):
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    prompts = [[1, 2, 3], [4, 5]]
    found, unasked = set(), set()
    for names, value in ((unasked, "0"), (found, "1")):
        monkeypatch.setenv("SERVE_SPEC_TRACE", value)
        llm = llm_maker(pair, "cpu")("EAGLE3", 3)
        with recorded_ranges(names):
            llm.generate(prompts, params)
    assert not unasked
    assert {
        "verify chain of 2: 5 tokens, 2 requests, 2 chunks",
        "draft 3: 2 tokens, 2 requests",
        "verify chain of 4: 8 tokens, 2 requests",
    } <= found
    assert any(re.fullmatch(r"extend \d: 2 tokens, 2 requests", name) for name in found)
    layers = {name for name in found if " layer " in name}
    target = layer_ranges("target", range(len(llm.engine.worker.target.pool.keys)))
    assert layers == target | layer_ranges("draft", [0])


def test_a_profile_names_each_stage_and_its_replay_with_shape_and_captured_size(pair, monkeypatch):
    monkeypatch.setenv("SERVE_SPEC_TRACE", "1")
    llm = llm_maker(pair, "cpu")("EAGLE3", 3, max_num_seqs=8, speculative_eagle_topk=3)
    table = captured(llm, [*chains(3), TREES[0]])
    state = table.states[TREES[0]]
    names: set[str] = set()
    with recorded_ranges(names), torch.inference_mode():
        for stage in (table.extend_chunks, state.extend, state.draft, table.admits[True]):
            assert stage is not None
            stage.run(StepSize(3, 3))
        state.verify.run(StepSize(30, 3))
    stages = {
        "extend_chunks: 16 tokens, 8 requests, 8 chunks",
        "extend 5: 4 tokens, 4 requests",
        "draft 4x12: 4 tokens, 4 requests",
        "admit tree of 13: 4 tokens, 4 requests",
        "verify tree of 16: 32 tokens, 8 requests",
    }
    assert {name for name in names if " layer " not in name} == {
        *stages,
        *(f"replay {stage}" for stage in stages),
    }
