"""What a cost table holds, what is refused, and how it travels to the disk and back."""

import copy
import json
import re

import pytest

from serve_spec.config import ConfigError
from serve_spec.config.base import validate
from serve_spec.config.cost_table import CostKey, CostTable, load_cost_table, write_cost_table
from tests.helpers import costs

KEY = costs.KEY.model_dump()
TABLE = {
    "version": 2,
    "key": KEY,
    "context": 128,
    "batch_sizes": [1, 2],
    "num_steps": [1, 3],
    "draft_ms": [[1.5, 3], [2, 4]],
    "draft_context_ms": 0.001,
    "num_tokens": [1, 2, 4, 8],
    "verify_ms": [7, 7.5, 8, 11.5],
    "verify_context_ms": 0.002,
    "sampled_token_ms": 0.25,
    "extrapolated": [[2, 3], [2, 0]],
    "measured_s": 9.5,
}


TREE = {"num_steps": 3, "num_draft_tokens": 8, "draft_ms": [3, 4]}
BRANCHED = {**TABLE, "key": {**KEY, "topk": 4}, "trees": [TREE]}


def changed(path, value):
    """The table of trees with one value replaced; `path` is dotted, numbers are positions."""
    table = copy.deepcopy(BRANCHED)
    *way, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    here = table
    for part in way:
        here = here[part]
    here[last] = value
    return table


def refusal(tmp_path, text):
    file = tmp_path / "costs.json"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_cost_table(file)
    (problem,) = caught.value.problems
    assert problem.startswith(f"{file}: ")
    assert problem.endswith("measure again (`serve-spec tune`) or delete the file")
    return problem


def test_a_table_comes_back_from_the_disk_as_it_went_and_nothing_lies_beside_it(tmp_path):
    file = tmp_path / "new" / "folder" / "costs.json"
    for table in (validate(CostTable, BRANCHED), validate(CostTable, TABLE)):
        write_cost_table(table, file)
        assert load_cost_table(file) == table
        assert [found.name for found in file.parent.iterdir()] == ["costs.json"]


def test_a_write_that_fails_leaves_the_old_table_whole(tmp_path):
    (tmp_path / "costs.json").mkdir()  # a folder cannot be replaced by a file
    with pytest.raises(OSError, match=r"costs\.json"):
        write_cost_table(validate(CostTable, TABLE), tmp_path / "costs.json")
    assert [file.name for file in tmp_path.iterdir()] == ["costs.json"]


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 1, "version=1, but format 2 is supported"),
        ("context", 0, "context=0"),
        ("batch_sizes", [2, 1], r"batch_sizes=\[2, 1\]: must ascend"),
        ("batch_sizes", [1, 1], r"batch_sizes=\[1, 1\]: must ascend"),
        ("batch_sizes", [0, 1], r"batch_sizes=\[0, 1\]: must ascend"),
        ("batch_sizes", [], r"batch_sizes=\[\]: must ascend"),
        ("batch_sizes", [1, 2, 4], r"len\(draft_ms\)=2: must be 3"),
        ("num_steps", [0, 1], r"num_steps=\[0, 1\]: must ascend"),
        ("num_steps", [1, 2, 3], r"len\(draft_ms\.0\)=2: must be 3"),
        ("num_tokens", [1, 2], r"len\(verify_ms\)=4: must be 2"),
        ("draft_ms", 3, "draft_ms=3: input should be a list"),
        ("draft_ms.1.0", 0, r"draft_ms\.1\.0=0\.0: must be positive"),
        ("draft_ms.0.1", "2", r"draft_ms\.0\.1='2'"),
        ("draft_context_ms", -1, r"draft_context_ms=-1"),
        ("verify_ms.1", 0, r"verify_ms\.1=0\.0"),
        ("verify_ms.2", -1, r"verify_ms\.2=-1\.0"),
        ("verify_ms.2", 10**400, r"verify_ms\.2="),
        ("verify_context_ms", -1, r"verify_context_ms=-1"),
        ("sampled_token_ms", -0.1, r"sampled_token_ms=-0\.1"),
        ("extrapolated", [[3, 1]], r"extrapolated=\[3, 1\]: no such point"),
        ("key.threads", 0, r"key\.threads=0"),
        ("key.weather", "fine", r"key\.weather: unknown key"),
        ("unit", "ms", "unit: unknown key"),
        ("trees", [TREE, TREE], r"trees=\[\(3, 8\), \(3, 8\)\]: must ascend strictly"),
        ("trees", 3, "trees=3"),
        ("trees.0.num_steps", 0, r"trees\.0\.num_steps=0"),
        ("trees.0.width", 4, r"trees\.0\.width: unknown key"),
        ("trees.0.draft_ms", [3], r"len\(trees\.0\.draft_ms\)=1: must be 2"),
        ("trees.0.draft_ms.1", 0, r"trees\.0\.draft_ms\.1=0\.0: must be positive"),
    ],
)
def test_a_file_that_holds_no_costs_is_refused_by_field_and_value(tmp_path, path, value, message):
    text = refusal(tmp_path, json.dumps(changed(path, value)))
    assert re.search(message, text), text


