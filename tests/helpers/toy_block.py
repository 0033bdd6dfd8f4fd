"""A small block head in plain torch: DFlash's layers, DSpark's bias and confidence.

`uncached` computes the same block as the papers write it: in one forward, from the features,
without a cache.
"""

import torch
import torch.nn.functional as F
from torch import nn

from serve_spec.layers.rope import RotaryTable
from serve_spec.models.drafts.base import Draft, DraftFamily, Evidence
from serve_spec.models.interfaces import FeatureCapture
from tests.helpers.checkpoints import read_checkpoint, write_checkpoint

NUM_LAYERS = 2
MASK_ID = 5
THETA = 10_000.0


def make_toy_block(directory, target_dir, **settings):
    """Write a random head for a target.

    settings: method, the name of its `DraftMethod`; block_size, first_row; is_causal, by layer;
    has_bias: whether drafts depend on others.
    """
    config = read_checkpoint(target_dir)[0]
    hidden, head_dim = int(config["hidden_size"]), int(config["head_dim"])
    query = int(config["num_attention_heads"]) * head_dim
    key = int(config["num_key_value_heads"]) * head_dim
    generator = torch.Generator().manual_seed(0)

    def matrix(out, width):
        return torch.randn(out, width, generator=generator) * width**-0.5

    tensors = {"toy.fc": matrix(hidden, 2 * hidden)}
    for layer in range(NUM_LAYERS):
        tensors[f"toy.{layer}.qkv"] = matrix(query + 2 * key, hidden)
        tensors[f"toy.{layer}.out"] = matrix(hidden, query)
        tensors[f"toy.{layer}.mlp"] = matrix(hidden, hidden)
    return write_checkpoint(directory, {"model_type": "toy_block", **settings}, tensors)


class ToyFamily(DraftFamily):
    """Reads the checkpoints of `make_toy_block`."""

    looks_like = "a toy block head (toy.fc)"

    def detect(self, config, shapes):
        is_own = "toy.fc" in shapes and config["method"] == self.name
        return Evidence(["toy.fc"]) if is_own else None

    def build(self, file, target, options):
        with options.defaults(target):
            return ToyBlock(file.config, file.shapes, target)

    def facts(self, file, target, options):
        return {"block": str(file.config["block_size"])}


class ToyBlock(Draft):
    """A `BlockHead`. The bias continues the likeliest tokens of a target without layers."""

    drafter = "block"

    def __init__(self, config, shapes, target):
        super().__init__(
            target.spec.hidden_size,
            target.spec.caches[:NUM_LAYERS],
            FeatureCapture((1, target.spec.num_layers)),
            feature_dim=2 * target.spec.hidden_size,
        )
        self.block_size, self.first_row = config["block_size"], config["first_row"]
        self.max_steps = self.block_size - self.first_row
        self.is_causal, self.has_bias = config["is_causal"], config["has_bias"]
        self.head_dim, self.kv_heads = self.caches[0].key_dim, self.caches[0].num_heads
        self.rope = RotaryTable(self.head_dim, THETA, None, target.max_model_len)
        self.weights = nn.ParameterDict(
            {
                name.replace(".", "_"): nn.Parameter(torch.empty(shape), requires_grad=False)
                for name, shape in shapes.items()
            }
        )
        self.embed_tokens, self.target_logits = target.embed_tokens, target.logits

    def tensors(self):
        return {name.replace("_", "."): tensor.data for name, tensor in self.weights.items()}

    def enter(self, features, ctx):
        rotation, context = self.rope.at(ctx.positions), self.context(features)
        for layer in range(NUM_LAYERS):
            ctx.attention.run(layer, self.projected(context, layer), rotation)

    def block(self, anchors, ctx):
        rotation = self.rope.at(ctx.positions)

        def attend(layer, heads):
            return ctx.attention.run(layer, heads, rotation)

        return self.run_layers(anchors, attend).view(len(anchors), self.block_size, -1)

    def uncached(self, features, anchor):
        """Return the hidden states [block_size, H] after a text of features [S, F]."""
        context = self.context(features)
        positions = torch.arange(len(context) + self.block_size)

        def attend(layer, heads):
            heads = torch.cat([self.projected(context, layer), heads])
            num_heads = heads.shape[1] - 2 * self.kv_heads
            query, key, value = heads.split((num_heads, self.kv_heads, self.kv_heads), dim=1)
            query, key = (rotate(x, positions) for x in (query, key))
            sees = torch.ones(len(heads), len(heads), dtype=torch.bool)
            if self.is_causal[layer]:
                sees = sees.tril()
            query, key, value = (x.transpose(0, 1) for x in (query, key, value))
            key, value = (x.repeat_interleave(num_heads // self.kv_heads, 0) for x in (key, value))
            attended = F.scaled_dot_product_attention(query, key, value, attn_mask=sees)
            return attended.transpose(0, 1)[len(context) :]

        return self.run_layers(torch.tensor([anchor]), attend)

    def context(self, features):
        """Return the context tokens [T, H] of features [T, F]."""
        return norm(features @ self.weights["toy_fc"].T)

    def projected(self, x, layer):
        """Return queries, keys and values [T, heads + 2·kv_heads, d] before rotation."""
        return (x @ self.weights[f"toy_{layer}_qkv"].T).view(len(x), -1, self.head_dim)

    def run_layers(self, anchors, attend):
        """Return the hidden states of blocks, one after another."""
        ids = torch.full((len(anchors), self.block_size), MASK_ID)
        ids[:, 0] = anchors
        stream = self.embed_tokens(ids.flatten())
        for layer in range(NUM_LAYERS):
            attended = attend(layer, self.projected(norm(stream), layer))
            stream = stream + attended.flatten(1) @ self.weights[f"toy_{layer}_out"].T
            stream = stream + F.silu(norm(stream)) @ self.weights[f"toy_{layer}_mlp"].T
        return norm(stream)

    def logits(self, hidden):
        logits = self.target_logits(hidden.flatten(0, 1) / 8)
        return logits.view(*hidden.shape[:2], -1)

    def step_logits(self, logits, hidden, before):
        found = logits[:, before.shape[1] - 1]
        if self.has_bias:
            found = found + self.target_logits(norm(self.embed_tokens(before[:, -1])))
        return found

    def confidence(self, hidden, before):
        return torch.sigmoid(hidden.sum(dim=2) - before[:, 1:] / 100) if self.has_bias else None


def norm(x):
    """Scale x to a mean square of 1."""
    return F.rms_norm(x, x.shape[-1:], eps=1e-6)


def rotate(x, positions):
    """Rotate [T, heads, d] by position: x·cos + (-x2, x1)·sin."""
    width = x.shape[2]
    angles = torch.outer(positions.double(), THETA ** (-torch.arange(0, width, 2) / width))
    cos, sin = (torch.cat([part, part], 1).unsqueeze(1) for part in (angles.cos(), angles.sin()))
    first, second = x.double().chunk(2, dim=2)
    return (x * cos + torch.cat([-second, first], dim=2) * sin).float()
