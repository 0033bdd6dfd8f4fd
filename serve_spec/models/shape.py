"""The shape of a stack of decoder layers, and its check against a checkpoint's tensors."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from serve_spec.config.checkpoint import Config, max_positions
from serve_spec.core.caches import PagedCache
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.rope import RopeScaling, RotaryTable
from serve_spec.models.config import positive_integer, read_rope, wrong

NUM_IDS_KEY = "serve_spec_num_ids"
"""The key of `config.json` with the number of real ids: see `DecoderShape.num_ids`."""


@dataclass(frozen=True)
class DecoderShape:
    """The sizes and switches of a stack of decoder layers, of a target or a draft.

    `qkv_bias` / `output_bias` / `mlp_bias`: these projections carry biases. `windows`: how many
    tokens each token sees in each layer, itself included; None: all. `max_position_embeddings`: the
    longest text, as scaled by the rope. `num_ids`: ids from here on pad the vocabulary and are
    never sampled; None: all are real. `scale`, `softcap`, `has_sinks`: see `PagedCache`.
    `rotary_dim`: numbers of a head that are rotated (None: all); `is_interleaved`: see `Rotation`.
    `qk_norm`: queries and keys are normalised head by head; `joint_qk_norm`: over all heads.
    """

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
    qkv_bias: bool
    output_bias: bool
    qk_norm: bool
    windows: tuple[int | None, ...]
    max_position_embeddings: int
    num_ids: int | None = None
    mlp_bias: bool = False
    scale: float | None = None
    softcap: float | None = None
    has_sinks: bool = False
    rotary_dim: int | None = None
    is_interleaved: bool = False
    joint_qk_norm: bool = False

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise wrong(
                f"num_key_value_heads={self.num_kv_heads} does not divide "
                f"num_attention_heads={self.num_heads}; correct it"
            )
        if self.head_dim % 2:
            raise wrong(f"head_dim={self.head_dim} is odd; rotary embeddings need pairs")
        if self.num_ids is not None and self.num_ids > self.vocab_size:
            why = f"{NUM_IDS_KEY}={self.num_ids} is more than vocab_size={self.vocab_size}"
            raise wrong(f"{why}; correct it")

    @property
    def caches(self) -> tuple[PagedCache, ...]:
        """Return what each layer keeps of a token, and how it attends."""
        cache = PagedCache(
            self.num_kv_heads,
            self.head_dim,
            self.head_dim,
            scale=self.scale,
            softcap=self.softcap,
            has_sinks=self.has_sinks,
        )
        return tuple(replace(cache, window=window) for window in self.windows)

    @property
    def sliding_window(self) -> int | None:
        """Return the smallest window of any layer; None if all tokens are seen."""
        return min((window for window in self.windows if window is not None), default=None)

    def rotary(self, longest: int | None = None) -> RotaryTable:
        """Return the rotary table of `longest` positions; None: of the longest text."""
        longest = longest or self.max_position_embeddings
        rotary_dim = self.rotary_dim or self.head_dim
        return RotaryTable(
            rotary_dim, self.rope_theta, self.rope_scaling, longest, self.is_interleaved
        )

    def for_texts_of(self, longest: int) -> DecoderShape:
        """Return the shape for texts of at most `longest` tokens.

        A window that holds the longest text hides nothing; attention is faster without.
        """
        windows = (w if w is not None and w < longest else None for w in self.windows)
        return replace(self, windows=tuple(windows))

    def on_rank_of(self, size: int) -> DecoderShape:
        """Return the heads and neurons of one of `size` ranks; may raise CheckpointError."""
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


def layer_sizes(config: Config) -> dict[str, Any]:
    """Return the fields of `DecoderShape` that targets and draft heads read from the same keys."""
    heads = positive_integer(config, "num_attention_heads")
    hidden = positive_integer(config, "hidden_size")
    theta, scaling = read_rope(config)
    # It raises, which max_positions does not.
    positive_integer(config, "max_position_embeddings", 2048)
    return {
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": positive_integer(config, "num_key_value_heads", heads),
        "head_dim": positive_integer(config, "head_dim", hidden // heads),
        "intermediate_size": positive_integer(config, "intermediate_size"),
        "rms_norm_eps": float(config.get("rms_norm_eps", 1e-6)),
        "rope_theta": theta,
        "rope_scaling": scaling,
        "max_position_embeddings": max_positions(config),
    }


class SizeCheck(NamedTuple):
    """A tensor's name, and the key of config.json whose value is the size of one dimension."""

    name: str
    key: str
    size: int
    dim: int = 0


def gate_size(shape: DecoderShape) -> SizeCheck:
    """Return the check of the first layer's gated MLP."""
    return SizeCheck("layers.0.mlp.gate_proj.weight", "intermediate_size", shape.intermediate_size)


def check_sizes(
    shape: DecoderShape,
    tensors: Mapping[str, tuple[int, ...]],
    directory: Path | str,
    prefix: str,
    mlp: Iterable[SizeCheck],
) -> None:
    """Raise CheckpointError unless a layer's tensors have the sizes of config.json.

    Called before memory is allocated. tensors: shapes by name. prefix: before `layers.` in names.
    mlp: what else to check.
    """
    layer = f"{prefix}layers.0."
    heads, kv_heads = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
    for name, key, size in (
        ("self_attn.o_proj.weight", "hidden_size", shape.hidden_size),
        ("self_attn.q_proj.weight", "num_attention_heads * head_dim", heads),
        ("self_attn.k_proj.weight", "num_key_value_heads * head_dim", kv_heads),
    ):
        check_size(tensors, directory, layer + name, key, size)
    for check in mlp:
        check_size(tensors, directory, prefix + check.name, *check[1:])


def check_size(
    tensors: Mapping[str, tuple[int, ...]],
    directory: Path | str,
    name: str,
    key: str,
    size: int,
    dim: int = 0,
) -> None:
    """Raise CheckpointError unless the tensor exists, with the size of config.json along `dim`."""
    if name not in tensors:
        fix = "the files are incomplete or config.json describes another model"
        raise CheckpointError(f"{directory}: missing {name}; {fix}")
    found = list(tensors[name])
    expected = [*found[:dim], size, *found[dim + 1 :]]
    if found != expected:
        raise CheckpointError(
            f"{directory}/config.json: {key}={size}: tensor {name} is {found}, expected "
            f"{expected}; correct config.json or fetch the right file"
        )
