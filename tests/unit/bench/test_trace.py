"""Recorded acceptance: a trace replays to what the engine does."""

import json
from dataclasses import replace
from itertools import takewhile
from math import log
from pathlib import Path
from statistics import fmean

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.simulator import Phase, Simulator
from serve_spec.adaptive.policy import StaticPolicy
from serve_spec.bench.command import main
from serve_spec.bench.harness import ClosedLoop
from serve_spec.bench.trace import (
    AcceptanceTrace,
    TraceSet,
    confidence_of,
    load_traces,
    record,
    save_traces,
)
from serve_spec.bench.workload import TextKind, TextRequest
from serve_spec.config import ConfigError
from serve_spec.core.draft import DraftShape
from tests.helpers.engines import llm_maker, make_pair
from tests.helpers.simulated_costs import TWO_CPU_CORES

DEPTH = 4
NUM_TOKENS = 20
KNOWN, FOREIGN = TextKind("code", 0.0), TextKind("shuffled", 1.0)
RECORDED = Path(__file__).parents[2] / "data" / "acceptance_traces.json"


def requests():
    """Six requests whose kinds alternate, as those of a mixture do."""
    prompts = [[(7 * i + 3 * j) % 250 for j in range(9)] for i in range(6)]
    return [TextRequest((KNOWN, FOREIGN)[i % 2], prompt, i) for i, prompt in enumerate(prompts)]


def served(engine, requests, batch_size):
    loop = ClosedLoop(engine, [(request, NUM_TOKENS) for request in requests], batch_size)
    return loop.advance(NUM_TOKENS * len(requests)), loop.texts


def counts(record):
    return record.batch_size, record.num_draft_tokens, record.num_output_tokens


def measured(engine, requests, batch_size):
    rounds, _ = served(engine, requests, batch_size)
    return [counts(r.record) for r in rounds if r.record.batch_size]


def replayed(shape, traces, batch_size, num_requests):
    rounds = []
    simulator = Simulator(
        StaticPolicy(shape),
        traces,
        TWO_CPU_CORES,
        on_round=lambda batch, steps, verified: rounds.append(counts(verified)),
    )
    simulator.run(Phase("mixture", batch_size, num_requests, NUM_TOKENS))
    return rounds


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return llm_maker(make_pair(tmp_path_factory.mktemp("pair")), "cpu")


@pytest.fixture(scope="module")
def traces(make):
    return record(make("EAGLE3", DEPTH).engine, requests(), NUM_TOKENS)


def test_every_request_has_a_count_for_every_position(traces):
    counts = [trace.num_correct_drafts for trace in traces.traces]
    assert {0, 1, 2} <= {count for each in counts for count in each}, "too few counts to tell"
    assert [len(each) for each in counts] == [NUM_TOKENS - 1] * 6
    assert [trace.kind for trace in traces.traces] == [r.kind for r in requests()]
    assert {trace.num_prompt_tokens for trace in traces.traces} == {9}
    rounds = [logprobs for trace in traces.traces for logprobs in trace.draft_logprobs]
    logprobs = [each for logprobs in rounds for each in logprobs]
    assert len(logprobs) == 6 * (NUM_TOKENS - 1) * DEPTH
    assert -20 < min(logprobs) < max(logprobs) <= 0


def test_confidence_is_measured_on_the_drafts_that_were_reached():
    probabilities = [(0.9, 0.4), (0.3, 0.99), (0.8, 0.7), (0.85, 0.5)]
    trace = AcceptanceTrace(
        *("code", 0.0, 0, 9),
        num_correct_drafts=(1, 0, 2, 0),
        draft_logprobs=tuple((log(first), log(second)) for first, second in probabilities),
    )
    # Kept: 0.9, 0.8, 0.7. Rejected: 0.4, 0.3, 0.85. Not reached: 0.99, 0.5.
    errors = 0.1, 0.3, 0.2, 0.85, 0.4, 0.3
    assert confidence_of([trace]) == pytest.approx({"AUC": 7 / 9, "error": fmean(errors)})
    assert confidence_of([replace(trace, draft_logprobs=())]) == {}


@pytest.mark.parametrize(("batch_size", "num_steps"), [(1, DEPTH), (3, 0), (3, 2)])
def test_a_fixed_depth_replays_to_the_rounds_the_engine_takes(make, traces, num_steps, batch_size):
    engine = make("EAGLE3", num_steps).engine
    expected = measured(engine, requests(), batch_size)
    assert replayed(DraftShape.chain(num_steps), traces, batch_size, 6) == expected


