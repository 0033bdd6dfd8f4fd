"""Admission against a sort in plain Python; reference and kernel alike."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.ops.admission import LEAST_SURVIVAL, Admission
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import admission, admission_triton  # isort: skip

TYPES = {"logprobs": torch.float32, "calibration": torch.float32, "drafts": torch.int64}
LOGPROBS = st.one_of(*(st.floats(least, 0, width=32) for least in (-40, -1, -(2.0**-18))))
WAYS = reference(admission), admission_triton


@st.composite
def batches(draw, ties):
    """Draw chains or trees whose drafts number the slots; with ties, probabilities are 0.5 or 1."""
    size, width, depth = (draw(st.integers(1, most)) for most in (5, 9, 6))

    def rows(values, count=size):
        return draw(st.lists(values, min_size=count, max_size=count))

    weights = st.just(0.0) if ties else st.floats(-1, 2, width=32)
    biases = st.sampled_from([0.0, 100.0]) if ties else st.floats(-3, 3, width=32)
    logprob = LOGPROBS | st.just(math.nan) | st.just(-math.inf) if draw(st.booleans()) else LOGPROBS
    parents = [[draw(st.integers(0, place)) for place in range(width)] for _ in range(size)]
    return {
        "logprobs": [rows(logprob, width) for _ in range(size)],
        "query_lens": rows(st.integers(0, width + 1) | st.just(width + 1)),
        "depth_limits": rows(st.integers(0, depth) | st.just(depth + 1)),
        "kinds": rows(st.integers(0, 1)),
        "calibration": [rows(st.tuples(weights, biases), depth) for _ in range(2)],
        "budget": [draw(st.integers(0, size * width + 1))],
        "drafts": torch.arange(size * width).view(size, width).tolist(),
        "parents": parents if draw(st.booleans()) else None,
    }


def admit(way, batch):
    given = {name: x for name, x in batch.items() if x is not None}
    for name, x in given.items():
        given[name] = torch.tensor(x, dtype=TYPES.get(name, torch.int32), device=DEVICE)
    with poisoned_memory():
        found = way.admit_drafts(**given)
    assert all(x is None or x.is_contiguous() for x in found)
    return Admission(*(x if x is None else x.tolist() for x in found))


def paths_of(drafts, parents):
    """Return the path of each draft: the drafts from the root on, itself included."""
    found = [[()] for _ in drafts]
    for b, paths in enumerate(found):
        for place, draft in enumerate(drafts[b]):
            paths.append((*paths[parents[b][place] if parents else place], draft))
    return [paths[1:] for paths in found]


def survival_of(batch, b, path):
    """Multiply the probabilities along a path of slots in float64."""
    lines = batch["calibration"][batch["kinds"][b]][: batch["depth_limits"][b]][: len(path)]
    logprobs = torch.tensor(batch["logprobs"]).flatten()[list(path)].double()
    end = batch["drafts"][b][0] + batch["query_lens"][b] - 1
    if path[-1] >= end or len(path) > len(lines) or not all(logprobs > -math.inf):
        return 0.0
    weights, biases = torch.tensor(lines).double().T
    probabilities = (weights * logprobs.exp().logit().clamp(-15, 15) + biases).sigmoid()
    return max(probabilities.prod().item(), LEAST_SURVIVAL)


@pytest.mark.parametrize("way", WAYS)
@settings(max_examples=40, deadline=None)
@given(batch=batches(ties=False) | batches(ties=True))
def test_the_drafts_most_likely_to_survive_are_admitted_behind_their_own_paths(way, batch):
    """Survival is the product of existing drafts' probabilities; equal ones go by place."""
    found = admit(way, batch)
    given, verified = paths_of(batch["drafts"], batch["parents"]), paths_of(*found[2:])
    for b, row in enumerate(found.survival):
        assert row == pytest.approx([survival_of(batch, b, path) for path in given[b]], 1e-4, 0)
    slots = [
        (-value, b, place)
        for b, row in enumerate(found.survival)
        for place, value in enumerate(row)
        if value > 0
    ]
    chosen = sorted((b, place) for _, b, place in sorted(slots)[: batch["budget"][0]])
    for b, query_len in enumerate(batch["query_lens"]):
        expected = [given[b][place] for at, place in chosen if at == b]
        assert found.query_lens[b] == (1 + len(expected) if query_len else 0)
        assert verified[b][: len(expected)] == expected


@pytest.mark.parametrize("size", [40, 261])  # the second is more than the kernel admits itself
def test_the_kernel_breaks_ties_of_large_batches_as_the_reference_does(size):
    numbers = {"query_lens": 64, "depth_limits": 63, "kinds": 0}
    batch = {name: [number] * size for name, number in numbers.items()}
    batch |= {"logprobs": [[-1.0] * 63] * size, "calibration": [[(0, 0)] * 63], "budget": [99]}
    assert admit(admission_triton, batch) == admit(reference(admission), batch)
