"""The promise on the model that ships: real text, real drafts, float32."""

import json
from dataclasses import replace

import pytest

from serve_spec import LLM
from serve_spec.bench.workload import held_out_prompts
from serve_spec.core.grammar import Grammar
from serve_spec.core.request import SamplingParams
from tests.helpers.engines import checked, switch_every_round
from tests.helpers.grammars import is_valid

NUM_PROMPTS = 8
ARRAY = Grammar.json_schema(
    {"type": "array", "items": {"enum": [1, "two", None]}, "minItems": 2, "maxItems": 3}
)


def shipped(**overrides):
    return checked(LLM("configs/tiny.yaml", device="cpu", dtype="float32", **overrides))


def requests(llm):
    """Return held-out code of 40 tokens, greedy and sampled, and two requests with a grammar."""
    prompts = held_out_prompts(llm.engine.tokenizer.encode, count=NUM_PROMPTS, num_tokens=40)
    params = [
        SamplingParams(max_tokens=24, temperature=(0.0, 0.7, 1.0)[i % 3], seed=i, ignore_eos=True)
        for i in range(NUM_PROMPTS)
    ]
    params[:2] = [replace(p, grammar=ARRAY, max_tokens=40) for p in params[:2]]
    return prompts, params


def texts(outputs):
    """Token for token: different tokens can read the same."""
    return [output.token_ids for output in outputs]


@pytest.fixture(scope="module")
def plain():
    llm = shipped(speculative_algorithm="NONE", speculative_num_steps=0)
    prompts, params = requests(llm)
    return [texts(llm.generate([p], q))[0] for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize(("head", "chunked"), [("EAGLE3", True), ("EAGLE", False)])
def test_nothing_that_happens_to_a_request_changes_its_text(plain, head, chunked):
    """Another depth every round, prompts in chunks, and too few pages for the batch, at once."""
    llm = shipped(
        speculative_algorithm=head,
        speculative_adaptive=False,
        speculative_draft_model_path=f"asset:tiny/{head.lower()}",
        max_model_len=96,
        num_pages=24,
        page_size=4,
        max_num_batched_tokens=32 if chunked else 96,
        chunked_prefill_size=8 if chunked else None,
    )
    switch_every_round(llm, (0, 7, 1, 3, 0, 0, 7))
    assert texts(llm.generate(*requests(llm))) == plain
    assert llm.engine.scheduler.queue.num_preemptions > 0


def test_by_default_costs_are_measured_and_weighed_and_the_text_stays(plain):
    llm = shipped(max_num_seqs=2, max_model_len=96)
    outputs = llm.generate(*requests(llm))
    assert texts(outputs) == plain
    assert all(is_valid(output.text, json.loads(ARRAY.text)) for output in outputs[:2])
    assert outputs[0].speculation.num_correct_drafts > 0
    snapshot = llm.engine.snapshot()
    assert snapshot["strategy"] == "goodput"
    assert snapshot["fallback"] is None
    # Of depths that still fit into the last request.
    assert {"0", "1"} <= set(snapshot["predicted_goodput"]) <= set(map(str, range(8)))
    costs = snapshot["costs"]
    assert costs["factors"], "rounds correct what was measured at start"
