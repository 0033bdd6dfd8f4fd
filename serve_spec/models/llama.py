"""Llama and the models computed like it: Mistral, Qwen2, Qwen3 (see `ModelShape`)."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from serve_spec.config.checkpoint import text_config
from serve_spec.config.engine import MAX_POSITIONS
from serve_spec.core.context import ForwardContext, torch_dtype
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.module import (
    Destination,
    Layer,
    finish_loading,
    named_parts,
    tensor_defaults,
)
from serve_spec.layers.norm import RMSNorm
from serve_spec.layers.vocabulary import vocab_embedding, vocab_head
from serve_spec.models.decoder import DecoderLayer
from serve_spec.models.dummy import dummy_checkpoint
from serve_spec.models.shape import FAMILIES, ModelShape, check_size, check_sizes, read_json
from serve_spec.models.upscale import open_weights
from serve_spec.models.weights import Checkpoint
from serve_spec.parallel.group import SINGLE, TensorParallel


@dataclass(frozen=True)
class FeatureCapture:
    """Hidden states of the target that a draft reads.

    `layer_ids`: the inputs of these layers (residual stream before any norm), concatenated; layer n
    of n is the stream before the final norm. None: the state after it (EAGLE-1, Medusa).
    """

    layer_ids: tuple[int, ...] | None

    def width(self, hidden_size: int) -> int:
        """Return the width of a feature, F."""
        return hidden_size * (1 if self.layer_ids is None else len(self.layer_ids))


class TargetOutput(NamedTuple):
    """`hidden` [T, H] after the final norm; `streams` [T, H] that were to be captured, if any."""

    hidden: Tensor
    streams: tuple[Tensor, ...] = ()

    @property
    def features(self) -> Tensor | None:
        """Return the captured streams side by side, [T, F]; None if there are none."""
        if len(self.streams) > 1:
            return torch.cat(self.streams, dim=1)
        return self.streams[0] if self.streams else None


class Llama(Layer):
    """A decoder-only transformer over a paged KV pool.

    Created with torch's default dtype and device, uninitialised: `load_target` fills it. With
    tied embeddings `lm_head` reads the embedding's matrix. `shape` is the whole model's,
    `rank_shape` this rank's part, for its KV pool and attention.
    """

    def __init__(
        self, shape: ModelShape, max_model_len: int | None = None, parallel: TensorParallel = SINGLE
    ) -> None:
        super().__init__()
        self.shape = shape
        self.parallel = parallel
        self.rank_shape = shape.on_rank_of(parallel.size)
        self.embed_tokens = vocab_embedding(shape.vocab_size, shape.hidden_size, parallel)
        self.layers = nn.ModuleList(
            DecoderLayer(self.rank_shape, index, parallel=parallel)
            for index in range(shape.num_layers)
        )
        self.norm = RMSNorm(shape.hidden_size, shape.rms_norm_eps, parallel)
        self.lm_head = vocab_head(shape.hidden_size, shape.vocab_size, parallel)
        self.lm_head.out_dtype = torch.float32
        if shape.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight
        self.max_model_len = max_model_len or shape.max_position_embeddings
        self.path: Path | None = None  # of its checkpoint
        self.rope = shape.rotary(self.max_model_len)
        # A plain tuple: iterating a ModuleList is slow.
        self._layers: tuple[DecoderLayer, ...] = tuple(self.layers)  # type: ignore[arg-type]

    def forward(
        self, token_ids: Tensor, ctx: ForwardContext, capture: FeatureCapture | None = None
    ) -> TargetOutput:
        """Return hidden states of `token_ids` [T] (int64) at the positions of `ctx`."""
        hidden = self.embed_tokens(token_ids)
        residual: Tensor | None = None
        rotation = self.rope.at(ctx.positions)
        wanted = () if capture is None else capture.layer_ids
        streams: dict[int, Tensor] = {}
        for index, layer in enumerate(self._layers):
            heads, residual = layer.before_attention(hidden, residual)
            if wanted and index in wanted:
                streams[index] = residual
            attended = layer.attention.attend(heads, rotation, ctx)
            hidden, residual = layer.after_attention(attended, residual)
        assert residual is not None, "a model has at least one layer"
        hidden, residual = self.norm.add(hidden, residual)
        if wanted is None:
            return TargetOutput(hidden, (hidden,))
        streams[len(self._layers)] = residual
        return TargetOutput(hidden, tuple(streams[index] for index in wanted))

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [R, V] of hidden [R, H]; -inf for padding ids."""
        return without_padding(self.lm_head(hidden), self.shape.num_ids)

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by Hugging Face's names; `lm_head.weight` only if it is not tied."""
        return named_parts(
            ("model.embed_tokens.", self.embed_tokens),
            *((f"model.layers.{index}.", layer) for index, layer in enumerate(self._layers)),
            ("model.norm.", self.norm),
            ("", None if self.shape.tie_word_embeddings else self.lm_head),
        )


