"""Verification of steps whose target knows the last token alone: the real operations."""

from itertools import accumulate
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.draft import NgramDrafts
from serve_spec.core.request import SamplingParams
from serve_spec.ops.acceptance import forced_counts
from serve_spec.ops.noise import seed_words
from serve_spec.ops.rejection import DraftLogits
from serve_spec.worker.forward import QueryShape, run_target
from serve_spec.worker.graphs import StepSize
from serve_spec.worker.request_slots import RequestSlots
from serve_spec.worker.step_buffers import StepBuffers
from serve_spec.worker.verify import Verifier, draft_probabilities, read_results, survival_table
from tests.helpers.plain_sampling import draw_params

CPU = torch.device("cpu")
VOCAB, START, MAX_DEPTH = 6, 0, 3
SAMPLED, GREEDY = SamplingParams(temperature=1.0), SamplingParams(temperature=0.0)
METHODS = ["standard", "block"]


class Requests:
    """Requests in slots of their own, after a text of `START` alone.

    target: logits by the last token [V, V]. method: how drafts are verified.
    """

    def __init__(self, target, params, seeds=None, method="coupled", synthetic_acceptance=None):
        count, vocab = len(params), target.shape[1]
        slots = RequestSlots(count, 1, 0, vocab, CPU)
        slots.recent.fill_(START)
        known = draw_params(params, range(count) if seeds is None else seeds, CPU)
        for field, values in zip(slots.params, known, strict=True):
            field[:-1] = values
        self.buffers = StepBuffers(slots, MAX_DEPTH, 1, max_draws=count * (MAX_DEPTH + 1))
        if method != "coupled":
            logits = DraftLogits.create((count, MAX_DEPTH, vocab), None, vocab, CPU)
            self.buffers.draft_logits = logits
        self.verifier = Verifier(MAX_DEPTH, CPU, synthetic_acceptance, method)
        self._target = SimpleNamespace(
            model=SimpleNamespace(
                forward=lambda ids, *_: SimpleNamespace(hidden=ids, features=None),
                logits=lambda hidden: target[hidden].clone(),
            ),
            pool=SimpleNamespace(page_size=1 << 20, scratch_slot=0),
            kinds=(),
            capture=None,
            features=None,
        )

    def verify(self, counts, drafts):
        self.buffers.write_requests([*range(len(counts))], counts, counts)
        self.buffers.write_drafts({b: NgramDrafts((*ids,)) for b, ids in enumerate(drafts)})
        size = StepSize(sum(counts) + len(counts), len(counts))
        tokens = run_target(self._target, self.buffers, size, QueryShape(MAX_DEPTH + 1))
        self.verifier(tokens, self.buffers)
        return read_results(self.buffers.results.tolist())


def markov():
    """Return logits by the token before [V, V] of a target, and of a draft that is near."""
    generator = torch.Generator().manual_seed(0)
    target = torch.randn(VOCAB, VOCAB, generator=generator) * 1.5
    return target, target + torch.randn(VOCAB, VOCAB, generator=generator)


def test_greedy_requests_and_those_without_drafts_are_verified_as_without_rejection():
    """Neither they nor broken drafts change what others of the batch emit."""
    target, draft = markov()
    params, seeds = [GREEDY, SAMPLED, SAMPLED, SAMPLED], [0, 1, 2, 0]
    counts, drafts = [2, 0, 2, 2], [[1, 2], [0, 0], [3, -1], [3, 4]]

    def verified(method, at):
        requests = Requests(target, [params[b] for b in at], [seeds[b] for b in at], method)
        if requests.buffers.draft_logits is not None:
            logits = requests.buffers.draft_logits.logits
            for place, b in enumerate(at):
                logits[place, :2] = draft[[START, 3]]
                logits[place, 1] += float("nan") if drafts[b][1] < 0 else 0
        return requests.verify([counts[b] for b in at], [drafts[b] for b in at])

    found, broken, _ = verified("block", range(4))
    assert found[:2] == verified("coupled", range(4))[0][:2]
    assert broken == (2,)
    assert all(0 <= token < VOCAB for row in found for token in row)
    assert len(found[2]) <= 2
    assert verified("block", [3])[0][0] == found[3]


@pytest.mark.parametrize("method", ["coupled", *METHODS])
def test_a_target_that_gives_nan_is_reported_as_broken(method):
    target, _ = markov()
    target[:, 2] = float("nan")
    requests = Requests(target, [SAMPLED] * 3, [1, 2, 3], method)
    emitted, _, broken = requests.verify([2] * 3, [[1, 2]] * 3)
    assert broken == (0, 1, 2)
    assert all(token >= 0 for tokens in emitted for token in tokens)


def forced(acceptance, num_steps):
    """Return how many drafts are accepted of requests with different seeds at position 100."""
    words = torch.tensor([seed_words(seed) for seed in range(len(num_steps))], dtype=torch.int32)
    steps = torch.tensor(num_steps, dtype=torch.int32)
    at = torch.full((len(num_steps),), 100)
    return forced_counts(words, at, steps, survival_table(acceptance, 8)).tolist()


@given(st.integers(1, 8), st.floats(0, 1))
def test_a_length_within_reach_is_met_at_every_depth_by_one_probability(num_steps, reach):
    length = 1 + reach * num_steps
    probabilities = draft_probabilities(length, num_steps)
    assert len(set(probabilities)) == 1
    mean = 1 + sum(accumulate(probabilities, lambda a, b: a * b))
    assert mean == pytest.approx(length, abs=1e-9)


@given(st.integers(1, 8), st.floats(0, 5))
def test_a_depth_that_cannot_reach_the_length_accepts_every_draft(num_steps, more):
    assert forced(num_steps + 1 + more, [num_steps] * 5) == [num_steps] * 5


def test_a_list_is_the_same_at_every_depth_and_its_share_of_those_that_reach_is_accepted():
    counts = forced([0.9, 0.5, 0.2], [3] * 20_000)
    for position, probability in enumerate([0.9, 0.5, 0.2]):
        reached = [count for count in counts if count >= position]
        fraction = sum(count > position for count in reached) / len(reached)
        assert fraction == pytest.approx(probability, abs=5 * 0.5 / len(reached) ** 0.5)
    assert draft_probabilities([0.8, 0.6], 1) == [0.8]
    assert draft_probabilities([0.8, 0.6], 4) == [0.8, 0.6, 0.6, 0.6]


def test_a_request_emits_the_drafts_it_is_forced_to_and_then_the_targets_draw():
    target, _ = markov()
    drafts = [1, 2, 3]
    requests = Requests(target, [GREEDY] * 6, synthetic_acceptance=[0.6])
    emitted, _, _ = requests.verify([3, 0, 2, 3, 3, 1], [drafts] * 6)
    for tokens in emitted:
        kept = len(tokens) - 1
        assert tokens == [*drafts[:kept], int(target[[START, *drafts][kept]].argmax())]
    assert len({len(tokens) for tokens in emitted}) > 1, "the requests of this test differ"
