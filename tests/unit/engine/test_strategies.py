"""Goodput on a real engine: the same text, and nothing hidden. And padded batches.

`test_conformance.py` does the same with the other strategies.
"""

import json
from dataclasses import replace
from itertools import count

import pytest

from serve_spec.adaptive import AdaptiveController, StepPolicy
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.core.round import RoundSteps
from serve_spec.engine import build
from tests.helpers.engines import policy_with_small_trees, recorded_plans, texts
from tests.helpers.simulated_costs import GPU_8B, recorded_table

TREE = {"speculative_eagle_topk": 2, "speculative_num_draft_tokens": 7}
TEXT = {"speculative_ngram_min_match_window_size": 1}
FIRST = {**TEXT, "speculative_ngram_first": True}
CHAIN = {"speculative_eagle_topk": 1}
# Small trees, which heads of EAGLE draft by default, are one more shape of theirs.
CASES = [
    ("EAGLE3", {}, {}, True),
    ("EAGLE", {}, TREE, False),
    ("MEDUSA", {}, TREE, True),
    ("STANDALONE", {}, CHAIN, False),
    ("NGRAM", TEXT, CHAIN, True),
    ("EAGLE3", FIRST, TREE, False),
]
# Prompts for which n-gram drafts are found, too.
PROMPTS = [[5 + i, 7, 9 + i, 11] * 3 + [5 + i, 7] for i in range(5)]
PARAMS = [
    SamplingParams(max_tokens=64, temperature=0.8 * (i % 2), seed=i, ignore_eos=True)
    for i in range(3)
]
ADAPTS = {"speculative_adaptive": True, "speculative_adaptive_strategy": "goodput"}


def test_ema_pads_a_batch_to_the_next_captured_size(make_llm, monkeypatch):
    """Five rows are of the slot from 8 on there, also after a live change; four are not."""
    monkeypatch.setattr(build, "_captures_graphs", lambda *args: True)
    monkeypatch.setattr(build, "GraphRecorder", lambda device: None)
    slots = {"1": {"candidate_steps": [3]}, "8": {"candidate_steps": [1]}}
    llm = make_llm("EAGLE3", 3, slots=slots, max_num_seqs=16)
    for num_rows in (4, 5):
        llm.engine.reconfigure({"speculative_adaptive_config": slots})
        llm.generate(PROMPTS[:num_rows], [PARAMS[0]] * num_rows)
        shown = llm.engine.snapshot()
        assert (shown["slots"]["8"]["num_rounds"] > 0) == (num_rows == 5)
        full = "8" if num_rows == 5 else "1"
        assert shown["slots"][full]["num_rounds"] > 0


@pytest.fixture(scope="module")
def plain(make_llm):
    return texts(make_llm().generate(PROMPTS[:3], PARAMS))


def without_a_clock(llm):
    """Tell the policy of an engine costs at which drafts pay, and no times of this machine."""
    controller = llm.engine.controller
    settings = controller.settings
    controller = AdaptiveController(settings, recorded_table(GPU_8B, trees=settings.trees))
    learn = controller.on_verify_complete
    controller.on_verify_complete = lambda verified: learn(replace(verified, times=None))
    llm.engine.controller = controller


@pytest.mark.parametrize(("algorithm", "keys", "tree", "by_request"), CASES, ids=str)
def test_every_drafter_adapts_stops_and_resumes_under_goodput(
    make_llm, plain, monkeypatch, algorithm, keys, by_request, tree
):
    """With the strategy's own candidates, whatever the draft can make; off for some rounds."""
    # Costs that are not used. Three times as long is waited for on a busy machine.
    monkeypatch.setitem(build._PROFILE_BUDGET_S, "cpu", 0.3)
    monkeypatch.setattr(build, "_policy", policy_with_small_trees)
    keys = {"max_num_seqs": 3, "speculative_per_sequence": by_request, **keys, **tree}
    llm = make_llm(algorithm, 3, **ADAPTS, **keys)
    engine, plans = llm.engine, recorded_plans(llm)
    assert engine.snapshot()["costs"]["state"] in ("measured", "loaded")
    without_a_clock(llm)
    changes = {5: {"speculative_adaptive": False, "speculative_num_steps": 0}, 9: ADAPTS}
    planned, step, steps = {}, engine.step, count()

    def step_and_change():
        if (number := next(steps)) in changes:
            engine.reconfigure(changes[number])
            planned[number] = len(plans)
        return step()

    monkeypatch.setattr(engine, "step", step_and_change)
    assert texts(llm.generate(PROMPTS[:3], PARAMS)) == plain
    shown = json.loads(json.dumps(engine.snapshot()))
    assert (shown["strategy"], shown["fallback"]) == ("goodput", None)
    names = {str(shape) for shape in engine.worker.states if not shape.is_chain}
    assert names == set(shown.get("candidate_trees", ()))
    is_eagle = algorithm in ("EAGLE", "EAGLE3") and "speculative_ngram_first" not in keys
    assert bool(names) == (tree == TREE or (not tree and is_eagle))
    drafted = [sum(row.num_steps for row in plan.requests) for plan in plans]
    # A round may have been planned ahead of the change.
    before, off, after = (
        sum(drafted[: planned[5]]),
        sum(drafted[planned[5] + 1 : planned[9]]),
        sum(drafted[planned[9] :]),
    )
    assert min(before, after) > 0 == off


def test_a_policy_by_request_keeps_none_that_ended(make_llm):
    llm = make_llm("EAGLE3", 3, **{**ADAPTS, "speculative_adaptive_strategy": "per_request"})
    llm.generate(PROMPTS[:3], PARAMS)
    controller = llm.engine.controller
    assert not controller._policy._speculators


class Alternating(StepPolicy):
    """A policy of this file: plain rounds and chains by turns, a request less deep each time."""

    def __init__(self, context):
        self.shapes = (PLAIN, DraftShape.chain(context.max_steps))
        self.num_rounds = self.num_accepted = 0
        self.known = set()

    def choose(self, batch):
        self.num_rounds += 1
        self.known |= {*batch.request_ids}
        shape = self.shapes[self.num_rounds % 2]
        return RoundSteps(shape, [max(0, shape.depth - i) for i in range(batch.size)])

    def observe(self, record):
        self.num_accepted += sum(record.correct_per_req)

    def forget(self, request_id):
        self.known.discard(request_id)

    def snapshot(self):
        return {"num_accepted": self.num_accepted}


def test_a_policy_of_another_package_decides_and_changes_no_text(make_llm, plain):
    name = f"{__name__}:{Alternating.__name__}"
    llm = make_llm("EAGLE3", 3, **{**ADAPTS, "speculative_adaptive_strategy": name})
    outputs = llm.generate(PROMPTS[:3], PARAMS)
    assert texts(outputs) == plain
    shown = json.loads(json.dumps(llm.engine.snapshot()))
    assert (shown["strategy"], shown["fallback"]) == (name, None)
    assert shown["num_accepted"] > 0
    assert set(shown["rounds_by_num_steps"]) == {"0", "7"}
    assert not llm.engine.controller._policy.known
    llm.engine.reconfigure({"speculative_adaptive_strategy": "static", "speculative_num_steps": 0})
    llm.engine.reconfigure({"speculative_adaptive_strategy": name})
    assert texts(llm.generate(PROMPTS[:3], PARAMS)) == plain
