"""Reading `config.json`: what the configs of targets and draft heads have in common.

Settings that no layer implements are refused by name before any weight is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_spec.config.checkpoint import Config, rope_parameters, text_config
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.registry import formats_of
from serve_spec.layers.rope import RopeScaling


def wrong(problem: str) -> CheckpointError:
    """Return the refusal of a config, whose folder `read_config` adds."""
    return CheckpointError(f"config.json: {problem}")


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; raise CheckpointError if it is absent, unreadable or not an object."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        adapter = path.with_name("adapter_config.json")
        if adapter.is_file():
            fix = "merge it into its base model, and give the merged checkpoint"
            raise CheckpointError(f"{path.parent} is a LoRA adapter; {fix}") from error
        raise CheckpointError(f"{path} does not exist; point at a checkpoint directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


_MODELOPT = "hf_quant_config.json"


def read_config(folder: Path | str) -> dict[str, Any]:
    """Return `read_settings`, with the stop tokens of `generation_config.json` too.

    Raises CheckpointError: a file is absent, unreadable or no JSON object.
    """
    folder = Path(folder)
    config = read_settings(folder)
    generation = folder / "generation_config.json"
    if not generation.exists():
        return config
    ids = [*_eos_ids(text_config(config)), *_eos_ids(read_json(generation))]
    nested = config.get("text_config")
    if isinstance(nested, Mapping):
        return {**config, "text_config": {**nested, "eos_token_id": ids}}
    return {**config, "eos_token_id": ids}


def read_settings(folder: Path) -> dict[str, Any]:
    """Return a checkpoint's `config.json`, with the `quantization_config` of modelopt's own file.

    Raises CheckpointError: as `read_config`.
    """
    config, file = read_json(folder / "config.json"), folder / _MODELOPT
    if not file.exists() or text_config(config).get("quantization_config"):
        return config
    settings = read_json(file).get("quantization")
    if not isinstance(settings, Mapping):
        raise CheckpointError(f"{file}: quantization is missing; fetch it again")
    return {**config, "quantization_config": {"quant_method": "modelopt", **settings}}


def eos_token_ids(config: Config) -> tuple[int, ...]:
    """Return the stop tokens of a config, without repetitions."""
    return tuple(dict.fromkeys(_eos_ids(config)))


def _eos_ids(config: Config) -> list[int]:
    value = config.get("eos_token_id")
    values = value if isinstance(value, list) else [value]
    return [int(token) for token in values if token is not None]


def positive_integer(config: Config, key: str, default: int | None = None) -> int:
    """Return a key's value, `default` if null; raise CheckpointError unless a positive integer."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "missing" if value is None else repr(value)
        raise wrong(f"{key} is {found}; a positive integer is needed")
    return value


def check_supported(config: Config) -> None:
    """Raise CheckpointError for settings that no layer implements."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise wrong(f"hidden_act={act!r}: not supported; only 'silu' is")
    strange = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if strange:
        why = f"layer_types {sorted(strange)} are not supported"
        raise wrong(f"{why}; only 'full_attention' and 'sliding_attention' are")
    formats_of(config)


def read_rope(config: Config) -> tuple[float, RopeScaling | None]:
    """Return base frequency and scaling; raise CheckpointError if the type is not supported."""
    kind = "?"
    try:
        rope = rope_parameters(config)
        theta, kind = _positive(rope["rope_theta"]), _rope_type(rope, config)
        return theta, None if kind in _PLAIN_ROPES else _scaling(kind, rope, config)
    except KeyError as error:
        raise wrong(f"rope type {kind!r} lacks {error}; add it") from error
    except CheckpointError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise wrong(f"rope_parameters or rope_scaling: {error}; correct it") from error


def split_partial_rotary(config: Config, default: float) -> tuple[float, Config]:
    """Return which part of a head is rotated, and the config as if all of it were.

    For families that rotate a part. Raises CheckpointError: it is no part.
    """
    key = "partial_rotary_factor"
    rope = config.get("rope_parameters")
    inner = rope if isinstance(rope, Mapping) else {}
    value = inner.get(key, config.get(key))
    part = default if value is None else value
    if not isinstance(part, float | int) or not 0 < part <= 1:
        raise wrong(f"{key}={part!r}: no part of a head; use a number above 0 and up to 1")
    whole = {**config, key: None}
    if inner:
        whole["rope_parameters"] = {name: inner[name] for name in inner if name != key}
    return float(part), whole


# dynamic scales only beyond max_position_embeddings, which is the longest text. mrope has three
# positions a token, equal ones for text.
_PLAIN_ROPES = ("default", "dynamic", "mrope")
_SCALED_ROPES = ("linear", "llama3", "yarn", "longrope")

ROPES = (*_PLAIN_ROPES, *_SCALED_ROPES)
"""Values of `rope_type` that are computed."""


def _rope_type(rope: Config, config: Config) -> str:
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise wrong(f"partial_rotary_factor={partial}: not supported; only 1.0 is")
    is_nested = any(isinstance(value, Mapping) for value in rope.values())
    kind = "per layer" if is_nested else rope["rope_type"]
    if kind not in ROPES:
        fix = f"use one of {sorted(ROPES)}"
        raise wrong(f"rope type {kind!r}: not supported; {fix}")
    return str(kind)


def _scaling(kind: str, rope: Config, config: Config) -> RopeScaling:
    longest = positive_integer(config, "max_position_embeddings", 2048)
    context = int(_positive(rope.get("original_max_position_embeddings") or longest))
    given = rope.get("attention_factor")
    if kind == "linear":
        return RopeScaling(kind, _positive(rope["factor"]))
    if kind == "llama3":
        factor = _positive(rope["factor"])
        low, high = (float(rope[f"{name}_freq_factor"]) for name in ("low", "high"))
        return RopeScaling(kind, factor, context, low_freq_factor=low, high_freq_factor=high)
    factor = _positive(rope.get("factor") or longest / context)
    if kind == "yarn":
        return RopeScaling(
            kind,
            factor,
            context,
            _yarn_attention_factor(factor, rope) if given is None else float(given),
            beta_fast=float(rope.get("beta_fast") or 32),
            beta_slow=float(rope.get("beta_slow") or 1),
            truncate=bool(rope.get("truncate", True)),
        )
    grown = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(context))
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    pairs = positive_integer(config, "head_dim", head_dim) // 2
    short, long = (tuple(map(float, rope[f"{name}_factor"])) for name in ("short", "long"))
    if not len(short) == len(long) == pairs:
        raise ValueError(f"{len(short)} short and {len(long)} long factors for {pairs} pairs")
    attention = grown if given is None else float(given)
    return RopeScaling(kind, factor, context, attention, short_factor=short, long_factor=long)


def _positive(number: Any) -> float:
    if not 0 < float(number) < math.inf:
        raise ValueError(f"{number} is no positive number")
    return float(number)


def _yarn_attention_factor(factor: float, rope: Config) -> float:
    def grown(scale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0

    scale, all_dim = rope.get("mscale"), rope.get("mscale_all_dim")
    return grown(scale) / grown(all_dim) if scale and all_dim else grown(1.0)
