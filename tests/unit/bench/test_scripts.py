"""The scripts under benchmarks/ run on a tiny random pair."""

import json
from itertools import accumulate
from operator import mul

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks import gate, kernels, layers, parallel, steps
from benchmarks.gate import Cell
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


def test_steps_are_timed_by_depth_in_turns_with_transformers(config, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    sizes = ["--batch-sizes", "2", "--depths", "0", "3", "--contexts", "10", "--turns", "4"]
    arguments = ["--config", config, "--replay", "--transformers", *sizes, "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["steps.py", *arguments])
    steps.main()
    machine, *found = [json.loads(line) for line in out.read_text().splitlines()]
    assert machine["command"].endswith(str(out))
    assert [row.get("depth", row.get("peer")) for row in found] == [0, 3, "transformers"]
    assert [row["accept_length"] for row in found[:2]] == [1, 4], "saved answers are repeated"
    assert min(row["ms"] for row in found) > 0


def test_steps_are_timed_by_dtype_of_the_cache_in_turns(config, tmp_path, monkeypatch):
    out = tmp_path / "rows.jsonl"
    sizes = ["--batch-sizes", "2", "--depths", "0", "3", "--contexts", "10", "--turns", "4"]
    arguments = ["--config", config, "--kv-cache-dtypes", "auto", "fp8", *sizes, "--json", str(out)]
    monkeypatch.setattr("sys.argv", ["steps.py", *arguments])
    steps.main()
    _, *found = [json.loads(line) for line in out.read_text().splitlines()]
    of_row = [(row["kv_cache_dtype"], row["depth"]) for row in found]
    assert of_row == [("auto", 0), ("auto", 3), ("fp8", 0), ("fp8", 3)]


@given(
    st.floats(1, 9) | st.lists(st.floats(0, 1), min_size=1, max_size=9).map(tuple),
    st.integers(0, 8),
)
def test_expected_tokens_are_those_of_the_forced_acceptance(acceptance, num_steps):
    kept = sum(accumulate(draft_probabilities(acceptance, num_steps), mul))
    assert kernels.expected_tokens(acceptance, num_steps) == pytest.approx(1 + kept)


STEP, ROUND = Cell(0, 8), Cell(3, 8)


def processes(step_ms, round_ms):
    """Times of a tree: one process for each pair."""
    return [{STEP: a, ROUND: b} for a, b in zip(step_ms, round_ms, strict=True)]


def test_the_gate_compares_medians_over_processes_and_names_the_cell_that_grew_most():
    base = processes([4.0, 4.2, 9.0], [10.0, 10.1, 9.8])
    new = processes([4.2, 3.9, 4.0], [10.4, 10.5, 9.9])
    step, rounds = gate.compare(base, new)
    assert (step.mode, step.base_ms, step.new_ms) == ("step", 4.2, 4.0)
    assert (rounds.mode, rounds.depth, rounds.batch_size) == ("round", 3, 8)
    assert rounds.ratio == pytest.approx(1.04)
    assert [step.spread, rounds.spread] == pytest.approx([5 / 4.2, 0.6 / 10.4])
    assert gate.slowest([step, rounds]) == rounds
    assert len(gate.table([step, rounds]).splitlines()) == 3


@pytest.mark.parametrize(
    ("base", "new"), [([], []), ([{STEP: 4.0, ROUND: 9.0}], [{STEP: 4.0}]), ([{STEP: 4.0}], [{}])]
)
def test_the_gate_compares_nothing_that_only_some_processes_timed(base, new):
    with pytest.raises(ValueError, match="not every process timed"):
        gate.compare(base, new)


@pytest.mark.parametrize(("growth", "status"), [(0.9, 0), (1.009, 0), (1.011, 1)])
def test_the_gate_alternates_trees_and_fails_beyond_its_limit(
    growth, status, tmp_path, monkeypatch, capsys
):
    ran = []

    def time(tree, arguments):
        ran.append(tree.name)
        times = {STEP: 4.0, ROUND: 10.0 * (growth if tree.name == "new" else 1)}
        return times, {"gpu": "a card", "commit": "abc"}

    monkeypatch.setattr(gate.Tree, "time", time)
    monkeypatch.setattr(gate.torch.cuda, "is_available", lambda: True)
    (tmp_path / "serve_spec").mkdir()
    arguments = ["--base-dir", str(tmp_path), "--config", "any.yaml", "--turns", "3"]
    assert gate.main(arguments) == status
    assert ran == ["base", "new", "new", "base", "base", "new"]
    record = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert record["slowest"] == pytest.approx(max(growth, 1.0))
    assert (record["gpu"], record["base"], record["new"]) == ("a card", tmp_path.name, "abc")


def test_the_gate_refuses_to_run_without_a_gpu(monkeypatch, capsys):
    monkeypatch.setattr(gate.torch.cuda, "is_available", lambda: False)
    assert gate.main(["--base", "HEAD"]) == 2
    assert capsys.readouterr().err == "gate: no GPU here: steps and rounds are compared on one\n"
