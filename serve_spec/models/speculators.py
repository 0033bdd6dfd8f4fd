"""Configs that `speculators` writes (RedHatAI's checkpoints), brought to the flat layout of others.

The layers' keys are in `transformer_layer_config`, without those at the defaults of their class;
the head's own keys are at the top. Source: github.com/vllm-project/speculators.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_spec.core.errors import CheckpointError

FAMILIES = {"eagle": "EAGLE", "eagle3": "EAGLE3"}
"""The families among the values of `speculators_model_type`."""

# Of transformers' LlamaConfig and Qwen3Config.
_SHARED_DEFAULTS = {"hidden_size": 4096, "num_attention_heads": 32, "rms_norm_eps": 1e-6}
_CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {**_SHARED_DEFAULTS, "intermediate_size": 11008, "vocab_size": 32000},
    "qwen3": {
        **_SHARED_DEFAULTS,
        "intermediate_size": 22016,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "vocab_size": 151936,
        "use_sliding_window": False,
    },
}
_NESTED = ("transformer_layer_config", "speculators_config")


def flat_config(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The config of the head in `directory`, every key at the top.

    Raises:
        CheckpointError: a kind of head, or layers, that are not computed here.
    """
    kind = config["speculators_model_type"]
    if kind not in FAMILIES:
        raise CheckpointError(
            f"{directory}: speculators_model_type={kind!r} is not supported; use a head of "
            f"{sorted(FAMILIES)}"
        )
    if config.get("layernorms"):
        raise CheckpointError(
            f"{directory}: layernorms=true is not supported, for its readers disagree on what is "
            "fed back; use an EAGLE head without extra norms, or an EAGLE-3 head"
        )
    layers = config.get("transformer_layer_config") or {}
    model_type = layers.get("model_type", "llama")
    if model_type not in _CLASS_DEFAULTS:
        raise CheckpointError(
            f"{directory}: transformer_layer_config.model_type={model_type!r} is not supported; "
            f"use a head with layers of {sorted(_CLASS_DEFAULTS)}"
        )
    own = {key: value for key, value in config.items() if key not in _NESTED and value is not None}
    return {**_CLASS_DEFAULTS[model_type], **layers, **own}
