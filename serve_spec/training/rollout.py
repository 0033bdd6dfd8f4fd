"""Rollout: the target continues prompts by itself, with a static cache and one batch per call."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from serve_spec.training.batches import windows
from serve_spec.training.checkpoint import save_state
from serve_spec.training.llama import Layer, Llama, rotary_table
from serve_spec.training.settings import RolloutPlan

_PREFILL_ROWS = 512


class Cache:
    """Keys and values of every layer for `rows` sequences of up to `length` tokens."""

    def __init__(self, model: Llama, rows: int, length: int) -> None:
        shape, weight = model.shape, model.embedding
        size = (shape.num_hidden_layers, rows, shape.num_key_value_heads, length, shape.head_dim)
        self.keys = torch.empty(size, device=weight.device, dtype=weight.dtype)
        self.values = torch.empty_like(self.keys)

    def prefill(self, model: Llama, prompts: Tensor) -> Tensor:
        """Fill from prompts [B, P]; post-norm hidden of the last prompt token, [B, H]."""
        last: list[Tensor] = []
        for start in range(0, len(prompts), _PREFILL_ROWS):
            chunk = prompts[start : start + _PREFILL_ROWS]
            kept: list[tuple[Tensor, Tensor]] = []
            last.append(model(chunk, cache=kept).last[:, -1])
            for index, (k, v) in enumerate(kept):
                rows = slice(start, start + len(chunk))
                self.keys[index, rows, :, : prompts.shape[1]] = k
                self.values[index, rows, :, : prompts.shape[1]] = v
        return torch.cat(last)

    def attend(self, index: int, q: Tensor, k: Tensor, v: Tensor, position: int) -> Tensor:
        """Store one token's k, v [B, kv, 1, D] and attend to all so far: [B, heads, 1, D]."""
        keys, values = self.keys[index], self.values[index]
        keys[:, :, position : position + 1] = k
        values[:, :, position : position + 1] = v
        # The query heads of one kv head act as so many query rows: no key is read twice.
        grouped = q.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        seen = slice(0, position + 1)
        out = F.scaled_dot_product_attention(grouped, keys[:, :, seen], values[:, :, seen])
        return out.flatten(1, 2).unsqueeze(2)


def next_tokens(logits: Tensor, temperature: Tensor, gumbel: Tensor) -> Tensor:
    """argmax(logits + T * gumbel): a sample at temperature T, the argmax at T = 0.

    Args:
        logits, gumbel: float32 [B, V]. temperature: [B, 1].
    """
    return (logits + temperature * gumbel).argmax(-1)


def gumbel_like(logits: Tensor) -> Tensor:
    """Fresh standard Gumbel noise with the shape of `logits`."""
    return torch.empty_like(logits).exponential_().log_().neg_()


@torch.no_grad()
def continue_rows(
    model: Llama, prompts: Tensor, new_tokens: int, temperature: Tensor, noise: Tensor | None = None
) -> Tensor:
    """Continue prompts [B, P] by `new_tokens` each; [B, P + new_tokens] int64.

    `<eos>` does not stop a row: it starts the next document. `noise` [B, new_tokens, V] fixes the
    Gumbel noise by place, without it noise is drawn from the global generator.
    """
    rows, start = prompts.shape
    shape = model.shape
    cache = Cache(model, rows, start + new_tokens)
    cos, sin = rotary_table(
        start + new_tokens, shape.head_dim, shape.rope_theta, model.embedding.device
    )
    tokens = torch.cat([prompts, prompts.new_zeros(rows, new_tokens)], dim=1)
    hidden = cache.prefill(model, prompts)
    for place in range(new_tokens):
        # Logits leave the head in float32: bfloat16 ones change about one token in a hundred.
        logits = hidden.float() @ model.embedding.float().T
        gumbel = gumbel_like(logits) if noise is None else noise[:, place]
        tokens[:, start + place] = next_tokens(logits, temperature, gumbel)
        if place + 1 < new_tokens:
            hidden = _decode(model, cache, tokens[:, start + place], start + place, cos, sin)
    return tokens


def _decode(
    model: Llama, cache: Cache, tokens: Tensor, position: int, cos: Tensor, sin: Tensor
) -> Tensor:
    """One token per row at `position`: post-norm hidden [B, H]."""
    x = model.model.embed_tokens(tokens[:, None])
    here = slice(position, position + 1)
    for index, layer in enumerate(model.model.layers):
        assert isinstance(layer, Layer)
        q, k, v = layer.self_attn.project(layer.input_layernorm(x), cos[here], sin[here])
        x = layer.close(x, cache.attend(index, q, k, v, position))
    hidden: Tensor = model.model.norm(x)[:, 0]
    return hidden


def build_pool(model: Llama, train: Tensor, plan: RolloutPlan, seed: int, path: Path) -> Tensor:
    """On-policy rows int16 [R, row_tokens], temperatures in equal parts; also written to `path`.

    Stops at `plan.max_batches` or before a batch would overrun `plan.seconds`.
    """
    rng = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    count = len(plan.temperatures)
    temperature = torch.tensor(plan.temperatures, device=train.device)
    temperature = temperature[torch.arange(plan.rows_per_batch, device=train.device) % count, None]
    new_tokens = plan.row_tokens - plan.prompt_tokens
    batches: list[Tensor] = []
    started = time.monotonic()
    for done in tqdm(range(plan.max_batches), desc="rollout"):
        spent = time.monotonic() - started
        if done and spent * (done + 1) / done > plan.seconds:
            break
        prompts = windows(train, plan.rows_per_batch, plan.prompt_tokens, rng)
        rows = continue_rows(model, prompts, new_tokens, temperature)
        batches.append(rows.to(torch.int16).cpu())
    pool = torch.cat(batches)
    save_state(path, {"pool": pool, "temperatures": list(plan.temperatures)})
    return pool.to(train.device)
