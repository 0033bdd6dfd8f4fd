"""Log-probabilities on a GPU, recorded stages included, are those of the CPU's own plain engine."""

import pytest

from tests.helpers.engines import MakeLLM, Pair, llm_maker, switch_every_round
from tests.helpers.plain_logprobs import close
from tests.unit.engine.test_logprobs import SWITCHING, prompts_and_params

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("algorithm", ["NONE", "EAGLE3", "EAGLE"])
@pytest.mark.parametrize("execution", ["eager", "lanes"])
@pytest.mark.parametrize("num_pages", [512, 32])
def test_a_gpu_tells_what_a_cpu_tells_with_and_without_speculation(
    pair: Pair, make_llm: MakeLLM, algorithm: str, execution: str, num_pages: int
) -> None:
    prompts, params = prompts_and_params()
    plain = llm_maker(pair, "cpu")()
    off = [plain.generate([p], q)[0] for p, q in zip(prompts, params, strict=True)]
    steps = 0 if algorithm == "NONE" else 7
    llm = make_llm(algorithm, steps, execution=execution, num_pages=num_pages)
    close(llm.generate(prompts, params), off)
    if steps:
        switch_every_round(llm, SWITCHING)
        close(llm.generate(prompts, params), off)
