"""From a directory to a target ready to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from serve_spec.layers.module import finish_loading, tensor_defaults
from serve_spec.models.llama import Llama
from serve_spec.models.shape import ModelShape
from serve_spec.models.weights import open_checkpoint

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
) -> Llama:
    """Loads a Hugging Face directory. `max_model_len` bounds positions (default: the config's).

    Raises:
        CheckpointError: what cannot be used, and the way out.
    """
    shape = ModelShape.from_directory(path)
    checkpoint = open_checkpoint(path)
    # A stored matrix wins over the flag: some exporters write both.
    tied = shape.tie_word_embeddings and "lm_head.weight" not in checkpoint
    shape = replace(shape, tie_word_embeddings=tied)
    with tensor_defaults(dtype, device):
        model = TARGETS[shape.architecture](shape, max_model_len)
    checkpoint.load_into(model.tensors())
    finish_loading(model)
    return model
