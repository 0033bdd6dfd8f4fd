"""Trees of drafts against an oracle that knows nodes by their paths."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.draft import most_drafts
from serve_spec.ops import draft_tree
from serve_spec.ops.draft_tree import choose_drafts, grow_beam, likeliest_children, root_beam
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import draft_tree_triton  # isort: skip


def likelihoods(topk, seed, *, ties):
    """Return the log-probabilities of a path's children, descending; child i is token i."""

    def of(path):
        generator = torch.Generator().manual_seed(hash((seed, path)) % 2**31)
        if ties:
            values = torch.randint(-2, 1, (topk,), generator=generator).float()
        else:
            values = -torch.rand(topk, generator=generator)
        return values.sort(descending=True).values.tolist()

    return of


def tree_of(likely, topk, steps, counts):
    """The paths of what the beam makes of several sequences at once, and each one's parent."""
    device = torch.device("cpu")
    beam = root_beam(len(steps), device)
    paths = [[()] for _ in steps]
    levels = []
    for step in range(max(steps)):
        scores = [[likely(path) for path in of_one] for of_one in paths]
        tokens = torch.arange(topk).expand(len(steps), len(paths[0]), topk)
        level, beam = grow_beam(beam, tokens, torch.tensor(scores), step)
        levels.append(level)
        paths = [
            [(*of_one[before], token) for before, token in zip(befores, ids, strict=True)]
            for of_one, befores, ids in zip(
                paths, beam.befores.tolist(), beam.token_ids.tolist(), strict=True
            )
        ]
    wanted = torch.tensor(steps), torch.tensor(counts)
    ids, parents, logprobs = choose_drafts(levels, *wanted, max(counts))
    found = []
    for row, above, own, count in zip(
        ids.tolist(), parents.tolist(), logprobs.tolist(), counts, strict=True
    ):
        nodes = [()]
        for token, parent, logprob in zip(row[:count], above[:count], own, strict=False):
            assert parent < len(nodes), "a parent comes before its children"
            assert logprob == pytest.approx(likely(nodes[parent])[token])
            nodes.append((*nodes[parent], token))
        found.append(nodes[1:])
    return found, [row[:n] for row, n in zip(parents.tolist(), counts, strict=True)]


def oracle(likely, topk, num_steps, count):
    """The same, node by node: all candidates of every level's beam, then the best of all."""

    def score(path):
        total = 0.0
        for depth, token in enumerate(path):
            total = float(torch.tensor(total) + torch.tensor(likely(path[:depth])[token]))
        return total

    beam, candidates = [()], []
    for _ in range(num_steps):
        level = [(*path, child) for path in beam for child in range(topk)]
        candidates += level
        beam = sorted(level, key=lambda path: -score(path))[:topk]
    best = sorted(candidates, key=lambda path: -score(path))[:count]
    return sorted(best, key=candidates.index)


@st.composite
def sizes(draw):
    """topk, and the levels and drafts of a few sequences."""
    topk = draw(st.integers(1, 4))
    steps = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    return topk, steps, [draw(st.integers(1, most_drafts(topk, n))) for n in steps]


@settings(max_examples=80, deadline=None)
@given(sizes(), st.integers(0, 1000), st.booleans())
def test_a_tree_is_the_best_of_all_its_beams_met(shape, seed, ties):
    topk, steps, counts = shape
    likely = likelihoods(topk, seed, ties=ties)
    found, _ = tree_of(likely, topk, steps, counts)
    for nodes, num_steps, count in zip(found, steps, counts, strict=True):
        assert nodes == oracle(likely, topk, num_steps, count)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 4), st.integers(2, 5), st.integers(0, 1000))
