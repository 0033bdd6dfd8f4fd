"""What the speculative section promises, and what it refuses at the door."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.speculative import parse_update
from serve_spec.ops.acceptance import MAX_ROWS


def test_an_algorithm_that_needs_a_draft_is_refused_without_one(minimal: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^speculative\.speculative_draft_model_path=None: EAG"):
        ServeSpecConfig.load(minimal, speculative_algorithm="EAGLE")


def test_drafts_from_the_text_need_no_checkpoint_and_refuse_one(
    minimal: dict[str, Any], drafting: dict[str, Any]
) -> None:
    assert ServeSpecConfig.load(minimal, speculative_algorithm="NGRAM").speculative.enabled
    with pytest.raises(ConfigError, match=r"speculative_draft_model_path=.*NGRAM drafts from"):
        ServeSpecConfig.load(drafting, speculative_algorithm="NGRAM")


def test_the_longest_match_of_the_text_is_no_shorter_than_the_shortest(
    minimal: dict[str, Any],
) -> None:
    sizes = {"min": 4, "max": 3}
    keys = {f"speculative_ngram_{end}_match_window_size": n for end, n in sizes.items()}
    with pytest.raises(ConfigError, match=r"max_match_window_size=3: give at least .*=4"):
        ServeSpecConfig.load(minimal, speculative_algorithm="NGRAM", **keys)


def test_the_text_comes_first_only_where_a_model_comes_second(
    minimal: dict[str, Any], drafting: dict[str, Any]
) -> None:
    key = "speculative_ngram_first"
    assert ServeSpecConfig.load(drafting).speculative.text_algorithm is None
    assert ServeSpecConfig.load(drafting, **{key: True}).speculative.text_algorithm == "NGRAM"
    with pytest.raises(ConfigError, match=rf"{key}=True: NGRAM knows no other drafts"):
        ServeSpecConfig.load(minimal, speculative_algorithm="NGRAM", **{key: True})
    off = ServeSpecConfig.load(drafting, speculative_algorithm="NONE", **{key: True})
    assert off.speculative.text_algorithm is None


def test_beside_a_model_short_matches_do_not_count_unless_it_is_said(
    minimal: dict[str, Any], drafting: dict[str, Any]
) -> None:
    alone = ServeSpecConfig.load(minimal, speculative_algorithm="NGRAM").speculative
    assert alone.ngram_min_match == 2
    beside = {"speculative_ngram_first": True}
    first = ServeSpecConfig.load(drafting, **beside).speculative
    assert first.ngram_min_match == first.speculative_ngram_max_match_window_size
    given = ServeSpecConfig.load(drafting, speculative_ngram_min_match_window_size=3, **beside)
    assert given.speculative.ngram_min_match == 3


def test_a_corpus_is_refused_where_nobody_looks_into_it(
    tmp_path: Path, minimal: dict[str, Any], drafting: dict[str, Any]
) -> None:
    (tmp_path / "notes.txt").write_text("what was said before")
    corpus = {"speculative_ngram_corpus": str(tmp_path / "notes.txt")}
    with pytest.raises(
        ConfigError, match=r"speculative_ngram_corpus=.*set speculative_ngram_first"
    ):
        ServeSpecConfig.load(drafting, **corpus)
    assert ServeSpecConfig.load(drafting, speculative_ngram_first=True, **corpus)
    assert ServeSpecConfig.load(minimal, speculative_algorithm="NGRAM", **corpus)
    with pytest.raises(ConfigError, match=r"speculative_ngram_corpus=.*nothing at"):
        ServeSpecConfig.load(
            minimal, speculative_algorithm="NGRAM", speculative_ngram_corpus="nowhere.txt"
        )


def test_without_drafts_nothing_adapts(minimal: dict[str, Any]) -> None:
    config = ServeSpecConfig.load(minimal, speculative_adaptive=True).speculative
    assert not config.enabled
    assert not config.speculative_adaptive


@pytest.mark.parametrize("num_steps", [0, 1, 3, 7])
def test_a_chain_verifies_one_row_more_than_it_drafts(
    drafting: dict[str, Any], num_steps: int
) -> None:
    for rows in (None, num_steps + 1):
        config = ServeSpecConfig.load(
            drafting, speculative_num_steps=num_steps, speculative_num_draft_tokens=rows
        )
        assert config.speculative.num_draft_tokens == num_steps + 1
    with pytest.raises(ConfigError, match=rf"has {num_steps + 1} rows"):
        ServeSpecConfig.load(
            drafting, speculative_num_steps=num_steps, speculative_num_draft_tokens=num_steps + 2
        )


@pytest.mark.parametrize(
    ("num_steps", "topk", "default"), [(3, 2, 7), (5, 4, 21), (1, 4, 5), (7, 10, 64), (0, 4, 1)]
)
def test_a_tree_verifies_its_root_and_topk_drafts_a_step_unless_told_otherwise(
    drafting: dict[str, Any], num_steps: int, topk: int, default: int
) -> None:
    shape = {"speculative_num_steps": num_steps, "speculative_eagle_topk": topk}
    config = ServeSpecConfig.load(drafting, **shape)
    assert config.speculative.num_draft_tokens == default
    told = ServeSpecConfig.load(
        drafting, **shape, speculative_num_draft_tokens=num_steps + 1
    ).speculative
    assert told.num_draft_tokens == num_steps + 1


@pytest.mark.parametrize("rows", [3, 16, 65])
def test_a_tree_that_its_beam_can_not_make_is_refused(drafting: dict[str, Any], rows: int) -> None:
    """Fewer rows than a path and its root, or more than the beam has candidates."""
    with pytest.raises(ConfigError, match=r"have 4 to 11 rows, root included"):
        ServeSpecConfig.load(
            drafting,
            speculative_num_steps=3,
            speculative_eagle_topk=2,
            speculative_num_draft_tokens=rows,
        )


def test_beams_that_no_mask_holds_are_refused(drafting: dict[str, Any]) -> None:
    ok = {"speculative_num_steps": 9, "speculative_eagle_topk": 8}
    assert ServeSpecConfig.load(drafting, **ok).speculative.num_draft_tokens == MAX_ROWS
    for keys in ({**ok, "speculative_num_steps": 10}, {**ok, "speculative_eagle_topk": 65}):
        with pytest.raises(ConfigError, match=r"speculative_eagle_topk=\d+: a beam of it may be"):
            ServeSpecConfig.load(drafting, **keys)


def test_trees_from_the_text_have_the_sizes_of_others(minimal: dict[str, Any]) -> None:
    keys = {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 2}
    assert ServeSpecConfig.load(minimal, **keys).speculative.num_draft_tokens == 7
    with pytest.raises(ConfigError, match=r"have 4 to 11 rows, root included"):
        ServeSpecConfig.load(minimal, **keys, speculative_num_draft_tokens=12)


@pytest.mark.parametrize(
    ("value", "ok"),
    [(0.0, False), (0.01, True), (2.0, True), (2.01, False), ("auto", True), ("high", False)],
)
def test_the_draft_sharpness_is_learnt_or_lies_in_zero_exclusive_to_two(
    drafting: dict[str, Any], value: float | str, ok: bool
) -> None:
    if ok:
        config = ServeSpecConfig.load(drafting, speculative_draft_sharpness=value)
        assert config.speculative.speculative_draft_sharpness == value
    else:
        with pytest.raises(ConfigError, match="speculative_draft_sharpness"):
            ServeSpecConfig.load(drafting, speculative_draft_sharpness=value)


CORRECTIONS: dict[str, Any] = {
    "speculative_draft_rope_theta": 10000.0,
    "speculative_draft_aux_layer_ids": [2, 16, 29],
    "speculative_draft_aux_layers_mean": "input",
    "speculative_draft_norm_before_residual": False,
    "speculative_draft_norm_output": True,
}


@pytest.mark.parametrize("key", CORRECTIONS)
def test_what_a_drafts_config_gets_wrong_can_be_said_and_is_not_said_by_default(
    drafting: dict[str, Any], key: str
) -> None:
    assert getattr(ServeSpecConfig.load(drafting).speculative, key) is None
    value = CORRECTIONS[key]
    said = getattr(ServeSpecConfig.load(drafting, **{key: value}).speculative, key)
    assert said == (tuple(value) if isinstance(value, list) else value)


@pytest.mark.parametrize("key", CORRECTIONS)
def test_a_correction_for_another_algorithm_is_refused(drafting: dict[str, Any], key: str) -> None:
    # Who switches speculation off for once keeps the rest of his file.
    assert ServeSpecConfig.load(drafting, speculative_algorithm="NONE", **{key: CORRECTIONS[key]})
    changes = {"speculative_algorithm": "EAGLE", key: CORRECTIONS[key]}
    if key == "speculative_draft_rope_theta":
        assert ServeSpecConfig.load(drafting, **changes)
    else:
        with pytest.raises(
            ConfigError, match=rf"^speculative\.{key}=.* for EAGLE3; leave it out with EAGLE"
        ):
            ServeSpecConfig.load(drafting, **changes)


@pytest.mark.parametrize("value", ["probe", 10000, 1.0, 5e5])
def test_a_drafts_theta_is_a_number_or_measured(drafting: dict[str, Any], value: object) -> None:
    config = ServeSpecConfig.load(drafting, speculative_draft_rope_theta=value)
    assert config.speculative.speculative_draft_rope_theta == value


@pytest.mark.parametrize("mean", ["input", "probe"])
def test_layers_are_named_by_the_user_or_read_from_the_config(
    drafting: dict[str, Any], mean: str
) -> None:
    named = {"speculative_draft_aux_layer_ids": [2, 16, 29]}
    with pytest.raises(ConfigError, match=r"aux_layers_mean='\w+'.*give one of both"):
        ServeSpecConfig.load(drafting, speculative_draft_aux_layers_mean=mean, **named)


@pytest.mark.parametrize(
    ("key", "value", "fix"),
    [
        ("speculative_draft_rope_theta", 0, "give a base ≥ 1, or 'probe'"),
        ("speculative_draft_rope_theta", "auto", "give a base ≥ 1, or 'probe'"),
        ("speculative_draft_rope_theta", True, "give a base ≥ 1, or 'probe'"),
        ("speculative_draft_rope_theta", float("inf"), "give a base ≥ 1, or 'probe'"),
        ("speculative_draft_aux_layer_ids", [], "layers of the target from 0 on"),
        ("speculative_draft_aux_layer_ids", [2, -1], "layers of the target from 0 on"),
        ("speculative_draft_aux_layers_mean", "both", "'input', 'output' or 'probe'"),
        ("speculative_draft_norm_output", 1, "valid boolean"),
    ],
)
def test_a_correction_out_of_range_is_refused_by_name(
    drafting: dict[str, Any], key: str, value: object, fix: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, **{key: value})
    (problem,) = caught.value.problems
    assert problem.startswith(f"speculative.{key}={value!r}: ")
    assert fix in problem


def test_a_bad_adaptive_config_is_refused_when_the_configuration_is_loaded(
    drafting: dict[str, Any], tmp_path: Path
) -> None:
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps({"8": {"candidate_steps": [1], "ema_alpha": 2}}))
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, speculative_adaptive_config=str(file))
    message = str(caught.value)
    assert message.startswith("speculative.speculative_adaptive_config: ")
    assert str(file) in message
    assert "8.ema_alpha=2" in message


def test_a_live_update_knows_what_it_was_told_and_nothing_else() -> None:
    update = parse_update({"min_dwell_rounds": 4})
    assert update.said() == {"min_dwell_rounds": 4}


@pytest.mark.parametrize(
    ("settings", "complaint"),
    [
        ({"dwell": 3}, "dwell: unknown key"),
        ({"min_dwell_rounds": -1}, "min_dwell_rounds=-1"),
        ({"speculative_adaptive_strategy": "best"}, "speculative_adaptive_strategy='best'"),
        ({"speculative_adaptive_config": {"1": {}}}, "1.candidate_steps: every slot must hold it"),
        (["ema"], "give a mapping"),
    ],
)
def test_an_invalid_live_update_is_refused(settings: Any, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        parse_update(settings)


@pytest.mark.parametrize("value", [1, 1.0, 2.5, [0.8], [1, 0.5, 0.0]])
def test_acceptance_can_be_forced_to_a_length_or_to_chances_by_position(
    drafting: dict[str, Any], value: Any
) -> None:
    config = ServeSpecConfig.load(drafting, synthetic_acceptance=value).speculative
    wanted = tuple(value) if isinstance(value, list) else value
    assert config.synthetic_acceptance == wanted


def test_acceptance_is_not_forced_unless_it_is_asked_for(drafting: dict[str, Any]) -> None:
    assert ServeSpecConfig.load(drafting).speculative.synthetic_acceptance is None


@pytest.mark.parametrize(
    "value", [0.99, 0, -3, True, "2.5", float("nan"), [], [1.1], [-0.1, 0.5], [True], [[0.5]]]
)
def test_a_length_below_one_and_a_chance_outside_zero_to_one_are_refused_by_name(
    drafting: dict[str, Any], value: Any
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, synthetic_acceptance=value)
    (problem,) = caught.value.problems
    assert problem.startswith(f"speculative.synthetic_acceptance={value!r}: give an accept length")


def test_acceptance_can_not_be_forced_where_nothing_drafts(minimal: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"^speculative\.synthetic_acceptance=2\.5: .* algorithm"):
        ServeSpecConfig.load(minimal, synthetic_acceptance=2.5)


def test_forced_acceptance_can_not_be_switched_while_the_engine_runs() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance: unknown key"):
        parse_update({"synthetic_acceptance": 2.5})


@pytest.mark.parametrize("method", ["standard", "block"])
@pytest.mark.parametrize(
    ("changes", "wrong"),
    [
        (
            {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": None},
            "speculative.rejection_sample_method='{}': drafts from texts",
        ),
        (
            {"speculative_ngram_first": True},
            "speculative.rejection_sample_method='{}': drafts from texts",
        ),
        ({"synthetic_acceptance": 2.0}, "speculative.rejection_sample_method='{}': synthetic"),
    ],
)
def test_rejection_is_refused_where_drafts_have_no_law_or_are_kept_by_chance(
    drafting: dict[str, Any], method: str, changes: dict[str, Any], wrong: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load(drafting, rejection_sample_method=method, **changes)
    (problem,) = caught.value.problems
    assert problem.startswith(wrong.format(method))


def test_rejection_means_nothing_where_nothing_drafts(minimal: dict[str, Any]) -> None:
    config = ServeSpecConfig.load(minimal, rejection_sample_method="block")
    assert not config.speculative.samples_drafts


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
def test_absurd_numbers_are_refused_before_anything_is_loaded(
    drafting: dict[str, Any], section: str, key: str, most: int
) -> None:
    told = rf"^{section}\.{key}={most + 1}: input should be less than or equal to {most}"
    with pytest.raises(ConfigError, match=told):
        ServeSpecConfig.load(drafting, **{key: most + 1})
    whole_chain = {"speculative_num_steps": 64} if key == "speculative_num_draft_tokens" else {}
    ServeSpecConfig.load(drafting, **{key: most, **whole_chain})


def test_candidate_steps_and_live_changes_are_bound_as_the_steps_of_a_start(
    tmp_path: Path, drafting: dict[str, Any]
) -> None:
    file = tmp_path / "slots.json"
    file.write_text(json.dumps({"candidate_steps": [1, 1000]}))
    with pytest.raises(ConfigError, match=r"candidate_steps=\[1, 1000\]: .* integers from 0 to 64"):
        ServeSpecConfig.load(drafting, speculative_adaptive_config=str(file))
    file.write_text(json.dumps({"candidate_steps": [1], "candidate_trees": [[1000, 2000]]}))
    with pytest.raises(ConfigError, match=r"candidate_trees=\[1000, 2000\]"):
        ServeSpecConfig.load(drafting, speculative_adaptive_config=str(file))
    for key in ("speculative_num_steps", "speculative_num_draft_tokens"):
        with pytest.raises(ConfigError, match=f"{key}=1000: "):
            parse_update({key: 1000})
