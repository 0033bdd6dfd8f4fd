"""Of the drafts of a step, those that are likeliest to be accepted are verified."""

import random
from dataclasses import replace

import pytest
import torch

from serve_spec import SamplingParams
from serve_spec.core.round import AS_DRAWN
from serve_spec.ops.admission import admit_drafts
from tests.helpers.table import Row, llm_maker

SKEWED = (((1.0, 1.0), (0.5, -1.0)), ((2.0, 0.0),), ((0.0, -2.0),))
CHAINS = [
    (Row("EAGLE3"), AS_DRAWN),
    (Row("EAGLE3", method="standard"), SKEWED),
    (Row("MEDUSA"), SKEWED),
    (Row("NGRAM"), SKEWED),
]


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return llm_maker(tmp_path_factory.mktemp("budget"), "cpu")


def run(llm, budget_of, calibration=AS_DRAWN):
    """Generate texts under a budget, by the drafts there may be; return all steps."""
    steps = []
    choose_steps, execute = llm.engine.controller.choose_steps, llm.engine.scheduler.commit

    def choose(batch):
        chosen = choose_steps(batch)
        budget = budget_of(batch.size * chosen.shape.size)
        return replace(chosen, budget=budget, calibration=calibration)

    def commit(plan, result, cut):
        steps.append((plan, result))
        return execute(plan, result, cut)

    llm.engine.controller.choose_steps = choose
    llm.engine.scheduler.commit = commit
    # Texts of three tokens repeat themselves.
    params = [
        SamplingParams(
            max_tokens=30,
            seed=n,
            temperature=1.5 * (n % 3 > 0),
            ignore_eos=True,
            allowed_token_ids=[5, 7, 9],
        )
        for n in range(6)
    ]
    llm.generate([[5, 7, 9, 5, 7, 11, 5, 7 + n] for n in range(6)], params)
    return steps


@pytest.mark.parametrize(("row", "calibration"), CHAINS)
def test_the_likeliest_drafts_of_all_requests_are_verified(make, row, calibration):
    rng = random.Random(1)
    num_cut = 0
    for plan, result in run(make(row), lambda most: rng.randint(0, most), calibration):
        reqs = plan.sampling_requests
        if plan.budget is None:
            assert list(result.num_drafts) == [req.num_draft_tokens for req in reqs]
            continue
        assert result.draft_logprobs is not None
        kinds = torch.tensor([req.draft_kind for req in reqs])
        counts = torch.tensor([req.num_draft_tokens for req in reqs], dtype=torch.int32)
        most = max(len(kind) for kind in calibration)
        padded = [[*kind, *kind[-1:] * (3 - len(kind))] for kind in calibration]
        assert most <= 3
        expected = admit_drafts(
            torch.from_numpy(result.draft_logprobs),
            counts + 1,
            counts,
            kinds,
            torch.tensor(padded),
            torch.tensor([plan.budget]),
        )
        assert list(result.num_drafts) == (expected.query_lens - 1).tolist()
        assert sum(result.num_drafts) == plan.budget
        num_cut += len(set(result.num_drafts)) > 1
    assert num_cut > 3, "requests of one step verify as many drafts as each is worth"


def test_a_tree_verifies_as_many_drafts_as_its_budget_allows(make):
    steps = run(make(Row("EAGLE3", is_tree=True)), lambda most: most // 2)
    budgets = [(plan.budget, sum(result.num_drafts)) for plan, result in steps if plan.budget]
    assert len(budgets) > 5
    assert all(budget == verified for budget, verified in budgets)


def test_drafts_after_a_longer_match_are_verified_first(make):
    seen = 0
    for plan, result in run(make(Row("NGRAM")), lambda most: 3):
        if plan.budget is None:
            continue
        counts = zip(plan.sampling_requests, result.num_drafts, strict=True)
        drafting = sorted((req.draft_match, n) for req, n in counts if req.draft_ids)
        (shortest, fewest), (longest, most) = drafting[0], drafting[-1]
        if shortest < longest:
            assert fewest <= most
            seen += 1
    assert seen > 3, "hardly any step had matches of two lengths"
