"""The scripts under benchmarks/ run on a tiny random pair."""

import json
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import kernels, layers, parallel
from serve_spec.worker.verify import draft_probabilities
from tests.helpers.engines import make_pair
from tests.unit.bench.configs import write_config

SMALL = ["--batch-sizes", "1", "--prompt-tokens", "10", "--repetitions", "1", "--rows", "1"]


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    root = tmp_path_factory.mktemp("scripts")
    depths = root / "depths.json"
    depths.write_text(json.dumps({"candidate_steps": [0, 1, 3]}))
    pair = make_pair(root, num_key_value_heads=4, num_hidden_layers=1)
    path = write_config(
        root,
        "EAGLE",
        pair,
        model={"max_model_len": 256},
        speculative={
            "speculative_draft_dtype": "float32",
            "speculative_adaptive_config": str(depths),
        },
        replica={"torch_num_threads": 1},
    )
    return str(path)


def rows(path, section):
    found = [json.loads(line) for line in path.read_text().splitlines()]
    return [row for row in found if row["section"] == section]


def test_kernels_are_timed_section_by_section(config, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path))
    out = tmp_path / "rows.jsonl"
    arguments = [*SMALL, "--output-tokens", "100", "--num-steps", "1", "3", "--json", str(out)]
    assert kernels.main(["--config", config, *arguments]) == 0
    assert rows(out, "environment")[0]["synthetic_acceptance"] == 2.5
    assert all(rows(out, section) for section in kernels.SECTIONS)
    *fixed, policy = rows(out, "rounds")
    assert [row["variant"] for row in fixed] == ["K=0", "K=1", "K=3"]
    assert max(row["over_best_fixed"] for row in fixed) == 1
    assert sum(policy["share_by_steps"].values()) == pytest.approx(1)
    assert fixed[0]["efficiency"] == 1


def test_without_a_draft_plain_decoding_is_timed_and_a_section_that_fails_is_named(
    config, tmp_path
):
    out = tmp_path / "rows.jsonl"
    arguments = [*SMALL, "--sections", "switch", "rounds", "--output-tokens", "20"]
    plain = ["speculative_algorithm=NONE", "speculative_draft_model_path=null"]
    arguments += ["--json", str(out), "--set", *plain]
    assert kernels.main(["--config", config, *arguments]) == 1
    assert "give two depths" in rows(out, "switch")[0]["failed"]
    assert [row["variant"] for row in rows(out, "rounds")] == ["K=0"]


def test_exchanges_and_rounds_of_two_ranks_are_timed(config, tmp_path):
    out = tmp_path / "rows.jsonl"
    arguments = [*SMALL, "--output-tokens", "40", "--json", str(out)]
    assert parallel.main(["--config", config, *arguments]) == 0
    (exchange,) = rows(out, "exchanges")
    assert min(exchange[name] for name in ("sum_us", "norm_us", "logits_us", "draws_us")) > 0
    found = rows(out, "rounds")
    at = [(row["variant"], row["tensor_parallel_size"]) for row in found]
    assert at == [("K=3", 1), ("K=3", 2), ("off", 1), ("off", 2)]
    assert [row["scaling"] for row in found[::2]] == [1, 1]
    assert found[0]["accept_length"] == found[1]["accept_length"] > 1


def test_layers_are_timed_whole_and_in_parts(config, tmp_path):
    out = tmp_path / "rows.jsonl"
    sizes = ["--parts", "1", "2", "--cases", "2x3", "--context", "20", "--num-layers", "2"]
    assert layers.main(["--config", config, *sizes, "--json", str(out)]) == 0
    found = rows(out, "layers")
    assert [row["parts"] for row in found] == [1, 2]
    assert min(row["layer_us"] for row in found) > 0


@given(
    st.floats(1, 9) | st.lists(st.floats(0, 1), min_size=1, max_size=9).map(tuple),
    st.integers(0, 8),
)
def test_expected_tokens_are_those_of_the_forced_acceptance(acceptance, num_steps):
    kept = sum(accumulate(draft_probabilities(acceptance, num_steps), mul))
    assert kernels.expected_tokens(acceptance, num_steps) == pytest.approx(1 + kept)
