"""The conformance table on a GPU, in float32.

A part of it with random models, whose answers are those of a CPU, and all of it with a published
model and the drafters that it has.
"""

import pytest

from serve_spec.config.base import ASSETS, PACKAGED, Refusal, locate
from serve_spec.config.hub import checkpoint_folder
from serve_spec.worker import capture
from tests.helpers.engines import Pair
from tests.helpers.table import DRAFT_MODELS, LOGPROB_TOLERANCE, Row, maker_of, run
from tests.unit.engine.test_conformance import (
    EVENTS,
    MAX_MODEL_LEN,
    cells,
    check,
    decode_alone,
    requests,
    table_maker,
)

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    return decode_alone(table_maker(tmp_path_factory, "cpu"))


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    return table_maker(tmp_path_factory, "cuda")


@pytest.mark.parametrize(("row", "event"), cells(["budget", "depth", "prefix"]))
def test_answers_are_those_of_plain_decoding_on_a_cpu(make, alone, row, event):
    check(EVENTS[event](make, row), alone, row, event, tolerance=LOGPROB_TOLERANCE)


@pytest.mark.parametrize("algorithm", DRAFT_MODELS)
def test_so_are_those_of_large_trees(make, alone, algorithm):
    row = Row(algorithm, is_tree=True)
    llm = make(row, speculative_eagle_topk=8, speculative_num_draft_tokens=32)
    answers = run(llm, requests())
    check(answers, alone, row, "none", tolerance=LOGPROB_TOLERANCE, tree_tokens=32)


@pytest.mark.parametrize("is_tree", [False, True])
def test_so_are_those_of_batches_larger_than_any_graph(make, alone, is_tree):
    row = Row("EAGLE3", is_tree=is_tree)
    llm = make(row, cuda_graph_max_bs=2)
    check(run(llm, requests()), alone, row, "none", tolerance=LOGPROB_TOLERANCE)


def test_so_are_those_of_steps_longer_than_any_graph(make, alone, monkeypatch):
    monkeypatch.setattr(capture, "MAX_CAPTURED_PROMPT_TOKENS", 32)
    row = Row("EAGLE3")
    check(run(make(row), requests()), alone, row, "none", tolerance=LOGPROB_TOLERANCE)


REAL_DRAFTS = {"EAGLE3": ASSETS / "smollm2/eagle3"}


@pytest.fixture(scope="module")
def make_real():
    """Build engines on SmolLM2-135M-Instruct."""
    try:
        target = checkpoint_folder("path", str(locate("path", "asset:smollm2", ASSETS)))
    except Refusal:
        pytest.skip(f"{PACKAGED['smollm2'][0]} is not installed: make demo")
    make = maker_of(Pair(target, REAL_DRAFTS), "cuda")
    return lambda row, **keys: make(row, **{"max_model_len": MAX_MODEL_LEN, **keys})


@pytest.fixture(scope="module")
def real_alone(make_real):
    return decode_alone(make_real)


@pytest.mark.parametrize(
    ("row", "event"),
    [cell for cell in cells(EVENTS) if cell.values[0].algorithm in ("NONE", "NGRAM", *REAL_DRAFTS)],
)
def test_a_published_model_answers_as_it_does_alone(make_real, real_alone, row, event):
    answers = EVENTS[event](make_real, row)
    # Of 49,152 tokens thousands lie within rounding of their neighbours.
    check(answers, real_alone, row, event, tolerance=LOGPROB_TOLERANCE, ranks=1e-3)
