"""Who can draft: a builder and its line; nothing else has to know of it."""

import pytest

from serve_spec.adaptive import PolicySettings
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.algorithms import ALGORITHMS, Algorithm
from serve_spec.core.request import SamplingParams
from serve_spec.models import load_target
from serve_spec.models.standalone import Standalone
from tests.helpers.engines import texts

PROMPTS = [[5, 6, 7, 5], [9, 8, 9, 8, 9]]
PARAMS = SamplingParams(max_tokens=13, temperature=0.0, ignore_eos=True)


def build_twin(path, target, options, dtype):
    """The target once more."""
    return Standalone(load_target(path, dtype, max_model_len=target.max_model_len))


def test_a_model_that_is_registered_drafts(make_llm, pair, monkeypatch):
    monkeypatch.setitem(ALGORITHMS, "TWIN", Algorithm(f"{__name__}:build_twin"))
    folder = str(pair.target)
    llm = make_llm("TWIN", 3, speculative_draft_model_path=folder)
    outputs = llm.generate(PROMPTS, PARAMS)
    assert texts(outputs) == texts(make_llm().generate(PROMPTS, PARAMS))
    for output in outputs:
        assert output.speculation.num_correct_drafts == output.speculation.num_draft_tokens > 0


def test_a_name_that_nobody_registered_is_refused_with_those_that_are(pair):
    with pytest.raises(ConfigError, match=r"speculative_algorithm='STUTTER': use NONE or .*MEDUSA"):
        ServeSpecConfig.load({"model": {"path": str(pair.target)}}, speculative_algorithm="STUTTER")


def test_more_drafts_than_there_are_heads_are_refused(make_llm):
    with pytest.raises(ValueError, match=r"speculative_num_steps=5.*the draft supports at most 4"):
        make_llm("MEDUSA", 5)


def test_a_policy_that_picks_its_own_depths_picks_none_beyond_the_heads():
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
