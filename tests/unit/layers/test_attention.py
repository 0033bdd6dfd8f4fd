"""A model of several kinds of attention layers, in the engine and in training."""

import math
from itertools import pairwise

import pytest
import torch

from recipes.training.causal import CausalAttention, row_positions
from serve_spec.core.caches import PagedCache
from serve_spec.layers.rope import RotaryTable
from tests.helpers.paged import PagedSequences

THETA, LENGTH = 100.0, 11
CACHES = (
    PagedCache(2, 16, 16),
    PagedCache(2, 16, 16, window=3),
    PagedCache(1, 32, 32, scale=0.5, softcap=2.0),
    PagedCache(4, 24, 24, window=5, has_sinks=True),
    PagedCache(2, 16, 16, softcap=1.0, has_sinks=True),
)
NUM_HEADS = (4, 2, 4, 4, 6)
# Rotated numbers of a head, and whether their pairs are neighbours.
ROTATIONS = ((16, False), (16, True), (12, True), (20, False), (8, False))
LAYERS = range(len(CACHES))


def layer_inputs(layer, num_tokens):
    """Return random heads [T, all, d] of a layer, and its sinks if it has them."""
    cache, generator = CACHES[layer], torch.Generator().manual_seed(layer)
    num_all = NUM_HEADS[layer] + 2 * cache.num_heads
    heads = torch.randn(num_tokens, num_all, cache.key_dim, generator=generator)
    sinks = torch.randn(NUM_HEADS[layer], generator=generator) if cache.has_sinks else None
    return heads, sinks


def rotation_at(layer, positions):
    rotary_dim, is_interleaved = ROTATIONS[layer]
    return RotaryTable(rotary_dim, THETA, None, LENGTH, is_interleaved).at(positions)


def plainly_attended(layer, heads, sinks):
    """Return a layer's result [T, heads, d] for a text, token by token and head by head."""
    cache, num_heads = CACHES[layer], NUM_HEADS[layer]
    query, key, value = heads.split((num_heads, cache.num_heads, cache.num_heads), dim=1)
    query, key = plainly_rotated(layer, query), plainly_rotated(layer, key)
    out = []
    for token in range(len(heads)):
        first = 0 if cache.window is None else max(0, token + 1 - cache.window)
        for head in range(num_heads):
            of_group = head // (num_heads // cache.num_heads)
            scores = key[first : token + 1, of_group] @ query[token, head]
            scores = scores * (cache.scale or 1 / math.sqrt(cache.key_dim))
            if cache.softcap is not None:
                scores = cache.softcap * (scores / cache.softcap).tanh()
            weights, total = scores.exp(), scores.exp().sum()
            if sinks is not None:
                total = total + sinks[head].exp()
            out.append(weights / total @ value[first : token + 1, of_group])
    return torch.stack(out).view(len(heads), num_heads, -1)


def plainly_rotated(layer, x):
    """Multiply every pair, as a complex number, by that of its angle."""
    rotary_dim, is_interleaved = ROTATIONS[layer]
    rotated, rest = x[..., :rotary_dim], x[..., rotary_dim:]
    pairs = rotated.unflatten(-1, (-1, 2) if is_interleaved else (2, -1))
    pairs = pairs if is_interleaved else pairs.transpose(-1, -2)
    angles = torch.arange(len(x))[:, None] / THETA ** (torch.arange(0, rotary_dim, 2) / rotary_dim)
    turned = torch.view_as_complex(pairs.contiguous()) * torch.exp(1j * angles).unsqueeze(1)
    pairs = torch.view_as_real(turned)
    pairs = pairs if is_interleaved else pairs.transpose(-1, -2)
    return torch.cat((pairs.flatten(-2), rest), dim=-1)


@pytest.mark.parametrize("steps", [[0, 11], [0, 1, 2, 9, 11], [0, 5, 8, 11]])
def test_layers_of_several_kinds_share_the_pages_of_one_model(steps):
    sequences = PagedSequences(CACHES, 2, LENGTH)
    inputs = [layer_inputs(layer, 2 * LENGTH) for layer in LAYERS]
    texts = [heads.view(2, LENGTH, *heads.shape[1:]) for heads, _ in inputs]
    found = [[] for _ in LAYERS]
    for begin, end in pairwise(steps):
        context = sequences.extend([(0, end - begin), (1, end - begin)])
        for layer, (_, sinks) in enumerate(inputs):
            heads = texts[layer][:, begin:end].flatten(0, 1)
            rotation = rotation_at(layer, context.positions)
            out = context.attention.run(layer, heads, rotation, sinks)
            found[layer].append(out.view(2, end - begin, *out.shape[1:]))
    for layer, (_, sinks) in enumerate(inputs):
        expected = [plainly_attended(layer, text, sinks) for text in texts[layer]]
        assert torch.allclose(torch.cat(found[layer], dim=1), torch.stack(expected), atol=1e-5)


@pytest.mark.parametrize("layer", LAYERS)
def test_causal_attention_of_whole_texts_and_its_gradients_are_those_of_the_formula(layer):
    heads, sinks = layer_inputs(layer, 2 * LENGTH)
    inputs = [each.requires_grad_() for each in (heads, sinks) if each is not None]
    rotation = rotation_at(layer, row_positions(2, LENGTH, heads.device))
    found = CausalAttention(2, CACHES).run(layer, heads, rotation, sinks)
    expected = torch.cat([plainly_attended(layer, text, sinks) for text in heads.chunk(2)])
    assert torch.allclose(found, expected, atol=1e-5)
    toward = torch.randn(found.shape, generator=torch.Generator().manual_seed(9))
    slopes = [torch.autograd.grad((each * toward).sum(), inputs) for each in (found, expected)]
    for ours, wanted in zip(*slopes, strict=True):
        assert torch.allclose(ours, wanted, atol=1e-4)
