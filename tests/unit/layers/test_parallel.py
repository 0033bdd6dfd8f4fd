"""Shards compute what the whole computes, on every rank; together they hold it once."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.layers.module import Shard, finish_loading
from serve_spec.layers.vocabulary import vocab_embedding, vocab_head
from serve_spec.parallel.group import SINGLE
from tests.helpers.ranks import on_ranks

SIZES = st.integers(2, 4)


def filled(layer, stored):
    """The layer, with its part of `stored` in it, ready to run."""
    for name, destination in layer.tensors().items():
        if isinstance(destination, Shard):
            assert destination.shape == stored[name].shape
            destination.tensor.copy_(stored[name][destination.index])
        else:
            destination.copy_(stored[name])
    finish_loading(layer)
    return layer


def drawn(seed, **shapes):
    """Random tensors; `_` in a name stands for `.`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


@settings(max_examples=25)
@given(SIZES, st.integers(1, 13), st.integers(1, 5))
def test_a_vocabulary_of_any_size_is_looked_up_and_scored_over_ranks(size, vocab, width):
    stored = drawn(0, weight=(vocab, width), lm_head__weight=(vocab, width))
    ids = torch.arange(vocab).repeat(2)

    def run(parallel):
        embedding = filled(vocab_embedding(vocab, width, parallel), stored)
        head = filled(vocab_head(width, vocab, parallel), stored)
        tied = vocab_head(width, vocab, parallel)
        tied.weight = embedding.matrix
        rows = embedding(ids)
        return rows, head(rows), tied(rows)

    with torch.inference_mode():
        expected = run(SINGLE)
    for found in on_ranks(size, run):
        assert found[1].is_contiguous()
        torch.testing.assert_close(found, expected)
        assert torch.equal(found[0], expected[0]), "a sum with zeros changes nothing"


def test_what_ranks_hold_together_is_the_checkpoint_once():
    stored = drawn(0, weight=(11, 4))

    def held(parallel):
        (shard,) = vocab_embedding(11, 4, parallel).tensors().values()
        assert isinstance(shard, Shard)
        return stored["weight"][shard.index]

    assert torch.equal(torch.cat(on_ranks(3, held)), stored["weight"])


@pytest.mark.parametrize("differs_at", [None, 0, 10])
def test_ranks_agree_whether_a_table_is_a_copy_of_theirs(differs_at):
    """A rank whose own rows are alike must not share what another has to load."""
    stored = drawn(0, weight=(11, 4))
    other = stored["weight"].half().float()
    if differs_at is not None:
        other[differs_at] += 1

    def holds(parallel):
        embedding = vocab_embedding(11, 4, parallel)
        filled(embedding, stored)
        return embedding.holds(other)

    assert on_ranks(4, holds) == [differs_at is None] * 4
    assert holds(SINGLE) == (differs_at is None)
