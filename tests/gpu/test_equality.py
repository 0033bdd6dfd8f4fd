"""The promise on a GPU, in float32: the text is the plain text of the CPU's own engine."""

import pytest

from tests.helpers.engines import MakeLLM, Pair, llm_maker, switch_every_round, texts
from tests.unit.engine import test_ngram_trees, test_trees
from tests.unit.engine.test_equality import SWITCHING, prompts_and_params

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[tuple[int, ...]]:
    prompts, params = prompts_and_params()
    llm = llm_maker(pair, "cpu")()
    return [texts(llm.generate([p], q))[0] for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "EAGLE"])
@pytest.mark.parametrize("num_pages", [512, 32])
def test_a_gpu_says_what_a_cpu_says_with_and_without_speculation(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str, num_pages: int
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 0 if algorithm == "NONE" else 7, num_pages=num_pages)
    assert texts(llm.generate(prompts, params)) == plain
    assert (llm.engine.scheduler.num_preemptions > 0) == (num_pages == 32)


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "NGRAM", "STANDALONE", "MEDUSA"])
def test_changing_the_tier_every_round_never_changes_the_text_on_a_gpu(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm(algorithm, 3, max_num_seqs=3, max_num_batched_tokens=19)
    deepest = 4 if algorithm == "MEDUSA" else 7  # it has four heads
    switch_every_round(llm, [min(steps, deepest) for steps in SWITCHING])
    assert texts(llm.generate(prompts, params)) == plain


@pytest.mark.parametrize("algorithm", ["EAGLE3", "EAGLE", "STANDALONE", "MEDUSA"])
@pytest.mark.parametrize(("topk", "rows"), [(2, 8), (4, 16), (8, 32)])
def test_trees_never_change_the_text_on_a_gpu(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str, topk: int, rows: int
) -> None:
    prompts, params = prompts_and_params()
    llm = test_trees.with_trees(make_llm, algorithm, (4, topk, rows))
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    assert test_trees.sums(outputs)[2] > 0


def test_trees_from_the_text_never_change_it_on_a_gpu(pair: Pair, make_llm: MakeLLM) -> None:
    prompts, params = test_ngram_trees.prompts_and_params()
    plain = texts(llm_maker(pair, "cpu")().generate(prompts, params))
    llm = test_ngram_trees.with_trees(make_llm, (4, 3, 13), max_num_seqs=8)
    switch_every_round(llm, test_trees.SWITCHING)
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    assert test_ngram_trees.num_kept(outputs) > 0


@pytest.mark.parametrize("text_first", [False, True])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_changing_between_chains_and_trees_every_round_never_changes_the_text_on_a_gpu(
    make_llm: MakeLLM, plain: list[tuple[int, ...]], algorithm: str, text_first: bool
) -> None:
    prompts, params = prompts_and_params()
    keys = {"speculative_ngram_first": text_first, "speculative_ngram_min_match_window_size": 1}
    sizes = {"num_pages": 48, "max_num_batched_tokens": 40}
    llm = test_trees.with_trees(make_llm, algorithm, (4, 3, 13), **sizes, **keys)
    switch_every_round(llm, test_trees.SWITCHING)
    assert texts(llm.generate(prompts, params)) == plain
    assert llm.engine.scheduler.num_preemptions > 0
