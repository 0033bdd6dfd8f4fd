"""What the speculative section promises, and what it refuses at the door."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.speculative import parse_update
from serve_spec.core.draft import MAX_TREE_TOKENS

EAGLE, NGRAM = {"speculative_algorithm": "EAGLE"}, {"speculative_algorithm": "NGRAM"}
NONE = {"speculative_algorithm": "NONE"}
NO_DRAFT = {"speculative_draft_model_path": None}
NGRAM_FIRST = {"speculative_ngram_first": True}
CORPUS = {"speculative_ngram_corpus": __file__}


def shape(num_steps, topk=1, rows=None):
    """Keys of a chain, or of a tree with a beam."""
    return {
        "speculative_num_steps": num_steps,
        "speculative_eagle_topk": topk,
        "speculative_num_draft_tokens": rows,
    }


def resolved(drafting, keys):
    return ServeSpecConfig.load(drafting, **keys).speculative


@pytest.mark.parametrize(
    ("keys", "attribute", "value"),
    [
        ({**NGRAM, **NO_DRAFT}, "enabled", True),
        ({**NONE, "speculative_adaptive": True}, "enabled", False),
        ({**NONE, "speculative_adaptive": True}, "speculative_adaptive", False),
        ({}, "text_algorithm", None),
        (NGRAM_FIRST, "text_algorithm", "NGRAM"),
        ({**NONE, **NGRAM_FIRST}, "text_algorithm", None),
        ({**NGRAM, **NO_DRAFT}, "ngram_min_match", 2),
        (
            {**NGRAM_FIRST, "speculative_ngram_max_match_window_size": 9},
            "ngram_min_match",
            9,
        ),
        ({**NGRAM_FIRST, "speculative_ngram_min_match_window_size": 3}, "ngram_min_match", 3),
        ({**NGRAM_FIRST, **CORPUS}, "speculative_ngram_corpus", Path(__file__)),
        ({**NGRAM, **NO_DRAFT, **CORPUS}, "speculative_ngram_corpus", Path(__file__)),
        (shape(0), "num_draft_tokens", 1),
        (shape(7), "num_draft_tokens", 8),
        (shape(7, rows=8), "num_draft_tokens", 8),
        (shape(3, 2), "num_draft_tokens", 7),
        (shape(3, 2, rows=4), "num_draft_tokens", 4),
        (shape(1, 4), "num_draft_tokens", 5),
        (shape(7, 10), "num_draft_tokens", 64),
        (shape(0, 4), "num_draft_tokens", 1),
        (shape(9, 8), "num_draft_tokens", MAX_TREE_TOKENS),
        ({**NGRAM, **NO_DRAFT, **shape(3, 2)}, "num_draft_tokens", 7),
        ({"speculative_draft_sharpness": 0.01}, "speculative_draft_sharpness", 0.01),
        ({"speculative_draft_sharpness": 2.0}, "speculative_draft_sharpness", 2.0),
        ({}, "speculative_draft_sharpness", 0.85),
        ({"speculative_draft_rope_theta": "probe"}, "speculative_draft_rope_theta", "probe"),
        ({"speculative_draft_rope_theta": 10000}, "speculative_draft_rope_theta", 10000),
        ({**EAGLE, "speculative_draft_rope_theta": 1.0}, "speculative_draft_rope_theta", 1.0),
        ({}, "synthetic_acceptance", None),
        ({"synthetic_acceptance": 1}, "synthetic_acceptance", 1),
        ({"synthetic_acceptance": 2.5}, "synthetic_acceptance", 2.5),
        ({"synthetic_acceptance": [1, 0.5, 0.0]}, "synthetic_acceptance", (1, 0.5, 0.0)),
        ({**NONE, "rejection_sample_method": "block"}, "samples_drafts", False),
    ],
)
def test_what_is_said_is_what_the_engine_reads(drafting, keys, attribute, value):
    assert getattr(resolved(drafting, keys), attribute) == value


@pytest.mark.parametrize(
    ("keys", "field", "problem"),
    [
        ({**EAGLE, **NO_DRAFT}, "speculative_draft_model_path=None", "EAGLE"),
        (NGRAM, "speculative_draft_model_path=", "NGRAM has no draft model"),
        (
            {
                "speculative_ngram_min_match_window_size": 4,
                "speculative_ngram_max_match_window_size": 3,
            },
            "speculative_ngram_max_match_window_size=3",
            "give at least .*=4",
        ),
        ({**NGRAM, **NO_DRAFT, **NGRAM_FIRST}, "speculative_ngram_first=True", "makes no other"),
        (CORPUS, "speculative_ngram_corpus=", "set speculative_ngram_first"),
        (
            {**NGRAM_FIRST, "speculative_ngram_corpus": "nowhere.txt"},
            "speculative_ngram_corpus=",
            "nothing at",
        ),
        (shape(3, rows=5), "speculative_num_draft_tokens=5", "has 4 tokens"),
        (shape(3, 2, rows=3), "speculative_num_draft_tokens=3", "have 4 to 11 tokens"),
        (shape(3, 2, rows=16), "speculative_num_draft_tokens=16", "have 4 to 11 tokens"),
        (
            {**NGRAM, **NO_DRAFT, **shape(3, 2, rows=12)},
            "speculative_num_draft_tokens=12",
            "have 4 to 11 tokens, root included",
        ),
        (shape(10, 8), "speculative_eagle_topk=8", "allows at most"),
        (shape(9, 65), "speculative_eagle_topk=65", "allows at most"),
        ({"speculative_draft_sharpness": 0.0}, "speculative_draft_sharpness", ""),
        ({"speculative_draft_sharpness": 2.01}, "speculative_draft_sharpness", ""),
        (
            {"speculative_draft_sharpness": "auto"},
            "speculative_draft_sharpness='auto'",
            "such as 0.85",
        ),
        *(
            ({"speculative_draft_rope_theta": wrong}, f"speculative_draft_rope_theta={wrong!r}",
             "give a base ≥ 1, or 'probe'")
            for wrong in (0, "auto", True, float("inf"))
        ),
        (
            {"speculative_draft_aux_layer_ids": []},
            "speculative_draft_aux_layer_ids=[]",
            "layer ids of the target",
        ),
        (
            {"speculative_draft_aux_layer_ids": [2, -1]},
            "speculative_draft_aux_layer_ids=[2, -1]",
            "layer ids of the target",
        ),
        (
            {"speculative_draft_aux_layers_mean": "both"},
            "speculative_draft_aux_layers_mean='both'",
            "'input', 'output' or 'probe'",
        ),
        (
            {
                "speculative_draft_aux_layer_ids": [2, 16, 29],
                "speculative_draft_aux_layers_mean": "probe",
            },
            "speculative_draft_aux_layers_mean='probe'",
            "set only one of them",
        ),
        (
            {"speculative_draft_norm_output": 1},
            "speculative_draft_norm_output=1",
            "valid boolean",
        ),
        *(
            ({"synthetic_acceptance": wrong}, f"synthetic_acceptance={wrong!r}",
             "give an accept length")
            for wrong in (0.99, True, "2.5", float("nan"), [], [1.1], [-0.1, 0.5], [True], [[0.5]])
        ),
        ({**NONE, "synthetic_acceptance": 2.5}, "synthetic_acceptance=2.5", "algorithm"),
        *(
            ({**keys, "rejection_sample_method": method}, f"rejection_sample_method='{method}'",
             problem)
            for method in ("standard", "block")
            for keys, problem in (
                ({**NGRAM, **NO_DRAFT}, "n-gram drafts come"),
                (NGRAM_FIRST, "n-gram drafts come"),
                (shape(3, 2), "it verifies chains only"),
                ({"synthetic_acceptance": 2.0}, "synthetic"),
            )
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_lies_out_of_range_is_refused_by_field_and_value(
    drafting, keys, field, problem
):
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, **keys)
    (found,) = caught.value.problems
    assert found.startswith(f"speculative.{field}")
    assert re.search(problem, found), found


CORRECTIONS: dict[str, Any] = {
    "speculative_draft_aux_layer_ids": (2, 16, 29),
    "speculative_draft_aux_layers_mean": "input",
    "speculative_draft_norm_before_residual": False,
    "speculative_draft_norm_output": True,
}


@pytest.mark.parametrize(("key", "value"), CORRECTIONS.items())
def test_what_an_eagle3_drafts_config_gets_wrong_can_be_said_and_of_no_other_draft(
    drafting, key, value
):
    assert getattr(resolved(drafting, {}), key) is None
    said = {key: list(value) if isinstance(value, tuple) else value}
    assert getattr(resolved(drafting, said), key) == value
    # Who switches speculation off for once keeps the rest of his file.
    assert not resolved(drafting, {**NONE, **said}).enabled
    told = rf"^speculative\.{key}=.* for EAGLE3; omit it with EAGLE"
    with pytest.raises(ConfigError, match=told):
        ServeSpecConfig.load(drafting, **EAGLE, **said)


def test_a_bad_adaptive_config_is_refused_when_the_configuration_is_loaded(drafting, tmp_path):
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps({"8": {"candidate_steps": [1], "ema_alpha": 2}}))
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, speculative_adaptive_config=str(file))
    message = str(caught.value)
    assert message.startswith("speculative.speculative_adaptive_config: ")
    assert str(file) in message
    assert "8.ema_alpha=2" in message


def test_a_live_update_knows_what_it_was_told_and_nothing_else():
    assert parse_update({"min_dwell_rounds": 4}) == {"min_dwell_rounds": 4}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dwell": 3}, "dwell: unknown key"),
        ({"synthetic_acceptance": 2.5}, "synthetic_acceptance: unknown key"),
        ({"min_dwell_rounds": -1}, "min_dwell_rounds=-1"),
        ({"speculative_num_steps": 1000}, "speculative_num_steps=1000: "),
        ({"speculative_num_draft_tokens": 1000}, "speculative_num_draft_tokens=1000: "),
        ({"speculative_adaptive_strategy": "best"}, "speculative_adaptive_strategy='best'"),
        ({"speculative_adaptive_config": {"1": {}}}, "1.candidate_steps: missing"),
        (["ema"], "not a mapping"),
    ],
)
def test_an_invalid_live_update_is_refused(settings, complaint):
    with pytest.raises(ConfigError, match=complaint):
        parse_update(settings)


@pytest.mark.parametrize(
    ("section", "key", "most"),
    [
        ("speculative", "speculative_num_steps", 64),
        ("speculative", "speculative_num_draft_tokens", 65),
        ("speculative", "speculative_ngram_max_match_window_size", 256),
        ("model", "max_model_len", 2**21),
        ("model", "tensor_parallel_size", 1024),
        ("cache", "page_size", 4096),
        ("scheduler", "max_num_seqs", 4096),
        ("scheduler", "max_num_batched_tokens", 2**20),
        ("scheduler", "max_waiting_seqs", 2**20),
        ("replica", "torch_num_threads", 1024),
    ],
)
def test_absurd_numbers_are_refused_before_anything_is_loaded(drafting, section, key, most):
    told = rf"^{section}\.{key}={most + 1}: input should be less than or equal to {most}"
    with pytest.raises(ConfigError, match=told):
        ServeSpecConfig.load(drafting, **{key: most + 1})
    whole_chain = {"speculative_num_steps": 64} if key == "speculative_num_draft_tokens" else {}
    ServeSpecConfig.load(drafting, **{key: most, **whole_chain})
