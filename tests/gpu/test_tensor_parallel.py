"""Texts do not depend on the number of GPUs, in float32."""

import pytest
import torch

from tests.helpers.engines import llm_maker, make_pair, switch_every_round
from tests.helpers.plain_logprobs import close
from tests.unit.engine.test_tensor_parallel import SWITCHING, requests

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    pair = make_pair(tmp_path_factory.mktemp("pair"), num_key_value_heads=4, vocab=291)
    return llm_maker(pair, "cuda")


@pytest.fixture(scope="module")
def one(make):
    return make().generate(*requests())


@pytest.mark.parametrize(
    ("algorithm", "size"), [("EAGLE3", 2), ("EAGLE3", 4), ("STANDALONE", 4), ("MEDUSA", 2)]
)
def test_ranks_with_a_gpu_each_give_the_texts_of_one(make, one, algorithm, size):
    if torch.cuda.device_count() < size:
        pytest.skip(f"needs {size} GPUs")
    llm = make(algorithm, 3, tensor_parallel_size=size)
    deepest = 4 if algorithm == "MEDUSA" else max(SWITCHING)  # its heads
    switch_every_round(llm, [min(depth, deepest) for depth in SWITCHING])
    close(llm.generate(*requests()), one)
    assert llm.engine.counters.num_correct_drafts > 0
    llm.shutdown()
