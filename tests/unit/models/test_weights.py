"""Configs and weight files: every layout is read, and what is wrong is refused by name."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from serve_spec.cli import main
from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import CheckpointError
from serve_spec.engine.build import load_models
from serve_spec.layers.rope import RopeScaling
from serve_spec.models.loader import load_target, read_spec
from serve_spec.models.registry import TARGETS, find_family
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import (
    make_eagle3,
    make_target,
    read_checkpoint,
    target_config,
    write_checkpoint,
)
from tests.helpers.paged import run_text

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def made(tmp_path):
    return make_target(tmp_path / "target", "llama2", hidden=32, layers=2)


def logits(model):
    return run_text(model, torch.arange(12))[0]


def rewrite(directory, change, **config):
    settings, tensors = read_checkpoint(directory)
    change(tensors)
    write_checkpoint(directory, {**settings, **config}, tensors)


def refusal(directory):
    with pytest.raises(CheckpointError) as error:
        load_target(directory, torch.float32)
    return str(error.value)


def shard(directory, whole="model.safetensors", save=save_file):
    """Splits the file in two with an index; returns the index's map."""
    _, tensors = read_checkpoint(directory)
    (directory / whole).unlink()
    stem, suffix = whole.split(".")
    weight_map = {}
    for number in (0, 1):
        name = f"{stem}-{number + 1}-of-2.{suffix}"
        part = {key: value for key, value in tensors.items() if len(key) % 2 == number}
        save(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    _write_index(directory, weight_map, whole)
    return weight_map


def _write_index(directory, weight_map, whole="model.safetensors"):
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{whole}.index.json").write_text(json.dumps(index))


def test_shards_and_pickles_give_the_same_model_as_one_file(made, tmp_path):
    expected = logits(load_target(made, torch.float32))
    pickled = write_checkpoint(tmp_path / "pickled", *read_checkpoint(made), pickle=True)

    def is_same(folder):
        return torch.equal(logits(load_target(folder, torch.float32)), expected)

    assert is_same(pickled)
    tensors = read_checkpoint(made)[1]
    torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert is_same(pickled)
    shard(made)
    assert is_same(made)
    shard(pickled, "pytorch_model.bin", torch.save)
    assert is_same(pickled)


def test_stored_half_precision_is_cast_and_stored_rotary_frequencies_are_harmless(made):
    frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    rewrite(made, lambda t: t.update({k: v.half() for k, v in t.items()} | frequencies))
    model = load_target(made, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_a_lora_adapter_is_refused_by_name(tmp_path):
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(CheckpointError, match="is a LoRA adapter; merge it into its base model"):
        read_spec(tmp_path)


def test_a_stored_lm_head_wins_over_tied_embeddings(made):
    expected = logits(load_target(made, torch.float32))
    rewrite(made, lambda t: None, tie_word_embeddings=True)
    assert torch.equal(logits(load_target(made, torch.float32)), expected)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("vocab_size", "[288, 32], expected [1000000000, 32]"),
        ("hidden_size", "[32, 32], expected [1000000000, 32]"),
        ("intermediate_size", "[64, 32], expected [1000000000, 32]"),
        ("head_dim", "[32, 32], expected [4000000000, 32]"),
        ("num_hidden_layers", "more than 4096; correct it"),
        ("max_position_embeddings", "more than 2097152; set max_model_len"),
    ],
)
def test_absurd_sizes_of_a_config_are_refused_by_key_before_memory_is_taken(made, key, expected):
    rewrite(made, lambda t: None, **{key: 10**9})
    message = refusal(made)
    assert f"{made}/config.json: " in message
    assert key in message
    assert "1000000000" in message or key == "head_dim"
    assert expected in message


