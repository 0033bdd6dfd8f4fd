"""Families of targets by architecture. A family's module is imported when a checkpoint needs it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from serve_spec.config.checkpoint import Config, nested_config, text_config
from serve_spec.core.errors import CheckpointError
from serve_spec.core.registry import Registry

if TYPE_CHECKING:
    from serve_spec.models.interfaces import TargetFamily

_HOOKS = ("defaults", "spec", "renames", "check", "build")

TARGETS: Registry[TargetFamily] = Registry("architecture", _HOOKS)
"""Families by name in `architectures` of `config.json`."""

TEXT_MODELS: Registry[TargetFamily] = Registry("model_type", _HOOKS)
"""Families by `model_type` of the text model inside a multimodal config."""


def register_target(
    place: str, architectures: Iterable[str], model_types: Iterable[str] = ()
) -> None:
    """Let `place`, `package.module:attribute`, be the `TargetFamily` of these architectures.

    model_types: of text models in multimodal configs, and of layers in speculators' configs, that
    the family computes. Raises PluginError: one of them has a family already.
    """
    for architecture in architectures:
        TARGETS.add(architecture, place)
    for model_type in model_types:
        TEXT_MODELS.add(model_type, place)


register_target("serve_spec.models.llama:FAMILY", ["LlamaForCausalLM"], ["llama"])
register_target("serve_spec.models.mistral:FAMILY", ["MistralForCausalLM"], ["mistral"])
register_target(
    "serve_spec.models.qwen2:FAMILY",
    ["Qwen2ForCausalLM"],
    ["qwen2", "qwen2_vl", "qwen2_vl_text", "qwen2_5_vl", "qwen2_5_vl_text"],
)
register_target("serve_spec.models.mimo:FAMILY", ["MiMoForCausalLM"])
register_target("serve_spec.models.qwen3:FAMILY", ["Qwen3ForCausalLM"], ["qwen3", "qwen3_vl_text"])
register_target("serve_spec.models.mixtral:FAMILY", ["MixtralForCausalLM"])
register_target("serve_spec.models.minimax_m2:FAMILY", ["MiniMaxM2ForCausalLM"])
register_target("serve_spec.models.qwen2_moe:FAMILY", ["Qwen2MoeForCausalLM"])
register_target("serve_spec.models.qwen3_moe:FAMILY", ["Qwen3MoeForCausalLM"])
register_target("serve_spec.models.glm4_moe:FAMILY", ["Glm4MoeForCausalLM"])
register_target("serve_spec.models.gpt_oss:FAMILY", ["GptOssForCausalLM"])
register_target(
    "serve_spec.models.transformers_family:FAMILY",
    [
        "ApertusForCausalLM",
        "ArceeForCausalLM",
        "Cohere2ForCausalLM",
        "CohereForCausalLM",
        "CwmForCausalLM",
        "Ernie4_5ForCausalLM",
        "Exaone4ForCausalLM",
        "Gemma2ForCausalLM",
        "Gemma3ForCausalLM",
        "Gemma4ForCausalLM",
        "GemmaForCausalLM",
        "Glm4ForCausalLM",
        "GlmForCausalLM",
        "GraniteForCausalLM",
        "HeliumForCausalLM",
        "HunYuanDenseV1ForCausalLM",
        "HyperCLOVAXForCausalLM",
        "Jais2ForCausalLM",
        "Ministral3ForCausalLM",
        "MinistralForCausalLM",
        "NanoChatForCausalLM",
        "NemotronForCausalLM",
        "Olmo2ForCausalLM",
        "Olmo3ForCausalLM",
        "OlmoForCausalLM",
        "PersimmonForCausalLM",
        "Phi3ForCausalLM",
        "SeedOssForCausalLM",
        "SmolLM3ForCausalLM",
        "Starcoder2ForCausalLM",
        "VaultGemmaForCausalLM",
    ],
    ["gemma3_text", "gemma4_text", "ministral3"],
)


def find_family(config: Config) -> tuple[TargetFamily, Config]:
    """Return the family of a parsed `config.json`, and the complete config of its text model.

    Raises CheckpointError: no family computes it. PluginError: the family's plug-in does not load.
    """
    text, nested = text_config(config), nested_config(config)
    if nested is not None:
        model_type = str(nested.get("model_type") or f"{config.get('model_type')}_text")
        if model_type not in TEXT_MODELS:
            raise _unsupported([f"{model_type} in a multimodal model"])
        family = TEXT_MODELS.load(model_type)
        return family, {**family.defaults.get(model_type, {}), **text}
    names = config.get("architectures") or []
    if len(names) != 1 or names[0] not in TARGETS:
        raise _unsupported(names)
    return TARGETS.load(names[0]), text


def class_defaults(model_type: str) -> Mapping[str, object] | None:
    """Return what a config class of transformers fills in; None if no family says so."""
    if model_type not in TEXT_MODELS:
        return None
    found = TEXT_MODELS.load(model_type).defaults.get(model_type)
    return found if found and "vocab_size" in found else None


def known_defaults() -> list[str]:
    """Return the values of `model_type` that have `class_defaults`."""
    return sorted(name for name in TEXT_MODELS.names() if class_defaults(name) is not None)


def _unsupported(names: object) -> CheckpointError:
    fix = f"use one of {sorted(TARGETS.names())}"
    return CheckpointError(f"config.json: architectures={names!r}: not supported; {fix}")
