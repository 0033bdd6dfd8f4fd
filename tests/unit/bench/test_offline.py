"""`bench offline` on a tiny random pair."""

import json

import pytest

from serve_spec.bench.command import main
from tests.unit.bench.configs import write_config


def run(path, extra):
    """Run the benchmark; return its records."""
    assert main(f"offline --json {path} {extra}".split()) == 0
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(tmp_path_factory.mktemp("bench"))


def test_every_variant_generates_the_same_texts_and_every_measurement_is_written(
    config, tmp_path, capsys
):
    plot = tmp_path / "r.png"
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} --num-prompts 3 --batch-sizes 1 2 --prompt-tokens 20
        --output-tokens 12 --repetitions 2 --num-steps 1 3 --temperatures 0 1 --plot {plot}""",
    )
    assert [each["variant"] for each in found[:4]] == ["off", "K=1", "K=3", "adaptive"]
    assert len(found) == 4 * 2 * 2
    assert all(each["same_texts"] == 3 and each["tokens_per_second"] > 0 for each in found)
    by_variant = {each["variant"]: each for each in found if each["batch_size"] == 1}
    assert by_variant["off"]["accept_length"] == 1.0
    assert 1.0 < by_variant["K=3"]["accept_length"] <= 4.0
    assert {"cpu", "commit", "versions", "command"} <= set(head["environment"])
    assert "synthetic_acceptance" not in head["environment"]
    assert plot.read_bytes().startswith(b"\x89PNG")
    shown = capsys.readouterr().out
    assert len(shown.splitlines()) == 2 + len(found), "a table and nothing else"


def test_forced_acceptance_is_named_above_the_table_and_in_the_record(config, tmp_path, capsys):
    head, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} --num-prompts 2 --repetitions 1 --prompt-tokens 20 --num-steps 3
        --output-tokens 24 --temperatures 0 --set synthetic_acceptance=[1.0]""",
    )
    assert "synthetic_acceptance=(1.0,)" in capsys.readouterr().out.splitlines()[0]
    assert head["environment"]["synthetic_acceptance"] == [1.0]
    accept_length = {each["variant"]: each["accept_length"] for each in found}
    assert accept_length["off"] == 1.0, "off stays plain decoding"
    # All drafts are accepted, except those past the end of a text.
    assert accept_length["K=3"] > 3.5


def test_batches_are_always_full_and_decoding_has_its_own_speed(config, tmp_path):
    _, *found = run(
        tmp_path / "r.jsonl",
        f"""--config {config} --num-prompts 1 --repetitions 1 --prompt-tokens 20 --num-steps 1
        --output-tokens 30 --temperatures 0 --batch-sizes 3""",
    )
    assert [each["num_texts"] for each in found] == [3, 3, 3]
    assert found[0]["decode_speedup"] == 1.0
    for each in found:
        over_off = each["decode_tokens_per_second"] / found[0]["decode_tokens_per_second"]
        assert each["decode_speedup"] == pytest.approx(over_off)
    assert set(found[1]["rounds_by_num_steps"]) <= {"0", "1"}, "a last token needs no draft"
