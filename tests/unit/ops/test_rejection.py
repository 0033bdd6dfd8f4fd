"""Rejection sampling emits the target's distribution: shown by enumeration."""

from itertools import product

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.ops.rejection import RULES, leftover

VOCAB = 3


class Tree:
    """Probabilities of the token after every text of up to `depth` tokens, target's and draft's.

    Text x_1 .. x_i is row i, the number that its tokens spell. p[i], q[i]: float64 [V^i, V].
    """

    def __init__(self, depth, seed, zeros):
        generator = torch.Generator().manual_seed(seed)
        self.depth = depth
        self.p = [_distributions(VOCAB**i, generator, "p" in zeros) for i in range(depth + 1)]
        self.q = [_distributions(VOCAB**i, generator, "q" in zeros) for i in range(depth)]

    def chains(self):
        """Return chains [N, K], their probabilities [N], q [N, K, V] and p [N, K + 1, V]."""
        drafts = torch.tensor([*product(range(VOCAB), repeat=self.depth)])
        at = [spell(drafts[:, :i]) for i in range(self.depth + 1)]
        q = torch.stack([self.q[i][at[i]] for i in range(self.depth)], dim=1)
        p = torch.stack([self.p[i][at[i]] for i in range(self.depth + 1)], dim=1)
        probability = q.gather(2, drafts.unsqueeze(2)).squeeze(2).prod(dim=1)
        return drafts, probability, q, p

    def joint(self):
        """The target's distribution of the first depth + 1 tokens, flat."""
        probs = torch.ones(1, dtype=torch.float64)
        for p in self.p:
            probs = (probs.unsqueeze(1) * p).flatten()
        return probs


def _distributions(count, generator, has_zeros):
    scores = torch.randn(count, VOCAB, generator=generator, dtype=torch.float64) * 1.5
    if has_zeros:  # at most one token each, since some must be left
        gone = torch.randint(VOCAB + 1, (count,), generator=generator)
        scores = scores.masked_fill(torch.arange(VOCAB) == gone.unsqueeze(1), float("-inf"))
    return scores.softmax(dim=1)


def spell(tokens):
    """The row of texts [N, i] in a table of all of them."""
    number = torch.zeros(len(tokens), dtype=torch.int64)
    for column in tokens.unbind(1):
        number = number * VOCAB + column
    return number


def emitted_distribution(tree, method, num_steps=None):
    """Return the distribution of the first depth + 1 tokens, and the mean of accepted drafts.

    Rounds after this one are exact.

    A coin decides against one number alone: two values of it, below and above, are all there is.
    """
    drafts, chain_probability, q, p = tree.chains()
    steps = torch.full((len(drafts),), tree.depth) if num_steps is None else num_steps
    probabilities_of, keep = RULES[method]
    probabilities, weights = probabilities_of(drafts, q, p, steps)
    probs = torch.zeros([VOCAB] * (tree.depth + 1), dtype=torch.float64)
    mean = 0.0
    for below in product([True, False], repeat=tree.depth):
        is_below = torch.tensor(below)
        coins = (probabilities / 2).where(is_below, (1 + probabilities) / 2)
        weight = chain_probability * probabilities.where(is_below, 1 - probabilities).prod(dim=1)
        correct = keep(probabilities, coins, steps)
        mean += float((weight * correct).sum())
        left = leftover(q, p, weights, correct, steps)
        left = left / left.sum(dim=1, keepdim=True)
        for n in range(len(drafts)):
            kept = drafts[n, : correct[n]].tolist()
            probs[tuple(kept)] += weight[n] * continued(tree, kept, left[n])
    return probs.flatten(), mean


def continued(tree, kept, left):
    """The distribution of what follows `kept`: a token of `left`, then the target alone."""
    after = torch.tensor([[*kept, token] for token in range(VOCAB)])
    probs = left
    for i in range(len(kept) + 1, tree.depth + 1):
        probs = (probs.flatten().unsqueeze(1) * tree.p[i][spell(after)]).flatten()
        after = torch.tensor([[*row, token] for row in after.tolist() for token in range(VOCAB)])
    return probs.view([VOCAB] * (tree.depth + 1 - len(kept)))


def total_variation(a, b):
    return float((a - b).abs().sum() / 2)


@pytest.mark.parametrize("method", RULES)
@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("zeros", ["", "p", "q", "pq"])
def test_what_is_emitted_follows_the_target(method, depth, zeros):
    """The joint distribution of a round is exact, also if target or draft has zeros."""
    for seed in range(3):
        tree = Tree(depth, seed, zeros)
        probs, _ = emitted_distribution(tree, method)
        assert total_variation(probs, tree.joint()) <= 1e-12


@pytest.mark.parametrize("method", RULES)
def test_so_it_does_with_chains_of_different_lengths_in_one_batch(method):
    """The length may depend on the draft's probabilities and earlier tokens; here on the first."""
    tree = Tree(3, 5, "pq")
    drafts, *_ = tree.chains()
    probs, _ = emitted_distribution(tree, method, drafts[:, 0] + 1)
    assert total_variation(probs, tree.joint()) <= 1e-12


@settings(max_examples=10, deadline=None)
@given(st.integers(0, 2**31), st.sampled_from([2, 3]), st.sampled_from(["", "p", "q", "pq"]))
def test_blocks_keep_as_many_drafts_as_single_tokens_at_least(seed, depth, zeros):
    tree = Tree(depth, seed, zeros)
    (_, standard), (_, block) = (
        emitted_distribution(tree, method) for method in ("standard", "block")
    )
    assert block >= standard - 1e-12


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**31))
def test_one_draft_is_kept_as_often_as_the_distributions_overlap(seed):
    """1 - TV(p, q): no exact rule keeps more."""
    tree = Tree(1, seed, "")
    for method in RULES:
        _, mean = emitted_distribution(tree, method)
        assert mean == pytest.approx(1 - total_variation(tree.p[0][0], tree.q[0][0]))
