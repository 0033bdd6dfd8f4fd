"""Both generations of SGLang's adaptive config, and everything it refuses."""

import json

import pytest

from serve_spec.config import ConfigError
from serve_spec.config.adaptive_file import SlotConfig, load_slots, parse_slot

LADDER = {"candidate_steps": [1, 3]}


def refusal(config):
    with pytest.raises(ConfigError) as caught:
        load_slots(config)
    return str(caught.value)


def test_a_flat_config_is_one_slot_and_keys_beside_slots_are_their_defaults():
    slots = load_slots({"candidate_steps": [2, 4], "ema_alpha": 0.5, "update_interval": 7})
    assert slots == {1: SlotConfig(candidate_steps=(2, 4), ema_alpha=0.5, update_interval=7)}
    slots = load_slots(
        {"ema_alpha": 0.5, "warmup_batches": 3, "64": {**LADDER, "ema_alpha": 1.0}, "8": LADDER}
    )
    assert list(slots) == [8, 64]
    assert [(s.ema_alpha, s.warmup_batches) for s in slots.values()] == [(0.5, 3), (1.0, 3)]


@pytest.mark.parametrize("ladder", [[], None, "1,3,7", [-1], [1, True], [1.0]])
@pytest.mark.parametrize("as_slot", [False, True])
def test_a_ladder_must_be_a_non_empty_list_of_integers_from_zero(ladder, as_slot):
    config = {"8": {"candidate_steps": ladder}} if as_slot else {"candidate_steps": ladder}
    message = refusal(config)
    assert message.startswith(f"{'8.' if as_slot else ''}candidate_steps={ladder!r}: ")
    assert "for example [1, 3, 7]" in message


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ema_alpha", 0),
        ("ema_alpha", 1.01),
        ("ema_alpha", "0.2"),
        ("update_interval", 0),
        ("update_interval", 1.5),
        ("warmup_batches", -1),
        ("down_hysteresis", float("nan")),
        ("up_hysteresis", None),
        ("ceiling_coeff", float("inf")),
    ],
)
def test_a_value_out_of_range_is_refused_by_key_and_value(key, value):
    assert refusal({key: value}).startswith(f"{key}={value!r}: ")
    assert refusal({"4": {**LADDER, key: value}}).startswith(f"4.{key}={value!r}: ")


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ema_alfa": 0.2, "1": LADDER}, "ema_alfa: unknown key; did you mean ema_alpha?"),
        ({"1": {**LADDER, "ema_alfa": 0.2}}, "1.ema_alfa: unknown key; did you mean 1.ema_alpha?"),
        ({}, "holds no slot"),
        ({"candidate_steps": [1, 3], "8": {"ema_alpha": 0.5}}, "8.candidate_steps: missing"),
        ({"8": [1, 3]}, "8=[1, 3]: not an object"),
        ({"8": LADDER, "08": LADDER}, "batch size 8 is given twice"),
        ({"candidate_steps": [1, 1000]}, "candidate_steps=[1, 1000]: "),
        (
            {"1": {**LADDER, "candidate_trees": [[2, 6], [4, 16]]}},
            "1.candidate_trees=[4, 16]: candidate_steps end at 3; add 4 there or remove the tree",
        ),
        ({**LADDER, "candidate_trees": [[1000, 2000]]}, "candidate_trees=[1000, 2000]"),
    ],
)
def test_what_is_no_adaptive_config_is_refused_by_key_and_way_out(config, message):
    assert message in refusal(config)


def test_all_slots_are_judged_at_once():
    message = refusal({"1": {**LADDER, "ema_alpha": 0}, "8": {}, "32": LADDER})
    assert [line.partition(":")[0] for line in message.splitlines()] == [
        "1.ema_alpha=0",
        "8.candidate_steps",
    ]


def test_a_file_its_mapping_and_the_slots_parsed_of_it_mean_the_same(tmp_path):
    config = {"1": LADDER, "8": LADDER, "ema_alpha": 0.5}
    file = tmp_path / "adaptive.json"
    file.write_text(json.dumps(config))
    slots = load_slots(config)
    assert load_slots(file) == load_slots(str(file)) == load_slots(slots) == slots


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "No such file"),
        ("{", "not valid JSON"),
        ("[1, 3]", "holds [1, 3]"),
        ('{"1": {"candidate_steps": [1]}, "1": {"candidate_steps": [3]}}', "1: given twice"),
    ],
)
def test_a_file_that_is_no_adaptive_config_is_refused_by_name(tmp_path, text, complaint):
    file = tmp_path / "adaptive.json"
    if text is not None:
        file.write_text(text)
    message = refusal(file)
    assert message.startswith(f"{file}: ")
    assert complaint in message


def test_ladders_and_listed_trees_are_sorted_and_folded_and_a_slot_may_list_no_tree():
    trees = [[3, 8], [2, 6], [3, 8]]
    slots = load_slots(
        {"1": {**LADDER, "candidate_trees": trees}, "8": {**LADDER, "candidate_trees": []}}
    )
    assert [slot.candidate_trees for slot in slots.values()] == [((2, 6), (3, 8)), ()]
    assert parse_slot({"candidate_steps": [7, 1, 3, 1, 0]}).candidate_steps == (0, 1, 3, 7)


@pytest.mark.parametrize("trees", [3, [3, 8], [[3]], [[3, True]], [["3", 8]], [[0, 4]], [[3, 3]]])
def test_what_is_no_list_of_trees_is_refused_by_value(trees):
    text = refusal({"1": {**LADDER, "candidate_trees": trees}})
    assert f"1.candidate_trees={trees!r}" in text
    assert "give pairs [num_steps, num_draft_tokens]" in text
