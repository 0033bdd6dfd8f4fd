"""The shape of a model, from a Hugging Face `config.json`.

Settings that no layer implements are refused by name before any weight is read.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serve_spec.config.checkpoint import Config, max_positions, rope_parameters, text_config
from serve_spec.core.context import KVShape
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.rope import RopeScaling, RotaryTable
from serve_spec.ops.paged_attention import AttentionKind

NUM_IDS_KEY = "serve_spec_num_ids"
"""The key of `config.json` with the number of real ids: see `ModelShape.num_ids`."""


@dataclass(frozen=True)
class _Family:
    """Defaults of an architecture in transformers that its config does not state.

    `bias_keys`: keys of the config that turn biases on.

    `use_sliding_window_key`: its windows are off unless that key is true.
    """

    qkv_bias: bool = False
    bias_keys: tuple[str, ...] = ()
    qk_norm: bool = False
    has_window: bool = True
    use_sliding_window_key: bool = False


FAMILIES = {
    "LlamaForCausalLM": _Family(bias_keys=("attention_bias", "mlp_bias"), has_window=False),
    "MistralForCausalLM": _Family(),
    "Qwen2ForCausalLM": _Family(qkv_bias=True, use_sliding_window_key=True),
    # Qwen2 with a layer for multi-token prediction, which serves as the draft.
    "MiMoForCausalLM": _Family(qkv_bias=True, use_sliding_window_key=True),
    "Qwen3ForCausalLM": _Family(
        bias_keys=("attention_bias",), qk_norm=True, use_sliding_window_key=True
    ),
}
_DEFAULT_WINDOW = 4096
_MOST_LAYERS = 4096


@dataclass(frozen=True)
class ModelShape:
    """Everything but the weights that fixes the computation of a Llama-like model.

    `qkv_bias` / `output_bias` / `mlp_bias`: these projections carry biases. `windows`: how many
    tokens each token sees in each layer, itself included; None: all. `max_position_embeddings`: the
    longest text, as scaled by the rope. `eos_token_ids` joins `config.json` and
    `generation_config.json`. `num_ids`: ids from here on pad the vocabulary and are never sampled;
    None: all are real.
    """

    architecture: str
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    rms_norm_eps: float
    rope_theta: float
    rope_scaling: RopeScaling | None
    tie_word_embeddings: bool
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    num_ids: int | None = None
    mlp_bias: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise CheckpointError(
                f"num_key_value_heads={self.num_kv_heads} does not divide "
                f"num_attention_heads={self.num_heads}; fix config.json"
            )
        if self.head_dim % 2:
            raise CheckpointError(f"head_dim={self.head_dim} is odd; rotary embeddings need pairs")
        if self.num_ids is not None and self.num_ids > self.vocab_size:
            why = f"{NUM_IDS_KEY}={self.num_ids} is more than vocab_size={self.vocab_size}"
            raise CheckpointError(f"{why}; fix config.json")

    @property
    def attention_kinds(self) -> tuple[AttentionKind, ...]:
        """Return how each layer attends."""
        return tuple(AttentionKind(window=window) for window in self.windows)

    @property
    def sliding_window(self) -> int | None:
        """Return the smallest window of any layer; None if all tokens are seen."""
        return min((window for window in self.windows if window is not None), default=None)

    @property
    def kv_shapes(self) -> tuple[KVShape, ...]:
        """Return what each layer keeps of a token."""
        return (KVShape(self.num_kv_heads, self.head_dim, self.head_dim),) * self.num_layers

    def rotary(self, longest: int | None = None) -> RotaryTable:
        """Return the rotary table of `longest` positions; None: of the longest text."""
        longest = longest or self.max_position_embeddings
        return RotaryTable(self.head_dim, self.rope_theta, self.rope_scaling, longest)

    def on_rank_of(self, size: int) -> ModelShape:
        """Return each of `size` ranks' share of heads and neurons; may raise CheckpointError."""
        shared = self._shared_sizes
        uneven = [f"{key}={number}" for key, number in shared.items() if number % size]
        if uneven:
            most = math.gcd(*shared.values())
            why = f"tensor_parallel_size={size} does not divide {', '.join(uneven)} of this model"
            raise CheckpointError(f"{why}; use a divisor of {most}")
        return replace(
            self,
            num_heads=self.num_heads // size,
            num_kv_heads=self.num_kv_heads // size,
            intermediate_size=self.intermediate_size // size,
        )

    def divides(self, size: int) -> bool:
        """Return whether `size` ranks can share the model."""
        return math.gcd(*self._shared_sizes.values()) % size == 0

    @property
    def _shared_sizes(self) -> dict[str, int]:
        return {
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.num_kv_heads,
            "intermediate_size": self.intermediate_size,
        }

    @staticmethod
    def from_directory(path: Path | str) -> ModelShape:
        """Return the shape of a target's folder, or raise CheckpointError."""
        path = Path(path)
        config = read_json(path / "config.json")
        generation_path = path / "generation_config.json"
        generation = read_json(generation_path) if generation_path.exists() else {}
        try:
            return ModelShape.from_config(config, generation)
        except CheckpointError as error:
            what = str(error).removeprefix("config.json: ")
            raise CheckpointError(f"{path}/config.json: {what}") from None

    @staticmethod
    def from_config(config: Config, generation: Config | None = None) -> ModelShape:
        """Return the shape in a target's parsed `config.json`, or raise CheckpointError."""
        config = text_config(config)
        architecture = _architecture(config)
        family = FAMILIES[architecture]
        check_supported(config)
        biases = {key for key in family.bias_keys if config.get(key)}
        num_layers = whole(config, "num_hidden_layers")
        if num_layers > _MOST_LAYERS:
            raise _wrong(f"num_hidden_layers={num_layers}: more than {_MOST_LAYERS}; correct it")
        return ModelShape(
            **layer_sizes(config),
            architecture=architecture,
            num_layers=num_layers,
            vocab_size=whole(config, "vocab_size"),
            tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
            qkv_bias=family.qkv_bias or "attention_bias" in biases,
            output_bias="attention_bias" in biases,
            mlp_bias="mlp_bias" in biases,
            qk_norm=family.qk_norm,
            windows=_windows(config, architecture, family, num_layers),
            eos_token_ids=_eos_token_ids(config, generation or {}),
            num_ids=None if config.get(NUM_IDS_KEY) is None else whole(config, NUM_IDS_KEY),
        )