@pytest.mark.parametrize(
    ("family", "key"),
    [
        ("mixtral", "num_local_experts"),
        ("mixtral", "intermediate_size"),
        ("qwen3_moe", "moe_intermediate_size"),
        ("glm4_moe", "n_routed_experts"),
        ("glm4_moe", "intermediate_size"),
        ("gpt_oss", "intermediate_size"),
    ],
)
def test_other_sizes_of_experts_are_refused_by_key_before_memory_is_taken(tmp_path, family, key):
    folder = make_target(tmp_path, family, hidden=32, layers=2)
    rewrite(folder, lambda t: None, **{key: 768})
    message = refusal(folder)
    assert f"{folder}/config.json: {key}=768: tensor model.layers." in message
    assert "expected [" in message


def test_an_expert_that_is_missing_is_refused_by_name(tmp_path):
    folder = make_target(tmp_path, "qwen3_moe", hidden=32, layers=2)
    name = "model.layers.1.mlp.experts.4.up_proj.weight"
    rewrite(folder, lambda t: t.pop(name))
    assert f"missing {name}" in refusal(folder)


def test_layers_for_multi_token_prediction_are_left_out(tmp_path):
    folder = make_target(tmp_path, "glm4_moe", hidden=32, layers=2)
    expected = logits(load_target(folder, torch.float32))
    extra = {f"model.layers.2.{name}.weight": torch.ones(8, 8) for name in ("eh_proj", "enorm")}
    rewrite(folder, lambda t: t.update(extra))
    assert torch.equal(logits(load_target(folder, torch.float32)), expected)


def test_a_model_of_many_positions_may_be_used_for_fewer(made):
    rewrite(made, lambda t: None, max_position_embeddings=10**9)
    assert load_target(made, torch.float32, max_model_len=64).max_model_len == 64


def keep_one_of_a_layer(tensors):
    for name in list(tensors):
        if name.startswith("model.layers.1.") and name != Q_PROJ:
            del tensors[name]


BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), ["missing lm_head.weight"]),
        (lambda t: t.pop(Q_PROJ), [f"missing {Q_PROJ}"]),
        (keep_one_of_a_layer, ["(8 in all)"]),
        (lambda t: t.update({BIAS: torch.ones(32)}), [f"surplus {BIAS}"]),
        (lambda t: t.update({Q_PROJ: torch.ones(16, 32)}), [Q_PROJ, "[16, 32]", "[32, 32]"]),
        (lambda t: t.update({Q_PROJ: torch.ones(32, 32, dtype=torch.int8)}), [Q_PROJ]),
    ],
    ids=["no lm_head", "missing", "many missing", "surplus", "another shape", "quantised"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(made, change, words):
    rewrite(made, change)
    message = refusal(made)
    assert [word for word in words if word not in message] == []


def test_weights_that_are_damaged_cut_short_or_missing_are_refused(made):
    path = made / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:4], whole[:40], whole[:5000], whole[:8] + b"\xff" * 32 + whole[40:]):
        path.write_bytes(content)
        assert "model.safetensors is damaged or cut short" in refusal(made)
    (made / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights.*config\.json"):
        load_target(made, torch.float32)


def test_a_pickle_that_is_unsafe_cut_short_or_of_something_else_is_refused(made):
    settings, tensors = read_checkpoint(made)
    path = made / "pytorch_model.bin"
    write_checkpoint(made, settings, tensors, pickle=True)
    (made / "model.safetensors").unlink(missing_ok=True)
    for content in (path.read_bytes()[:5000], pickle.dumps({"x": print}, protocol=2)):
        path.write_bytes(content)
        assert "pytorch_model.bin cannot be read" in refusal(made)
    torch.save({"epoch": 3}, path)
    assert "epoch" in refusal(made)


def test_an_index_at_odds_with_its_shards_is_refused(made):
    weight_map = shard(made)
    shutil.copy(made / "model-1-of-2.safetensors", made / "again.safetensors")
    first = next(name for name, file in weight_map.items() if file.startswith("model-1"))
    other = {"model-1-of-2.safetensors": "model-2-of-2.safetensors"}
    elsewhere = other.get(weight_map[Q_PROJ], "model-1-of-2.safetensors")
    for changed, word in (
        ({**weight_map, Q_PROJ: elsewhere}, Q_PROJ),
        ({**weight_map, first: "again.safetensors"}, "in both"),
        ({}, "weight_map"),
    ):
        _write_index(made, changed)
        assert word in refusal(made)
    _write_index(made, weight_map)
    (made / "model-2-of-2.safetensors").unlink()
    assert "absent model-2-of-2.safetensors" in refusal(made)


SCALING = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)

