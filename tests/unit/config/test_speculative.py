"""What the speculative section promises, and what it refuses."""

import json
import re
from pathlib import Path

import pytest

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.adaptive_file import MAX_STEPS
from serve_spec.config.root import parse_override
from serve_spec.config.speculative import parse_update
from serve_spec.core.draft import MAX_TREE_TOKENS

FILE = __file__


def keys_of(settings):
    """The keys in `key=value key=value`, values in YAML without spaces."""
    pairs = dict(map(parse_override, settings.split()))
    whole = {"synthetic_acceptance", "rejection_sample_method"}
    return {k if k in whole else f"speculative_{k}": value for k, value in pairs.items()}


def resolved(drafting, settings):
    return ServeSpecConfig.load(drafting, **keys_of(settings)).speculative


@pytest.mark.parametrize(
    ("settings", "attribute", "value"),
    [
        ("algorithm=NGRAM draft_model_path=null", "enabled", True),
        ("algorithm=NONE adaptive=true", "enabled", False),
        ("algorithm=NONE adaptive=true", "speculative_adaptive", False),
        ("", "ngram_algorithm", None),
        ("ngram_first=true", "ngram_algorithm", "NGRAM"),
        ("algorithm=NONE ngram_first=true", "ngram_algorithm", None),
        ("algorithm=NGRAM draft_model_path=null", "ngram_min_match", 2),
        ("ngram_first=true ngram_max_match_window_size=9", "ngram_min_match", 9),
        ("ngram_first=true ngram_min_match_window_size=3", "ngram_min_match", 3),
        (f"ngram_first=true ngram_corpus={FILE}", "speculative_ngram_corpus", Path(FILE)),
        (f"algorithm=NGRAM draft_model_path=null ngram_corpus={FILE}", "enabled", True),
        (f"algorithm=REPLAY draft_model_path=null replay_answers={FILE}", "enabled", True),
        ("num_steps=0", "num_draft_tokens", 1),
        ("num_steps=7", "num_draft_tokens", 8),
        ("num_steps=7 num_draft_tokens=8", "num_draft_tokens", 8),
        ("num_steps=3 eagle_topk=2", "num_draft_tokens", 7),
        ("num_steps=3 eagle_topk=2 num_draft_tokens=4", "num_draft_tokens", 4),
        ("num_steps=0 eagle_topk=4", "num_draft_tokens", 1),
        ("num_steps=9 eagle_topk=8", "num_draft_tokens", MAX_TREE_TOKENS),
        ("algorithm=NGRAM draft_model_path=null num_steps=3 eagle_topk=2", "num_draft_tokens", 7),
        ("draft_sharpness=0.01", "speculative_draft_sharpness", 0.01),
        ("draft_sharpness=2.0", "speculative_draft_sharpness", 2.0),
        ("draft_rope_theta=10000", "speculative_draft_rope_theta", 10000),
        ("algorithm=EAGLE draft_rope_theta=1.0", "speculative_draft_rope_theta", 1.0),
        ("synthetic_acceptance=1", "synthetic_acceptance", 1),
        ("synthetic_acceptance=[1,0.5,0.0]", "synthetic_acceptance", (1, 0.5, 0.0)),
        ("algorithm=NONE rejection_sample_method=block", "samples_drafts", False),
    ],
)
def test_settings_are_what_the_engine_reads(drafting, settings, attribute, value):
    assert getattr(resolved(drafting, settings), attribute) == value


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ("algorithm=EAGEL", r"algorithm='EAGEL': use NONE or one of \[.*'EAGLE', "),
        ("algorithm=EAGLE draft_model_path=null", "draft_model_path=None: EAGLE needs a draft"),
        ("algorithm=NGRAM", "draft_model_path='.*': NGRAM has no draft model"),
        (
            "ngram_min_match_window_size=4 ngram_max_match_window_size=3",
            "ngram_max_match_window_size=3: give at least .*=4",
        ),
        ("algorithm=NGRAM draft_model_path=null ngram_first=true", "ngram_first=True: .* no other"),
        (f"ngram_corpus={FILE}", "ngram_corpus='.*': .* set speculative_ngram_first"),
        (
            "algorithm=REPLAY draft_model_path=null",
            "replay_answers=None: REPLAY is for benchmarks, .* or use another",
        ),
        (f"replay_answers={FILE}", "replay_answers='.*': EAGLE3 replays no answers; leave it out"),
        (
            f"algorithm=REPLAY draft_model_path=null replay_answers={FILE} eagle_topk=2",
            "eagle_topk=2: REPLAY drafts chains alone",
        ),
        ("ngram_first=true ngram_corpus=nowhere.txt", "ngram_corpus='.*nowhere.txt': nothing at"),
        ("num_steps=3 num_draft_tokens=5", "num_draft_tokens=5: .* has 4 tokens"),
        *(
            (f"num_steps=3 eagle_topk=2 num_draft_tokens={n}{more}",
             f"num_draft_tokens={n}: .* have 4 to 11 tokens, root included")
            for n, more in ((3, ""), (16, ""), (12, " algorithm=NGRAM draft_model_path=null"))
        ),
        ("num_steps=10 eagle_topk=8", "eagle_topk=8: allows at most"),
        ("num_steps=9 eagle_topk=65", "eagle_topk=65: allows at most"),
        *(
            (f"draft_sharpness={wrong}", f"draft_sharpness='?{wrong}'?: .* such as 0.85")
            for wrong in ("0.0", "2.01", "auto")
        ),
        *(
            (f"draft_rope_theta={wrong}", "draft_rope_theta=.*: give a base ≥ 1; .*, 10000 ")
            for wrong in ("0", "probe", "true", ".inf")
        ),
        ("draft_aux_layer_ids=[]", r"draft_aux_layer_ids=\[\]: give layer ids of the target"),
        ("draft_aux_layer_ids=[2,-1]", r"draft_aux_layer_ids=\[2, -1\]: give layer ids"),
        ("draft_aux_layer_ids=3", "draft_aux_layer_ids=3: give layer ids"),
        ("draft_aux_layers_mean=probe", "draft_aux_layers_mean='probe': give 'input' or 'output'"),
        (
            "draft_aux_layer_ids=[2,16,29] draft_aux_layers_mean=input",
            "draft_aux_layers_mean='input': .* set only one of them",
        ),
        ("draft_norm_output=1", "draft_norm_output=1: .*valid boolean"),
        *(
            (f"synthetic_acceptance={wrong}", "synthetic_acceptance=.*: give an accept length")
            for wrong in ("0.99", "true", "'2.5'", ".nan", "[]", "[1.1]", "[-0.1,0.5]", "[[0.5]]")
        ),
        ("algorithm=NONE synthetic_acceptance=2.5", "synthetic_acceptance=2.5: .*algorithm=NONE"),
        *(
            (f"rejection_sample_method={how} {settings}", f"rejection_sample_method=.{how}.: {why}")
            for how in ("standard", "block")
            for settings, why in (
                ("algorithm=NGRAM draft_model_path=null", "n-gram drafts come"),
                ("ngram_first=true", "n-gram drafts come"),
                ("num_steps=3 eagle_topk=2", "it verifies chains only"),
                ("synthetic_acceptance=2.0", "synthetic"),
            )
        ),
    ],
)  # fmt: skip
def test_what_contradicts_itself_or_lies_out_of_range_is_refused_by_field_and_value(
    drafting, settings, problem
):
    with pytest.raises(ConfigError) as caught:
        resolved(drafting, settings)
    (found,) = caught.value.problems
    assert re.match(rf"speculative\.(speculative_)?{problem}", found), found


