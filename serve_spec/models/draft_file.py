"""Opening a draft checkpoint: which family its tensors are, and what its layers look like.

Published configs are wrong about many things (number of layers, biases, tied embeddings), so what a
tensor's presence or shape can tell, it tells.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.embedding import Embedding
from serve_spec.models.expansion import open_weights
from serve_spec.models.llama import Llama
from serve_spec.models.shape import ModelShape, check_supported, read_json, read_rope, whole
from serve_spec.models.weights import Checkpoint

_ALIASES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
)


@dataclass(frozen=True)
class DraftOptions:
    """What a user may know better than the checkpoint's config. None: believe the checkpoint.

    `rope_theta`: some published heads were trained with 10000 whatever their config says.
    `aux_layer_ids`: layers of the target whose inputs the head reads (EAGLE-3). `aux_layers_mean`:
    how to read the config's own ids, as a layer's input or its output. `norm_before_residual` and
    `norm_output`: EAGLE-3's two switches that configs leave out.
    """

    rope_theta: float | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    aux_layers_mean: Literal["input", "output"] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None


@dataclass(frozen=True)
class DraftFile:
    """A draft's config (flat) and tensors (by their current names: `layers.0.`, `fc`, ...)."""

    path: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint

    def setting(self, key: str) -> Any:
        """A key of the config, at the top or inside `eagle_config`; None when absent."""
        value = self.config.get(key)
        return (self.config.get("eagle_config") or {}).get(key) if value is None else value


def open_draft(path: Path | str, algorithm: str) -> DraftFile:
    """Opens the head in `path` and makes sure it is what `algorithm` runs; reads no weight.

    Raises:
        CheckpointError: damaged files, another family, or a format not supported yet.
    """
    file = open_draft_file(path)
    family = draft_family(file)
    if family != algorithm:
        raise CheckpointError(
            f"{file.path} holds an {family} head by its tensors, but "
            f"speculative_algorithm={algorithm!r}; set it to {family!r}"
        )
    return file


def open_draft_file(path: Path | str) -> DraftFile:
    """Opens the head in `path`, of whatever family; reads no weight.

    Raises:
        CheckpointError: damaged files, or a format not supported yet.
    """
    directory = Path(path)
    config = read_json(directory / "config.json")
    if isinstance(config.get("model"), dict):
        # Early vLLM conversions wrap the head's config: {"model_type": "eagle", "model": {...}}.
        config = {**config, **config["model"]}
    _refuse_other_formats(directory, config)
    check_supported(config)
    checkpoint = open_weights(directory)
    checkpoint.rename({name: _current_name(name) for name in checkpoint.shapes})
    return DraftFile(directory, config, checkpoint)