def _wrong(problem: str) -> CheckpointError:
    return CheckpointError(f"config.json: {problem}")


def layer_sizes(config: Config) -> dict[str, Any]:
    """Return the fields of `ModelShape` that targets and draft heads read from the same keys."""
    heads = whole(config, "num_attention_heads")
    hidden = whole(config, "hidden_size")
    theta, scaling = read_rope(config)
    whole(config, "max_position_embeddings", 2048)  # raises, which max_positions does not
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": whole(config, "num_key_value_heads", heads),
        "head_dim": whole(config, "head_dim", hidden // heads),
        "intermediate_size": whole(config, "intermediate_size"),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": max_positions(config),
    }


def check_sizes(
    shape: ModelShape, tensors: Mapping[str, tuple[int, ...]], directory: Path | str, prefix: str
) -> None:
    """Raise CheckpointError unless a layer's tensors have the sizes of config.json.

    Called before memory is allocated. tensors: shapes by name. prefix: before `layers.0.` in names.
    """
    layer = f"{prefix}layers.0."
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for name, key, size in (
        ("self_attn.o_proj.weight", "hidden_size", shape.hidden_size),
        ("self_attn.q_proj.weight", "num_attention_heads * head_dim", heads),
        ("self_attn.k_proj.weight", "num_key_value_heads * head_dim", kv_heads),
        ("mlp.gate_proj.weight", "intermediate_size", shape.intermediate_size),
    ):
        check_size(tensors, directory, layer + name, key, size)


def check_size(
    tensors: Mapping[str, tuple[int, ...]], directory: Path | str, name: str, key: str, size: int
) -> None:
    """Raise CheckpointError unless the tensor exists, with as many rows as config.json says."""
    if name not in tensors:
        fix = "the files are incomplete or config.json describes another model"
        raise CheckpointError(f"{directory}: missing {name}; {fix}")
    found = list(tensors[name])
    expected = [size, *found[1:]]
    if found != expected:
        raise CheckpointError(
            f"{directory}/config.json: {key}={size}: tensor {name} is {found}, expected "
            f"{expected}; correct config.json or fetch the right file"
        )


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object; raise CheckpointError if it is absent, unreadable or not an object."""
    try:
        content = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path} does not exist; point at a checkpoint directory") from error
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} cannot be read as JSON ({error}); fetch it again") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} holds {type(content).__name__}, not a JSON object")
    return content


def whole(config: Config, key: str, default: int | None = None) -> int:
    """Return a key's value, `default` if null; raise CheckpointError unless a positive integer."""
    value = config.get(key)
    if value is None:
        value = default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        found = "missing" if value is None else repr(value)
        raise _wrong(f"{key} is {found}; a positive integer is needed")
    return value


