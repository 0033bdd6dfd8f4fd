"""Draft models that no file of the package knows: a block head, and one with its own drafter.

They are defined in tests alone, and drive the same stages as every other draft model.
"""

from types import SimpleNamespace

import pytest
import torch

from serve_spec.core.draft import DraftShape
from serve_spec.core.errors import PluginError
from serve_spec.core.request import SamplingParams
from serve_spec.engine import build
from serve_spec.worker.drafters.base import create_drafter
from serve_spec.worker.step_buffers import DraftVocabulary
from tests.helpers.checkpoints import VOCAB
from tests.helpers.engines import recorded_plans, switch_every_round
from tests.helpers.paged import run_text
from tests.helpers.table import NUM_STEPS, PLAIN, Row
from tests.helpers.toy_block import ToyBlock
from tests.unit.engine.test_conformance import EVENTS, check, decode_alone, table_maker
from tests.unit.worker.test_capture import captured, chains, plan

# Whole blocks whose drafts depend on each other; a causal layer, and the anchor predicts, too.
HEADS = {
    "fill-in": {"block_size": NUM_STEPS + 1},
    "from the anchor": {
        "block_size": NUM_STEPS + 2,
        "first_row": 0,
        "is_causal": (False, True),
        "has_bias": False,
    },
}
DRAFTING = Row("EAGLE3")  # whose draft model is replaced


class RepeatingDrafter:
    """Drafts the newest token of each request again and again."""

    keeps_kv = False
    first_entry = 0
    has_constant_cost = True

    def __init__(self, model, memory):
        self.dtype = model.dtype

    def vocabulary(self):
        return DraftVocabulary(VOCAB, None)

    def slots_past(self, shape):
        return shape.size

    def draft(self, buffers, num_requests, shape):
        slots, reqs = buffers.slots, buffers.request_slots[:num_requests].long()
        newest = (slots.lengths[reqs] - 1) % slots.recent.shape[1]
        tokens = slots.recent[reqs, newest].unsqueeze(1)
        buffers.drafts[:num_requests, : shape.depth] = tokens
        buffers.draft_logprobs[:num_requests, : shape.depth] = -1.0


REPEATING = SimpleNamespace(
    drafter=f"{__name__}:RepeatingDrafter",
    capture=None,
    caches=(),
    feature_dim=0,
    dtype=torch.float32,
    target_ids=None,
    max_steps=None,
)


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return table_maker(tmp_path_factory, "cpu")


@pytest.fixture(scope="module")
def alone(make):
    return decode_alone(make)


@pytest.fixture(params=HEADS)
def head(request, monkeypatch):
    """Replace the draft model of every engine by a toy, and return its settings."""

    def load(config, target):
        return ToyBlock(target, **HEADS[request.param]) if config.speculative.enabled else None

    monkeypatch.setattr(build, "_load_head", load)
    return HEADS[request.param]


@pytest.mark.parametrize("event", ["preemption", "depth", "budget", "prefix", "late"])
def test_answers_with_a_block_head_are_those_of_plain_decoding_alone(make, alone, head, event):
    check(EVENTS[event](make, DRAFTING), alone, DRAFTING, event)


@pytest.mark.parametrize("event", ["abort", "depth", "late"])
def test_answers_with_a_drafter_of_ones_own_are_those_of_plain_decoding_alone(
    make, alone, monkeypatch, event
):
    monkeypatch.setattr(
        build, "_load_head", lambda config, _: REPEATING if config.speculative.enabled else None
    )
    check(EVENTS[event](make, DRAFTING), alone, DRAFTING, event)


@pytest.mark.parametrize("place", ["no_such_package.drafter:Mine", f"{__name__}:Mine"])
def test_a_drafter_that_cannot_be_imported_is_refused_by_its_place(place):
    with pytest.raises(PluginError, match=f"^drafter '{place}': .*; correct `drafter`"):
        create_drafter(SimpleNamespace(drafter=place), None)


def test_a_block_is_computed_from_the_features_before_its_anchor(make, head):
    """Whatever was drafted, paused, computed in chunks or found in the prefix cache before."""
    llm = make(DRAFTING, max_num_seqs=1, max_num_batched_tokens=16)
    switch_every_round(llm, [3, 0, 1, 3, 0, 0, 2], ragged=False)
    toy, blocks = llm.engine.worker.drafter.head, []
    block = toy.block

    def record(anchors, ctx):
        hidden = block(anchors, ctx)
        blocks.append((int(ctx.positions[0]), int(anchors[0]), hidden[0].clone()))
        return hidden

    toy.block = record
    prompt = [(7 * i) % 250 for i in range(21)]
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True)
    for _ in range(2):
        (output,) = llm.generate([prompt], params)
        text = [*prompt, *output.token_ids]
        features = run_text(toy.target, torch.tensor(text), toy.capture)[1]
        assert len(blocks) > 5
        for start, anchor, hidden in blocks:
            assert anchor == text[start]
            expected = toy.uncached(features[:start], anchor)
            assert (hidden - expected).abs().max() < 2e-4
        blocks.clear()
    assert llm.engine.counters.num_prefix_hit_tokens > 0


def test_a_request_with_drafts_has_pages_for_a_whole_block(make, head):
    llm = make(DRAFTING)
    switch_every_round(llm, [1, 3, 0, 2])
    plans = recorded_plans(llm)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    llm.generate([[i, 2, 3] for i in range(5)], params)
    drafting = [req for plan in plans for req in plan.requests if req.num_steps]
    assert {req.num_steps for req in drafting} >= {1, 2}
    for req in drafting:
        assert 4 * len(req.page_ids) >= req.length + head["block_size"] - 1


def test_all_depths_of_a_block_share_one_draft_stage(make, head):
    found = captured(make(DRAFTING, max_num_seqs=8), chains(0, 1, 2, 3))
    stages = {found.of(plan(DraftShape.chain(depth), 4)).draft for depth in (1, 2, 3)}
    assert len(stages) == 1
    assert None not in stages


def test_sampled_drafts_of_a_block_leave_greedy_texts_as_they_are(make, head):
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [[i, 7, 9] * (1 + i) for i in range(4)]
    plain = [output.token_ids for output in make(PLAIN).generate(prompts, params)]
    llm = make(Row("EAGLE3", method="standard"))
    assert [output.token_ids for output in llm.generate(prompts, params)] == plain
    assert llm.engine.counters.num_correct_drafts > 0
