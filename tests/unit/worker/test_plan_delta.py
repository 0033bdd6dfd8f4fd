"""Ranks get the difference to the last plan, and restore the plan from it."""

import pickle
import random

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.draft import DraftShape
from serve_spec.core.plan import EditedText, ScheduledBatch, ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.worker.tensor_parallel import PlanDecoder, PlanEncoder

PARAMS = [SamplingParams(), SamplingParams(temperature=0.0, frequency_penalty=0.5)]


def random_row(rng, request):
    """Return a row whose long fields mostly continue those of an earlier one."""
    text = tuple(range(rng.randint(1, 30)))
    edited = EditedText(3, text, held_ids=(2,)) if rng.random() < 0.5 else None
    return ScheduledRequest(
        request_id=str(request),
        token_ids=text[-1:],
        start=len(text) - 1,
        samples=rng.random() < 0.8,
        page_ids=tuple(range(rng.randint(0, 9))) + tuple(rng.sample(range(20, 40), 2)),
        params=PARAMS[request % 2],
        seed=request,
        is_decode=True,
        shape=DraftShape.chain(rng.randint(0, 3)),
        request_slot=request,
        edited=edited,
        generated_ids=text if rng.random() < 0.5 else (),
    )


@given(st.integers(0, 2**32))
def test_a_rank_restores_every_plan_in_order(seed):
    rng = random.Random(seed)
    encoder, decoder = PlanEncoder(), PlanDecoder()
    for _ in range(8):
        requests = rng.sample(range(5), rng.randint(0, 5))
        rows = tuple(random_row(rng, request) for request in requests)
        plan = ScheduledBatch(rows, DraftShape.chain(3), len(rows), follows=rng.random() < 0.5)
        assert decoder.decode(pickle.loads(pickle.dumps(encoder.encode(plan)))) == plan


def test_a_long_text_costs_a_step_no_more_than_a_short_one():
    encoder = PlanEncoder()
    sizes = []
    for length in (10, 5_000):
        for grown in (0, 1):
            pages = tuple(range(length + grown))
            row = random_row(random.Random(1), 1)._replace(page_ids=pages, generated_ids=pages)
            row = row._replace(request_id=str(length), edited=EditedText(3, pages))
            encoded = encoder.encode(ScheduledBatch((row,), DraftShape.chain(0), 1))
        sizes.append(len(pickle.dumps(encoded)))
    assert sizes[1] < sizes[0] + 100
