"""Draft methods that no file of the package knows: a block head, and one with its own drafter.

They are registered from here alone, and drive the same stages as every other draft model.
"""

import pytest
import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.config.drafts import METHODS, DraftMethod, register_draft
from serve_spec.core.draft import DraftShape
from serve_spec.core.errors import PluginError
from serve_spec.core.request import SamplingParams
from serve_spec.engine.check import check_checkpoints
from serve_spec.models.drafts.base import Draft, DraftFamily, Evidence
from serve_spec.worker.step_buffers import DraftVocabulary
from tests.helpers.checkpoints import VOCAB, make_target, write_checkpoint
from tests.helpers.engines import recorded_plans, switch_every_round
from tests.helpers.paged import run_text
from tests.helpers.table import NUM_STEPS, PLAIN, Row
from tests.helpers.toy_block import make_toy_block
from tests.unit.engine.test_conformance import EVENTS, check, decode_alone, table_maker
from tests.unit.worker.test_capture import captured, chains, plan


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


class Repeating(Draft):
    """A draft model without weights or draft KV."""

    drafter = f"{__name__}:RepeatingDrafter"
    read_elsewhere = ("repeat",)

    def tensors(self):
        return {}


class RepeatingFamily(DraftFamily):
    """Reads checkpoints that say no more than that they repeat."""

    def detect(self, config, shapes):
        return Evidence(["repeat"]) if "repeat" in shapes else None

    def build(self, file, target, options):
        with options.defaults(target):
            return Repeating(target.spec.hidden_size, (), None, feature_dim=0)

    def facts(self, file, target, options):
        return {}


# Whole blocks whose drafts depend on each other; a causal layer, and the anchor predicts, too.
BLOCKS = {
    "FILL_IN": {
        "block_size": NUM_STEPS + 1,
        "first_row": 1,
        "is_causal": [False, False],
        "has_bias": True,
    },
    "FROM_ANCHOR": {
        "block_size": NUM_STEPS + 2,
        "first_row": 0,
        "is_causal": [False, True],
        "has_bias": False,
    },
}
TOY = "tests.helpers.toy_block:ToyFamily"


@pytest.fixture(scope="module", autouse=True)
def _methods():
    """Register the methods as a package does. The newest row is asked first."""
    known = dict(METHODS)
    register_draft(DraftMethod("REPEATING", f"{__name__}:RepeatingFamily", allows_trees=False))
    for name in BLOCKS:
        register_draft(DraftMethod(name, TOY, allows_trees=False))
    yield
    METHODS.clear()
    METHODS.update(known)


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Write a target and drafts; return their folders by method, the target's under NONE."""
    root = tmp_path_factory.mktemp("drafts")
    target = make_target(root / "target", family="qwen3", layers=4)
    folders = {
        name: make_toy_block(root / name, target, method=name, **keys)
        for name, keys in BLOCKS.items()
    }
    repeating = {"repeat": torch.zeros(1)}
    folders["REPEATING"] = write_checkpoint(root / "r", {"model_type": "repeating"}, repeating)
    return {"NONE": target, **folders}


@pytest.fixture(scope="module")
def make(tmp_path_factory, folders):
    return table_maker(tmp_path_factory, "cpu", folders)


@pytest.fixture(scope="module")
def alone(make):
    return decode_alone(make)


@pytest.mark.parametrize(
    ("name", "event"),
    [
        *(("FILL_IN", event) for event in ("depth", "prefix", "late")),
        *(("FROM_ANCHOR", event) for event in ("preemption", "budget", "late")),
        *(("REPEATING", event) for event in ("abort", "depth", "late")),
    ],
)
def test_answers_with_a_registered_draft_are_those_of_plain_decoding_alone(
    make, alone, name, event
):
    check(EVENTS[event](make, Row(name)), alone, Row(name), event)


@pytest.mark.parametrize("name", BLOCKS)
def test_a_block_is_computed_from_the_features_before_its_anchor(make, name):
    """Whatever was drafted, paused, computed in chunks or found in the prefix cache before."""
    llm = make(Row(name), max_num_seqs=1, max_num_batched_tokens=16)
    switch_every_round(llm, [3, 0, 1, 3, 0, 0, 2], ragged=False)
    worker = llm.engine.worker
    head, blocks = worker.drafter.head, []
    block = head.block

    def record(anchors, ctx):
        hidden = block(anchors, ctx)
        blocks.append((int(ctx.positions[0]), int(anchors[0]), hidden[0].clone()))
        return hidden

    head.block = record
    prompt = [(7 * i) % 250 for i in range(21)]
    params = SamplingParams(max_tokens=30, temperature=0.7, seed=1, ignore_eos=True)
    for _ in range(2):
        (output,) = llm.generate([prompt], params)
        text = [*prompt, *output.token_ids]
        features = run_text(worker.target.model, torch.tensor(text), head.capture)[1]
        assert len(blocks) > 5
        for start, anchor, hidden in blocks:
            assert anchor == text[start]
            expected = head.uncached(features[:start], anchor)
            assert (hidden - expected).abs().max() < 2e-4
        blocks.clear()
    assert llm.engine.counters.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("name", BLOCKS)
def test_a_request_with_drafts_has_pages_for_a_whole_block(make, name):
    llm = make(Row(name))
    switch_every_round(llm, [1, 3, 0, 2])
    plans = recorded_plans(llm)
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    llm.generate([[i, 2, 3] for i in range(5)], params)
    drafting = [req for plan in plans for req in plan.requests if req.num_steps]
    assert {req.num_steps for req in drafting} >= {1, 2}
    for req in drafting:
        assert 4 * len(req.page_ids) >= req.length + BLOCKS[name]["block_size"] - 1


def test_all_depths_of_a_block_share_one_draft_stage(make):
    found = captured(make(Row("FILL_IN"), max_num_seqs=8), chains(0, 1, 2, 3))
    stages = {found.of(plan(DraftShape.chain(depth), 4)).draft for depth in (1, 2, 3)}
    assert len(stages) == 1
    assert None not in stages


@pytest.mark.parametrize("name", BLOCKS)
def test_sampled_drafts_of_a_block_leave_greedy_texts_as_they_are(make, name):
    params = SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True)
    prompts = [[i, 7, 9] * (1 + i) for i in range(4)]
    plain = [output.token_ids for output in make(PLAIN).generate(prompts, params)]
    llm = make(Row(name, method="standard"))
    assert [output.token_ids for output in llm.generate(prompts, params)] == plain
    assert llm.engine.counters.num_correct_drafts > 0


@pytest.mark.parametrize("place", ["no_such_package.drafter:Mine", f"{__name__}:Mine"])
def test_a_drafter_that_cannot_be_imported_is_refused_before_weights_are_read(
    folders, monkeypatch, place
):
    monkeypatch.setattr(Repeating, "drafter", place)
    config = ServeSpecConfig.load(
        str(folders["NONE"]),
        speculative_algorithm="REPEATING",
        speculative_draft_model_path=str(folders["REPEATING"]),
    )
    with pytest.raises(PluginError, match=f"^drafter '{place}': .*; correct `drafter`"):
        check_checkpoints(config)
