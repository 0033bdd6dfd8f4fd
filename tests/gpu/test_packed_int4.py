"""Targets in four bits and in GGUF on a GPU: they stay so, and products are those of the floats."""

import pytest
import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.layers.formats import grouped_int4
from serve_spec.layers.formats.gguf import BLOCKS
from serve_spec.layers.formats.grouped_int4 import PackedInt4
from serve_spec.layers.formats.scaled import ResidentWeight
from serve_spec.models.loader import load_target
from tests.helpers import packed
from tests.helpers.checkpoints import make_target
from tests.helpers.gguf import write_gguf
from tests.helpers.paged import PagedSequences

pytestmark = pytest.mark.gpu

DEVICE = "cuda"


def repacked(folder, name):
    made = make_target(folder / "made", "qwen2", layers=2, hidden=256)
    return packed.repack(made, folder, name)


def logits(folder, dtype):
    model, ids = load_target(folder, dtype, DEVICE), torch.arange(3, 43, device=DEVICE)
    sequence = PagedSequences(model.spec.caches, 1, len(ids), dtype=dtype, device=DEVICE)
    hidden = model.forward(ids, sequence.extend([(0, len(ids))])).hidden
    return model.logits(hidden).float()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", packed.FORMATS)
def test_a_packed_target_gives_the_logits_of_its_floats(tmp_path, name, dtype):
    found, expected = (logits(folder, dtype) for folder in repacked(tmp_path, name))
    assert (found - expected).norm() < 0.02 * expected.norm()


def gguf_folder(folder, kind, monkeypatch):
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(folder / "cache"))
    made = make_target(folder / "made", "llama2", layers=2, hidden=256)
    path = write_gguf(folder / "m.gguf", made, kind)
    return ServeSpecConfig.load(str(path)).model.folder


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", BLOCKS)
def test_a_gguf_target_gives_the_logits_of_its_floats(tmp_path, monkeypatch, kind, dtype):
    folder = gguf_folder(tmp_path, kind, monkeypatch)
    found, size = logits(folder, dtype), num_bytes(folder, dtype)
    monkeypatch.setattr(grouped_int4, "stays_packed", lambda *_: False)
    expected = logits(folder, dtype)
    assert (found - expected).norm() < 0.02 * expected.norm()
    assert size < 0.7 * num_bytes(folder, dtype)


def num_bytes(folder, dtype):
    """The memory of a matrix."""
    return load_target(folder, dtype, DEVICE).layers[0].mlp.down.format.num_bytes


@pytest.mark.parametrize("name", ["awq", "gptq ordered", *BLOCKS])
def test_a_row_has_the_same_bits_in_a_graph_alone_and_among_others(tmp_path, monkeypatch, name):
    if name in BLOCKS:
        folder = gguf_folder(tmp_path, name, monkeypatch)
    else:
        folder, _ = repacked(tmp_path, name)
    model = load_target(folder, torch.bfloat16, DEVICE)
    product = model.layers[0].attention.qkv.format
    assert isinstance(product, PackedInt4 | ResidentWeight)
    generator = torch.Generator(DEVICE).manual_seed(0)
    x = torch.randn(128, 256, generator=generator, device=DEVICE).bfloat16()
    among = product.linear(x)
    for count in (1, 2, 8, 16, 17, 33, 64, 65):
        assert torch.equal(product.linear(x[:count]), among[:count])
    graph, row = torch.cuda.CUDAGraph(), x[:1].clone()
    with torch.cuda.graph(graph):
        found = product.linear(row)
    row.copy_(x[5:6])
    graph.replay()
    assert torch.equal(found, among[5:6])
