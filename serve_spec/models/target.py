"""From a directory to a target ready to run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from serve_spec.layers.module import finish_loading, tensor_defaults
from serve_spec.models.expansion import open_weights
from serve_spec.models.llama import Llama
from serve_spec.models.shape import ModelShape
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
    with tensor_defaults(dtype, device):
        model = TARGETS[shape.architecture](shape, max_model_len, parallel)
    checkpoint.load_into(model.tensors())
    finish_loading(model)
    model.path = Path(path)
    return model
