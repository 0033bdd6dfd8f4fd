"""Every way a draft checkpoint can be wrong is refused with names, values and a way out."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.models import DraftOptions, FeatureCapture, Llama, load_draft, load_target
from tests.helpers.checkpoints import (
    make_eagle,
    make_eagle3,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.unit.models.draft_formats import medusa_tensors

Change = Callable[[dict[str, Tensor]], object]


def refusal(
    directory: Path, target: Llama, algorithm: str, options: DraftOptions | None = None
) -> str:
    with pytest.raises(CheckpointError) as error:
        load_draft(directory, target, algorithm, options)
    return str(error.value)


def rewrite(directory: Path, change: Change) -> None:
    config, tensors = read_checkpoint(directory)
    change(tensors)
    write_checkpoint(directory, config, tensors, pickle=(directory / "pytorch_model.bin").exists())


def assert_names(message: str, *words: str) -> None:
    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("make", "asked", "held"), [(make_eagle3, "EAGLE", "EAGLE3"), (make_eagle, "EAGLE3", "EAGLE")]
)
def test_the_other_eagle_is_told_apart(
    tmp_path: Path,
    target_dir: Path,
    target: Llama,
    make: Callable[..., Path],
    asked: str,
    held: str,
) -> None:
    # The names in its config mean nothing: official EAGLE-3 heads call themselves LlamaForCausalLM.
    make(tmp_path, target_dir, architectures=["LlamaForCausalLM"])
    message = refusal(tmp_path, target, asked)
    assert_names(
        message, f"is of family {held} by its tensors", f"{asked!r}", f"set it to {held!r}"
    )


@pytest.mark.parametrize("key", ["intermediate_size", "num_attention_heads", "head_dim"])
@pytest.mark.parametrize(
    ("make", "algorithm"),
    [(make_eagle3, "EAGLE3"), (make_eagle, "EAGLE"), (make_target, "STANDALONE")],
)
def test_absurd_sizes_of_a_config_are_refused_by_key_before_memory_is_taken(
    tmp_path: Path,
    target_dir: Path,
    target: Llama,
    make: Callable[..., Path],
    algorithm: str,
    key: str,
) -> None:
    make(tmp_path / "draft", *[] if make is make_target else [target_dir])
    config = json.loads((tmp_path / "draft" / "config.json").read_text())
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    config |= {"head_dim": head_dim, key: 10**9 * (2 if key == "num_attention_heads" else 1)}
    (tmp_path / "draft" / "config.json").write_text(json.dumps(config))
    message = refusal(tmp_path / "draft", target, algorithm)
    assert_names(message, f"{tmp_path}/draft/config.json: ", key, "correct config.json")


@pytest.mark.parametrize("algorithm", ["NGRAM", "NONE", "EAGLE9"])
def test_algorithms_without_a_head_are_refused(
    tmp_path: Path, target: Llama, algorithm: str
) -> None:
    with pytest.raises(ValueError, match=f"speculative_algorithm='{algorithm}'.*EAGLE3"):
        load_draft(tmp_path, target, algorithm)


@pytest.mark.parametrize("name", ["medusa_lm_head.safetensors", "model.safetensors"])
def test_medusa_heads_are_no_eagle_whatever_their_file_is_called(
    tmp_path: Path, target: Llama, name: str
) -> None:
    write_checkpoint(tmp_path, {}, medusa_tensors(32, 2))
    (tmp_path / "model.safetensors").rename(tmp_path / name)
    message = refusal(tmp_path, target, "EAGLE")
    assert_names(message, "MEDUSA", "blocks.0.layers.0.weight", "'EAGLE'")


def test_a_config_that_says_medusa_does_not_make_it_so(
    tmp_path: Path, target_dir: Path, target: Llama
) -> None:
    make_eagle(tmp_path, target_dir, model_type="medusa", medusa_num_heads=2)
    assert load_draft(tmp_path, target, "EAGLE").hidden_size == 32


def test_a_whole_model_is_no_head(tmp_path: Path, target: Llama) -> None:
    make_target(tmp_path, "llama2", hidden=32, layers=2)
    message = refusal(tmp_path, target, "EAGLE3")
    assert_names(message, "STANDALONE", "model.embed_tokens.weight", "'EAGLE3'")


def test_tensors_of_no_known_family_are_refused_with_their_names(
    tmp_path: Path, target: Llama
) -> None:
    write_checkpoint(tmp_path, {}, {"adapter.weight": torch.ones(2)})
    message = refusal(tmp_path, target, "EAGLE3")
    assert_names(message, str(tmp_path), "neither", "fc.weight", "adapter.weight")


def test_an_empty_directory_is_refused(tmp_path: Path, target: Llama) -> None:
    assert_names(refusal(tmp_path, target, "EAGLE3"), "config.json does not exist")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("fc.weight"), ["missing fc.weight"]),
        (lambda t: t.pop("lm_head.weight"), ["missing lm_head.weight"]),
        (lambda t: t.pop("midlayer.mlp.up_proj.weight"), ["missing layers.0.mlp.up_proj.weight"]),
        (lambda t: t.update({"adapter.weight": torch.ones(2)}), ["surplus adapter.weight"]),
        (
            lambda t: t.update({"norm.weight": torch.ones(31)}),
            ["norm.weight", "[31]", "expected [32]"],
        ),
        (
            lambda t: t.update({"layers.0.hidden_norm.weight": torch.ones(32)}),
            ["layers.0.hidden_norm.weight", "midlayer.hidden_norm.weight", "keep one"],
        ),
        (
            lambda t: t.update({"layers.2.input_layernorm.weight": torch.ones(32)}),
            ["missing layers.1"],
        ),
        (
            lambda t: t.update({"input_norm.weight": torch.ones(32)}),
            ["input_norm.weight", "[32]", "expected [96]"],
        ),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tmp_path: Path, target_dir: Path, target: Llama, change: Change, words: list[str]
) -> None:
    make_eagle3(tmp_path, target_dir)
    rewrite(tmp_path, change)
    assert_names(refusal(tmp_path, target, "EAGLE3"), *words)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("layers.0.mlp.down_proj.weight"), ["missing layers.0.mlp.down_proj"]),
        (lambda t: [t.pop(n) for n in list(t) if "layers" in n], ["missing layers.0"]),
        (lambda t: t.update({"norm.weight": torch.ones(32)}), ["surplus norm.weight"]),
        (lambda t: t.update({"fc.bias": torch.ones(3)}), ["fc.bias", "[3]", "expected [32]"]),
        (
            lambda t: t.update({"embed_tokens.weight": torch.ones(99, 32)}),
            ["embed_tokens.weight", "[99, 32]", "[288, 32]"],
        ),
    ],
)
def test_tensors_of_an_eagle_head_that_do_not_fit_are_named(
    tmp_path: Path, target_dir: Path, target: Llama, change: Change, words: list[str]
) -> None:
    make_eagle(tmp_path, target_dir)
    rewrite(tmp_path, change)
    assert_names(refusal(tmp_path, target, "EAGLE"), *words)


@pytest.mark.parametrize("make", [make_eagle, make_eagle3])
def test_a_head_for_another_vocabulary_is_refused(
    tmp_path: Path, target: Llama, make: Callable[..., Path]
) -> None:
    other = make_target(tmp_path / "other", "llama2", hidden=32, layers=8, vocab=400)
    make(tmp_path / "head", other)
    algorithm = "EAGLE" if make is make_eagle else "EAGLE3"
    message = refusal(tmp_path / "head", target, algorithm)
    assert_names(message, "vocab_size=400", "288", "trained for this target")


@pytest.mark.parametrize("make", [make_eagle, make_eagle3])
def test_a_head_for_a_wider_target_is_refused(
    tmp_path: Path, target: Llama, make: Callable[..., Path]
) -> None:
    other = make_target(tmp_path / "other", "llama2", hidden=64, layers=8)
    make(tmp_path / "head", other)
    algorithm = "EAGLE" if make is make_eagle else "EAGLE3"
    message = refusal(tmp_path / "head", target, algorithm)
    assert_names(message, "hidden_size=64", "32", "trained for this target")


def test_a_thin_head_without_an_embedding_of_its_own_is_refused(
    tmp_path: Path, target_dir: Path, target: Llama
) -> None:
    make_eagle3(tmp_path, target_dir, hidden_size=16, head_dim=8)
    message = refusal(tmp_path, target, "EAGLE3")
    assert_names(message, "embed_tokens.weight is missing", "hidden_size=16", "32")


def test_an_fc_for_features_of_another_width_is_refused(
    tmp_path: Path, target_dir: Path, target: Llama
) -> None:
    make_eagle3(tmp_path, target_dir, eagle_aux_hidden_state_layer_ids=[1, 4])
    message = refusal(tmp_path, target, "EAGLE3")
    assert_names(message, "fc.weight", "width 96", "2 x 32 = 64")


@pytest.mark.parametrize("ids", ["1,4,5", [1.0, 4.0, 5.0], [True, 4, 5], {"low": 1}, 0])
def test_layer_ids_that_are_none_are_refused(
    tmp_path: Path, target_dir: Path, target: Llama, ids: object
) -> None:
    make_eagle3(tmp_path, target_dir, eagle_aux_hidden_state_layer_ids=ids)
    message = refusal(tmp_path, target, "EAGLE3")
    assert_names(message, f"eagle_aux_hidden_state_layer_ids={ids!r}", "list of integers")
    # Who knows better says so, and then no one asks the config.
    options = DraftOptions(aux_layer_ids=(2, 4, 5))
    assert load_draft(tmp_path, target, "EAGLE3", options).capture == FeatureCapture((2, 4, 5))


def test_layers_that_a_user_names_outside_the_target_are_refused_as_his(
    tmp_path: Path, target_dir: Path, target: Llama
) -> None:
    make_eagle3(tmp_path, target_dir)
    message = refusal(tmp_path, target, "EAGLE3", DraftOptions(aux_layer_ids=(2, 4, 9)))
    assert_names(message, "speculative_draft_aux_layer_ids=[2, 4, 9]", "0 .. 8")


def test_layer_ids_given_twice_have_to_agree(
    tmp_path: Path, target_dir: Path, target: Llama
) -> None:
    # SGLang reads the nested ones, vLLM those at the top: one of them captures the wrong layers.
    nested = {"eagle_aux_hidden_state_layer_ids": [1, 3, 4]}
    make_eagle3(
        tmp_path, target_dir, eagle_config=nested, eagle_aux_hidden_state_layer_ids=[2, 4, 5]
    )
    message = refusal(tmp_path, target, "EAGLE3")
    assert_names(message, "[2, 4, 5] at the top", "[1, 3, 4] in eagle_config", "remove one")


@pytest.mark.parametrize("ids", [[4, 5, 11], [-3, 4, 5]])
def test_captured_layers_outside_the_target_are_refused(
    tmp_path: Path, target_dir: Path, target: Llama, ids: list[int]
) -> None:
    make_eagle3(tmp_path, target_dir, eagle_aux_hidden_state_layer_ids=ids)
    message = refusal(tmp_path, target, "EAGLE3")
    assert_names(message, "eagle_aux_hidden_state_layer_ids", str(ids), "0 .. 8", "draft_aux")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("d2t"), ["d2t is missing", "100 of 288"]),
        # Ids themselves, as FR-Spec's token maps hold them.
        (lambda t: t.update(d2t=t["d2t"] + torch.arange(100)), ["d2t", "offsets"]),
        (lambda t: t.update(d2t=t["d2t"] + 1), ["d2t", "offsets"]),
        (lambda t: t.update(d2t=t["d2t"].float()), ["d2t", "float32", "[100] integers"]),
        (lambda t: t.update(d2t=t["d2t"][:50]), ["d2t", "[50]", "[100]"]),
        (lambda t: t["t2d"].logical_not_(), ["t2d", "d2t", "offsets"]),
        (lambda t: t.update(t2d=t["t2d"][:200]), ["t2d", "[200]", "[288]"]),
    ],
)
def test_id_maps_that_contradict_each_other_are_refused(
    tmp_path: Path, target_dir: Path, target: Llama, change: Change, words: list[str]
) -> None:
    make_eagle3(tmp_path, target_dir, draft_vocab=100)
    rewrite(tmp_path, change)
    assert_names(refusal(tmp_path, target, "EAGLE3"), *words)


def test_draft_ids_whose_padding_is_not_last_are_refused(tmp_path: Path) -> None:
    padded = make_target(tmp_path / "t", "llama2", hidden=32, layers=8, serve_spec_num_ids=280)
    make_eagle3(tmp_path / "head", padded, draft_vocab=200)
    ids = torch.arange(88, 288).flip(0)
    rewrite(tmp_path / "head", lambda t: [t.update(d2t=ids - torch.arange(200)), t.pop("t2d")])
    message = refusal(tmp_path / "head", load_target(padded, torch.float32), "EAGLE3")
    assert_names(message, "num_ids=280", "padding has to come last")


def test_a_draft_vocabulary_at_odds_with_the_lm_head_is_refused(
    tmp_path: Path, target_dir: Path, target: Llama
) -> None:
    make_eagle3(tmp_path, target_dir, draft_vocab=100)
    config, tensors = read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, {**config, "draft_vocab_size": 64}, tensors)
    assert_names(refusal(tmp_path, target, "EAGLE3"), "draft_vocab_size=64", "100 rows")


@pytest.mark.parametrize(
    ("config", "words"),
    [
        ({"hidden_act": "gelu"}, ["hidden_act", "gelu"]),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, ["linear", "llama3"]),
        ({"sliding_window": 2048}, ["sliding_window=2048", "layer_types"]),
        ({"target_hidden_size": 48}, ["target_hidden_size=48", "32"]),
        ({"eagle_config": {"use_aux_hidden_state": False}}, ["use_aux_hidden_state"]),
        ({"eagle_config": {"use_mtp_layernorm": True}}, ["use_mtp_layernorm=true"]),
        ({"eagle_config": {"parallel_draft_step": 4}}, ["parallel_draft_step=4"]),
        ({"num_aux_hidden_states": 5}, ["num_aux_hidden_states=5", "[2, 4, 5]"]),
        ({"num_attention_heads": 8}, ["k_proj.weight", "expected"]),
        ({"norm_before_fc": True}, ["missing input_norm.weight"]),
    ],
)
def test_configs_that_are_not_computed_are_refused(
    tmp_path: Path, target_dir: Path, target: Llama, config: dict[str, Any], words: list[str]
) -> None:
    make_eagle3(tmp_path, target_dir)
    written, tensors = read_checkpoint(tmp_path)
    write_checkpoint(tmp_path, {**written, **config}, tensors)
    assert_names(refusal(tmp_path, target, "EAGLE3"), *words)


def test_two_kinds_of_norms_before_fc_exclude_each_other(
    tmp_path: Path, target_dir: Path, target: Llama
) -> None:
    make_eagle3(tmp_path, target_dir)
    norms = {f"fc_norm.{index}.weight": torch.ones(32) for index in range(3)}
    rewrite(tmp_path, lambda t: t.update({"input_norm.weight": torch.ones(96), **norms}))
    assert_names(refusal(tmp_path, target, "EAGLE3"), "input_norm", "fc_norm", "one of them")


def test_a_wrapped_config_is_unwrapped(tmp_path: Path, target_dir: Path, target: Llama) -> None:
    make_eagle(tmp_path, target_dir)
    config, tensors = read_checkpoint(tmp_path)
    wrapped = {"model_type": "eagle", "model": {**config, "eagle_fc_bias": True}}
    write_checkpoint(tmp_path, wrapped, tensors, pickle=True)
    assert load_draft(tmp_path, target, "EAGLE").hidden_size == 32
