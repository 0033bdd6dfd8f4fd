"""`serve-spec tune`: what follows from measurements, the file that keeps them, whole sweeps."""

import json
import tempfile
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serve_spec.adaptive import AdaptiveSpeculativeParams
from serve_spec.bench import tune
from serve_spec.bench.command import main
from serve_spec.bench.tune import swept_trees
from serve_spec.bench.tune_report import (
    Measurement,
    MeasurementFile,
    adaptive_config,
    markdown,
    rows,
)
from serve_spec.config import ConfigError, SpeculativeConfig
from serve_spec.config.adaptive_file import load_slots
from serve_spec.config.base import validate
from serve_spec.config.cost_table import load_cost_table
from serve_spec.core.draft import PLAIN, DraftShape
from serve_spec.core.request import SamplingParams
from serve_spec.engine.llm import LLM
from tests.unit.bench.configs import write_config, write_dataset

CLASSES = ("predictable", "mixed", "unpredictable")
SETTINGS = {"num_prompts": 8, "model": {"path": "/target", "dtype": "float32"}}


def cell(batch_size, prompt_class, num_steps, speed=100.0, shape=PLAIN):
    return Measurement(
        batch_size=batch_size,
        prompt_class=prompt_class,
        num_steps=num_steps,
        tokens_per_second=speed,
        tokens_per_second_low=speed * 0.9,
        speedup=speed / 100,
        accept_length=1 + num_steps / 2,
        round_ms=10.0,
        draft_ms=2.0,
        verify_ms=7.5,
        same_texts=8,
        num_texts=8,
        tree_drafts=shape.tree_size,
        topk=shape.topk,
    )


@st.composite
def sweeps(draw):
    """Cells of a whole sweep in any order, with speeds that tie now and then."""
    sizes = draw(st.lists(st.integers(1, 300), min_size=1, max_size=5, unique=True))
    depths = draw(st.lists(st.integers(1, 8), max_size=4, unique=True))
    shapes = [PLAIN, *map(DraftShape.chain, depths)]
    shapes += draw(st.lists(trees(), max_size=3, unique=True))
    places = [(size, name, shape) for size in sizes for name in CLASSES for shape in shapes]
    cells = [
        cell(size, name, shape.depth, draw(st.integers(1, 5)) * 50.0, shape)
        for size, name, shape in places
    ]
    return draw(st.permutations(cells))


def trees():
    return st.builds(
        lambda depth, more: DraftShape(depth, depth + more, 2), st.integers(1, 8), st.integers(0, 8)
    )


def winners(cells, batch_size):
    """The best depth of every class at a batch size, by looking at all of them."""
    found = set()
    for name in CLASSES:
        mine = [c for c in cells if (c.batch_size, c.prompt_class) == (batch_size, name)]
        fastest = max(c.tokens_per_second for c in mine)
        equals = [c.shape for c in mine if c.tokens_per_second == fastest]
        fewest = min(shape.size for shape in equals)
        cheapest = [shape for shape in equals if shape.size == fewest]
        chains = [shape for shape in cheapest if shape.is_chain]
        found.add(chains[0] if chains else min(cheapest))
    return found


@given(sweeps())
def test_the_slot_of_every_measured_batch_size_holds_the_best_steps_and_trees_of_every_class(cells):
    slots = load_slots(json.loads(json.dumps(adaptive_config(cells))))
    params = AdaptiveSpeculativeParams(0, slots)
    assert min(slots) == min(c.batch_size for c in cells)
    assert all(here != after for here, after in pairwise(slots.values())), "neighbours are merged"
    for batch_size in {c.batch_size for c in cells}:
        slot, best = slots[params.slot_key(batch_size)], winners(cells, batch_size)
        assert set(slot.candidate_steps) == {shape.depth for shape in best}
        shapes = {(tree.depth, tree.size + 1) for tree in best if not tree.is_chain}
        assert set(slot.candidate_trees or ()) == shapes
        have_trees = any(c.tree_drafts for c in cells)
        assert (slot.candidate_trees is not None) == have_trees, "though it be none"


def test_the_report_names_the_two_keys_and_shows_every_cell():
    cells = [cell(size, name, k, 100 + k) for name in CLASSES for size in (1, 4) for k in (0, 3)]
    tree = DraftShape(3, 15, 4)
    cells += [cell(size, CLASSES[0], 3, speed, tree) for size, speed in ((1, 120), (4, 90))]
    keys = {"speculative_adaptive_config": "/a.json", "speculative_cost_table": "/c.json"}
    report = markdown(
        cells,
        classes={name: f"about {name}" for name in CLASSES},
        keys=keys,
        facts={"hardware": "a machine"},
    )
    assert "  speculative_adaptive_config: /a.json\n  speculative_cost_table: /c.json\n" in report
    assert "- hardware: a machine" in report
    assert "| 1 | [3] | 3x15 | 3x15, 1.20 x off | K=3, 1.03 x off | K=3, 1.03 x off |" in report
    assert "| 4 | [3] | none | K=3, 1.03 x off | K=3, 1.03 x off | K=3, 1.03 x off |" in report
    for row in rows(cells):
        assert f"| {row[1]} | {row[2]} | {row[3]} | {row[4]} |" in report


