"""Drafts with weights in four-bit integers on a GPU."""

import pytest
import torch

from serve_spec.layers.formats.int4 import (
    Int4Weight,
    int4_works,
    plain_weight,
    quantized_groups,
)
from tests.helpers.engines import llm_maker, sampled_requests, switch_every_round, texts

pytestmark = pytest.mark.gpu

# (outputs, in): inputs of two, four and eight tiles, and matrices of an 8B model.
SHAPES = [(16, 32), (48, 96), (80, 64), (64, 384), (6144, 4096), (4096, 14336)]


def random(*shape, seed):
    generator = torch.Generator("cuda").manual_seed(seed)
    return torch.randn(shape, generator=generator, device="cuda")


def test_this_gpu_has_such_products():
    assert int4_works(torch.device("cuda", 0))


@pytest.mark.parametrize("num_rows", [1, 8, 17, 64, 300])
@pytest.mark.parametrize(("num_outputs", "in_features"), SHAPES)
def test_the_product_is_that_of_the_plain_weight_with_its_bias(num_outputs, in_features, num_rows):
    x = random(num_rows, in_features, seed=0).bfloat16()
    weight, bias = random(num_outputs, in_features, seed=1), random(num_outputs, seed=2)
    found = Int4Weight(weight, bias).linear(x, torch.float32)
    expected = x.double() @ plain_weight(*quantized_groups(weight)).double().T + bias
    assert (found - expected).norm() < 0.01 * expected.norm()


def test_a_recorded_product_equals_a_launched_one():
    weight, x = Int4Weight(random(48, 96, seed=1)), random(5, 96, seed=0).bfloat16()
    weight.linear(x, torch.float32)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = weight.linear(x, torch.float32)
    x.copy_(random(5, 96, seed=3))
    graph.replay()
    assert torch.equal(found, weight.linear(x, torch.float32))


def test_four_bits_take_a_third_of_the_memory_of_bfloat16():
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    weight = Int4Weight(random(1024, 4096, seed=1))
    held = torch.cuda.memory_allocated() - before
    assert weight.num_bytes == 1024 * 4096 * 5 // 8
    assert held < 1.01 * weight.num_bytes


@pytest.mark.parametrize("draft_dtype", ["auto", "float32"])
@pytest.mark.parametrize("algorithm", ["EAGLE3", "STANDALONE"])
def test_drafts_in_int4_never_change_the_text_on_a_gpu(pair, make_llm, algorithm, draft_dtype):
    prompts, params = sampled_requests()
    plain = texts(llm_maker(pair, "cpu")().generate(prompts, params))
    llm = make_llm(
        algorithm,
        3,
        speculative_draft_model_quantization="int4",
        speculative_draft_dtype=draft_dtype,
        max_num_seqs=3,
        max_num_batched_tokens=19,
    )
    switch_every_round(llm, (0, 7, 1, 0, 3, 0, 0, 7))
    outputs = llm.generate(prompts, params)
    assert texts(outputs) == plain
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 0