WINDOW = {"use_sliding_window": True, "sliding_window": 12}
MIXED = ["full_attention", "sliding_attention"] * 2


def read(config):
    family, text = find_family(config)
    family.spec(text)
    return family.shape(text)


def shape_of(family="llama3", **changes):
    return read({**target_config(family, 64, 4, 288), **changes})


def without(family, *keys):
    return {k: v for k, v in target_config(family, 64, 4, 288).items() if k not in keys}


def test_absent_keys_take_the_values_transformers_gives_them_also_in_a_nested_config():
    config = without("llama2", "num_key_value_heads", "rope_theta", "rms_norm_eps", "hidden_act")
    shape = read(config)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)
    assert (shape.rope_theta, shape.rms_norm_eps) == (10000.0, 1e-6)
    assert read(without("mistral", "sliding_window")).sliding_window == 4096
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    shape = read({"model_type": "llava", "text_config": text})
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers) == (4096, 11008, 32)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"rope_scaling": {**target_config("llama3", 64, 4, 288)["rope_scaling"], "type": "llama3"}},
        {
            "rope_scaling": None,
            "rope_theta": None,
            "rope_parameters": {
                **target_config("llama3", 64, 4, 288)["rope_scaling"],
                "rope_theta": 500000.0,
            },
        },
    ],
)
def test_all_spellings_of_llama3_rope_agree(changes):
    shape = shape_of(**changes)
    assert (shape.rope_theta, shape.rope_scaling) == (500000.0, SCALING)


@pytest.mark.parametrize(
    ("family", "changes", "windows"),
    [
        ("mistral", {"sliding_window": None}, [None] * 4),
        ("mistral", {"sliding_window": 12}, [12] * 4),
        ("qwen2", {"use_sliding_window": False, "sliding_window": 12}, [None] * 4),
        ("qwen2", {**WINDOW, "max_window_layers": 0}, [12] * 4),
        ("qwen2", {**WINDOW, "max_window_layers": 3}, [None, None, None, 12]),
        ("qwen3", {**WINDOW, "max_window_layers": 4}, [None] * 4),
        ("qwen3", {**WINDOW, "layer_types": MIXED}, [None, 12, None, 12]),
        ("mistral", {"sliding_window": 12, "layer_types": ["full_attention"] * 4}, [None] * 4),
    ],
)
def test_a_sliding_window_counts_only_in_the_layers_that_use_it(family, changes, windows):
    shape = shape_of(family, **changes)
    assert [cache.window for cache in shape.caches] == windows
    assert shape.sliding_window == (12 if 12 in windows else None)


