"""Reading configs: every dialect, and every refusal by name."""

import json

import pytest

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.rope import RopeScaling
from serve_spec.models import ModelShape
from tests.helpers.checkpoints import target_config

SCALING = RopeScaling("llama3", 8.0, 64, low_freq_factor=1.0, high_freq_factor=4.0)

WINDOW = {"use_sliding_window": True, "sliding_window": 12}
MIXED = ["full_attention", "sliding_attention"] * 2


def shape_of(family="llama3", **changes):
    return ModelShape.from_config({**target_config(family, 64, 4, 288), **changes})


def without(family, *keys):
    return {k: v for k, v in target_config(family, 64, 4, 288).items() if k not in keys}


def test_absent_keys_take_the_values_transformers_gives_them():
    config = without("llama2", "num_key_value_heads", "rope_theta", "rms_norm_eps", "hidden_act")
    shape = ModelShape.from_config(config)
    assert (shape.num_kv_heads, shape.head_dim) == (4, 16)
    assert (shape.rope_theta, shape.rms_norm_eps) == (10000.0, 1e-6)
    assert ModelShape.from_config(without("mistral", "sliding_window")).sliding_window == 4096


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
    assert [kind.window for kind in shape.attention_kinds] == windows
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
    assert ModelShape.from_directory(tmp_path).eos_token_ids == (7, 9, 11)
    assert shape_of(eos_token_id=None).eos_token_ids == ()


@pytest.mark.parametrize(
    ("family", "changes", "words"),
    [
        ("llama3", {"architectures": ["GemmaForCausalLM"]}, ["architectures", "Gemma", "Qwen3"]),
        ("llama3", {"architectures": None}, ["architectures", "LlamaForCausalLM"]),
        ("llama3", {"hidden_act": "gelu"}, ["hidden_act", "gelu", "silu"]),
        ("llama3", {"rope_scaling": {"type": "su", "factor": 4}}, ["su", "llama3"]),
        ("llama3", {"rope_scaling": {"type": "linear"}}, ["linear", "factor"]),
        ("llama3", {"rope_scaling": {"type": "linear", "factor": 0}}, ["0 is no positive number"]),
        ("llama3", {"rope_scaling": ["linear"]}, ["rope_scaling"]),
        ("llama3", {"rope_scaling": {}, "rope_theta": "big"}, ["rope_scaling", "big"]),
        ("llama3", {"num_hidden_layers": 10**9}, ["num_hidden_layers=1000000000", "more than"]),
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
        ("llama3", {"quantization_config": {"quant_method": "gptq"}}, ["gptq", "bfloat16"]),
        (
            "qwen3",
            {
                "use_sliding_window": True,
                "sliding_window": 9,
                "layer_types": ["full_attention", "sliding_attention"],
            },
            ["layer_types", "2 entries", "num_hidden_layers=4"],
        ),
        (
            "llama3",
            {"text_config": {"model_type": "gemma3_text", "vocab_size": 9}},
            ["architectures", "gemma3_text", "LlamaForCausalLM"],
        ),
        (
            "llama3",
            {
                "text_config": target_config("qwen3", 64, 4, 288),
                "quantization_config": {"quant_method": "fp8"},
            },
            ["quant_method='fp8'"],
        ),
        ("qwen3", {"layer_types": ["linear_attention"] * 4}, ["layer_types", "linear_attention"]),
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
    shape = ModelShape.from_config(
        {
            "model_type": kind,
            "text_config": {**text, **own, "tie_word_embeddings": False},
            "tie_word_embeddings": True,
            "eos_token_id": 7,
        }
    )
    assert (shape.architecture, shape.tie_word_embeddings) == (architecture, True)
    assert (shape.eos_token_ids, shape.qk_norm) == ((7,), kind == "qwen3_vl")


def test_a_nested_config_takes_missing_sizes_of_its_class():
    text = {"model_type": "llama", "vocab_size": 32064, "max_position_embeddings": 4096}
    shape = ModelShape.from_config({"model_type": "llava", "text_config": text})
    assert (shape.hidden_size, shape.intermediate_size, shape.num_layers) == (4096, 11008, 32)


@pytest.mark.parametrize("content", [None, "{", "[1]"])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, content):
    if content is not None:
        (tmp_path / "config.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        ModelShape.from_directory(tmp_path)