@pytest.mark.parametrize("num_bytes", [1, 200])
def test_a_file_returns_its_measurements_without_a_last_line_cut_short(tmp_path, num_bytes):
    path = tmp_path / "new" / "cells.jsonl"
    tree = cell(1, "mixed", 3, shape=DraftShape(3, 3, 2))
    first, again = cell(1, "mixed", 3), cell(1, "mixed", 3, speed=200)
    kept, lost = [cell(1, "mixed", 0), tree, first, again], cell(1, "mixed", 1)
    MeasurementFile(path, SETTINGS).append([*kept, lost])
    path.write_bytes(path.read_bytes()[:-num_bytes])
    record = MeasurementFile(path, SETTINGS)
    assert record.by_place == {c.place: c for c in kept}, "of one place the last one counts"
    assert len(record.by_place) == 3
    record.append([lost])
    assert MeasurementFile(path, SETTINGS).by_place == {c.place: c for c in (*kept, lost)}
    path.write_text('{"settings": {"num_p')
    MeasurementFile(path, SETTINGS).append([lost])
    assert set(MeasurementFile(path, SETTINGS).by_place) == {lost.place}


@pytest.mark.parametrize("line", ["[]", '{"cells": 3}', "something else", '{"settings": 3}'])
def test_a_file_that_holds_something_else_is_refused(tmp_path, line):
    path = tmp_path / "cells.jsonl"
    for before in ("", json.dumps({"settings": SETTINGS}) + "\n"):
        path.write_text(f"{before}{line}\n")
        with pytest.raises(ConfigError, match="has no measurements of this version"):
            MeasurementFile(path, SETTINGS)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    return write_config(
        tmp_path_factory.mktemp("tune"),
        # Too little on purpose: a sweep makes the room it needs.
        cache={"page_size": 4, "num_pages": 32},
        scheduler={"max_num_seqs": 1, "max_num_batched_tokens": 8},
    )


def arguments(config, folder, *more):
    sizes = ["--prompt-tokens", "12", "--output-tokens", "24", "--num-prompts", "3"]
    return ["tune", str(config), "--output-dir", str(folder), *sizes, "--repetitions", "1", *more]


def test_an_interrupted_sweep_continues_and_writes_all_files(config, tmp_path, capsys, monkeypatch):
    steps = ["--num-steps", "1", "3"]
    with monkeypatch.context() as patch:
        patch.setattr(tune, "plot", lambda *_: None)
        assert main(arguments(config, tmp_path, *steps, "--batch-sizes", "2")) == 0
    before = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert len(before) == 1 + 3 * 3
    # As if it had been stopped while it wrote the last group.
    (tmp_path / "cells.jsonl").write_text("\n".join(before[:-1]) + "\n" + before[-1][:40])
    capsys.readouterr()
    assert main(arguments(config, tmp_path, *steps, "--batch-sizes", "1", "2")) == 0
    after = (tmp_path / "cells.jsonl").read_text().splitlines()
    assert after[: len(before) - 1] == before[:-1]

    assert capsys.readouterr().out.splitlines()[-1] == "0 texts differ from those of K = 0"
    result = json.loads((tmp_path / "tune.json").read_text())
    places = [(c["batch_size"], c["prompt_class"], c["num_steps"]) for c in result["cells"]]
    assert sorted(places) == sorted((b, n, k) for b in (1, 2) for n in CLASSES for k in (0, 1, 3))
    for c in result["cells"]:
        assert c["same_texts"] == c["num_texts"] == {1: 3, 2: 4}[c["batch_size"]]
        assert c["accept_length"] == 1 if c["num_steps"] == 0 else 1 < c["accept_length"] <= 4
        assert 0 < c["tokens_per_second_low"] <= c["tokens_per_second"]
        place = c["batch_size"], c["prompt_class"], 0
        off = result["cells"][places.index(place)]["tokens_per_second"]
        assert c["speedup"] == c["tokens_per_second"] / off
    costs = load_cost_table(tmp_path / "cost_table.json")
    assert (costs.batch_sizes[-1], costs.num_steps[-1]) == (2, 3)
    assert load_slots(tmp_path / "adaptive.json") == load_slots(result["adaptive_config"])
    assert "## The best steps" in (tmp_path / "report.md").read_text()
    assert (tmp_path / "tune.png").read_bytes().startswith(b"\x89PNG")

    monkeypatch.setattr(tune, "plot", lambda *_: None)
    files = [tmp_path / "cells.jsonl", tmp_path / "cost_table.json"]
    once = [file.read_bytes() for file in files]
    call = arguments(config, tmp_path, "--num-steps", "1", "--batch-sizes", "1")
    assert main(call) == 0
    assert [file.read_bytes() for file in files] == once, "nothing is measured again"
    with pytest.raises(ConfigError, match=r"^repetitions=2: .* was measured with 1; use that"):
        main([*call, "--repetitions", "2"])
    with pytest.raises(ConfigError, match=r"^model.dtype=.bfloat16.: .* with .auto.; .* --fresh"):
        main([*call, "--set", "dtype=bfloat16"])
    assert [file.read_bytes() for file in files] == once, "a refusal changes nothing"
    assert main([*call, "--fresh"]) == 0
    assert len(files[0].read_text().splitlines()) == 1 + 2 * 3
    assert load_cost_table(files[1]).batch_sizes == (1,)


