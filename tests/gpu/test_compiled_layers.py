"""Layers left to torch's compiler on a GPU, in float32: the text is that of the CPU's engine."""

import pytest
import torch

from tests.helpers.engines import Pair, llm_maker, switch_every_round, texts
from tests.unit.engine.test_equality import SWITCHING, prompts_and_params

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("execution", ["eager", "lanes"])
def test_compiled_layers_say_what_a_cpu_says_while_the_tier_changes_every_round(
    pair: Pair, execution: str
) -> None:
    prompts, params = prompts_and_params()
    plain = llm_maker(pair, "cpu")().generate(prompts, params)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    llm = llm_maker(pair, "cuda")(
        "EAGLE3", 3, execution=execution, torch_compile=True, max_num_seqs=3
    )
    switch_every_round(llm, SWITCHING)
    assert texts(llm.generate(prompts, params)) == texts(plain)
    assert 0 < counters["stats"]["unique_graphs"] <= 16
    assert not counters["graph_break"]
