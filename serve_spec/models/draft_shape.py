"""What an EAGLE or EAGLE-3 head's layers look like, from its config and tensors."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.embedding import Embedding
from serve_spec.models.draft_file import DraftFile, DraftOptions
from serve_spec.models.llama import Llama
from serve_spec.models.shape import ModelShape, check_sizes, read_rope, whole

_EMBEDDING = "embed_tokens.weight"


def draft_shape(file: DraftFile, target: Llama, options: DraftOptions) -> ModelShape:
    """The shape of the head's layers beside `target`. Positions reach as far as the target's.

    Raises:
        CheckpointError: another vocabulary than the target's, or options not supported.
    """
    shape = layer_shape(file, options, target.shape.vocab_size)
    if shape.vocab_size != target.shape.vocab_size:
        raise CheckpointError(
            f"{file.path}: vocab_size={shape.vocab_size}, but the target's is "
            f"{target.shape.vocab_size}; use a head trained for this target"
        )
    return replace(
        shape,
        max_position_embeddings=target.max_model_len,
        num_ids=target.shape.num_ids,
    )


def layer_shape(
    file: DraftFile, options: DraftOptions, vocab_size: int | None = None
) -> ModelShape:
    """The shape of the head's layers by itself.

    vocab_size: where the config leaves it out.

    Raises:
        CheckpointError: options not supported, or tensors of other sizes than the config's.
    """
    config, shapes = file.config, file.checkpoint.shapes
    heads = whole(config, "num_attention_heads")
    hidden = whole(config, "hidden_size")
    theta, scaling = read_rope(config)
    attention = "layers.0.self_attn."
    shape = ModelShape(
        architecture=file.recognition.family,
        hidden_size=hidden,
        num_layers=_count_layers(shapes),
        num_heads=heads,
        num_kv_heads=whole(config, "num_key_value_heads", heads),
        head_dim=whole(config, "head_dim", hidden // heads),
        intermediate_size=whole(config, "intermediate_size"),
        vocab_size=whole(config, "vocab_size", vocab_size),
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope_theta=theta if options.rope_theta is None else options.rope_theta,
        rope_scaling=scaling,
        tie_word_embeddings=False,
        qkv_bias=attention + "q_proj.bias" in shapes,
        output_bias=attention + "o_proj.bias" in shapes,
        qk_norm=attention + "q_norm.weight" in shapes,
        sliding_window=_sliding_window(file),
        max_position_embeddings=whole(config, "max_position_embeddings", 2048),
        eos_token_ids=(),
    )
    check_sizes(shape, shapes, file.path, "")
    return shape


def own_embedding(file: DraftFile, target: Llama, hidden_size: int) -> Tensor | None:
    """The file's embedding [V, H] in the target's dtype; None when the target's serves as well.

    Many files carry a frozen copy of the target's: sharing it saves the memory.

    Raises:
        CheckpointError: neither the file nor the target has one of this width.
    """
    if not has_embedding(file, target, hidden_size):
        return None
    theirs = target.embed_tokens.weight
    own = file.checkpoint.read(_EMBEDDING).to(dtype=theirs.dtype, device=theirs.device)
    return None if target.embed_tokens.holds(own) else own


def has_embedding(file: DraftFile, target: Llama, hidden_size: int) -> bool:
    """Whether the file stores an embedding, by its shape.

    Raises:
        CheckpointError: neither the file nor the target has one of this width.
    """
    found = file.checkpoint.shapes.get(_EMBEDDING)
    width = target.shape.hidden_size
    if found is None:
        if hidden_size == width:
            return False
        raise CheckpointError(
            f"{file.path}: {_EMBEDDING} is missing and the target's cannot stand in: hidden_size="
            f"{hidden_size}, target {width}; use a head trained for this target"
        )
    expected = (target.shape.vocab_size, hidden_size)
    if found != expected:
        raise CheckpointError(
            f"{file.path}: tensor {_EMBEDDING} is {list(found)}, expected {list(expected)}; "
            "use a head trained for this target"
        )
    return True


def embedding_of(weight: Tensor) -> Embedding:
    """An embedding layer over `weight` [V, H]."""
    embedding = Embedding(0, 0)
    embedding.weight = torch.nn.Parameter(weight, requires_grad=False)
    return embedding


def _sliding_window(file: DraftFile) -> int | None:
    """Tokens each draft layer sees, itself included; None for all."""
    config = file.config
    kinds = set(config.get("layer_types") or ())
    is_off = config.get("use_sliding_window") is False or kinds == {"full_attention"}
    if not config.get("sliding_window") or is_off:
        return None
    window = whole(config, "sliding_window")
    if kinds != {"sliding_attention"}:
        raise CheckpointError(
            f"{file.path}: sliding_window={window} with layer_types={sorted(kinds)} does not say "
            "that all draft layers have it, and mixed ones are not supported; correct config.json "
            "(layer_types, or sliding_window=null), or use a head whose layers are alike"
        )
    return window


def _count_layers(names: Iterable[str]) -> int:
    indices = {int(m[1]) for name in names if (m := re.match(r"layers\.(\d+)\.", name))}
    return max(indices, default=0) + 1
