"""Generation with the target: batches with a static KV cache, and the on-policy pool."""

from __future__ import annotations

import time
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from tqdm import tqdm

from recipes.training.causal import Rows, causal_context, row_positions
from recipes.training.settings import RolloutPlan
from recipes.training.weights import save_state
from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.models.decoder import Decoder
from serve_spec.models.shape import DecoderShape

_PREFILL_ROWS = 512


class CachedAttention(Rows):
    """Attention of one new token per row over a static cache."""

    def __init__(self, shape: DecoderShape, keys: Tensor, values: Tensor, place: int) -> None:
        """Take keys and values [layers, B, kv_heads, length, D], filled up to `place`."""
        super().__init__(keys.shape[1], shape.caches)
        self._keys, self._values, self._place = keys, values, place
        windows = [cache.window for cache in shape.caches]
        self._firsts = [max(0, place + 1 - window) if window else 0 for window in windows]

    def run(
        self, layer: int, heads: Tensor, rotation: Rotation, sinks: Tensor | None = None
    ) -> Tensor:
        """Return [B, heads, D]; see `LayerAttention`."""
        assert sinks is None, "targets trained here have no sinks"
        query, key, value = self.split(layer, heads, rotation)
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self._place : self._place + 1] = key
        values[:, :, self._place : self._place + 1] = value
        # Query heads of one KV head become query rows, so that keys are read once.
        grouped = query.unflatten(1, (keys.shape[1], -1)).squeeze(3)
        seen = slice(self._firsts[layer], self._place + 1)
        cache = self.caches[layer]
        assert cache.softcap is None, "targets trained here have no softcap"
        out = F.scaled_dot_product_attention(
            grouped, keys[:, :, seen], values[:, :, seen], scale=cache.scale
        )
        return out.flatten(1, 2)


def gumbel_like(logits: Tensor) -> Tensor:
    """Return fresh standard Gumbel noise with the shape of `logits`."""
    return torch.empty_like(logits).exponential_().log_().neg_()


@torch.no_grad()
def continue_rows(
    model: Decoder,
    prompts: Tensor,
    new_tokens: int,
    temperature: Tensor,
    noise: Tensor | None = None,
) -> Tensor:
    """Continue prompts [B, P] by `new_tokens` each; return [B, P + new_tokens] int64.

    model: as `load_target` returns it.
    `<eos>` does not stop a row but starts the next document. `noise` [B, new_tokens, V] is the
    Gumbel noise; without it, noise is drawn from the global generator.
    """
    rows, start = prompts.shape
    shape, weight = model.shape, model.embed_tokens.weight
    size = (shape.num_layers, rows, shape.num_kv_heads, start + new_tokens, shape.head_dim)
    keys = torch.empty(size, device=weight.device, dtype=weight.dtype)
    values = torch.empty_like(keys)
    tokens = torch.cat([prompts, prompts.new_zeros(rows, new_tokens)], dim=1)
    hidden = _prefill(model, prompts, keys, values)
    for place in range(new_tokens):
        # float32, because bfloat16 logits change about one token in a hundred.
        logits = model.logits(hidden)
        gumbel = gumbel_like(logits) if noise is None else noise[:, place]
        tokens[:, start + place] = (logits + temperature * gumbel).argmax(-1)
        if place + 1 < new_tokens:
            attention = CachedAttention(shape, keys, values, start + place)
            positions = row_positions(rows, 1, weight.device, first=start + place)
            context = ForwardContext(positions, attention)
            hidden = model.forward(tokens[:, start + place], context).hidden
    return tokens


def _prefill(model: Decoder, prompts: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    """Fill the cache from prompts [B, P]; return the hidden state of their last token, [B, H]."""
    last: list[Tensor] = []
    length = prompts.shape[1]
    for start in range(0, len(prompts), _PREFILL_ROWS):
        chunk = prompts[start : start + _PREFILL_ROWS]
        kept: list[tuple[Tensor, Tensor]] = []
        out = model.forward(chunk.flatten(), causal_context(model.shape, chunk, kept))
        last.append(out.hidden.unflatten(0, chunk.shape)[:, -1])
        rows = slice(start, start + len(chunk))
        for index, (key, value) in enumerate(kept):
            keys[index, rows, :, :length] = key
            values[index, rows, :, :length] = value
    return torch.cat(last)


def build_pool(model: Decoder, train: Tensor, plan: RolloutPlan, seed: int, path: Path) -> Tensor:
    """Generate on-policy rows [R, row_tokens] in equal parts by temperature; save them to `path`.

    Stop at `plan.max_batches` or before a batch would exceed `plan.seconds`.
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
        batches.append(rows.to(train.dtype).cpu())
    pool = torch.cat(batches)
    save_state(path, {"pool": pool, "temperatures": list(plan.temperatures)})
    return pool.to(train.device)


def windows(stream: Tensor, rows: int, row_tokens: int, rng: torch.Generator) -> Tensor:
    """Return random rows of `stream` [N], int64 [rows, row_tokens]; rng: on the CPU."""
    room = len(stream) - row_tokens
    if room <= 0:
        raise ValueError(
            f"row_tokens={row_tokens}: the stream has only {len(stream)} tokens; add text"
        )
    starts = torch.randint(0, room, (rows,), generator=rng).to(stream.device)
    return stream[starts[:, None] + torch.arange(row_tokens, device=stream.device)].long()


def mixed_rows(
    step: int, stream: Tensor, pool: Tensor, num_tokens: int, row_tokens: int, rng: torch.Generator
) -> Tensor:
    """Return corpus rows on odd steps, on-policy rows on even ones, with equal token counts."""
    if step % 2:
        return windows(stream, max(1, num_tokens // row_tokens), row_tokens, rng)
    rows = max(1, num_tokens // pool.shape[1])
    return pool[torch.randint(0, len(pool), (rows,), generator=rng).to(pool.device)].long()
