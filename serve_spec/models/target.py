"""From a directory to a target ready to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from serve_spec.config.engine import MAX_POSITIONS
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.module import finish_loading, tensor_defaults
from serve_spec.models.expansion import open_weights
from serve_spec.models.llama import Llama
from serve_spec.models.shape import ModelShape, check_size, check_sizes
from serve_spec.models.weights import Checkpoint
from serve_spec.parallel.group import SINGLE, TensorParallel

TARGETS: dict[str, type[Llama]] = {
    "LlamaForCausalLM": Llama,
    "MistralForCausalLM": Llama,
    "Qwen2ForCausalLM": Llama,
    "Qwen3ForCausalLM": Llama,
}


def load_target(
    path: Path | str,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    max_model_len: int | None = None,
    parallel: TensorParallel = SINGLE,
) -> Llama:
    """Loads a Hugging Face directory, or an expansion of one, built where it runs.

    `max_model_len` bounds positions (default: the config's). Of several ranks each loads its part.

    Raises:
        CheckpointError: what cannot be used, and the way out.
    """
    shape = ModelShape.from_directory(path)
    checkpoint = open_weights(path)
    # A stored matrix wins over the flag: some exporters write both.
    tied = shape.tie_word_embeddings and "lm_head.weight" not in checkpoint
    shape = replace(shape, tie_word_embeddings=tied)
    _check_memory(shape, checkpoint, max_model_len)
    with tensor_defaults(dtype, device):
        model = TARGETS[shape.architecture](shape, max_model_len, parallel)
    checkpoint.load_into(model.tensors())
    finish_loading(model)
    model.path = Path(path)
    return model


def _check_memory(shape: ModelShape, checkpoint: Checkpoint, max_model_len: int | None) -> None:
    """Refuses what config.json says in excess of the files, before memory is taken for it."""
    tensors, directory = checkpoint.shapes, checkpoint.directory
    check_size(tensors, directory, "model.embed_tokens.weight", 0, "vocab_size", shape.vocab_size)
    check_sizes(shape, tensors, directory, "model.")
    if not any(name.startswith(f"model.layers.{shape.num_layers - 1}.") for name in tensors):
        raise CheckpointError(
            f"{directory}/config.json: num_hidden_layers={shape.num_layers}: missing "
            f"model.layers.{shape.num_layers - 1}; correct config.json or fetch the right file"
        )
    if max_model_len is None and shape.max_position_embeddings > MAX_POSITIONS:
        raise CheckpointError(
            f"{directory}/config.json: max_position_embeddings={shape.max_position_embeddings}: "
            f"more than {MAX_POSITIONS}; set max_model_len"
        )
