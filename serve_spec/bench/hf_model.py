"""A target as a transformers model over the same weights, to compare speeds with its `generate`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from serve_spec.models import Llama, ModelShape


def as_transformers(target: Llama, vocab_size: int | None = None) -> LlamaForCausalLM:
    """`target` as transformers computes it, on its device. Weights are shared, nothing is copied.

    vocab_size: width of the logits, with -inf past the target's real ids; None: the target's own.
    Assisted generation wants it equal in model and assistant, so the assistant of an expanded
    target is `as_transformers(base, expanded.shape.vocab_size)`. It is right about every token.

    Raises:
        ValueError: not a Llama, or weights packed for a CPU or spread over ranks.
    """
    shape = target.shape
    if shape.architecture != "LlamaForCausalLM":
        raise ValueError(f"architecture={shape.architecture!r}: only Llama targets can be compared")
    if not all(parameter.numel() for parameter in target.parameters()):
        raise ValueError("the weights are packed for this CPU; load the target on a GPU")
    tensors = {**target.tensors(), "lm_head.weight": target.lm_head.weight}
    if not all(isinstance(tensor, Tensor) for tensor in tensors.values()):
        raise ValueError("the weights are spread over ranks; load the target on one GPU")
    with torch.device("meta"):
        model = LlamaForCausalLM(_config(shape))
        model.lm_head = _Head(shape, vocab_size or shape.vocab_size)
    model.load_state_dict(tensors, assign=True)
    model.model.rotary_emb = LlamaRotaryEmbedding(model.config).to(target.lm_head.weight.device)
    model.config.vocab_size = vocab_size or shape.vocab_size
    model.requires_grad_(False).train(False)
    return model


class _Head(nn.Module):
    """The output head, all rows computed, with -inf for ids that are not real."""

    def __init__(self, shape: ModelShape, vocab_size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape.vocab_size, shape.hidden_size))
        self.num_ids = shape.num_ids or shape.vocab_size
        self.num_added = vocab_size - shape.vocab_size

    def forward(self, hidden: Tensor) -> Tensor:
        """[..., H] -> [..., vocab_size]."""
        logits = F.linear(hidden, self.weight)
        logits[..., self.num_ids :] = float("-inf")
        return F.pad(logits, (0, self.num_added), value=float("-inf"))


def _config(shape: ModelShape) -> LlamaConfig:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": shape.rope_theta}
    if shape.rope_scaling is not None:
        rope |= {"rope_type": "llama3", **asdict(shape.rope_scaling)}
    eos = list(shape.eos_token_ids)
    return LlamaConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=shape.max_position_embeddings,
        rms_norm_eps=shape.rms_norm_eps,
        rope_parameters=rope,
        attention_bias=shape.output_bias,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=eos or None,
        pad_token_id=eos[0] if eos else 0,
    )