def check_supported(config: Config) -> None:
    """Raise CheckpointError for settings that no layer implements."""
    act = config.get("hidden_act", "silu")
    if act != "silu":
        raise _wrong(f"hidden_act={act!r}: not supported; only 'silu' is")
    strange = set(config.get("layer_types") or ()) - {"full_attention", "sliding_attention"}
    if strange:
        why = f"layer_types {sorted(strange)} are not supported"
        raise _wrong(f"{why}; only 'full_attention' and 'sliding_attention' are")
    if config.get("quantization_config"):
        method = config["quantization_config"].get("quant_method", "unknown")
        why = f"config.json: quantization_config.quant_method={method!r}: not supported"
        raise CheckpointError(f"{why}; use the float32, bfloat16 or float16 checkpoint")


def read_rope(config: Config) -> tuple[float, RopeScaling | None]:
    """Return base frequency and scaling; raise CheckpointError if the type is not supported."""
    kind = "?"
    try:
        rope = rope_parameters(config)
        theta, kind = _positive(rope["rope_theta"]), _rope_type(rope, config)
        return theta, None if kind in _PLAIN_ROPES else _scaling(kind, rope, config)
    except KeyError as error:
        raise _wrong(f"rope type {kind!r} lacks {error}; add it") from error
    except CheckpointError:
        raise
    except (TypeError, ValueError, ArithmeticError) as error:
        raise _wrong(f"rope_parameters or rope_scaling: {error}; correct it") from error


# dynamic scales only beyond max_position_embeddings, which is the longest text. mrope has three
# positions a token, equal ones for text.
_PLAIN_ROPES = ("default", "dynamic", "mrope")
_SCALED_ROPES = ("linear", "llama3", "yarn", "longrope")


def _rope_type(rope: Config, config: Config) -> str:
    partial = rope.get("partial_rotary_factor", config.get("partial_rotary_factor")) or 1.0
    if partial != 1.0:
        raise _wrong(f"partial_rotary_factor={partial}: not supported; only 1.0 is")
    is_nested = any(isinstance(value, Mapping) for value in rope.values())
    kind = "per layer" if is_nested else rope["rope_type"]
    if kind not in (*_PLAIN_ROPES, *_SCALED_ROPES):
        fix = f"use one of {sorted({*_PLAIN_ROPES, *_SCALED_ROPES})}"
        raise _wrong(f"rope type {kind!r}: not supported; {fix}")
    return str(kind)


def _scaling(kind: str, rope: Config, config: Config) -> RopeScaling:
    longest = whole(config, "max_position_embeddings", 2048)
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
    pairs = whole(config, "head_dim", config["hidden_size"] // config["num_attention_heads"]) // 2
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


def _architecture(config: Config) -> str:
    names = config.get("architectures") or []
    if len(names) == 1 and names[0] in FAMILIES:
        return str(names[0])
    raise _wrong(f"architectures={names!r}: not supported; use one of {sorted(FAMILIES)}")


def _windows(
    config: Config, architecture: str, family: _Family, num_layers: int
) -> tuple[int | None, ...]:
    window = config.get("sliding_window", _DEFAULT_WINDOW if family.has_window else None)
    if family.use_sliding_window_key and not config.get("use_sliding_window", False):
        window = None
    if window is None:
        return (None,) * num_layers
    if not family.has_window:
        raise _wrong(f"sliding_window={window!r}: not supported for {architecture}; set null")
    window = whole(config, "sliding_window", window)
    if kinds := config.get("layer_types"):
        if len(kinds) != num_layers:
            raise _wrong(
                f"layer_types has {len(kinds)} entries for num_hidden_layers="
                f"{num_layers}; correct config.json"
            )
        return tuple(window if kind == "sliding_attention" else None for kind in kinds)
    # transformers: layers max_window_layers .. n-1 use the window, those before it see everything.
    first = int(config.get("max_window_layers", 28)) if family.use_sliding_window_key else 0
    return tuple(window if index >= first else None for index in range(num_layers))


def _eos_token_ids(config: Config, generation: Config) -> tuple[int, ...]:
    ids: dict[int, None] = {}
    for source in (config, generation):
        value = source.get("eos_token_id")
        values = value if isinstance(value, list) else [value]
        ids |= {int(token): None for token in values if token is not None}
    return tuple(ids)
