"""Which trees `serve-spec tune` measures: those a server could draft, and no others."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_spec.adaptive import PolicySettings
from serve_spec.bench.tune.trees import swept_trees
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.base import judge
from serve_spec.core.draft import DraftShape


def speculative(topk: int, num_steps: int = 2, file: Path | None = None) -> SpeculativeConfig:
    keys = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "asset:tiny/eagle3",
        "speculative_eagle_topk": topk,
        "speculative_num_steps": num_steps,
        "speculative_adaptive_config": None if file is None else str(file),
    }
    return judge(SpeculativeConfig, keys)


def is_swept(tree: tuple[int, int], topk: int) -> bool:
    config = speculative(topk)
    try:
        return swept_trees([tree], config) == [DraftShape(*tree, topk)]
    except ConfigError:
        return False


def may_be_listed(tree: tuple[int, int], topk: int) -> bool:
    """Whether a server takes an adaptive config that lists it."""
    depth, size = tree
    slot = {"candidate_steps": [depth], "candidate_trees": [[depth, size + 1]]}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "adaptive.json"
        file.write_text(json.dumps(slot))
        try:
            speculative(topk, file=file)
        except ConfigError:
            return False
    return True


@example((2, 6), 2)
@example((33, 63), 2)
@example((34, 63), 2)
@given(st.tuples(st.integers(0, 40), st.integers(0, 70)), st.integers(2, 9))
def test_a_tree_may_be_swept_just_where_a_server_may_list_it(
    tree: tuple[int, int], topk: int
) -> None:
    assert is_swept(tree, topk) == may_be_listed(tree, topk)


@given(topk=st.integers(2, 9), num_steps=st.integers(0, 7))
def test_unasked_the_trees_are_those_a_policy_may_draft_unasked(topk: int, num_steps: int) -> None:
    config = speculative(topk, num_steps)
    assert swept_trees(None, config) == list(PolicySettings.of(config).trees)


def test_asked_for_they_are_measured_once_each_in_ascending_order() -> None:
    wanted = [(3, 7), (2, 5), (3, 5), (2, 5)]
    assert swept_trees(wanted, speculative(2)) == [
        DraftShape(depth, size, 2) for depth, size in sorted(set(wanted))
    ]


@pytest.mark.parametrize(("topk", "num_steps"), [(1, 3), (2, 0)])
def test_where_a_server_drafts_chains_alone_there_are_no_trees(topk: int, num_steps: int) -> None:
    config = speculative(topk, num_steps)
    assert swept_trees(None, config) == []
    with pytest.raises(ConfigError, match=r"^trees=\['2x3'\]: speculative_eagle_topk=\d with"):
        swept_trees([(2, 3)], config)