def draft_shape(file: DraftFile, target: Llama, options: DraftOptions, family: str) -> ModelShape:
    """The shape of the head's layers. Positions reach as far as the target's.

    Raises:
        CheckpointError: another vocabulary than the target's, or options not supported.
    """
    config = file.config
    heads = whole(config, "num_attention_heads")
    hidden = whole(config, "hidden_size")
    vocab = whole(config, "vocab_size", target.shape.vocab_size)
    if vocab != target.shape.vocab_size:
        raise CheckpointError(
            f"{file.path}: vocab_size={vocab}, but the target's is {target.shape.vocab_size}; "
            "use a head trained for this target"
        )
    _refuse_sliding_window(file)
    theta, scaling = read_rope(config)
    attention = "layers.0.self_attn."
    return ModelShape(
        architecture=family,
        hidden_size=hidden,
        num_layers=_count_layers(file.checkpoint.shapes),
        num_heads=heads,
        num_kv_heads=whole(config, "num_key_value_heads", heads),
        head_dim=whole(config, "head_dim", hidden // heads),
        intermediate_size=whole(config, "intermediate_size"),
        vocab_size=vocab,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta if options.rope_theta is None else options.rope_theta,
        rope_scaling=scaling,
        tie_word_embeddings=False,
        qkv_bias=attention + "q_proj.bias" in file.checkpoint,
        output_bias=attention + "o_proj.bias" in file.checkpoint,
        qk_norm=attention + "q_norm.weight" in file.checkpoint,
        sliding_window=None,
        max_position_embeddings=target.max_model_len,
        eos_token_ids=(),
        num_ids=target.shape.num_ids,
    )


def own_embedding(file: DraftFile, target: Llama, hidden_size: int) -> Tensor | None:
    """The file's embedding [V, H] in the target's dtype; None when the target's serves as well.

    Many files carry a frozen copy of the target's: sharing it saves the memory.

    Raises:
        CheckpointError: neither the file nor the target has one of this width.
    """
    name = "embed_tokens.weight"
    theirs = target.embed_tokens.weight
    if name not in file.checkpoint:
        if hidden_size == theirs.shape[1]:
            return None
        raise CheckpointError(
            f"{file.path}: {name} is missing and the target's cannot stand in: hidden_size="
            f"{hidden_size}, target {theirs.shape[1]}; use a head trained for this target"
        )
    expected = (target.shape.vocab_size, hidden_size)
    if file.checkpoint.shapes[name] != expected:
        raise CheckpointError(
            f"{file.path}: tensor {name} is {list(file.checkpoint.shapes[name])}, expected "
            f"{list(expected)}; use a head trained for this target"
        )
    own = file.checkpoint.read(name).to(dtype=theirs.dtype, device=theirs.device)
    return None if target.embed_tokens.holds(own) else own


def embedding_of(weight: Tensor) -> Embedding:
    """An embedding layer over `weight` [V, H]."""
    embedding = Embedding(0, 0)
    embedding.weight = torch.nn.Parameter(weight, requires_grad=False)
    return embedding


def _refuse_other_formats(directory: Path, config: Mapping[str, Any]) -> None:
    kind = None
    if config.get("speculators_model_type"):
        named = config["speculators_model_type"]
        kind = f"a speculators checkpoint (speculators_model_type={named!r})"
    elif (
        "medusa_num_heads" in config
        or config.get("model_type") == "medusa"
        or any(directory.glob("medusa_lm_head.*"))
    ):
        kind = "a Medusa checkpoint"
    if kind:
        raise CheckpointError(
            f"{directory} is {kind}, which is not supported yet; use an EAGLE or EAGLE-3 head"
        )


def _refuse_sliding_window(file: DraftFile) -> None:
    config = file.config
    kinds: Iterable[str] = config.get("layer_types") or ["sliding_attention"]
    window = config.get("sliding_window")
    if window and config.get("use_sliding_window", True) and "sliding_attention" in kinds:
        raise CheckpointError(
            f"{file.path}: sliding_window={window} is not supported in draft layers; "
            "use a head with full attention"
        )


def _current_name(name: str) -> str:
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name


def draft_family(file: DraftFile) -> str:
    """`EAGLE` or `EAGLE3`, by the tensors.

    Raises:
        CheckpointError: neither.
    """
    shapes = file.checkpoint.shapes
    width = 2 * whole(file.config, "hidden_size")
    query = shapes.get("layers.0.self_attn.q_proj.weight", ())
    if "layers.0.hidden_norm.weight" in shapes or query[1:] == (width,):
        return "EAGLE3"
    if shapes.get("fc.weight", ())[1:] == (width,):
        return "EAGLE"
    raise CheckpointError(
        f"{file.path} holds neither an EAGLE nor an EAGLE-3 head (fc.weight with "
        "layers.0.* is needed); stand-alone draft models are not supported yet"
    )


def _count_layers(names: Iterable[str]) -> int:
    indices = {int(m[1]) for name in names if (m := re.match(r"layers\.(\d+)\.", name))}
    return max(indices, default=0) + 1
