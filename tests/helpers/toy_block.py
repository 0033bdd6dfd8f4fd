"""A small random block head in plain torch: DFlash's layers, DSpark's bias and confidence.

`uncached` computes the same block as the papers write it: all at once, from the features, without a
cache. The weights come from a fixed seed.
"""

import torch
import torch.nn.functional as F

from serve_spec.layers.rope import RotaryTable
from serve_spec.models.interfaces import FeatureCapture

NUM_LAYERS = 2
MASK_ID = 5


class ToyBlock:
    """A head for `target`, a `BlockHead`. is_causal: by layer. has_bias: drafts depend on others.

    The bias continues the likeliest tokens of a target without layers, so some drafts are right.
    """

    drafter = "block"
    target_ids = None

    def __init__(
        self, target, *, block_size=4, first_row=1, is_causal=(False, False), has_bias=True
    ):
        self.target = target
        self.hidden_size, shape = target.spec.hidden_size, target.shape
        self.heads, self.kv_heads, self.head_dim = (
            shape.num_heads, shape.num_kv_heads, shape.head_dim,
        )  # fmt: skip
        self.caches = shape.caches[:NUM_LAYERS]
        self.theta = 10_000.0
        self.rope = RotaryTable(self.head_dim, self.theta, None, target.max_model_len)
        self.block_size, self.first_row = block_size, first_row
        self.max_steps = block_size - first_row
        self.is_causal, self.has_bias = is_causal, has_bias
        self.capture = FeatureCapture((1, target.spec.num_layers))
        hidden = self.hidden_size
        self.feature_dim = 2 * hidden
        self.dtype = torch.float32
        generator = torch.Generator().manual_seed(0)

        def matrix(out, width):
            return torch.randn(out, width, generator=generator) * width**-0.5

        self.fc = matrix(hidden, self.feature_dim)
        qkv = (self.heads + 2 * self.kv_heads) * self.head_dim
        self.layers = [
            (
                matrix(qkv, hidden),
                matrix(hidden, self.heads * self.head_dim),
                matrix(hidden, hidden),
            )
            for _ in range(NUM_LAYERS)
        ]

    def context(self, features):
        """Return the context tokens [T, H] of features [T, F]."""
        return norm(features @ self.fc.T)

    def enter(self, features, ctx):
        """See `BlockHead`."""
        rotation, tokens = self.rope.at(ctx.positions), self.context(features)
        for index, (qkv, _, _) in enumerate(self.layers):
            ctx.attention.run(index, self.projected(tokens, qkv), rotation)

    def block(self, anchors, ctx):
        """See `BlockHead`."""
        rotation = self.rope.at(ctx.positions)

        def attend(index, heads):
            return ctx.attention.run(index, heads, rotation)

        return self.run_layers(anchors, attend).view(len(anchors), self.block_size, -1)

    def uncached(self, features, anchor):
        """Return the hidden states [block_size, H] after a text of features [S, F]."""
        context = self.context(features)
        positions = torch.arange(len(context) + self.block_size)

        def attend(index, heads):
            before = self.projected(context, self.layers[index][0])
            heads = torch.cat([before, heads])
            split = (self.heads, self.kv_heads, self.kv_heads)
            query, key, value = heads.split(split, dim=1)
            rotated = [rotate(x, positions, self.theta) for x in (query, key)]
            sees = torch.ones(len(heads), len(heads), dtype=torch.bool)
            if self.is_causal[index]:
                sees = sees.tril()
            query, key, value = (x.transpose(0, 1) for x in (*rotated, value))
            key, value = (x.repeat_interleave(self.heads // self.kv_heads, 0) for x in (key, value))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=sees)
            return attended.transpose(0, 1)[len(context) :]

        return self.run_layers(torch.tensor([anchor]), attend)

    def run_layers(self, anchors, attend):
        """Return the hidden states of blocks, one after another."""
        ids = torch.full((len(anchors), self.block_size), MASK_ID)
        ids[:, 0] = anchors
        stream = self.target.embed_tokens(ids.flatten())
        for index, (qkv, out, mlp) in enumerate(self.layers):
            attended = attend(index, self.projected(norm(stream), qkv))
            stream = stream + attended.flatten(1) @ out.T
            stream = stream + F.silu(norm(stream)) @ mlp.T
        return norm(stream)

    def projected(self, x, qkv):
        """Return queries, keys and values [T, heads + 2·kv_heads, d] before rotation."""
        return (x @ qkv.T).view(len(x), -1, self.head_dim)

    def logits(self, hidden):
        """See `BlockHead`."""
        logits = self.target.logits(hidden.flatten(0, 1) / 8)
        return logits.view(*hidden.shape[:2], -1)

    def step_logits(self, logits, hidden, before):
        """See `BlockHead`."""
        found = logits[:, before.shape[1] - 1]
        if self.has_bias:
            found = found + self.target.logits(norm(self.target.embed_tokens(before[:, -1])))
        return found

    def confidence(self, hidden, before):
        """See `BlockHead`."""
        return torch.sigmoid(hidden.sum(dim=2) - before[:, 1:] / 100) if self.has_bias else None


def norm(x):
    """Scale x to a mean square of 1."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def rotate(x, positions, theta):
    """Rotate [T, heads, d] by position: x·cos + (-x2, x1)·sin."""
    width = x.shape[2]
    angles = torch.outer(positions.double(), theta ** (-torch.arange(0, width, 2) / width))
    cos, sin = (torch.cat([part, part], 1).unsqueeze(1) for part in (angles.cos(), angles.sin()))
    first, second = x.double().chunk(2, dim=2)
    return (x * cos + torch.cat([-second, first], dim=2) * sin).float()
