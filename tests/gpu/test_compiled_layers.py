"""Layers left to torch's compiler on a GPU, in float32: the text is that of the CPU's engine."""

import pytest
import torch

from tests.helpers.engines import llm_maker, sampled_requests, switch_every_round, texts

pytestmark = pytest.mark.gpu


def test_compiled_layers_emit_what_a_cpu_emits_while_the_depth_changes_every_round(pair):
    prompts, params = sampled_requests()
    plain = llm_maker(pair, "cpu")().generate(prompts, params)
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    llm = llm_maker(pair, "cuda")("EAGLE3", 3, torch_compile=True, max_num_seqs=3)
    switch_every_round(llm, (0, 7, 1, 0, 3, 0, 0, 7))
    assert texts(llm.generate(prompts, params)) == texts(plain)
    assert 0 < counters["stats"]["unique_graphs"] <= 16
    assert not counters["graph_break"]
