"""How often layers are compiled. `engine/test_compiled_layers` has what they compute."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from serve_spec.layers.module import tensor_defaults
from serve_spec.models.decoder import compile_layers
from serve_spec.models.loader import load_target
from serve_spec.models.registry import find_family
from serve_spec.worker.graphs import token_counts
from tests.helpers.checkpoints import target_config
from tests.helpers.mixtures import ARCHITECTURES

BACKEND = "eager"  # traces and guards like any other, and needs no C++ compiler
REGIONS_BY_ROWS = 2 * 2
"""Two regions; one row, or more."""


@pytest.fixture(autouse=True)
def _nothing_compiled():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    yield
    torch._dynamo.reset()


@pytest.fixture
def own_target(target_dir):
    """One that a test may change."""
    return load_target(target_dir, torch.float32)


def num_compiled():
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"], "a region is one graph"
    return int(counters["stats"]["unique_graphs"])


def run_regions(layer, num_rows):
    """Both regions of a layer on made-up rows."""
    shape = layer.attention.shape
    weight = layer.attention.qkv.format.weight

    def rows(width):
        generator = torch.Generator().manual_seed(width)
        return torch.randn(num_rows, width, generator=generator).to(weight)

    residual = rows(shape.hidden_size)
    before = layer.before_attention(rows(shape.hidden_size).neg(), residual)
    return [*before, *layer.after_attention(rows(shape.num_heads * shape.head_dim), residual)]


def test_layers_that_are_alike_are_compiled_for_one_row_and_for_more_and_never_again(own_target):
    compile_layers(own_target, BACKEND)
    found = []
    for num_rows in reversed(token_counts(512)):
        for layer in own_target.layers:
            run_regions(layer, num_rows)
        found.append(num_compiled())
    assert found == [2] * (len(found) - 1) + [REGIONS_BY_ROWS]


def test_a_batch_as_high_as_the_layer_is_wide_is_compiled_once_more_at_most(own_target):
    """Equal sizes look like one to the compiler when it first meets them."""
    compile_layers(own_target, BACKEND)
    layer = own_target.layers[1]
    for num_rows in (own_target.shape.hidden_size, 5, 6, 100, 31):
        run_regions(layer, num_rows)
    assert num_compiled() <= REGIONS_BY_ROWS


@pytest.mark.parametrize("family_name", ["qwen3", *ARCHITECTURES])
def test_on_a_gpu_the_references_are_compiled_and_not_our_kernels(monkeypatch, family_name):
    """Each region as one graph: experts read nothing on the host, either."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device=None: (9, 0))
    family, config = find_family(target_config(family_name, 32, 2, 288))
    # Tensors without numbers: nothing here can run on a GPU, but everything can be traced for one.
    with FakeTensorMode(allow_non_fake_inputs=True):
        with tensor_defaults(torch.bfloat16, "cuda"):
            model = family.build(config)
        compile_layers(model, BACKEND)
        layer = model.layers[1]
        for num_rows in (40, 1, 7):
            assert all(x.is_cuda for x in run_regions(layer, num_rows))
    assert num_compiled() == REGIONS_BY_ROWS
