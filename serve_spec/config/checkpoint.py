"""What the files of a checkpoint say to the parts of serve_spec that load no weights."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

Config = Mapping[str, Any]
"""A parsed `config.json`."""

_LLAMA = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}
CLASS_DEFAULTS: Mapping[str, Config] = {
    "llama": _LLAMA,
    "mistral": {**_LLAMA, "intermediate_size": 14336, "num_key_value_heads": 8},
    "qwen3": {
        **_LLAMA,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
        "use_sliding_window": False,
    },
}
"""Values of transformers' config classes, by `model_type`: nested configs omit such keys."""

# Architectures of text models inside multimodal ones, by `model_type`.
_TEXT_ARCHITECTURES = {
    "llama": "LlamaForCausalLM",
    "mistral": "MistralForCausalLM",
    "qwen2": "Qwen2ForCausalLM",
    "qwen2_vl": "Qwen2ForCausalLM",
    "qwen2_vl_text": "Qwen2ForCausalLM",
    "qwen2_5_vl": "Qwen2ForCausalLM",
    "qwen2_5_vl_text": "Qwen2ForCausalLM",
    "qwen3": "Qwen3ForCausalLM",
    "qwen3_vl_text": "Qwen3ForCausalLM",
}
# Keys that some exporters write beside `text_config` instead of into it.
_SHARED = ("eos_token_id", "quantization_config", "torch_dtype", "dtype")


def text_config(config: Config) -> Config:
    """Return the config of the text model in a multimodal checkpoint; others as they are."""
    nested = config.get("text_config", config if "vision_config" in config else None)
    if not isinstance(nested, Mapping):
        return config
    model_type = nested.get("model_type", "llama")
    architecture = _TEXT_ARCHITECTURES.get(model_type, f"{model_type} in a multimodal model")
    shared = {key: config[key] for key in _SHARED if nested.get(key) is None and key in config}
    ties = config.get("tie_word_embeddings") or nested.get("tie_word_embeddings")
    return {
        **CLASS_DEFAULTS.get(model_type, {}),
        **nested,
        **shared,
        "architectures": [architecture],
        "tie_word_embeddings": bool(ties),
    }


def rope_parameters(config: Config) -> dict[str, Any]:
    """Return rope type, base and scaling; `rope_type` and `rope_theta` are always present.

    transformers 5 writes them into `rope_parameters`, earlier versions into `rope_scaling` (with
    `type`, at first) and `rope_theta`.
    """
    rope = dict(config.get("rope_parameters") or config.get("rope_scaling") or {})
    rope["rope_type"] = rope.get("rope_type") or rope.get("type") or "default"
    rope["rope_theta"] = rope.get("rope_theta") or config.get("rope_theta") or 10000.0
    original = config.get("original_max_position_embeddings")
    if original is not None:
        rope["original_max_position_embeddings"] = original
    return rope


def max_positions(config: Config) -> int:
    """Return the longest text that a model was made for, in tokens.

    As in vLLM, a linear rope multiplies `max_position_embeddings`, yarn its original value.
    """
    longest = int(config.get("max_position_embeddings") or 2048)
    rope = rope_parameters(config)
    factor = rope.get("factor") or 1.0
    if rope["rope_type"] == "linear":
        return int(longest * factor)
    if rope["rope_type"] == "yarn":
        original = rope.get("original_max_position_embeddings") or longest
        return max(longest, int(original * factor))
    return longest
