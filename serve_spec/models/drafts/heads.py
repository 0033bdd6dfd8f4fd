"""What heads of decoder layers share: their names of tensors, sizes, embedding, ids and facts."""

from __future__ import annotations

import re
from dataclasses import replace

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.vocabulary import Embedding
from serve_spec.models.config import positive_integer
from serve_spec.models.drafts.base import DraftFile, DraftOptions, Facts
from serve_spec.models.interfaces import Target
from serve_spec.models.shape import DecoderShape, check_sizes, gate_size, layer_sizes
from serve_spec.models.weights import Checkpoint

EMBEDDING, LM_HEAD, FC = "embed_tokens.weight", "lm_head.weight", "fc.weight"
QUERY, OUTPUT = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"

PREFIX = (r"^model\.", "")
"""A prefix that some exporters write before every name."""

LAYER_NAMES = (
    PREFIX,
    (r"^midlayer\.", "layers.0."),
    # speculators' EAGLE-1.
    (r"^fusion_fc\.", "fc."),
    (r"^transformer\.", "layers.0."),
)
"""Renames of heads that have `fc` and decoder layers."""


def reads_two(matrix: tuple[int, ...], width: tuple[int, ...]) -> bool:
    """Return whether the matrix [out, in] reads two vectors of the given width."""
    return len(matrix) == 2 and matrix[1:] == tuple(2 * size for size in width)


def shape_for(file: DraftFile, target: Target, options: DraftOptions) -> DecoderShape:
    """Return the shape of the head's layers over `target`'s positions, or raise CheckpointError."""
    shape = layer_shape(file, target, options)
    if shape.vocab_size != target.spec.vocab_size:
        raise file.refusal(
            f"vocab_size={shape.vocab_size}, but the target's is {target.spec.vocab_size}"
        )
    return replace(shape, max_position_embeddings=target.max_model_len, num_ids=target.spec.num_ids)


def layer_shape(file: DraftFile, target: Target | None, options: DraftOptions) -> DecoderShape:
    """Return the shape of the head's layers, or raise CheckpointError.

    target: its vocabulary counts if the config has none.
    """
    vocab_size = None if target is None else target.spec.vocab_size
    config, attention = file.config, "layers.0.self_attn."
    has_bias = bool(config.get("attention_bias"))
    num_layers = _num_layers(file)
    shape = DecoderShape(
        **layer_sizes(config),
        num_layers=num_layers,
        vocab_size=positive_integer(config, "vocab_size", vocab_size),
        qkv_bias=file.stores(attention + "q_proj.bias", dummy=has_bias),
        output_bias=file.stores(attention + "o_proj.bias", dummy=has_bias),
        qk_norm=file.stores(attention + "q_norm.weight", dummy=config.get("model_type") == "qwen3"),
        mlp_bias=file.stores("layers.0.mlp.down_proj.bias"),
        windows=(_sliding_window(file),) * num_layers,
    )
    if options.rope_theta is not None:
        shape = replace(shape, rope_theta=options.rope_theta)
    if not file.is_dummy:
        check_sizes(shape, file.shapes, file.path, "", [gate_size(shape)])
    return shape


def _num_layers(file: DraftFile) -> int:
    if file.is_dummy:
        return positive_integer(file.config, "num_hidden_layers", 1)
    found = [int(m[1]) for name in file.shapes if (m := re.match(r"layers\.(\d+)\.", name))]
    return max(found, default=0) + 1


def _sliding_window(file: DraftFile) -> int | None:
    """Return how many tokens each draft layer sees, itself included; None: all."""
    config = file.config
    kinds = set(config.get("layer_types") or ())
    is_off = config.get("use_sliding_window") is False or kinds == {"full_attention"}
    if not config.get("sliding_window") or is_off:
        return None
    window = positive_integer(config, "sliding_window")
    if kinds != {"sliding_attention"}:
        raise file.refusal(
            f"sliding_window={window} with layer_types={sorted(kinds)} does not say that all draft "
            "layers have it, and mixed ones are not supported",
            "correct config.json (layer_types, or sliding_window=null), or use a head whose layers "
            "are alike",
        )
    return window


def check_embedding(file: DraftFile, target: Target, hidden_size: int) -> None:
    """Raise CheckpointError unless the file or the target has an embedding of this width."""
    found, width = file.shapes.get(EMBEDDING), target.spec.hidden_size
    if found is None and hidden_size != width and not file.is_dummy:
        raise file.refusal(
            f"{EMBEDDING} is missing and the target's cannot stand in: hidden_size={hidden_size}, "
            f"target {width}"
        )
    expected = (target.spec.vocab_size, hidden_size)
    if found is not None and found != expected:
        raise file.refusal(f"tensor {EMBEDDING} is {list(found)}, expected {list(expected)}")


def stored_embedding(checkpoint: Checkpoint, embedding: Embedding) -> Embedding:
    """Return a layer with the stored embedding, or `embedding`, the target's, if it is equal.

    Many files hold a copy of the target's; sharing it saves memory.
    """
    if EMBEDDING not in checkpoint:
        return embedding
    theirs = embedding.weight
    own = checkpoint.read(EMBEDDING).to(dtype=theirs.dtype, device=theirs.device)
    if embedding.holds(own):
        return embedding
    layer = Embedding(0, 0)
    layer.weight = torch.nn.Parameter(own, requires_grad=False)
    return layer


