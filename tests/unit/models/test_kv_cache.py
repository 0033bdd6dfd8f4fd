"""FP8 KV caches: who asks for one, which scales a checkpoint has, and what is computed."""

from dataclasses import replace

import pytest
import torch

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats import fp16
from serve_spec.models import kv_cache
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.kv_cache import cache_dtype, store_in
from serve_spec.models.loader import check_target, load_target
from serve_spec.ops import paged_attention
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import (
    in_sixteen_bits,
    make_eagle,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.paged import PagedSequences
from tests.helpers.quantized import repack
from tests.helpers.ranks import on_ranks

E4M3 = torch.float8_e4m3fn
IDS = torch.arange(3, 43)
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}


def with_tensors(folder, more, **config):
    """Add tensors below `model.layers.1.self_attn.`, and keys of config.json."""
    settings, tensors = read_checkpoint(folder)
    added = {f"model.layers.1.self_attn.{name}": torch.as_tensor(x) for name, x in more.items()}
    return write_checkpoint(folder, {**settings, **config}, {**tensors, **added})


def logits(model, chunks=(40,)):
    sequence = PagedSequences(model.spec.caches, 1, len(IDS))
    found, start = [], 0
    for count in chunks:
        context = sequence.extend([(0, count)])
        found.append(model.logits(model.forward(IDS[start : start + count], context).hidden))
        start += count
    return torch.cat(found)


NAMES = {
    "llm-compressor": ("k_scale", "v_scale"),
    "Model Optimizer": ("k_proj.k_scale", "v_proj.v_scale"),
    "fused": ("qkv_proj.k_scale", "qkv_proj.v_scale"),
    "vLLM": ("attn.k_scale", "attn.v_scale"),
    "static outputs": ("k_proj.output_scale", "v_proj.output_scale"),
    "caches": ("k_cache.scale", "v_cache.scale"),
}


@pytest.mark.parametrize("names", NAMES.values(), ids=NAMES)
def test_scales_of_a_layer_have_the_names_of_any_exporter(names, tmp_path):
    folder = make_target(tmp_path / "made", "mistral", layers=3)
    scales = dict(zip(names, (torch.tensor([0.5]), torch.tensor(0.25).bfloat16()), strict=True))
    unused = {"q_scale": torch.ones(4), "prob_output_scale": 0.1, "k_zero_point": torch.zeros(1)}
    with_tensors(folder, {**scales, **unused})
    check_target(folder)
    model = load_target(folder, torch.float32)
    assert model.cache_scales == {1: (0.5, 0.25)}
    store_in(None, model)
    assert {(c.dtype, c.key_scale, c.value_scale) for c in model.spec.caches} == {(None, 1, 1)}
    store_in(E4M3, model)
    found = [(cache.dtype, cache.key_scale, cache.value_scale) for cache in model.spec.caches]
    assert found == [(E4M3, 1, 1), (E4M3, 0.5, 0.25), (E4M3, 1, 1)]


def test_an_old_file_has_one_scale_for_keys_and_values(tmp_path):
    folder = with_tensors(make_target(tmp_path / "made", layers=2), {"kv_scale": 0.125})
    assert load_target(folder, torch.float32).cache_scales == {1: (0.125, 0.125)}


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({"k_scale": torch.ones(2, 1)}, ["self_attn.k_scale is [2, 1]", "one scale per layer"]),
        ({"v_scale": 0.0}, ["self_attn.v_scale is 0.0", "positive"]),
        ({"k_proj.k_scale": float("nan")}, ["k_proj.k_scale is nan"]),
        ({"v_zero_point": torch.ones(1)}, ["self_attn.v_zero_point: not 0"]),
        ({"k_scale": 1.0, "kv_scale": 2.0}, ["is 2.0", "is 1.0", "keep one"]),
    ],
)
def test_scales_that_are_not_computed_are_refused_before_memory_is_taken(tensors, words, tmp_path):
    folder = with_tensors(make_target(tmp_path / "made", layers=2), tensors)
    for refusing in (check_target, lambda folder: load_target(folder, torch.float32, "meta")):
        with pytest.raises(CheckpointError) as raised:
            refusing(folder)
        message = str(raised.value)
        assert [word for word in words if word not in message] == []
        assert ("; " in message or ": " in message, "\n" in message) == (True, False)


def test_a_draft_leaves_the_scales_of_its_file_out(tmp_path):
    target = load_target(make_target(tmp_path / "target", layers=2), torch.float32)
    head = make_eagle(tmp_path / "eagle", tmp_path / "target")
    config, tensors = read_checkpoint(head)
    scale = {"layers.0.self_attn.k_scale": torch.tensor(0.5)}
    write_checkpoint(head, config, {**tensors, **scale})
    store_in(E4M3, target)
    assert {cache.dtype for cache in load_draft(head, target, "EAGLE").caches} == {None}


