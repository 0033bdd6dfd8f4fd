"""Sampled drafts on a GPU, in float32: captured stages emit what a CPU's engine emits."""

import random

import pytest
import torch

from serve_spec.core.request import SamplingParams
from serve_spec.worker.graphs import GraphRecorder
from tests.helpers.engines import llm_maker, switch_every_round
from tests.unit.engine.test_rejection import METHODS, STEPS
from tests.unit.ops import test_reject_drafts

pytestmark = pytest.mark.gpu

ALGORITHMS = ["EAGLE3", "EAGLE", "STANDALONE", "MEDUSA"]


def varied_requests():
    """Prompts of 1 to 20 tokens; greedy, filtered and edited requests among the sampled ones."""
    rng = random.Random(0)
    prompts = [[rng.randrange(256) for _ in range(n)] for n in (1, 2, 5, 11, 20, 16)]
    kinds = [
        {},
        {"temperature": 0.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 20},
        {"repetition_penalty": 1.4, "logit_bias": {7: 1.5}},
        {"temperature": 0.9, "min_p": 0.02, "min_tokens": 30, "frequency_penalty": 0.3},
    ]
    params = [
        SamplingParams(max_tokens=16 + 3 * i, seed=40 + i, ignore_eos=True, **kind)
        for i, kind in enumerate(kinds)
    ]
    return prompts, params


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.parametrize("depths", [[STEPS], [0, 4, 2, 4, 1]])
def test_a_gpu_keeps_and_replaces_what_a_cpu_does(pair, make_llm, algorithm, method, depths):
    found = []
    for make in (make_llm, llm_maker(pair, "cpu")):
        # Planned ahead, steps would begin and end elsewhere, on which the texts depend.
        llm = make(algorithm, STEPS, rejection_sample_method=method, async_scheduling=False)
        switch_every_round(llm, depths)
        outputs = llm.generate(*varied_requests())
        found.append([(o.token_ids, o.speculation.num_correct_drafts) for o in outputs])
        if make is make_llm:
            assert isinstance(llm.engine.worker.recorder, GraphRecorder)
    assert found[0] == found[1]
    assert sum(kept for _, kept in found[0]) > 0


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("num_draft_ids", [128_256, 32_000])
def test_a_large_vocabulary_is_verified_as_by_plain_numbers(monkeypatch, method, num_draft_ids):
    monkeypatch.setattr(test_reject_drafts, "VOCAB", 128_256)
    made = test_reject_drafts.Batch.of(test_reject_drafts.ragged(7), 7, num_draft_ids=num_draft_ids)
    expected = made.expected(method)
    assert made.emitted(method, test_reject_drafts.rejection_triton) == expected
    torch.cuda.empty_cache()
