"""Which shapes of trees a policy is given to choose from."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveController, PolicySettings
from serve_spec.adaptive.candidates import SMALL_TREES
from serve_spec.adaptive.settings import candidates, ladder
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.adaptive_file import load_slots
from serve_spec.config.base import validate
from serve_spec.core.draft import PLAIN, DraftShape, most_drafts
from tests.helpers.rounds import decode_batch, verified_round

TOPK = 4
ALL_SMALL = tuple(sorted(set().union(*SMALL_TREES.values())))
CONFIGURED = DraftShape(4, 15, TOPK)
CHAIN = DraftShape.chain(4)


@st.composite
def shapes(draw):
    """What a configuration with beams of `TOPK` may ask for."""
    num_steps = draw(st.integers(1, 7))
    most = min(63, most_drafts(TOPK, num_steps))
    return DraftShape(num_steps, draw(st.integers(num_steps, most)), TOPK)


@given(shapes())
def test_a_ladder_holds_the_configured_tree_and_smaller_ones_that_can_be_drafted(tree):
    found = ladder(tree)
    assert list(found) == sorted(set(found))
    assert found[-1] == tree
    for shape in found[:-1]:
        assert shape.depth < shape.size < tree.size
        assert shape.size <= most_drafts(TOPK, shape.depth)


def test_a_slot_drafts_what_it_lists_or_the_ladder_within_its_bound():
    slots = load_slots(
        {
            "1": {"candidate_steps": [7]},
            "8": {"candidate_steps": [3]},
            "16": {"candidate_steps": [4], "candidate_trees": [[4, 9], [2, 6]]},
            "32": {"candidate_steps": [4], "candidate_trees": []},
            "64": {"candidate_steps": [0]},
        }
    )
    assert {key: candidates(CONFIGURED, slot) for key, slot in slots.items()} == {
        1: (DraftShape(2, 3, TOPK), DraftShape(3, 7, TOPK), DraftShape(4, 15, TOPK)),
        8: (DraftShape(1, 3, TOPK), DraftShape(2, 7, TOPK), DraftShape(3, 15, TOPK)),
        16: (DraftShape(2, 5, TOPK), DraftShape(4, 8, TOPK)),
        32: (),
        64: (),
    }


def test_ema_drafts_the_largest_tree_of_its_depth_and_none_of_0_levels():
    slots = {
        "1": {"candidate_steps": [0, 1, 4]},
        "8": {"candidate_steps": [2, 3], "candidate_trees": [[3, 5], [3, 8]]},
    }
    one, deep, listed = DraftShape(1, 4, TOPK), DraftShape(4, 15, TOPK), DraftShape(3, 7, TOPK)
    chosen = settings(strategy="ema", slots=load_slots(slots))
    assert set(chosen.trees) == {one, deep, listed}
    for start, size, shape in [
        (0, 1, PLAIN),
        (1, 1, one),
        (4, 1, deep),
        (2, 8, DraftShape.chain(2)),
        (3, 8, listed),
    ]:
        assert chosen.build(start, None).choose(decode_batch(size)).shape == shape


def settings(**changes):
    return PolicySettings(**{"shape": CONFIGURED, "tree": CONFIGURED, **changes})


def test_every_strategy_names_what_it_may_ask_for():
    assert settings(strategy="static").trees == (CONFIGURED,)
    assert settings(adaptive=False, shape=CHAIN).trees == ()
    assert settings(strategy="per_request").trees == (CONFIGURED,)
    assert settings(strategy="per_request", max_steps=2).trees == (DraftShape(2, 15, TOPK),)
    assert settings(strategy="goodput").trees == ladder(CONFIGURED)
    conservative = (DraftShape(1, 4, TOPK), DraftShape(3, 15, TOPK), DraftShape(7, 15, TOPK))
    assert settings(strategy="ema").trees == conservative
    for strategy in ("static", "ema", "per_request", "goodput"):
        assert settings(shape=CHAIN, tree=None, strategy=strategy).trees == ()


@pytest.mark.parametrize("strategy", ["static", "ema", "per_request"])
def test_what_is_asked_for_is_among_what_was_named(strategy):
    chosen = settings(strategy=strategy)
    controller = AdaptiveController(chosen)
    assert controller.shapes == chosen.shapes
    for number in range(60):
        batch = decode_batch(1 + number % 3)
        steps = controller.choose_steps(batch)
        assert steps.shape in chosen.trees
        levels = list(steps.steps_per_req or [steps.shape.depth] * batch.size)
        assert max(levels) <= steps.shape.depth
        depth = steps.shape.depth
        record = verified_round(levels, batch.size, depth, steps_per_req=levels, shape=steps.shape)
        controller.on_verify_complete(record)
    assert controller.snapshot()["fallback"] is None


def test_a_fixed_depth_can_be_made_a_chain_and_a_tree_again():
    """Shapes that were not built are refused."""
    controller = AdaptiveController(settings(adaptive=False, strategy="static"))

    def asked(**changes):
        controller.reconfigure({f"speculative_{key}": value for key, value in changes.items()})
        return controller.choose_steps(decode_batch(1)).shape

    assert asked(num_steps=4) == CONFIGURED
    assert asked(num_draft_tokens=None) == CHAIN
    assert asked(num_draft_tokens=16) == CONFIGURED
    assert asked(num_steps=0) == PLAIN
    assert asked(num_steps=4, num_draft_tokens=16) == CONFIGURED
    shown = controller.snapshot()
    # A change of shape alone counts as a change of depth.
    assert sum(shown["switches"].values()) == 4
    assert shown["rounds_by_num_steps"]["4x15"] == 3
    assert (shown["speculative_num_steps"], shown["speculative_num_draft_tokens"]) == (4, 16)
    with pytest.raises(ConfigError, match=r"drafts of 4x8: not built .*; use some of 0, 4, 4x15"):
        asked(num_draft_tokens=9)
    assert controller.choose_steps(decode_batch(1)).shape == CONFIGURED


def drafting(tmp_path, trees, **keys):
    """A section whose adaptive config lists these trees; any folder stands for the checkpoint."""
    file = tmp_path / "adaptive.json"
    file.write_text(f'{{"1": {{"candidate_steps": [0, 5], "candidate_trees": {trees}}}}}')
    return section(tmp_path, speculative_adaptive_config=str(file), **keys)


def section(tmp_path, **keys):
    drafts = {"speculative_algorithm": "EAGLE3", "speculative_draft_model_path": str(tmp_path)}
    return validate(SpeculativeConfig, {**drafts, **keys})


def test_listed_trees_come_from_the_adaptive_config(tmp_path):
    config = drafting(tmp_path, [[3, 8], [5, 20]], speculative_eagle_topk=4)
    found = PolicySettings.of(config).trees
    assert found == (DraftShape(3, 7, TOPK), DraftShape(5, 19, TOPK))


@pytest.mark.parametrize(
    ("topk", "trees", "message"),
    [
        (1, [[3, 8]], "candidate_trees=[3, 8]: slot 1 lists it, but speculative_eagle_topk=1"),
        (2, [[2, 8]], "makes trees of at most 7 tokens of 2 steps; change one of them"),
        (4, [[5, 65]], "makes trees of at most 64 tokens of 5 steps"),
    ],
)
def test_listed_trees_that_cannot_be_drafted_are_refused(tmp_path, topk, trees, message):
    with pytest.raises(ConfigError) as caught:
        drafting(tmp_path, trees, speculative_eagle_topk=topk)
    assert message in str(caught.value)


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({}, ALL_SMALL),
        ({"speculative_adaptive_config": "aggressive"}, ALL_SMALL),
        ({"speculative_algorithm": "EAGLE"}, ALL_SMALL),
        ({"speculative_algorithm": "STANDALONE"}, ()),
        ({"speculative_eagle_topk": 1}, ()),
        ({"speculative_adaptive": False}, ()),
        ({"speculative_adaptive_strategy": "ema"}, ()),
        ({"rejection_sample_method": "block"}, ()),
        ({"speculative_ngram_first": True}, ()),
        ({"synthetic_acceptance": 2.5}, ()),
    ],
)
def test_goodput_adds_small_trees_to_chains_unless_the_configuration_rules_them_out(
    tmp_path, keys, expected
):
    found = PolicySettings.of(section(tmp_path, **keys))
    assert found.trees == expected
    assert found.shape == DraftShape.chain(3)
    assert [found.largest_batch(tree) for tree in expected] == [8, 8][: len(expected)]


def test_small_trees_are_as_deep_as_the_draft_and_the_slots_allow(tmp_path):
    config = section(tmp_path)
    assert PolicySettings.of(config, max_steps=5).trees == ALL_SMALL[:1]
    assert PolicySettings.of(config, max_steps=3).trees == ()
    assert PolicySettings.of(config, may_branch=False).trees == ()
    for deep, found in (({}, ALL_SMALL[:1]), ({"candidate_trees": []}, ())):
        slots = {"1": {"candidate_steps": [4]}, "4": {"candidate_steps": [1], **deep}}
        changes = {"speculative_adaptive_config": slots}
        assert PolicySettings.of(config).changed(changes).trees == found