def test_a_place_of_the_beam_sees_its_own_path_whatever_parent_it_goes_on_from(
    topk, num_steps, seed
):
    likely = likelihoods(topk, seed, ties=False)
    beam = root_beam(1, torch.device("cpu"))
    paths, kept = [()], []
    for step in range(num_steps):
        tokens = torch.arange(topk).expand(1, len(paths), topk)
        _, beam = grow_beam(beam, tokens, torch.tensor([[likely(path) for path in paths]]), step)
        befores, ids = beam.befores[0].tolist(), beam.token_ids[0].tolist()
        paths = [(*paths[before], token) for before, token in zip(befores, ids, strict=True)]
        kept += paths
        for path, mask in zip(paths, beam.masks[0].tolist(), strict=True):
            seen = {kept[bit] for bit in range(len(kept)) if mask >> bit & 1}
            assert seen == {path[: depth + 1] for depth in range(len(path))}


def test_equal_children_rank_by_column():
    scores = torch.randn(8, 300, generator=torch.Generator().manual_seed(1)).round()
    scores[:, ::7] = -0.0
    found, _ = likeliest_children(scores, 6, None)
    assert torch.equal(found, scores.argsort(dim=1, descending=True, stable=True)[:, :6])


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_without_a_finite_score_have_no_children_and_influence_nothing(bad):
    scores = torch.zeros(2, 6)
    scores[0, 3] = bad
    found, likely = likeliest_children(scores, 2, None)
    assert found[0].tolist() == [-1, -1]
    nothing, _ = likeliest_children(torch.full((1, 6), float("-inf")), 2, None)
    assert nothing.tolist() == [[-1, -1]]
    beam = root_beam(1, torch.device("cpu"))
    first, beam = grow_beam(beam, torch.tensor([[[4, 5]]]), torch.tensor([[[-1.0, -2.0]]]), 0)
    # The first of the beam is broken, so that the second one's children are all there are.
    second, _ = grow_beam(beam, found.unsqueeze(0), likely.unsqueeze(0), 1)
    ids, parents, _ = choose_drafts([first, second], torch.tensor([2]), torch.tensor([4]), 4)
    assert ids.tolist() == [[4, 5, *found[1].tolist()]]
    assert parents.tolist() == [[0, 0, 2, 2]]


@settings(max_examples=12, deadline=None)
@given(sizes(), st.integers(0, 2**31), st.booleans(), st.integers(0, 6))
def test_the_kernels_grow_and_choose_as_the_reference_does(shape, seed, ties, num_broken):
    """Beside sequences that draft nothing; some candidates are no tokens."""
    topk, steps, counts = shape
    steps, counts = [*steps, 0], [*counts, -1]
    generator = torch.Generator().manual_seed(seed)
    beams = {
        impl: root_beam(len(steps), DEVICE) for impl in (reference(draft_tree), draft_tree_triton)
    }
    levels = {impl: [] for impl in beams}
    for step in range(max(steps)):
        by_place = (len(steps), 1 if step == 0 else topk, topk)
        ids = torch.randint(0, 50, by_place, generator=generator)
        scores = -torch.rand(by_place, generator=generator)
        scores = scores.mul(3).round() if ties else scores
        broken = torch.randint(ids.numel(), (num_broken,), generator=generator)
        ids.view(-1)[broken] = -1
        scores.view(-1)[broken[:1]] = float("nan")
        for impl in beams:
            with poisoned_memory():
                level, beams[impl] = impl.grow_beam(
                    beams[impl], ids.to(DEVICE), scores.to(DEVICE), step
                )
            levels[impl].append(level)
        for mine, other in zip(*beams.values(), strict=True):
            assert torch.equal(mine, other)
        for mine, other in zip(*(of_impl[-1] for of_impl in levels.values()), strict=True):
            assert torch.equal(mine.nan_to_num(), other.nan_to_num())
    num_steps = torch.tensor(steps, dtype=torch.int32, device=DEVICE)
    wanted = torch.tensor(counts, dtype=torch.int32, device=DEVICE)
    found = []
    for impl, of_impl in levels.items():
        with poisoned_memory():
            found.append(impl.choose_drafts(of_impl, num_steps, wanted, max(counts)))
    for b, count in enumerate(counts):
        for plain, kernel in zip(*found, strict=True):
            mine, its = plain[b, : max(count, 0)], kernel[b, : max(count, 0)]
            assert torch.equal(mine.nan_to_num(), its.nan_to_num())