def read_d2t(file: DraftFile, rows: int, vocab: int) -> Tensor | None:
    """Return the target's id of each of `rows` draft ids, int64 [Vd]; None if they are the same.

    `d2t` holds offsets (target id - draft id); `t2d` marks the target ids that are reached.
    """
    if file.is_dummy:
        return None if rows == vocab else torch.arange(rows)
    if not file.stores("d2t"):
        if rows == vocab:
            return None
        why = f"tensor d2t is missing although the head draws from {rows} of {vocab} tokens"
        raise file.refusal(why, "fetch the complete file")
    offsets = file.read("d2t")
    if tuple(offsets.shape) != (rows,) or offsets.is_floating_point():
        raise CheckpointError(
            f"{file.path}: tensor d2t is {list(offsets.shape)} of {offsets.dtype}, expected "
            f"[{rows}] integers"
        )
    if rows == vocab and not offsets.any():
        return None
    ids = torch.arange(rows) + offsets.long()
    fix = "d2t must hold offsets (target id - draft id)"
    check_target_ids(file, "d2t", ids, vocab, fix)
    if file.stores("t2d"):
        _check_reached(file, ids, vocab, fix)
    return ids


def check_target_ids(file: DraftFile, name: str, ids: Tensor, vocab: int, fix: str) -> None:
    """Raise CheckpointError unless draft ids map to distinct ids below `vocab`.

    name: the tensor that they come from.
    """
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocab or ids.unique().numel() != ids.numel():
        why = f"{name} maps draft ids to {low} .. {high}, not to distinct ids below {vocab}"
        raise file.refusal(why, fix)


def _check_reached(file: DraftFile, ids: Tensor, vocab: int, fix: str) -> None:
    reached = file.read("t2d")
    if tuple(reached.shape) != (vocab,):
        raise file.refusal(f"tensor t2d is {list(reached.shape)}, expected [{vocab}]")
    if not torch.equal(reached.nonzero().view(-1), ids.sort().values):
        raise file.refusal("t2d marks other tokens than d2t reaches", fix)


def num_draft_ids(target_ids: Tensor | None, num_ids: int | None) -> int | None:
    """Return how many draft ids map to real ids of the target (None: all).

    Raises CheckpointError unless they are the first ones.
    """
    if target_ids is None or num_ids is None:
        return num_ids
    is_real = target_ids < num_ids
    count = int(is_real.sum())
    if not is_real[:count].all():
        raise CheckpointError(
            f"d2t mixes ids below num_ids={num_ids} with padding; padding has to come last"
        )
    return count


def facts(
    file: DraftFile, shape: DecoderShape, options: DraftOptions, theta_hint: str = ""
) -> Facts:
    """Describe the layers of a head; the caller adds which states of the target it reads.

    theta_hint: appended to the rotary base of the config.
    """
    own = "in the file; the target's is used where both are the same"
    return {
        "layers": layers_fact(shape),
        "rope theta": _theta(file, shape, options, theta_hint),
        "biases": f"fc {yes_no(file.stores('fc.bias'))}, qkv {yes_no(shape.qkv_bias)}, "
        f"o_proj {yes_no(shape.output_bias)}, head norms {yes_no(shape.qk_norm)}",
        "vocabulary": _vocabulary(file, shape),
        "embedding": own if file.stores(EMBEDDING) else "the target's",
    }


def layers_fact(shape: DecoderShape) -> str:
    """Return the sizes of layers in a line."""
    window = f", window {shape.sliding_window}" if shape.sliding_window else ""
    return (
        f"{shape.num_layers}, hidden {shape.hidden_size}, {shape.num_heads} heads and "
        f"{shape.num_kv_heads} key heads of {shape.head_dim}, mlp {shape.intermediate_size}{window}"
    )


def yes_no(is_so: bool) -> str:
    """Return yes or no."""
    return "yes" if is_so else "no"


def _theta(file: DraftFile, shape: DecoderShape, options: DraftOptions, hint: str) -> str:
    theta = f"{shape.rope_theta:g}"
    if options.rope_theta is not None:
        return f"{theta}, from speculative_draft_rope_theta"
    rope = file.config.get("rope_parameters") or file.config.get("rope_scaling") or {}
    if "rope_theta" not in {**file.config, **rope}:
        return f"{theta}, the default: config.json has none"
    return f"{theta}, from config.json{hint}"


def _vocabulary(file: DraftFile, shape: DecoderShape) -> str:
    rows = file.shapes.get(LM_HEAD)
    if rows is None:
        return f"{shape.vocab_size} tokens, through the target's lm_head"
    if rows[0] == shape.vocab_size:
        return f"{shape.vocab_size} tokens, own lm_head"
    return f"{rows[0]} of {shape.vocab_size} tokens, own lm_head, ids mapped by d2t (offsets)"