def without_padding(logits: Tensor, num_ids: int | None) -> Tensor:
    """Set `logits` [R, V] of ids from `num_ids` on (None: none) to -inf, in place."""
    if num_ids is not None:
        logits[:, num_ids:] = float("-inf")
    return logits


TARGETS: dict[str, type[Llama]] = dict.fromkeys(FAMILIES, Llama)


def load_target(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    parallel: TensorParallel = SINGLE,
    *,
    finish: bool = True,
    dummy: bool = False,
) -> Llama:
    """Load a Hugging Face directory, or an expansion of one, or raise CheckpointError.

    `max_model_len` bounds positions (default: the config's). Each of several ranks loads its part.
    finish: False for a model that has gradients. dummy: random weights, no file is read.
    """
    shape, checkpoint = open_target(path, dummy=dummy)
    _check_memory(shape, checkpoint, max_model_len)
    longest = max_model_len or shape.max_position_embeddings
    # A window that holds the longest text hides nothing; attention is faster without.
    windows = tuple(w if w is not None and w < longest else None for w in shape.windows)
    shape = replace(shape, windows=windows)
    with tensor_defaults(dtype, device):
        model = TARGETS[shape.architecture](shape, max_model_len, parallel)
    checkpoint.load_into(model.tensors())
    if finish:
        finish_loading(model)
    model.path = Path(path)
    return model


def target_dtype(name: str, path: Path | str, device: torch.device) -> torch.dtype:
    """Return the dtype for `model.dtype`.

    auto: as in vLLM on a GPU, that is float16 for a float16 checkpoint, else bfloat16. float32 on a
    CPU, where it is exact and no slower.
    """
    if name != "auto":
        return torch_dtype(name)
    if device.type != "cuda":
        return torch.float32
    config = text_config(read_json(Path(path) / "config.json"))
    is_half = "float16" in (config.get("dtype"), config.get("torch_dtype"))
    return torch.float16 if is_half else torch.bfloat16


def open_target(path: Path | str, *, dummy: bool = False) -> tuple[ModelShape, Checkpoint]:
    """Return shape and weights, random if `dummy`; reads no weight. May raise CheckpointError."""
    shape = ModelShape.from_directory(path)
    if dummy:
        with tensor_defaults(torch.float32, "meta"):
            empty = TARGETS[shape.architecture](shape, max_model_len=1)
        shapes = {name: tuple(tensor.shape) for name, tensor in empty.tensors().items()}
        return shape, dummy_checkpoint(Path(path), shapes)
    checkpoint = open_weights(path)
    if any(name.startswith(_BESIDE_TEXT) for name in checkpoint.shapes):
        checkpoint.rename({name: _text_name(name) for name in checkpoint.shapes})
    # A stored matrix wins over the flag: some exporters write both.
    tied = shape.tie_word_embeddings and "lm_head.weight" not in checkpoint
    return replace(shape, tie_word_embeddings=tied), checkpoint


# Prefixes of checkpoints that are multimodal, or hold their own draft.
_BESIDE_TEXT = ("model.language_model.", "language_model.", "visual.", "model.mtp_layers.")
_TEXT_MODEL = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")


def _text_name(stored: str) -> str | None:
    """Return the plain name of a text model's tensor; None for other parts of a checkpoint."""
    name = stored.replace("model.language_model.", "model.").removeprefix("language_model.")
    return name if name.startswith(_TEXT_MODEL) else None


def _check_memory(shape: ModelShape, checkpoint: Checkpoint, max_model_len: int | None) -> None:
    """Raise if config.json claims more than the files hold, before memory is allocated."""
    tensors, directory = checkpoint.shapes, checkpoint.directory
    check_size(tensors, directory, "model.embed_tokens.weight", "vocab_size", shape.vocab_size)
    check_sizes(shape, tensors, directory, "model.")
    if not any(name.startswith(f"model.layers.{shape.num_layers - 1}.") for name in tensors):
        raise CheckpointError(
            f"{directory}/config.json: num_hidden_layers={shape.num_layers}: missing "
            f"model.layers.{shape.num_layers - 1}; correct config.json or fetch the right file"
        )
    if max_model_len is None and shape.max_position_embeddings > MAX_POSITIONS:
        why = f"max_position_embeddings={shape.max_position_embeddings}: more than {MAX_POSITIONS}"
        raise CheckpointError(f"{directory}/config.json: {why}; set max_model_len")
