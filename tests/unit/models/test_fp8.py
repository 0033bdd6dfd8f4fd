"""Targets in eight bits: what a file stands for is what is computed, or it is refused by name."""

import json
from pathlib import Path

import pytest
import torch

import serve_spec
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats import scaled
from serve_spec.layers.formats.fp8 import Fp8OnLoadFormats
from serve_spec.models.loader import check_target, load_target, quantized_formats
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import make_target, read_checkpoint, write_checkpoint
from tests.helpers.paged import PagedSequences, run_text
from tests.helpers.quantized import FORMATS, fp8_rows, repack
from tests.helpers.ranks import on_ranks

TINY = Path(serve_spec.__file__).parent / "assets" / "tiny" / "target"
IDS = torch.arange(3, 43)
LAYER = "model.layers.1."
Q_PROJ, DOWN = f"{LAYER}self_attn.q_proj", f"{LAYER}mlp.down_proj"


def logprobs(folder, parallel=SINGLE, formats=None):
    model = load_target(folder, torch.float32, parallel=parallel, formats=formats)
    context = PagedSequences(model.spec.caches, 1, len(IDS)).extend([(0, len(IDS))])
    return model.logits(model.forward(IDS, context).hidden).log_softmax(-1)


@pytest.mark.parametrize("name", FORMATS)
def test_the_shipped_target_in_any_format_is_what_its_numbers_stand_for(name, tmp_path):
    packed, floats = repack(TINY, tmp_path, name)
    found, expected = logprobs(packed), logprobs(floats)
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    assert not torch.allclose(expected, logprobs(TINY), rtol=0, atol=1e-3), "it rounds"


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(("family", "is_resident"), [("mistral", False), ("qwen2", True)])
def test_blocks_may_end_anywhere_on_any_rank(name, family, is_resident, tmp_path, monkeypatch):
    """Also with biases, and an output matrix that is left as it is; and as on a GPU."""
    monkeypatch.setattr(scaled, "fits_kernel", lambda *_: is_resident)
    made = make_target(tmp_path / "made", family, hidden=72, layers=2, num_key_value_heads=4)
    packed, floats = repack(made, tmp_path, name)
    expected = logprobs(floats)
    torch.testing.assert_close(logprobs(packed), expected, rtol=0, atol=1e-4)
    for found in on_ranks(2, lambda ranks: logprobs(packed, ranks)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", FORMATS)
def test_bfloat16_weights_are_rounded_once(name, tmp_path):
    packed, _ = repack(make_target(tmp_path / "made", "mistral", layers=1), tmp_path, name)
    exact, rounded = (
        load_target(packed, dtype).layers[0].mlp.down.format.weight
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert torch.equal(exact.bfloat16(), rounded)


@pytest.mark.parametrize(
    ("name", "skipped", "settings"),
    [
        ("fp8 blocks", [Q_PROJ, f"{LAYER}mlp"], "modules_to_not_convert"),
        ("fp8 AutoFP8", [Q_PROJ, "down_proj"], "ignored_layers"),
        ("modelopt", ["lm_head", Q_PROJ, f"{LAYER}mlp*"], "exclude_modules"),
        ("compressed rows", ["lm_head", Q_PROJ, r"re:.*\.1\.mlp\.(up|gate|down)_proj"], "ignore"),
    ],
)
def test_modules_that_are_left_out_stay_floats(name, skipped, settings, tmp_path):
    """And one product has parts of one kind."""
    made = make_target(tmp_path / "made", "mistral", layers=2)
    _, tensors = read_checkpoint(made)
    attention = {f"{LAYER}self_attn.{part}_proj" for part in "qkv"}
    modules = {each.removesuffix(".weight") for each in tensors if each.startswith(f"{LAYER}mlp")}
    down = {each.removesuffix(".weight") for each in tensors if "down_proj" in each}
    plain = attention | (down if "down_proj" in skipped else modules)
    named = [*skipped, *(path for path in attention if path != Q_PROJ)]
    packed, floats = repack(made, tmp_path, name, plain, **{settings: named})
    torch.testing.assert_close(logprobs(packed), logprobs(floats), rtol=0, atol=1e-4)
    packed, _ = repack(made, tmp_path, name, plain, **{settings: skipped})
    with pytest.raises(CheckpointError, match=r"q_proj and .*k_proj are one product"):
        check_target(packed)


def test_the_output_matrix_may_be_quantized_too(tmp_path):
    made = make_target(tmp_path / "made", "llama2", hidden=32, layers=1)
    packed, floats = repack(made, tmp_path, "compressed rows", heads=("lm_head",), ignore=[])
    torch.testing.assert_close(logprobs(packed), logprobs(floats), rtol=0, atol=1e-4)


def test_a_text_model_inside_a_multimodal_one_has_the_names_of_its_file(tmp_path):
    made = make_target(tmp_path / "made", "mistral", hidden=32, layers=1)
    packed, floats = repack(made, tmp_path, "fp8 static")
    expected = logprobs(floats)
    config, tensors = read_checkpoint(packed)
    quantization = config.pop("quantization_config")
    quantization["modules_to_not_convert"] = ["model.vision_tower", "lm_head"]
    wrapped = {
        "architectures": ["Mistral3ForConditionalGeneration"],
        "model_type": "mistral3",
        "text_config": config,
        "vision_config": {},
        "quantization_config": quantization,
    }
    stored = {f"language_model.{name}": tensor for name, tensor in tensors.items()}
    stored["vision_tower.patch.weight"] = torch.ones(2, 2)
    folder = write_checkpoint(tmp_path / "wrapped", wrapped, stored)
    torch.testing.assert_close(logprobs(folder), expected, rtol=0, atol=1e-4)


def test_settings_of_the_model_optimizer_may_be_in_a_file_of_their_own(tmp_path):
    made = make_target(tmp_path / "made", "mistral", hidden=32, layers=1)
    packed, floats = repack(made, tmp_path, "modelopt")
    config, tensors = read_checkpoint(packed)
    settings = config.pop("quantization_config")
    write_checkpoint(packed, config, tensors)
    path = packed / "hf_quant_config.json"
    path.write_text(json.dumps({"producer": {"name": "modelopt"}, "quantization": settings}))
    torch.testing.assert_close(logprobs(packed), logprobs(floats), rtol=0, atol=1e-4)
    path.write_text("{}")
    with pytest.raises(CheckpointError, match=r"hf_quant_config.json: quantization is missing; "):
        check_target(packed)


def test_random_weights_have_the_shape_of_a_quantized_file(tmp_path):
    packed, _ = repack(make_target(tmp_path / "made", "mistral"), tmp_path, "fp8 blocks")
    (packed / "model.safetensors").unlink()
    model = load_target(packed, torch.float32, load_format="dummy")
    assert run_text(model, IDS)[0].std() > 0.1


def without(name):
    return lambda tensors: tensors.pop(name)


def change(name, function):
    return lambda tensors: tensors.update({name: function(tensors[name])})


@pytest.mark.parametrize(
    ("name", "rewrite", "settings", "words"),
    [
        ("fp8 blocks", without(f"{DOWN}.weight_scale_inv"), {}, [f"{DOWN}.weight_scale_inv"]),
        ("fp8 static", without(f"{DOWN}.activation_scale"), {}, [f"{DOWN}.activation_scale"]),
        (
            "fp8 blocks",
            None,
            {"weight_block_size": [64, 64]},
            ["proj.weight_scale_inv is [1, 1]", "expected [2, 1]"],
        ),
        ("fp8 blocks", None, {"weight_block_size": None}, ["weight_scale_inv is [", "[1]"]),
        ("fp8 blocks", None, {"weight_block_size": [128]}, ["weight_block_size=[128]"]),
        ("fp8 blocks", None, {"weight_block_size": [0, 128]}, ["weight_block_size=[0, 128]"]),
        ("fp8 blocks", None, {"activation_scheme": "static"}, ["missing", "activation_scale"]),
        ("fp8 blocks", None, {"activation_scheme": "none"}, ["activation_scheme='none'"]),
        ("fp8 blocks", None, {"ignored_layers": "lm_head"}, ["ignored_layers='lm_head'"]),
        ("fp8 blocks", None, {"quant_method": "gptq3"}, ["quant_method='gptq3'", "'fp8'"]),
        (
            "fp8 blocks",
            change(f"{DOWN}.weight", torch.Tensor.float),
            {},
            [f"{DOWN}.weight is of torch.float32", "expected torch.float8_e4m3fn"],
        ),
        (
            "fp8 blocks",
            change(f"{DOWN}.weight", lambda weight: weight.float().to(torch.float8_e5m2)),
            {},
            [f"{DOWN}.weight is of torch.float8_e5m2", "expected torch.float8_e4m3fn"],
        ),
        (
            "fp8 blocks",
            change(f"{DOWN}.weight_scale_inv", lambda scale: scale.to(torch.int32)),
            {},
            [f"{DOWN}.weight_scale_inv is of torch.int32"],
        ),
        (
            "fp8 blocks",
            None,
            {"modules_to_not_convert": ["down_proj"]},
            ["surplus", f"{DOWN}.weight_scale_inv"],
        ),
        ("modelopt", None, {"quant_algo": "NVFP4"}, ["quant_algo='NVFP4'"]),
        ("modelopt", None, {"kv_cache_quant_algo": "NVFP4"}, ["kv_cache_quant_algo='NVFP4'"]),
        (
            "modelopt",
            None,
            {"kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "attn_head"}},
            ["kv_cache_scheme.strategy='attn_head'", "one scale per layer"],
        ),
        ("modelopt", None, {"exclude_modules": []}, ["missing lm_head.weight_scale"]),
        ("modelopt", without(f"{DOWN}.input_scale"), {}, [f"{DOWN}.input_scale"]),
        ("compressed rows", without(f"{DOWN}.weight_scale"), {}, [f"{DOWN}.weight_scale"]),
        (
            "compressed static",
            change(f"{DOWN}.weight_scale", lambda scale: scale.expand(2)),
            {},
            [f"{DOWN}.weight_scale is [2]", "expected [1]"],
        ),
    ],
)
def test_files_that_do_not_fit_are_refused_before_memory_is_taken(
    name, rewrite, settings, words, tmp_path
):
    made = make_target(tmp_path / "made", "mistral", hidden=64, layers=2)
    packed, _ = repack(made, tmp_path, name, **settings)
    if rewrite is not None:
        config, tensors = read_checkpoint(packed)
        rewrite(tensors)
        write_checkpoint(packed, config, tensors)
    for refusing in (check_target, lambda folder: load_target(folder, torch.float32, "meta")):
        with pytest.raises(CheckpointError) as raised:
            refusing(packed)
        message = str(raised.value)
        assert [word for word in words if word not in message] == []
        assert ("; " in message, "\n" in message) == (True, False)


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"num_bits": 4}, ["weights.num_bits=4"]),
        ({"strategy": "group", "group_size": 128}, ["weights.strategy='group'"]),
        ({"symmetric": False}, ["weights.symmetric=False"]),
    ],
)
def test_schemes_of_llm_compressor_that_are_not_computed_are_refused(changed, words, tmp_path):
    packed, _ = repack(make_target(tmp_path / "made", "mistral"), tmp_path, "compressed rows")
    config = json.loads((packed / "config.json").read_text())
    config["quantization_config"]["config_groups"]["group_0"]["weights"] |= changed
    (packed / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError) as raised:
        check_target(packed)
    assert [word for word in words if word not in str(raised.value)] == []


