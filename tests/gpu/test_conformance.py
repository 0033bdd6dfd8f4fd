"""A part of the conformance table on a GPU, in float32: answers are those of a CPU."""

import pytest

from tests.helpers.table import DRAFT_MODELS, LOGPROB_TOLERANCE, Row, run
from tests.unit.engine.test_conformance import (
    EVENTS,
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