def test_trees_are_measured_and_a_server_accepts_both_files(config, tmp_path, monkeypatch):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tune, "plot", lambda *_: None)
    sizes = ["--num-steps", "1", "--trees", "2x5", "2x3", "--batch-sizes", "2"]
    more = ["--set", "speculative_eagle_topk=2"]
    assert main(arguments(config, tmp_path, *sizes, *more)) == 0
    measured = json.loads((tmp_path / "tune.json").read_text())
    depths = [(c["num_steps"], c["tree_drafts"]) for c in measured["cells"]]
    assert depths == [(0, 0), (1, 0), (2, 3), (2, 5)] * len(CLASSES)
    for c in measured["cells"]:
        assert c["same_texts"] == c["num_texts"] == 4
        assert 1 <= c["accept_length"] <= 1 + c["num_steps"]
    best, every = tmp_path / "adaptive.json", tmp_path / "every.json"
    every.write_text('{"1": {"candidate_steps": [2], "candidate_trees": [[2, 4], [2, 6]]}}')
    for slots in (best, every):
        llm = LLM(
            config,
            speculative_eagle_topk=2,
            speculative_adaptive_strategy="goodput",
            speculative_adaptive_config=str(slots),
            speculative_cost_table=str(tmp_path / "cost_table.json"),
        )
        llm.generate([[1, 2, 3]], SamplingParams(max_tokens=8, ignore_eos=True))
        assert llm.engine.snapshot()["fallback"] is None
    assert llm.engine.snapshot()["candidate_trees"] == ["2x3", "2x5"]
    assert not (tmp_path / "cache").exists(), "a refused table is measured anew, and kept there"


def test_each_category_of_a_dataset_is_swept_plain_and_sampled(config, tmp_path, monkeypatch):
    monkeypatch.setattr(tune, "plot", lambda *_: None)
    words = ["tune", str(config), "--output-dir", str(tmp_path), "--num-steps", "2"]
    words += ["--batch-sizes", "1", "--output-tokens", "12", "--num-prompts", "4"]
    words += ["--dataset", str(write_dataset(tmp_path)), "--repetitions", "1"]
    assert main(words) == 0
    result = json.loads((tmp_path / "tune.json").read_text())
    places = [(c["prompt_class"], c["num_steps"]) for c in result["cells"]]
    classes = [f"{category} T={t}" for category in ("code", "chat") for t in (0, 1)]
    assert places == [(name, k) for name in classes for k in (0, 2)]
    assert all(c["same_texts"] == c["num_texts"] == 4 for c in result["cells"])
    report = (tmp_path / "report.md").read_text()
    assert "(3 code, 3 chat), as chats" in report
    assert "## chat T=1: chat, T = 1" in report
    with pytest.raises(ConfigError, match=r"^seed=1: .* was measured with 0; use that"):
        main([*words, "--seed", "1"])


@pytest.mark.parametrize(
    ("more", "problem"),
    [
        (["--num-steps", "0"], r"--num-steps=\[0\]: add a depth above 0 to compare with 0"),
        (["--output-tokens", "5"], r"--output-tokens=5: at batch size \d+ a text ends before"),
        (["--set", "speculative_algorithm=NONE"], "speculative.speculative_algorithm='NONE'"),
        (
            ["--set", "synthetic_acceptance=2.5"],
            r"speculative.synthetic_acceptance=2.5: .* needs real acceptance; omit the key",
        ),
        (["--trees", "3x7"], r"--trees: speculative_eagle_topk=1 .* or omit --trees"),
        (
            ["--trees", "2x4", "3x99", "--set", "speculative_eagle_topk=2"],
            "--trees=3x99: speculative_eagle_topk=2 makes trees of 3 levels with 3 to 10 drafts",
        ),
    ],
)
def test_invalid_arguments_are_refused(config, tmp_path, more, problem):
    with pytest.raises(ConfigError, match=f"^{problem}"):
        main(arguments(config, tmp_path, *more))


def speculative(topk, num_steps=2, file=None):
    keys = {
        "speculative_algorithm": "EAGLE3",
        "speculative_draft_model_path": "asset:tiny/eagle3",
        "speculative_eagle_topk": topk,
        "speculative_num_steps": num_steps,
        "speculative_adaptive_config": None if file is None else str(file),
    }
    return validate(SpeculativeConfig, keys)


def is_swept(tree, topk):
    config = speculative(topk)
    try:
        return swept_trees([tree], config) == [DraftShape(*tree, topk)]
    except ConfigError:
        return False


def may_be_listed(tree, topk):
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
def test_a_tree_is_swept_exactly_if_a_server_accepts_it(tree, topk):
    assert is_swept(tree, topk) == may_be_listed(tree, topk)