@pytest.mark.parametrize(
    ("name", "settings", "expected"),
    [
        ("auto", None, None),
        ("auto", {"quant_method": "compressed-tensors", "kv_cache_scheme": CACHE}, E4M3),
        ("auto", {"quant_method": "modelopt", "quant_algo": "FP8"}, None),
        (
            "auto",
            {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_quant_algo": "FP8"},
            E4M3,
        ),
        ("auto", {"quant_method": "modelopt", "quant_algo": "FP8", "kv_cache_scheme": CACHE}, E4M3),
        ("bfloat16", {"quant_method": "compressed-tensors", "kv_cache_scheme": CACHE}, None),
        ("bfloat16", None, None),
        ("fp8", None, E4M3),
        ("fp8_e4m3", None, E4M3),
    ],
)
def test_the_configuration_goes_before_the_checkpoint(name, settings, expected, tmp_path):
    folder = make_target(tmp_path / "made", layers=1, quantization_config=settings)
    assert cache_dtype(name, folder, torch.bfloat16, torch.device("cpu")) == expected
    assert cache_dtype(name, folder, None, None) == expected


def test_devices_without_fp8_and_floats_that_are_not_computed_are_refused(tmp_path, monkeypatch):
    floats = make_target(tmp_path / "floats", layers=1)
    settings = {"quant_method": "compressed-tensors", "kv_cache_scheme": CACHE}
    asking = make_target(tmp_path / "asking", layers=1, quantization_config=settings)
    old = torch.device("cuda", 1)
    monkeypatch.setattr(kv_cache, "converts_fp8", lambda device: device != old)
    for name, folder in (("fp8", floats), ("auto", asking)):
        assert cache_dtype(name, folder, torch.float16, torch.device("cuda", 0)) == E4M3
        with pytest.raises(ValueError, match=f"kv_cache_dtype='{name}': .*8.9 or newer.*cuda:1; "):
            cache_dtype(name, folder, torch.float16, old)
    assert cache_dtype("auto", floats, torch.float16, old) is None
    why = "kv_cache_dtype='bfloat16': the compute dtype is float16; use auto, fp8 or float16"
    with pytest.raises(ValueError, match=why):
        cache_dtype("bfloat16", floats, torch.float16, old)


@pytest.mark.parametrize(
    ("family", "more"),
    [("qwen3", {}), ("mistral", {"sliding_window": 8}), ("gpt_oss", {"sliding_window": 8})],
)
def test_a_model_attends_to_rounded_keys_and_values_of_all_tokens(
    family, more, tmp_path, monkeypatch
):
    """Also to those of its own step, so that it does not matter how a text is cut.

    Weights are of 16 bits, and stay so: products then have the same bits in any batch.
    """
    monkeypatch.setattr(fp16, "_MIN_ELEMENTS", 1)
    folder = in_sixteen_bits(make_target(tmp_path / "made", family, layers=2, **more))
    with_tensors(folder, {"k_scale": 0.02, "v_scale": 0.003})
    model, expected = (load_target(folder, torch.float32) for _ in range(2))
    store_in(E4M3, model)
    whole = logits(model)
    for chunks in ((20, 1, 1, 18), (1,) * len(IDS)):
        assert torch.equal(logits(model, chunks), whole), "bit for bit"
    attend, layers = paged_attention.paged_attention, []

    def rounded(query, keys, values, *rest):
        scales = model.cache_scales.get(len(layers), (1.0, 1.0))
        layers.append(scales)
        for pool, scale in zip((keys, values), scales, strict=True):
            pool.copy_((pool / scale).clamp(-448, 448).to(E4M3).float() * scale)
        return attend(query, keys, values, *rest)

    monkeypatch.setattr(paged_attention, "paged_attention", rounded)
    torch.testing.assert_close(whole, logits(expected), rtol=0, atol=1e-4)
    assert layers == [(1.0, 1.0), (pytest.approx(0.02), pytest.approx(0.003))]
    monkeypatch.undo()
    assert not torch.allclose(whole, logits(expected), rtol=0, atol=1e-2), "it rounds"


def test_a_quantized_file_brings_its_scales(tmp_path):
    made = make_target(tmp_path / "made", "mistral", hidden=64, layers=2)
    packed, floats = repack(made, tmp_path, "modelopt", kv_cache_quant_algo="FP8")
    scales = {"k_proj.k_scale": 0.02, "v_proj.v_scale": 0.003}
    models = [load_target(with_tensors(each, scales), torch.float32) for each in (packed, floats)]
    for model in models:
        store_in(E4M3, model)
    torch.testing.assert_close(*map(logits, models), rtol=0, atol=1e-3)


def test_every_rank_has_its_heads_and_the_scales_of_all(tmp_path):
    made = make_target(tmp_path / "made", "mistral", layers=2, num_key_value_heads=4)
    folder = with_tensors(made, {"k_scale": 0.02, "v_scale": 0.003})

    def run(parallel=SINGLE):
        model = load_target(folder, torch.float32, parallel=parallel)
        store_in(E4M3, model)
        return logits(model).log_softmax(-1), model.spec.caches[1]

    expected, cache = run()
    for found, of_rank in on_ranks(2, run):
        assert of_rank == replace(cache, num_heads=2)
        # A sum that is rounded otherwise may move a key to the next number of FP8.
        torch.testing.assert_close(found, expected, rtol=0, atol=0.1)
