"""Edited scores on a GPU, in float32: the text is the plain text of the CPU's own engine."""

import pytest

from serve_spec.core.request import RequestOutput
from tests.helpers.engines import MakeLLM, Pair, llm_maker, switch_every_round
from tests.helpers.plain_logprobs import close
from tests.unit.engine.test_score_edits import SWITCHING, prompts_and_params

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def plain(pair: Pair) -> list[RequestOutput]:
    prompts, params = prompts_and_params()
    llm = llm_maker(pair, "cpu")()
    return [llm.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "EAGLE"])
@pytest.mark.parametrize("execution", ["eager", "lanes"])
def test_a_gpu_edits_as_a_cpu_does_with_and_without_speculation(
    make_llm: MakeLLM, plain: list[RequestOutput], algorithm: str, execution: str
) -> None:
    prompts, params = prompts_and_params()
    steps = 0 if algorithm == "NONE" else 7
    close(make_llm(algorithm, steps, execution=execution).generate(prompts, params), plain)


def test_nothing_that_happens_to_a_request_changes_its_edited_text_on_a_gpu(
    make_llm: MakeLLM, plain: list[RequestOutput]
) -> None:
    prompts, params = prompts_and_params()
    llm = make_llm("EAGLE3", 3, num_pages=32, max_num_seqs=3, max_num_batched_tokens=19)
    switch_every_round(llm, SWITCHING)
    close(llm.generate(prompts, params), plain)