@pytest.mark.parametrize("field", sorted(TABLE))
def test_every_field_must_be_there(tmp_path, field):
    table = {name: value for name, value in TABLE.items() if name != field}
    assert f"{field}: field required" in refusal(tmp_path, json.dumps(table))


def test_a_file_that_is_missing_cut_short_or_no_json_of_finite_numbers_is_refused(tmp_path):
    text = json.dumps(TABLE)
    for number in ("NaN", "-Infinity", "1e999"):
        refusal(tmp_path, text.replace('"measured_s": 9.5', f'"measured_s": {number}'))
    for length in range(0, len(text), 17):
        refusal(tmp_path, text[:length])
    for other in ("[]", "null", "[" * 100_000, "9" * 5000, "\x00"):
        refusal(tmp_path, other)
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    for name in ("bytes", "nowhere"):
        with pytest.raises(ConfigError, match=rf"{name}\.json"):
            load_cost_table(tmp_path / f"{name}.json")


def test_a_foreign_table_is_refused_by_every_field_that_differs_with_both_values():
    validate(CostTable, TABLE).refuse_foreign(validate(CostKey, KEY), max_steps=3)
    here = validate(CostKey, KEY | {"hardware": "another", "threads": 4})
    with pytest.raises(ConfigError) as caught:
        validate(CostTable, TABLE).refuse_foreign(here, max_steps=3)
    (problem,) = caught.value.problems
    assert problem == (
        "key.hardware='a processor', but this engine has 'another'; key.threads=1, but "
        "this engine has 4: measure again (`serve-spec tune`) or delete the file"
    )


@pytest.mark.parametrize("field", KEY)
def test_each_field_of_the_key_counts(field):
    other = KEY | {field: KEY[field] + (1 if isinstance(KEY[field], int) else "x")}
    with pytest.raises(ConfigError, match=rf"key\.{field}="):
        validate(CostTable, TABLE).refuse_foreign(validate(CostKey, other), max_steps=3)


@pytest.mark.parametrize(
    ("max_steps", "trees", "message"),
    [
        (4, [], "num_steps=[1, 3], but 4 is needed"),
        (3, [(2, 4), (3, 8)], "trees=[(3, 8)], but [(2, 4)] are needed"),
    ],
)
def test_a_table_that_lacks_a_depth_or_a_tree_that_is_wanted_is_refused(max_steps, trees, message):
    table, here = validate(CostTable, BRANCHED), validate(CostKey, {**KEY, "topk": 4})
    table.refuse_foreign(here, max_steps=3, trees=[(3, 8)])
    with pytest.raises(ConfigError) as caught:
        table.refuse_foreign(here, max_steps=max_steps, trees=trees)
    assert message in str(caught.value)
