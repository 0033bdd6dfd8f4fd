"""What the files of a checkpoint say to the parts of serve_spec that load no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_spec.config.base import Refusal, checkpoint_name
from serve_spec.config.drafts import detect_method, draft_in_target
from serve_spec.config.hub import cached_file, config_folder

Config = Mapping[str, Any]
"""A parsed `config.json`."""

# Keys that some exporters write beside `text_config` instead of into it.
_SHARED = ("eos_token_id", "quantization_config", "torch_dtype", "dtype")


def nested_config(config: Config) -> Config | None:
    """Return the config of the text model inside that of a multimodal one; None without it."""
    nested = config.get("text_config", config if "vision_config" in config else None)
    return nested if isinstance(nested, Mapping) else None


def text_config(config: Config) -> Config:
    """Return the config of the text model in a multimodal checkpoint; others as they are."""
    nested = nested_config(config)
    if nested is None:
        return config
    shared = {key: config[key] for key in _SHARED if nested.get(key) is None and key in config}
    ties = config.get("tie_word_embeddings") or nested.get("tie_word_embeddings")
    return {**nested, **shared, "tie_word_embeddings": bool(ties)}


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


_MODEL, _DRAFT = "model.path", "speculative.speculative_draft_model_path"


def with_detected(sections: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return the sections of a configuration with what its checkpoints tell.

    A draft tells its `speculative_algorithm`, if that is left out. A draft that is given as the
    model, and names the target it was made for, becomes the draft of that target. A model that
    holds its own draft (MTP) is its own draft unless another algorithm is given.
    folder: the base of relative paths.
    Raises ConfigError: a draft of the hub cannot be downloaded.
    Raises Refusal: a draft that does not tell its algorithm or target.
    """
    model, draft = sections["model"], sections.get("speculative") or {}
    if not isinstance(model, dict) or not isinstance(draft, dict):
        return dict(sections)
    path, place = model.get("path"), model.get("download_dir")
    place = None if place is None else folder / str(place)
    own = _read(_MODEL, path, model.get("revision"), folder, place)
    source = path if model.get("revision") is None else f"{path}@{model['revision']}"
    held = draft_in_target(own)
    if held is not None and draft.get("speculative_algorithm", held) == held:
        draft = {"speculative_draft_model_path": source, **draft}
    if "speculators_config" in own or "medusa_num_heads" in own:
        draft = {"speculative_draft_model_path": source, **draft}
        model = {**model, "path": _target_of(own, str(path)), "revision": None}
    name = draft.get("speculative_draft_model_path")
    if isinstance(name, str | Path) and "speculative_algorithm" not in draft:
        config = _read(_DRAFT, name, None, folder, place, fetches=True)
        method = detect_method(config)
        if config and method is None:
            kind = config.get("speculators_model_type") or config.get("architectures")
            fix = f"config.json names {kind}, which is not supported; use another draft"
            raise Refusal(_DRAFT, str(name), fix)
        draft = {**draft, **({"speculative_algorithm": method.name} if method else {})}
    return {**sections, "model": model, **({"speculative": draft} if draft else {})}


def _target_of(config: Config, name: str) -> str:
    verifier = _mapping(_mapping(config.get("speculators_config")).get("verifier"))
    target = verifier.get("name_or_path") or config.get("base_model_name_or_path")
    if not isinstance(target, str) or target == name.partition("@")[0]:
        fix = "a draft whose config.json names no target; give the target, and this as the draft"
        raise Refusal(_MODEL, name, fix)
    return target


def _mapping(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _read(
    field: str,
    name: object,
    revision: str | None,
    folder: Path,
    download_dir: Path | None,
    *,
    fetches: bool = False,
) -> Config:
    """Return the config of a checkpoint; empty if it is invalid, which is reported later.

    fetches: whether it is downloaded; else one that is not in the cache counts as empty.
    """
    try:
        found = checkpoint_name(field, str(name), folder)
        source = found if revision is None else f"{found}@{revision}"
        file: Path | None
        if fetches or found.startswith(("asset:", "/")):
            file = config_folder(field, source, download_dir) / "config.json"
        else:
            file = cached_file(source, "config.json", download_dir)
        content = {} if file is None else json.loads(file.read_text())
    except (Refusal, OSError, UnicodeDecodeError, json.JSONDecodeError):
        return {}
    return content if isinstance(content, dict) else {}
