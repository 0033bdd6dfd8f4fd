"""Shards compute what the whole computes, on every rank; together they hold it once."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from serve_spec.layers.module import Layer, Shard, finish_loading
from serve_spec.layers.norm import RMSNorm
from serve_spec.layers.parallel import column_linear, row_linear, vocab_embedding, vocab_head
from serve_spec.parallel.group import SINGLE, TensorParallel
from tests.helpers.ranks import on_ranks

SIZES = st.integers(2, 4)


def filled(layer: Layer, stored: dict[str, Tensor]) -> Layer:
    """The layer, with its part of `stored` in it, ready to run."""
    for name, destination in layer.tensors().items():
        if isinstance(destination, Shard):
            assert destination.shape == stored[name].shape
            destination.tensor.copy_(stored[name][destination.index])
        else:
            destination.copy_(stored[name])
    finish_loading(layer)
    return layer


def drawn(seed: int, **shapes: tuple[int, ...]) -> dict[str, Tensor]:
    """Random tensors; `_` in a name stands for `.`."""
    generator = torch.Generator().manual_seed(seed)
    return {
        name.replace("__", "."): torch.randn(shape, generator=generator)
        for name, shape in shapes.items()
    }


@settings(max_examples=25)
@given(SIZES, st.integers(1, 5), st.integers(1, 3), st.integers(1, 9), st.booleans(), st.booleans())
def test_columns_rows_and_the_norm_after_them_over_ranks_are_those_of_one(
    size: int, rows: int, other: int, width: int, bias: bool, finished: bool
) -> None:
    """finished: as on CPUs; else the norm asks for the sum and the addition as one."""
    q, k = rows * size, other * size
    stored = drawn(0, q__weight=(q, width), k__weight=(k, width), x=(3, width), weight=(width,))
    stored |= drawn(1, o__weight=(width, q), q__bias=(q,), k__bias=(k,), o__bias=(width,))
    x = stored["x"]

    def run(parallel: TensorParallel) -> tuple[Tensor, Tensor, Tensor]:
        n = parallel.size
        columns = column_linear(width, {"q": q // n, "k": k // n}, parallel, bias)
        output = row_linear(q // n, {"o": width}, parallel, bias)
        norm = RMSNorm(width, 1e-5, parallel)
        filled(columns, stored), filled(output, stored), norm.weight.copy_(stored["weight"])
        if finished:
            finish_loading(norm)
        first, second = columns(x).split([q // n, k // n], dim=1)
        normed, total = norm.add(output(first.contiguous()), x)
        return normed, total, parallel.all_gather(second.contiguous(), 1)

    with torch.inference_mode():
        expected = run(SINGLE)
    for found in on_ranks(size, run):
        torch.testing.assert_close(found, expected)


def test_a_row_product_alone_is_one_addend() -> None:
    stored = drawn(0, o__weight=(4, 6), o__bias=(4,), x=(3, 6))

    def addend(parallel: TensorParallel) -> Tensor:
        n = parallel.size
        output = filled(row_linear(6 // n, {"o": 4}, parallel, bias=True), stored)
        return output(stored["x"].chunk(n, dim=1)[parallel.rank].contiguous())

    with torch.inference_mode():
        expected = addend(SINGLE)
    partials = on_ranks(3, addend)
    assert not torch.allclose(partials[0], expected)
    torch.testing.assert_close(torch.stack(partials).sum(0), expected)


@settings(max_examples=25)
@given(SIZES, st.integers(1, 13), st.integers(1, 5))
def test_a_vocabulary_of_any_size_is_looked_up_and_scored_over_ranks(
    size: int, vocab: int, width: int
) -> None:
    stored = drawn(0, weight=(vocab, width), lm_head__weight=(vocab, width))
    ids = torch.arange(vocab).repeat(2)

    def run(parallel: TensorParallel) -> tuple[Tensor, Tensor, Tensor]:
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


def test_what_ranks_hold_together_is_the_checkpoint_once() -> None:
    stored = drawn(0, weight=(11, 4))

    def held(parallel: TensorParallel) -> Tensor:
        (shard,) = vocab_embedding(11, 4, parallel).tensors().values()
        assert isinstance(shard, Shard)
        return stored["weight"][shard.index]

    assert torch.equal(torch.cat(on_ranks(3, held)), stored["weight"])


@pytest.mark.parametrize("differs_at", [None, 0, 10])
def test_ranks_agree_whether_a_table_is_a_copy_of_theirs(differs_at: int | None) -> None:
    """A rank whose own rows are alike must not share what another has to load."""
    stored = drawn(0, weight=(11, 4))
    other = stored["weight"].half().float()
    if differs_at is not None:
        other[differs_at] += 1

    def holds(parallel: TensorParallel) -> bool:
        embedding = vocab_embedding(11, 4, parallel)
        filled(embedding, stored)
        return embedding.holds(other)

    assert on_ranks(4, holds) == [differs_at is None] * 4
    assert holds(SINGLE) == (differs_at is None)
