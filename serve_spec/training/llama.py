"""Plain Llama decoder for training: the parameter names and the arithmetic of the public class.

`Llama.state_dict()` has the names of transformers' `LlamaForCausalLM` with tied embeddings, so an
exported checkpoint loads there unchanged. Kept apart from transformers because EAGLE features,
per-layer keys and whole-graph compilation need the inside of the forward pass.
"""

from __future__ import annotations

import copy
from dataclasses import asdict
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.training.settings import EOS_ID, LlamaShape


class Hidden(NamedTuple):
    """One forward pass: post-norm hidden [B, T, H] and the captured layer inputs, each the same."""

    last: Tensor
    captured: tuple[Tensor, ...]


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Root-mean-square norm in float32, scaled by `weight` [H]; same shape and dtype as `x`."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return weight.to(x.dtype) * wide.to(x.dtype)


def rotary_table(
    length: int, head_dim: int, theta: float, device: torch.device
) -> tuple[Tensor, Tensor]:
    """cos and sin for positions 0..length-1, each float32 [length, head_dim]."""
    exponent = torch.arange(0, head_dim, 2, device=device, dtype=torch.float32) / head_dim
    position = torch.arange(length, device=device, dtype=torch.float32)
    angle = position[:, None] * (1.0 / theta**exponent)
    angle = torch.cat([angle, angle], dim=-1)
    return angle.cos(), angle.sin()


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary embedding of `x` [B, heads, T, D] with tables [T, D], computed in float32."""
    wide = x.float()
    first, second = wide.chunk(2, dim=-1)
    return (wide * cos + torch.cat([-second, first], dim=-1) * sin).to(x.dtype)


class Linear(nn.Linear):
    """Bias-free product that lets float32 master weights meet bfloat16 features."""

    def __init__(self, in_features: int, out_features: int) -> None:
        super().__init__(in_features, out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight.to(x.dtype))


class Attention(nn.Module):
    """Grouped-query attention without biases; draft layers may read a wider input."""

    def __init__(self, shape: LlamaShape, input_size: int | None = None) -> None:
        super().__init__()
        width, dim = input_size or shape.hidden_size, shape.head_dim
        self.head_dim = dim
        self.q_proj = Linear(width, shape.num_attention_heads * dim)
        self.k_proj = Linear(width, shape.num_key_value_heads * dim)
        self.v_proj = Linear(width, shape.num_key_value_heads * dim)
        self.o_proj = Linear(shape.num_attention_heads * dim, shape.hidden_size)

    def project(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Rotated queries and keys, and values: each [B, heads, T, D]."""
        q, k, v = (
            layer(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def merge(self, attended: Tensor) -> Tensor:
        """Heads [B, heads, T, D] back to the residual width [B, T, H]."""
        out: Tensor = self.o_proj(attended.transpose(1, 2).flatten(2))
        return out


class FeedForward(nn.Module):
    """SwiGLU feed-forward."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.gate_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.up_proj = Linear(shape.hidden_size, shape.intermediate_size)
        self.down_proj = Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Norm(nn.Module):
    """RMSNorm with a learnt weight [H]."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.eps = shape.rms_norm_eps
        self.weight = nn.Parameter(torch.ones(shape.hidden_size))

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class Layer(nn.Module):
    """One pre-norm decoder layer."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = FeedForward(shape)
        self.input_layernorm = Norm(shape)
        self.post_attention_layernorm = Norm(shape)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Causal self-attention over `x` [B, T, H]; also returns keys and values."""
        q, k, v = self.self_attn.project(self.input_layernorm(x), cos, sin)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.close(x, attended), k, v

    def close(self, x: Tensor, attended: Tensor) -> Tensor:
        """Residual and feed-forward after attention."""
        x = x + self.self_attn.merge(attended)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers and final norm (the `model.` part of the public names)."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))
        self.norm = Norm(shape)


class Llama(nn.Module):
    """Causal language model with tied embeddings."""

    def __init__(self, shape: LlamaShape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Decoder(shape)

    @property
    def embedding(self) -> Tensor:
        """Token embedding, which is also the output head: [V, H]."""
        return self.model.embed_tokens.weight

    def initialise(self, generator: torch.Generator) -> None:
        """N(0, 0.02) everywhere, smaller by sqrt(2 layers) where a branch joins the residual."""
        joined = 0.02 / (2 * self.shape.num_hidden_layers) ** 0.5
        with torch.no_grad():
            for name, weight in self.named_parameters():
                if weight.ndim < 2:
                    continue
                std = joined if name.endswith(("o_proj.weight", "down_proj.weight")) else 0.02
                weight.copy_(torch.randn(weight.shape, generator=generator) * std)

    def forward(
        self,
        tokens: Tensor,
        captures: tuple[int, ...] = (),
        cache: list[tuple[Tensor, Tensor]] | None = None,
    ) -> Hidden:
        """Run `tokens` [B, T] from position 0.

        `captures` names layers whose input is returned; `cache` receives (keys, values) per layer.
        """
        shape = self.shape
        x = self.model.embed_tokens(tokens)
        cos, sin = rotary_table(tokens.shape[1], shape.head_dim, shape.rope_theta, tokens.device)
        captured: list[Tensor] = []
        for index, layer in enumerate(self.model.layers):
            if index in captures:
                captured.append(x)
            x, k, v = layer(x, cos, sin)
            if cache is not None:
                cache.append((k, v))
        return Hidden(self.model.norm(x), tuple(captured))

    def logits(self, last: Tensor) -> Tensor:
        """Next-token logits [..., V] of post-norm hidden [..., H]."""
        return F.linear(last, self.embedding)


def last_layer(model: Llama) -> Layer:
    """A float32 copy of the last layer, on the CPU: what draft layers start from."""
    layer = copy.deepcopy(model.model.layers[-1]).float().cpu()
    assert isinstance(layer, Layer)
    return layer


def llama_config(shape: LlamaShape, architecture: str = "LlamaForCausalLM") -> dict[str, Any]:
    """config.json of a checkpoint with this shape.

    `rope_theta` is written both in the classic place and in transformers 5's `rope_parameters`.
    """
    return {
        "architectures": [architecture],
        "model_type": "llama",
        **asdict(shape),
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.rope_theta},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": EOS_ID,
        "eos_token_id": EOS_ID,
        "pad_token_id": None,
        "initializer_range": 0.02,
        "use_cache": True,
    }
