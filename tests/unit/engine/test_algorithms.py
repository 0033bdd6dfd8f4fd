"""Who can draft: a builder and its line; nothing else has to know of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
import torch

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ConfigError, ServeSpecConfig, SpeculativeConfig
from serve_spec.config.algorithms import ALGORITHMS, Algorithm
from serve_spec.core.draft import TextDrafts
from serve_spec.core.draft_shape import DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.models import DraftHead, DraftOptions, Llama, load_target
from serve_spec.models.standalone import Standalone
from tests.helpers.engines import MakeLLM, Pair, texts

PROMPTS = [[5, 6, 7, 5], [9, 8, 9, 8, 9]]
PARAMS = SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)


class Stutterer:
    """Drafts the newest token again and again."""

    def __init__(self, most: int) -> None:
        self.most = most

    def propose(self, request_id: str, token_ids: Sequence[int], most: int) -> tuple[int, ...]:
        return (token_ids[-1],) * min(most, self.most)

    def propose_tree(
        self, request_id: str, token_ids: Sequence[int], shape: DraftShape
    ) -> TextDrafts:
        """And another first one, where there is room."""
        chain = self.propose(request_id, token_ids, shape.depth)
        if len(chain) == shape.size:
            return TextDrafts(chain, tuple(range(len(chain))))
        return TextDrafts((*chain, token_ids[-1] ^ 1), (*range(len(chain)), 0))

    def forget(self, request_id: str) -> None:
        pass


def build_stutterer(
    config: SpeculativeConfig, encode: Callable[[str], list[int]], max_steps: int
) -> Stutterer:
    return Stutterer(max_steps)


def build_twin(
    path: Path | str, target: Llama, options: DraftOptions, dtype: torch.dtype
) -> DraftHead:
    """The target once more."""
    return Standalone(load_target(path, dtype, max_model_len=target.max_model_len))


@pytest.fixture
def _registered(monkeypatch: pytest.MonkeyPatch) -> None:
    here = __name__
    monkeypatch.setitem(ALGORITHMS, "STUTTER", Algorithm(f"{here}:build_stutterer", from_text=True))
    monkeypatch.setitem(ALGORITHMS, "TWIN", Algorithm(f"{here}:build_twin"))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_builder_is_there(name: str) -> None:
    assert callable(ALGORITHMS[name].load())


@pytest.mark.usefixtures("_registered")
def test_a_model_that_is_registered_drafts(make_llm: MakeLLM, pair: Pair) -> None:
    folder = str(pair.target)
    llm = make_llm("TWIN", 3, speculative_draft_model_path=folder)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert texts(outputs) == texts(make_llm().generate(PROMPTS, PARAMS))
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens > 0


@pytest.mark.usefixtures("_registered")
@pytest.mark.parametrize("topk", [1, 2])
def test_a_text_drafter_that_is_registered_drafts(make_llm: MakeLLM, topk: int) -> None:
    llm = make_llm("STUTTER", 3, speculative_eagle_topk=topk)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert texts(outputs) == texts(make_llm().generate(PROMPTS, PARAMS))
    assert all(output.speculation.num_draft_tokens > 0 for output in outputs)


def test_a_name_that_nobody_registered_is_refused_with_those_that_are(pair: Pair) -> None:
    with pytest.raises(ConfigError, match=r"speculative_algorithm='STUTTER': use NONE or .*MEDUSA"):
        ServeSpecConfig.load({"model": {"path": str(pair.target)}}, speculative_algorithm="STUTTER")


def test_more_drafts_than_there_are_heads_are_refused(make_llm: MakeLLM) -> None:
    with pytest.raises(ValueError, match=r"speculative_num_steps=5.*the draft makes 4 at most"):
        make_llm("MEDUSA", 5)


def test_a_policy_that_picks_its_own_depths_picks_none_beyond_the_heads() -> None:
    config = ServeSpecConfig.load(
        {
            "model": {"path": "asset:tiny/target"},
            "speculative": {
                "speculative_algorithm": "MEDUSA",
                "speculative_draft_model_path": "asset:tiny/medusa",
            },
        }
    ).speculative
    assert PolicySettings.of(config).max_depth > 4
    assert PolicySettings.of(config, max_steps=4).max_depth == 4
