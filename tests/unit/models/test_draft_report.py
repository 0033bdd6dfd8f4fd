"""`serve-spec check-config --draft` shows what was recognised, what follows, or what is wrong."""

import json

import pytest
import torch

from serve_spec.cli import main
from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import CheckpointError
from serve_spec.models.drafts.report import describe_draft
from tests.helpers.checkpoints import (
    make_eagle,
    make_eagle3,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.unit.models.draft_formats import as_speculators, medusa_tensors


def facts(draft, target_dir=None, algorithm="EAGLE3", **keys):
    """Return the lines of the report by their names."""
    config = None
    if target_dir is not None:
        speculative = {
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": str(draft),
            **keys,
        }
        config = ServeSpecConfig.load(
            {"model": {"path": str(target_dir)}, "speculative": speculative}
        )
    lines = describe_draft(draft, config).splitlines()
    return {name: text.strip() for name, text in (line.split(":", 1) for line in lines)}


def test_an_official_eagle3_head_is_explained(tmp_path, target_dir):
    make_eagle3(tmp_path, target_dir, draft_vocab=100, rope_theta=1000000.0)
    found = facts(tmp_path, target_dir)
    assert found["family"] == "EAGLE3, layout: official, SpecForge, AngelSlim"
    assert found["recognised by"] == "midlayer.hidden_norm.weight"
    assert found["layers"] == "1, hidden 32, 4 heads and 4 key heads of 8, mlp 64"
    assert found["rope theta"].startswith(
        "1e+06, from config.json; the official trainer used 10000"
    )
    assert found["biases"] == "fc no, qkv no, o_proj no, head norms no"
    assert found["vocabulary"].startswith("100 of 288 tokens")
    assert found["target layers"].startswith("inputs of [2, 4, 5] of 8, the common default")
    assert "norm_before_residual no (left out)" in found["norms"]
    assert found["target"] == f"{target_dir}: fits"


AUX = "speculative_draft_aux_layers_mean"
THETA = "speculative_draft_rope_theta"


@pytest.mark.parametrize(
    ("config", "keys", "line", "words"),
    [
        ([1, 3, 4], {}, "target layers", ["inputs of [2, 4, 5]", "read as outputs"]),
        ([2, 4, 5], {}, "target layers", ["inputs of [2, 4, 5]", "read as inputs"]),
        ([2, 4, 8], {}, "target layers", ["inputs of [2, 4, 8]", "no output of layer 8"]),
        ([3, 4, 6], {}, "target layers", ["inputs of [4, 5, 7]", "the file does not tell"]),
        ([3, 4, 6], {AUX: "input"}, "target layers", ["inputs of [3, 4, 6]", f"set by {AUX}"]),
        (
            [3, 4, 6],
            {"speculative_draft_aux_layer_ids": [0, 1, 2]},
            "target layers",
            ["inputs of [0, 1, 2]", "from speculative_draft_aux_layer_ids"],
        ),
        (None, {}, "rope theta", ["10000, the default: config.json has none"]),
        (None, {THETA: 500.0}, "rope theta", [f"500, from {THETA}"]),
        (None, {}, "norms", ["norm_output no (config.json)"]),
        (
            None,
            {"speculative_draft_norm_output": True},
            "norms",
            ["norm_output yes (speculative_draft_norm_output)"],
        ),
    ],
)
def test_what_holds_is_named_with_its_source(tmp_path, target_dir, config, keys, line, words):
    ids = {} if config is None else {"eagle_aux_hidden_state_layer_ids": config}
    make_eagle3(tmp_path, target_dir, norm_output=False, **ids)
    found = facts(tmp_path, target_dir, **keys)[line]
    assert all(word in found for word in words), found


def test_the_two_meanings_of_norm_output_are_named_unless_one_is_configured(tmp_path, target_dir):
    make_eagle3(tmp_path / "official", target_dir, norm_output=True)
    as_speculators(tmp_path / "official", tmp_path / "speculators", norm_output=True)
    hint = "try speculative_draft_norm_output: false"
    assert hint in facts(tmp_path / "official", target_dir)["norms"]
    decided = {"speculative_draft_norm_output": True}
    assert hint not in facts(tmp_path / "official", target_dir, **decided)["norms"]
    assert hint not in facts(tmp_path / "speculators", target_dir)["norms"]


def test_a_speculators_head_is_explained(tmp_path, target_dir):
    make_eagle3(tmp_path / "official", target_dir, own_embedding=True, rope_theta=500000.0)
    window = {"sliding_window": 64, "layer_types": ["sliding_attention"]}
    ids = {"eagle_aux_hidden_state_layer_ids": [3, 4, 6]}
    as_speculators(tmp_path / "official", tmp_path / "s", layers=window, **ids)
    found = facts(tmp_path / "s", target_dir)
    assert found["family"] == "EAGLE3, layout: speculators"
    assert found["layers"].endswith("window 64")
    assert found["rope theta"] == "500000, from config.json"
    assert found["target layers"].endswith("read as inputs: as in speculators")
    assert "norm_before_residual yes (left out)" in found["norms"]
    assert found["embedding"].startswith("in the file")


def test_an_eagle_head_is_explained(tmp_path, target_dir):
    make_eagle(tmp_path, target_dir)
    found = facts(tmp_path, target_dir, algorithm="EAGLE3")
    assert found["family"] == "EAGLE, layout: official"
    assert found["recognised by"] == "fc.weight reads a token and a feature (width 64)"
    assert found["biases"].startswith("fc yes")
    assert found["vocabulary"] == "288 tokens, through the target's lm_head"
    assert "set it to 'EAGLE'" in found["target"]


@pytest.mark.parametrize(
    ("heads", "output"),
    [
        ({"rows": 288}, "one matrix each"),
        ({"rows": 288, "shared": True}, "one matrix that all share"),
        ({}, "the target's"),
    ],
)
def test_medusa_heads_are_explained(tmp_path, target_dir, heads, output):
    write_checkpoint(tmp_path, {"medusa_num_heads": 2}, medusa_tensors(32, 5, 2, **heads))
    found = facts(tmp_path, target_dir)
    assert found["family"] == "MEDUSA, layout: vLLM"
    assert found["heads"] == "5 of 2 residual block(s), counted by tensors"
    assert found["output"] == output
    assert found["biases"] == "yes"


def test_a_stand_alone_draft_is_explained(tmp_path, target_dir):
    make_target(tmp_path, "llama3", layers=2, vocab=300)
    found = facts(tmp_path, target_dir)
    assert found["architecture"] == "LlamaForCausalLM"
    assert found["vocabulary"] == "300 tokens, 288 of them the target's"


def make_medusa(directory, _):
    return write_checkpoint(directory, {}, medusa_tensors(32, 2))


@pytest.mark.parametrize(
    "make", [make_eagle, make_eagle3, make_medusa, lambda d, _: make_target(d, "llama2")]
)
def test_without_a_target_what_depends_on_it_is_left_open(tmp_path, target_dir, make):
    make(tmp_path, target_dir)
    found = facts(tmp_path)
    assert found["target"] == "not compared: name a configuration file"
    if found["family"].startswith("EAGLE3"):
        assert found["target layers"].endswith("name a configuration file")
    held = facts(tmp_path, target_dir)
    same = set(found) - {"target", "target layers", "vocabulary"}
    assert {name: held[name] for name in same} == {name: found[name] for name in same}


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (make_eagle, "layers.0.mlp.up_proj.weight"),
        (make_eagle3, "midlayer.mlp.up_proj.weight"),
        (make_medusa, "blocks.1.layers.0.weight"),
        (lambda d, _: make_target(d, "llama2"), "model.layers.1.mlp.up_proj.weight"),
    ],
)
def test_tensors_that_loading_would_refuse_are_refused(tmp_path, target_dir, make, name):
    make(tmp_path, target_dir)
    config, tensors = read_checkpoint(tmp_path)
    tensors[name] = torch.ones(3)
    write_checkpoint(tmp_path, config, tensors, pickle=(tmp_path / "pytorch_model.bin").exists())
    with pytest.raises(CheckpointError, match=r"is \[3\], expected"):
        facts(tmp_path, target_dir)


def test_the_command_explains_or_refuses(tmp_path, target_dir, capsys):
    make_eagle3(tmp_path / "head", target_dir)
    file = tmp_path / "c.yaml"
    file.write_text(json.dumps({"model": {"path": str(target_dir)}}))
    assert main(["check-config", "--draft", str(tmp_path / "head"), str(file)]) == 0
    assert "recognised by: midlayer.hidden_norm.weight\n" in capsys.readouterr().out
    narrow = make_target(tmp_path / "narrow", "llama2", hidden=64)
    overrides = [str(file), f"path={narrow}"]
    assert main(["check-config", "--draft", str(tmp_path / "head"), *overrides]) == 2
    printed = capsys.readouterr()
    assert printed.out == ""
    assert "trained for this target" in printed.err
