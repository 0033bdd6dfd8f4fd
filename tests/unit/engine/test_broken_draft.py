"""A draft that gives NaN, or ids that are none, ends speculation for its own sequence.

The text does not notice.
"""

from itertools import count

import pytest
import torch

from serve_spec.config.algorithms import ALGORITHMS, Algorithm
from serve_spec.core.draft import TextDrafts
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import heard_steps, texts


def break_draft(llm, row, forwards):
    """Let the head give NaN for a row of its batch, in these of its forwards."""
    worker = llm.engine.worker
    head = worker.drafter.head
    whole, calls = head.logits, count()

    def broken(hidden, step=0):
        logits = whole(hidden, step)
        if next(calls) in forwards:
            logits[row] = torch.nan
        return logits

    head.logits = broken


@pytest.mark.parametrize(
    ("topk", "first", "ahead"), [(1, 0, False), (1, 7, True), (3, 1, True), (3, 7, False)]
)
def test_a_sequence_whose_draft_breaks_goes_on_without_speculation(make_llm, topk, first, ahead):
    prompts = [[1, 2, 3], [4, 5, 6, 7], [8, 9]]
    params = SamplingParams(max_tokens=40, temperature=0.8, seed=3, ignore_eos=True)
    plain = texts(make_llm().generate(prompts, params))
    llm = make_llm("EAGLE3", 3, speculative_eagle_topk=topk, async_scheduling=ahead)
    steps = heard_steps(llm)
    break_draft(llm, 1, range(first, first + 3))
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    # A round that was planned ahead may draft for the sequence, and break, once more.
    assert 1 <= sum(step.num_broken_drafts for step in steps) <= 1 + ahead
    assert outputs[1].speculation.num_draft_tokens < outputs[0].speculation.num_draft_tokens
    assert outputs[1].speculation.rounds_by_num_steps[0] > 2
    assert outputs[0].speculation.num_correct_drafts > 0


class Misspeller:
    """Drafts the newest token, then ids that no vocabulary has, of texts that
    begin with an odd one."""

    def propose(self, request_id, token_ids, most):
        if token_ids[0] % 2 == 0:
            return (token_ids[-1],) * min(most, 2)
        return (token_ids[-1], 10**6, -7)[:most]

    def match_length(self, request_id):
        return 0

    def propose_tree(self, request_id, token_ids, shape):
        chain = self.propose(request_id, token_ids, shape.depth)
        return TextDrafts(chain, tuple(range(len(chain))))

    def forget(self, request_id):
        pass


def build_misspeller(config, encode, max_steps):
    return Misspeller()


@pytest.mark.parametrize(("topk", "grammar"), [(2, None), (1, Grammar.regex("[a-z ]*"))])
def test_a_draft_that_is_no_id_of_the_target_ends_speculation_for_its_sequence(
    make_llm, monkeypatch, topk, grammar
):
    misspeller = Algorithm(f"{__name__}:build_misspeller", from_text=True)
    monkeypatch.setitem(ALGORITHMS, "MISSPELL", misspeller)
    prompts = [[100, 101, 102], [101, 103, 104]]
    params = SamplingParams(max_tokens=30, seed=3, ignore_eos=True, grammar=grammar)
    plain = texts(make_llm().generate(prompts, params))
    llm = make_llm("MISSPELL", 3, speculative_eagle_topk=topk)
    steps = heard_steps(llm)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    assert sum(step.num_broken_drafts for step in steps) == 1
    drafted = [output.speculation.num_draft_tokens for output in outputs]
    assert drafted[0] > 10 > drafted[1] > 0