def test_floats_become_fp8_by_row_when_they_are_loaded(tmp_path):
    """All matrices but the output one; as on a GPU."""
    made = make_target(tmp_path / "made", "qwen2", hidden=64, layers=2)
    config, tensors = read_checkpoint(made)
    rounded = {
        name: fp8_rows(tensor)[2] if name.endswith("_proj.weight") else tensor
        for name, tensor in tensors.items()
    }
    floats = write_checkpoint(tmp_path / "floats", config, rounded)
    found = logprobs(made, formats=Fp8OnLoadFormats())
    torch.testing.assert_close(found, logprobs(floats), rtol=0, atol=1e-4)
    assert not torch.allclose(found, logprobs(made), rtol=0, atol=1e-3), "it rounds"


@pytest.mark.parametrize(
    ("packed", "name", "device", "words"),
    [
        (None, "fp8", "cpu", "quantization='fp8': only GPUs .* this is cpu; leave it out"),
        (None, "modelopt", None, "quantization='modelopt': the checkpoint is not quantized; "),
        ("modelopt", "fp8", None, "quantization='fp8': the checkpoint has quant_method 'modelopt'"),
    ],
)
def test_a_quantization_that_the_checkpoint_or_device_lacks_is_refused(
    packed, name, device, words, tmp_path
):
    folder = make_target(tmp_path / "made", "mistral", hidden=64, layers=1)
    if packed is not None:
        folder, _ = repack(folder, tmp_path, packed)
    with pytest.raises(ValueError, match=words):
        quantized_formats(name, folder, device and torch.device(device))
    for asked in (None, "auto", packed):
        assert quantized_formats(asked, folder, torch.device("cpu")) is None