@pytest.mark.parametrize(
    ("key", "text", "value"),
    [
        ("draft_aux_layer_ids", "[2,16,29]", (2, 16, 29)),
        ("draft_aux_layers_mean", "input", "input"),
        ("draft_norm_before_residual", "false", False),
        ("draft_norm_output", "true", True),
    ],
)
def test_what_an_eagle3_drafts_config_gets_wrong_can_be_corrected_and_of_no_other_draft(
    drafting, key, text, value
):
    assert getattr(resolved(drafting, ""), f"speculative_{key}") is None
    assert getattr(resolved(drafting, f"{key}={text}"), f"speculative_{key}") == value
    # Speculation may be switched off without removing the other keys.
    assert not resolved(drafting, f"algorithm=NONE {key}={text}").enabled
    told = rf"^speculative\.speculative_{key}=.* for EAGLE3; omit it with EAGLE"
    with pytest.raises(ConfigError, match=told):
        resolved(drafting, f"algorithm=EAGLE {key}={text}")


def test_a_bad_adaptive_config_is_refused_when_the_configuration_is_loaded(drafting, tmp_path):
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps({"8": {"candidate_steps": [1], "ema_alpha": 2}}))
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, speculative_adaptive_config=str(file))
    message = str(caught.value)
    assert message.startswith("speculative.speculative_adaptive_config: ")
    assert str(file) in message
    assert "8.ema_alpha=2" in message


def test_an_update_has_only_the_keys_that_were_given():
    assert parse_update({"min_dwell_rounds": 4}) == {"min_dwell_rounds": 4}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dwell": 3}, "dwell: unknown key"),
        ({"synthetic_acceptance": 2.5}, "synthetic_acceptance: unknown key"),
        ({"min_dwell_rounds": -1}, "min_dwell_rounds=-1"),
        ({"speculative_num_steps": 1000}, "speculative_num_steps=1000: "),
        ({"speculative_num_draft_tokens": 1000}, "speculative_num_draft_tokens=1000: "),
        *(
            (
                {"speculative_adaptive_strategy": name},
                f"speculative_adaptive_strategy='{name}': use",
            )
            for name in ("best", "a:", ":B", "a b:C", "a.:B", "a:B:C")
        ),
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
        ("speculative", "speculative_num_steps", MAX_TREE_TOKENS - 1),
        ("speculative", "speculative_num_draft_tokens", MAX_TREE_TOKENS),
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
    whole_chain = (
        {"speculative_num_steps": MAX_STEPS} if key == "speculative_num_draft_tokens" else {}
    )
    ServeSpecConfig.load(drafting, **{key: most, **whole_chain})
