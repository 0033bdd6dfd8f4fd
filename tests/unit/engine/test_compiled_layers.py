"""torch_compile changes what computes the layers, never a text. Float32."""

import pytest
import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import SamplingParams
from serve_spec.models.decoder import compile_layers
from serve_spec.profile.source import cost_key
from tests.helpers.engines import switch_every_round

PROMPTS = [[5, 9, 200, 31], [17], list(range(30))]
PARAMS = [
    SamplingParams(max_tokens=20 + 5 * i, temperature=t, seed=i, ignore_eos=True)
    for i, t in enumerate((0.0, 0.7, 1.0))
]


def models(llm):
    """Target and head."""
    worker = llm.engine.worker
    return [worker.target.model, worker.drafter.head]


def texts(llm):
    return [output.token_ids for output in llm.generate(PROMPTS, PARAMS)]


def test_compiled_layers_write_the_same_texts(make_llm):
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    llm = make_llm("EAGLE3", 3)
    for model in models(llm):
        # Traced and split up as for a GPU; inductor would need a C++ compiler here.
        compile_layers(model, backend="aot_eager")
    # Another depth every round: many different numbers of rows.
    switch_every_round(llm, (3, 0, 1, 2, 0, 3))
    assert texts(llm) == texts(make_llm())
    num_compiled = counters["stats"]["unique_graphs"]
    # Two regions, a first layer or not, two models: for one row, for more, and for the number that
    # came first, which is taken for the only one.
    assert 0 < num_compiled <= 24
    assert not counters["graph_break"]
    assert len(texts(llm)) == len(PROMPTS)
    assert counters["stats"]["unique_graphs"] == num_compiled, "all there is has been compiled"


def test_costs_of_compiled_layers_are_kept_apart(make_llm):
    llm = make_llm("EAGLE3", 3)
    compiled = ServeSpecConfig.load(llm.config, torch_compile=True)
    keys = [cost_key(config, llm.engine.worker) for config in (llm.config, compiled)]
    assert keys[0] != keys[1]
    assert keys[0] == cost_key(
        ServeSpecConfig.load(compiled, torch_compile=False), llm.engine.worker
    )


@pytest.mark.parametrize(
    ("overrides", "why"), [({}, "torch's compiler"), ({"tensor_parallel_size": 2}, "not supported")]
)
def test_if_layers_cannot_be_compiled_the_option_is_refused(make_llm, overrides, why):
    with pytest.raises(ValueError, match=f"torch_compile=True: {why}"):
        make_llm(torch_compile=True, **overrides)
