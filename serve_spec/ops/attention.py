"""Attention of dense rows in torch: one layer's scale, softcap and sinks, with gradients."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from serve_spec.core.caches import PagedCache


def attend(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    cache: PagedCache,
    *,
    mask: Tensor | None = None,
    is_causal: bool = False,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the attention [B, heads, Q, dv] of query [B, heads, Q, dk], in its dtype.

    keys [B, kv_heads, L, dk], values [B, kv_heads, L, dv], as stored, but in the dtype of the
    query; kv_heads divides heads. mask: added to
    the scores, [Q, L] or broadcastable to [B, heads, Q, L]. is_causal: query token i of L sees the
    keys 0 .. i. Without both every token sees every key. sinks: the logits of `PagedCache`,
    broadcastable to [B, heads, Q, 1]. The window of `cache` is left to the mask.
    """
    group = query.shape[1] // keys.shape[1]
    if cache.softcap is None and not cache.has_sinks:
        mixed = F.scaled_dot_product_attention(
            query,
            keys,
            values,
            attn_mask=mask,
            is_causal=is_causal,
            scale=cache.score_scale,
            enable_gqa=group > 1,
        )
        return mixed if cache.value_scale == 1.0 else mixed * cache.value_scale
    if group > 1:
        keys, values = (each.repeat_interleave(group, dim=1) for each in (keys, values))
    wide = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(wide) @ keys.to(wide).mT * cache.score_scale
    if cache.softcap is not None:
        scores = cache.softcap * (scores / cache.softcap).tanh()
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, float("-inf"))
    if mask is not None:
        scores = scores + mask
    if cache.has_sinks:
        assert sinks is not None, "a layer with sinks gives their logits"
        sinks = sinks.to(wide).expand(*scores.shape[:-1], 1)
        scores = torch.cat((scores, sinks), dim=-1)
    weights = scores.softmax(dim=-1)[..., : keys.shape[2]]
    return (weights @ values.to(wide) * cache.value_scale).to(query.dtype)
