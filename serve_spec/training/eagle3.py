"""EAGLE-3 head in the public layout, trained by training-time test (arXiv 2503.01840)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from serve_spec.training.llama import (
    Attention,
    FeedForward,
    Linear,
    Llama,
    Norm,
    last_layer,
    llama_config,
)
from serve_spec.training.settings import LlamaShape
from serve_spec.training.teacher import Lesson


class Midlayer(nn.Module):
    """Decoder layer whose attention reads [norm(embedding) ; norm(state)], embedding first."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape, input_size=2 * shape.hidden_size)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape)
        self.hidden_norm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)


class Eagle3Head(nn.Module):
    """One layer over the target's low, middle and high features, with its own output head.

    The state fed back from step to step is the layer's output before `norm`.
    """

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(3 * shape.hidden_size, shape.hidden_size)
        self.midlayer = Midlayer(shape)
        self.norm = Norm(shape)
        self.lm_head = Linear(shape.hidden_size, shape.vocab_size)

    def enter(self, lesson: Lesson) -> Tensor:
        """fc over the captured features [B, T, 3H]: [B, T, H]."""
        state: Tensor = self.fc(lesson.captured)
        return state

    def project(
        self, embeds: Tensor, state: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual and rotated q, k, and v of one step."""
        layer = self.midlayer
        joined = torch.cat([layer.input_layernorm(embeds), layer.hidden_norm(state)], dim=-1)
        return (state, *layer.self_attn.project(joined, cos, sin))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection and feed-forward: the next state [B, T, H]."""
        layer = self.midlayer
        hidden = residual + layer.self_attn.merge(attended)
        state: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return state

    def logits(self, state: Tensor) -> Tensor:
        """Draft logits [B, T, V]; the draft vocabulary is the whole vocabulary."""
        logits: Tensor = self.lm_head(self.norm(state))
        return logits


@torch.no_grad()
def eagle3_from(target: Llama, generator: torch.Generator) -> Eagle3Head:
    """Head that starts as the target's last layer reading the target's highest feature."""
    head = Eagle3Head(target.shape)
    hidden = target.shape.hidden_size
    last = last_layer(target)
    fc = torch.zeros(hidden, 3 * hidden)
    fc[:, 2 * hidden :] = torch.eye(hidden)
    head.fc.weight.copy_(fc + _noise(fc.shape, generator))
    ours, theirs = head.midlayer.self_attn, last.self_attn
    for name in ("q_proj", "k_proj", "v_proj"):
        weight = getattr(theirs, name).weight
        widened = torch.cat([_noise(weight.shape, generator), weight], dim=1)
        getattr(ours, name).weight.copy_(widened)
    ours.o_proj.weight.copy_(theirs.o_proj.weight)
    head.midlayer.mlp.load_state_dict(last.mlp.state_dict())
    head.midlayer.hidden_norm.weight.copy_(last.input_layernorm.weight)
    head.midlayer.post_attention_layernorm.weight.copy_(last.post_attention_layernorm.weight)
    head.norm.weight.copy_(target.model.norm.weight)
    head.lm_head.weight.copy_(target.embedding)
    return head.to(target.embedding.device)


def _noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.02


def eagle3_config(shape: LlamaShape) -> dict[str, Any]:
    """config.json: no capture ids (so layers 2, n//2, n-3), no d2t, rope_theta said plainly."""
    config = llama_config(shape, "LlamaForCausalLMEagle3")
    return {
        **config,
        "num_hidden_layers": 1,
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": shape.hidden_size,
        "tie_word_embeddings": False,
    }