def test_recording_leaves_the_engine_as_it_was(make):
    engine = make("EAGLE3", DEPTH).engine
    steps, texts = served(engine, requests(), 3)
    record(engine, requests(), NUM_TOKENS)
    steps_after, texts_after = served(engine, requests(), 3)
    assert texts_after == texts
    assert len(steps_after) == len(steps)


def test_an_engine_that_may_cut_drafts_cannot_record(make):
    several = {"speculative_adaptive": True, "speculative_adaptive_strategy": "ema"}
    narrow = {"max_num_batched_tokens": 12}
    for keys, problem in ((several, "candidate_steps"), (narrow, "max_num_batched_tokens")):
        with pytest.raises(ValueError, match=problem):
            record(make("EAGLE3", 3, **keys).engine, requests(), NUM_TOKENS)


TOPK = 2
TREE = DraftShape(3, 7, TOPK)


def branching(make):
    rows = TREE.size + 1
    keys = {"speculative_eagle_topk": TOPK, "speculative_num_draft_tokens": rows}
    return make("EAGLE3", TREE.depth, **keys).engine


@pytest.fixture(scope="module")
def with_tree(make, traces):
    recorded = record(branching(make), requests(), NUM_TOKENS)
    return traces.with_tree(TREE, recorded)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_trees_replay_to_the_rounds_the_engine_takes_until_texts_near_their_end(
    make, with_tree, batch_size
):
    """There, trees have fewer levels, which is not what was recorded."""
    of_engine, of_replay = (
        list(takewhile(lambda counts: counts[1] == batch_size * TREE.size, rounds))
        for rounds in (
            measured(branching(make), requests()[:batch_size], batch_size),
            replayed(TREE, with_tree, batch_size, batch_size),
        )
    )
    assert of_engine == of_replay
    assert len(of_engine) > 1


def test_traces_of_other_requests_are_not_put_together(traces):
    others = replace(traces, traces=traces.traces[::-1])
    with pytest.raises(ValueError, match="other requests"):
        traces.with_tree(TREE, others)


def trace_sets():
    trace = st.builds(
        AcceptanceTrace,
        prompts=st.sampled_from(["code", "shuffled"]),
        temperature=st.floats(0, 2),
        seed=st.integers(0, 2**63),
        num_prompt_tokens=st.integers(1, 1000),
        num_correct_drafts=st.lists(st.integers(0, 5), max_size=9).map(tuple),
        of_trees=st.tuples(*[st.lists(st.integers(0, 2), max_size=9).map(tuple)] * 2),
        draft_logprobs=st.lists(st.tuples(*[st.floats(-20, 0)] * 5), max_size=9).map(tuple),
    )
    trees = st.integers(2, 8).map(lambda topk: (DraftShape(2, 4, topk), DraftShape(3, 9, topk)))
    return st.builds(TraceSet, st.just(5), st.lists(trace, max_size=4).map(tuple), trees)


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    return tmp_path_factory.mktemp("traces") / "traces.json"


@given(written=trace_sets())
def test_what_is_written_is_read(file, written):
    save_traces(written, file)
    assert load_traces(file) == written


def test_a_file_that_is_no_trace_and_a_trace_of_forced_acceptance_are_refused(tmp_path):
    path = tmp_path / "traces.json"
    good = json.loads(RECORDED.read_text())
    trace = good["traces"][0]
    for bad, why in (
        ({**good, "format": 99}, "format=99"),
        ({"traces": []}, "format"),
        ({**good, "traces": [{**trace, "num_correct_drafts": [8]}]}, "num_correct_drafts=8"),
        ({**good, "traces": [{**trace, "num_correct_drafts": [True]}]}, "True"),
        ({**good, "traces": [{"num_correct_drafts": [1]}]}, "acceptance trace"),
    ):
        path.write_text(json.dumps(bad))
        with pytest.raises(ValueError, match=why) as caught:
            load_traces(path)
        assert str(path) in str(caught.value)
    with pytest.raises(ValueError, match="not in the file"):
        load_traces(RECORDED).of(TextKind("code", 0.3))
    with pytest.raises(ConfigError, match=r"synthetic_acceptance=2\.0: a trace needs real texts"):
        main(["trace", "--set", "synthetic_acceptance=2.0", "--json", str(tmp_path / "t.json")])
    assert not (tmp_path / "t.json").exists()
