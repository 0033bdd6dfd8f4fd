"""A model over several ranks gives the logits, features and drafts of the whole one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.expand import LOAD_FORMAT, expand_target
from benchmarks.expansion import Expansion
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.module import Shard, finish_loading
from serve_spec.layers.vocabulary import vocab_embedding, vocab_head
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.family import read_shape
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import load_target, read_spec
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import make_eagle, make_eagle3, make_mtp, make_target
from tests.helpers.mixtures import ARCHITECTURES
from tests.helpers.paged import PagedSequences
from tests.helpers.ranks import on_ranks
from tests.helpers.table import make_medusa

NUM_TOKENS = 24
CAPTURE = FeatureCapture((0, 2, 3))
CASES = {
    "tied": ("llama3", {"num_key_value_heads": 4}),
    "biases": ("llama3", {"num_key_value_heads": 4, "attention_bias": True}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
    "odd vocabulary": ("mistral", {"num_key_value_heads": 4, "vocab": 261}),
    **{name: (name, {"num_key_value_heads": 4}) for name in ARCHITECTURES},
}


def tokens():
    return torch.randint(0, 256, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1))


def answers(model):
    """Logits [T, V] and features [T, F] of one text, in two chunks."""
    sequence = PagedSequences(model.spec.caches, 1, NUM_TOKENS)
    outputs = [
        model.forward(part, sequence.extend([(0, len(part))]), CAPTURE)
        for part in tokens().split([20, 4])
    ]
    features = [output.features for output in outputs if output.features is not None]
    return torch.cat([model.logits(output.hidden) for output in outputs]), torch.cat(features)


@pytest.mark.parametrize(
    ("name", "size"), [*((name, 2) for name in CASES), ("tied", 4), ("odd vocabulary", 4)]
)
def test_a_sharded_target_is_the_whole_one(tmp_path, name, size):
    family, config = CASES[name]
    folder = make_target(tmp_path, family, layers=3, hidden=32, **config)
    expected = answers(load_target(folder, torch.float32))

    def run(parallel):
        model = load_target(folder, torch.float32, parallel=parallel)
        assert model.rank_shape.num_kv_heads * size == model.shape.num_kv_heads
        return answers(model)

    for found in on_ranks(size, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


def test_every_rank_of_an_expansion_builds_its_part_of_the_same_noise(tmp_path):
    base = make_target(tmp_path / "base", "llama2", layers=2, hidden=32)
    folder = tmp_path / "large"
    expand_target(Expansion(str(base), 4, 2, 3, 301, None, noise=1.0, seed=0), folder)

    def run(parallel):
        model = load_target(folder, torch.float32, parallel=parallel, load_format=LOAD_FORMAT)
        return answers(model)

    expected = run(SINGLE)
    for found in on_ranks(2, run):
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def make_standalone(directory, target):
    return make_target(directory, "llama2", hidden=16, vocab=261, eos_token_id=None, seed=7)


ALGORITHM_OF = {
    make_standalone: "STANDALONE",
    make_medusa: "MEDUSA",
    make_eagle: "EAGLE",
    make_eagle3: "EAGLE3",
    make_mtp: "MTP",
}


@pytest.mark.parametrize(
    ("make", "options", "num_shards"),
    [
        (make_standalone, {}, 2),
        (make_medusa, {"num_heads": 2}, 1),
        (make_eagle, {}, 2),
        (make_mtp, {}, 2),
        (make_eagle3, {}, 2),
        (make_eagle3, {"own_embedding": True, "draft_vocab": 131}, 2),
        (make_eagle3, {"num_attention_heads": 1, "num_key_value_heads": 1}, 1),
    ],
)
def test_ranks_that_share_a_target_share_a_head_that_they_divide(
    tmp_path, make, options, num_shards
):
    """All of them draft as one rank does."""
    target = make_target(tmp_path / "target", "llama2", hidden=32, vocab=261, eos_token_id=None)
    folder = make(tmp_path / "head", target, **options)
    algorithm = ALGORITHM_OF[make]

    def run(parallel):
        model = load_target(target, torch.float32, parallel=parallel)
        head = load_draft(folder, model, algorithm)
        sequence = PagedSequences(head.caches, 1, NUM_TOKENS)
        features = torch.randn(NUM_TOKENS, head.feature_dim, generator=torch.Generator())
        hidden = head.encode(features)
        context = sequence.extend([(0, NUM_TOKENS)])
        hidden = head.forward(tokens(), hidden, context)
        logits = [head.logits(hidden, step).clone() for step in range(head.max_steps or 1)]
        return logits, [cache.num_heads for cache in head.caches]

    expected, num_heads = run(SINGLE)
    for found, heads_of_rank in on_ranks(2, run):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
        assert [num_shards * heads for heads in heads_of_rank] == num_heads


@pytest.mark.parametrize(
    ("size", "config", "uneven"),
    [
        (4, {}, "num_key_value_heads=2"),
        (3, {}, "num_attention_heads=4, num_key_value_heads=2, intermediate_size=64"),
        (2, {"intermediate_size": 65}, "intermediate_size=65"),
    ],
)
def test_sizes_that_ranks_do_not_divide_are_refused_by_name(tmp_path, size, config, uneven):
    shape = read_shape(make_target(tmp_path, hidden=32, **config))
    with pytest.raises(CheckpointError, match=rf"tensor_parallel_size={size}.*{uneven}"):
        shape.on_rank_of(size)


@pytest.mark.parametrize(
    ("family", "config", "uneven"),
    [
        ("qwen3_moe", {"moe_intermediate_size": 15}, "moe_intermediate_size=15 "),
        ("qwen2_moe", {"shared_expert_intermediate_size": 33}, "shared_expert=33 "),
        ("glm4_moe", {"intermediate_size": 63}, "intermediate_size=63 "),
    ],
)
def test_experts_that_ranks_do_not_divide_are_refused_by_name(tmp_path, family, config, uneven):
    folder = make_target(tmp_path, family, hidden=32, layers=2, **config)
    with pytest.raises(CheckpointError, match=f"tensor_parallel_size=2 does not divide {uneven}"):
        read_spec(folder, 2)
    read_spec(folder, 1)


def test_a_shard_of_another_shape_is_refused_as_the_whole_would_be(tmp_path):
    folder = make_target(tmp_path, "llama2", hidden=32)
    (folder / "config.json").write_text(
        (folder / "config.json").read_text().replace('"vocab_size": 288', '"vocab_size": 286')
    )
    with pytest.raises(CheckpointError, match=r"is \[288, 32\], expected \[286, 32\]"):
        on_ranks(2, lambda parallel: load_target(folder, torch.float32, parallel=parallel))


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
        tied = vocab_head(width, vocab, parallel, tied=embedding)
        rows = embedding(ids)
        return rows, head(rows), tied(rows)

    with torch.inference_mode():
        expected = run(SINGLE)
    for found in on_ranks(size, run):
        assert found[1].is_contiguous()
        torch.testing.assert_close(found, expected)
        assert torch.equal(found[0], expected[0]), "a sum with zeros changes nothing"


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
