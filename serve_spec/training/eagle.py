"""EAGLE-1 head in the public layout (arXiv 2401.15077), trained by the same unroll as EAGLE-3."""

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


class EagleLayer(nn.Module):
    """Decoder layer without an input norm, as layer 0 of public EAGLE-1 heads."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.post_attention_layernorm = Norm(shape)


class EagleHead(nn.Module):
    """Predicts the target's next post-norm feature; the target's own head makes it logits."""

    output_head: Tensor

    def __init__(self, shape: LlamaShape, output_head: Tensor) -> None:
        super().__init__()
        self.shape = shape
        self.fc = Linear(2 * shape.hidden_size, shape.hidden_size)
        self.layers = nn.ModuleList([EagleLayer(shape)])
        self.register_buffer("output_head", output_head, persistent=False)

    @property
    def layer(self) -> EagleLayer:
        layer = self.layers[0]
        assert isinstance(layer, EagleLayer)
        return layer

    def enter(self, lesson: Lesson) -> Tensor:
        """The target's feature as it is: [B, T, H]."""
        # Marked as differentiable so that step 0 runs the same compiled graph as later steps.
        return lesson.last.detach().requires_grad_(torch.is_grad_enabled())

    def project(
        self, embeds: Tensor, state: Tensor, cos: Tensor, sin: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Residual fc([embedding ; feature]) and rotated q, k, and v of one step."""
        residual = self.fc(torch.cat([embeds, state], dim=-1))
        return (residual, *self.layer.self_attn.project(residual, cos, sin))

    def finish(self, residual: Tensor, attended: Tensor) -> Tensor:
        """Output projection and feed-forward: the predicted feature [B, T, H]."""
        layer = self.layer
        hidden = residual + layer.self_attn.merge(attended)
        state: Tensor = hidden + layer.mlp(layer.post_attention_layernorm(hidden))
        return state

    def logits(self, state: Tensor) -> Tensor:
        """Target head applied to the predicted feature, without a norm: [B, T, V]."""
        return nn.functional.linear(state, self.output_head)


@torch.no_grad()
def eagle_from(target: Llama, generator: torch.Generator) -> EagleHead:
    """Head that passes the feature on, its layer silent at first.

    The layer starts as the target's last one, but nothing normalises its input here: features are
    far larger than what that layer was trained on, so its two output matrices start at zero (with
    the target's own they made the loss diverge). The token's half of fc is scaled to add half the
    size of a feature: embeddings are small, and a draft that can not see the token learns slowly.
    """
    hidden = target.shape.hidden_size
    head = EagleHead(target.shape, target.embedding.detach())
    last = last_layer(target)
    feature_rms = target.model.norm.weight.float().pow(2).mean().sqrt()
    token_norm = target.embedding.float().pow(2).mean().sqrt() * hidden**0.5
    token_half = torch.randn(hidden, hidden, generator=generator)
    token_half *= (0.5 * feature_rms / token_norm).cpu()
    head.fc.weight.copy_(torch.cat([token_half, torch.eye(hidden)], dim=1))
    head.layer.self_attn.load_state_dict(last.self_attn.state_dict())
    head.layer.mlp.load_state_dict(last.mlp.state_dict())
    head.layer.post_attention_layernorm.load_state_dict(last.post_attention_layernorm.state_dict())
    head.layer.self_attn.o_proj.weight.zero_()
    head.layer.mlp.down_proj.weight.zero_()
    return head.to(target.embedding.device)


def eagle_config(shape: LlamaShape) -> dict[str, Any]:
    """config.json; `bias: false` because fc has none."""
    config = llama_config(shape, "LlamaForCausalLMEagle")
    return {**config, "num_hidden_layers": 1, "bias": False, "tie_word_embeddings": False}