@pytest.mark.parametrize(
    ("rope", "longest"),
    [
        ({"type": "linear", "factor": 2.5}, 1280),
        ({"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}, 1024),
        ({"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 100}, 512),
        ({"type": "dynamic", "factor": 4.0}, 512),
    ],
)
def test_a_scaled_rope_lengthens_the_context_as_in_vllm(rope, longest):
    assert shape_of("llama2", rope_scaling=rope).max_position_embeddings == longest


def test_stop_tokens_of_both_files_are_joined(tmp_path):
    config = {**target_config("llama3", 64, 4, 288), "eos_token_id": [7, 9]}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": [9, 11]}')
    assert read_spec(tmp_path).eos_token_ids == (7, 9, 11)
    family, text = find_family({**config, "eos_token_id": None})
    assert family.spec(text).eos_token_ids == ()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        (
            "llama3",
            {"architectures": ["DiffLlamaForCausalLM"]},
            ["architectures", "DiffLlama", "Qwen3"],
        ),
        ("llama3", {"architectures": None}, ["architectures", "LlamaForCausalLM"]),
        ("llama3", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("llama3", {"rope_scaling": {"type": "su", "factor": 4}}, ["su", "llama3"]),
        ("llama3", {"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ("llama3", {"rope_scaling": {"type": "linear", "factor": 0}}, ["0 is no positive number"]),
        ("llama3", {"rope_scaling": ["linear"]}, ["rope_scaling"]),
        ("llama3", {"rope_scaling": {}, "rope_theta": "big"}, ["rope_scaling", "big"]),
        ("llama3", {"rope_scaling": {"type": "yarn", "factor": "four"}}, ["rope_scaling", "four"]),
        (
            "llama3",
            {"rope_scaling": {"type": "longrope", "short_factor": [1.0], "long_factor": [2.0]}},
            ["rope_scaling", "1 long factors for 8 pairs"],
        ),
        ("llama3", {"rope_scaling": {"rope_type": "llama3"}}, ["llama3", "factor"]),
        (
            "llama3",
            {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
            ["per layer", "default"],
        ),
        ("llama3", {"partial_rotary_factor": 0.5}, ["partial_rotary_factor", "0.5"]),
        ("llama3", {"sliding_window": 9}, ["sliding_window", "9", "null"]),
        ("llama3", {"num_key_value_heads": 3}, ["num_key_value_heads=3", "num_attention_heads=4"]),
        ("llama3", {"hidden_size": None}, ["hidden_size", "missing"]),
        ("llama3", {"vocab_size": "many"}, ["vocab_size", "many"]),
        ("llama3", {"head_dim": 15}, ["head_dim=15"]),
        ("llama3", {"quantization_config": {"quant_method": "exl2"}}, ["exl2", "bfloat16"]),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            ["layer_types", "2 values", "num_hidden_layers=4"],
        ),
        (
            "llama3",
            {"text_config": {"model_type": "llama4_text", "vocab_size": 9}},
            ["architectures", "llama4_text", "LlamaForCausalLM"],
        ),
        (
            "llama3",
            {
                "text_config": target_config("qwen3", 64, 4, 288),
                "quantization_config": {"quant_method": "fp8", "fmt": "e5m2"},
            },
            ["fmt='e5m2'"],
        ),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, ["layer_types", "linear_attention"]),
        (
            "qwen3_moe",
            {"quantization_config": {"quant_method": "fp8"}},
            ["quant_method='fp8'", "experts", "bfloat16"],
        ),
        ("qwen3_moe", {"use_sliding_window": True}, ["use_sliding_window=true", "set false"]),
        ("qwen2_moe", {"num_experts": 0}, ["num_experts is 0"]),
        ("qwen2_moe", {"num_experts": 10**9}, ["num_experts=1000000000", "1023"]),
        ("qwen2_moe", {"mlp_only_layers": 3}, ["mlp_only_layers is 3"]),
        ("mixtral", {"num_experts_per_tok": 7}, ["num_experts_per_tok=7", "num_local_experts=6"]),
        ("minimax_m2", {"qk_norm_type": "per_head"}, ["qk_norm_type='per_head'", "per_layer"]),
        ("minimax_m2", {"rotary_dim": 40}, ["partial_rotary_factor=1.25"]),
        ("minimax_m2", {"attn_type_list": [1, 0]}, ["attn_type_list", "full attention"]),
        ("glm4_moe", {"scoring_func": "softmax"}, ["scoring_func='softmax'", "sigmoid"]),
        ("glm4_moe", {"n_group": 4}, ["n_group=4", "topk_group=2", "2 chosen of 6 experts"]),
        ("glm4_moe", {"num_experts_per_tok": 5}, ["topk_group=2", "5 chosen of 6"]),
        ("glm4_moe", {"first_k_dense_replace": "one"}, ["first_k_dense_replace is 'one'"]),
        ("glm4_moe", {"partial_rotary_factor": 2}, ["partial_rotary_factor=2"]),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, ["quant_method='mxfp4'"]),
    ],
)
def test_what_is_not_computed_is_refused_by_name(family, changes, words):
    with pytest.raises(CheckpointError) as refusal:
        shape_of(family, **changes)
    assert [word for word in words if word not in str(refusal.value)] == []


@pytest.mark.parametrize(
    ("kind", "own", "architecture"),
    [
        ("qwen3_vl", {"model_type": "qwen3_vl_text"}, "Qwen3ForCausalLM"),
        ("qwen3_vl", {}, "Qwen3ForCausalLM"),
        ("mistral3", {"model_type": "mistral"}, "MistralForCausalLM"),
    ],
)
def test_a_nested_config_is_read_with_what_its_exporter_left_outside(kind, own, architecture):
    text = without("qwen3", "architectures", "model_type", "eos_token_id")
    family, text = find_family(
        {
            "model_type": kind,
            "text_config": {**text, **own, "tie_word_embeddings": False},
            "tie_word_embeddings": True,
            "eos_token_id": 7,
        }
    )
    assert (family, text["tie_word_embeddings"]) == (TARGETS.load(architecture), True)
    found = family.spec(text).eos_token_ids, family.shape(text).qk_norm
    assert found == ((7,), kind == "qwen3_vl")


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_spec(tmp_path)


NEGATED = """
from serve_spec.models.weights import Checkpoint, SafetensorsFile, open_checkpoint

class Negated(SafetensorsFile):
    def read(self, name):
        return -super().read(name)

def open_weights(folder):
    return Checkpoint([Negated(folder / "hidden.safetensors")], folder)

def open_nothing(folder):
    return {}

def open_two(folder, other):
    return open_checkpoint(folder)

constant = 3
"""


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """Return the name of a module outside the package, which stores weights with other signs."""
    name = f"plugin_{tmp_path.name}"
    (tmp_path / f"{name}.py").write_text(NEGATED)
    monkeypatch.syspath_prepend(tmp_path)
    return name


def hide_negated(folder):
    _, tensors = read_checkpoint(folder)
    (folder / "model.safetensors").unlink()
    save_file({name: -tensor for name, tensor in tensors.items()}, folder / "hidden.safetensors")


def test_a_function_of_another_package_opens_the_weights_of_target_and_draft(tmp_path, plugin):
    target = make_target(tmp_path / "target", hidden=32)
    make_eagle3(tmp_path / "draft", target)
    keys = {
        "model": {"path": str(target), "device": "cpu", "dtype": "float32"},
        "speculative": {
            "speculative_draft_model_path": str(tmp_path / "draft"),
            "speculative_draft_dtype": "float32",
        },
        "cache": {"num_pages": 64},
    }
    stored = load_models(ServeSpecConfig.load(keys), SINGLE)
    for folder in (target, tmp_path / "draft"):
        hide_negated(folder)
    opened = load_models(ServeSpecConfig.load(keys, load_format=f"{plugin}:open_weights"), SINGLE)
    assert torch.equal(logits(opened.target), logits(stored.target))
    x = torch.ones(1, 3 * 32)  # the features that a head reads
    assert torch.equal(opened.head.encode(x), stored.head.encode(x))


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("negated", "use auto, safetensors, dummy or MODULE:FUNCTION"),
        (
            "no_such_package:open_weights",
            "does not import (ModuleNotFoundError: No module named 'no_such_package')",
        ),
        ("{}:open_all", "has no open_all; correct the name"),
        ("{}:constant", "cannot be called with a folder (3 is not a callable object)"),
        ("{}:open_two", "cannot be called with a folder (missing a required argument: 'other')"),
        ("{}:open_nothing", "returned dict for /"),
    ],
)
def test_a_load_format_that_opens_no_weights_is_refused_in_one_line(
    made, plugin, capsys, name, problem
):
    name = name.format(plugin)
    (made / "model.safetensors").unlink()  # a refusal needs no weights
    assert main(["check-config", str(made), f"load_format={name}"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert f"model.load_format={name!r}: " in line
    assert problem in line
