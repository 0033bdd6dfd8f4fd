"""Which scheme a module has in a file of llm-compressor, and what is refused."""

import pytest
import torch

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats import compressed_tensors
from serve_spec.layers.formats.base import Matrix
from serve_spec.layers.formats.compressed_tensors import CompressedTensors
from serve_spec.layers.module import Span

FOUR_BITS = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128}
ROWS = {"num_bits": 8, "type": "float", "strategy": "channel"}
BLOCKS = {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]}
CACHE = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
Q_PROJ = "model.layers.3.self_attn.q_proj"


@pytest.fixture(autouse=True)
def two_formats(monkeypatch):
    """Formats whose modules exist."""
    place = "serve_spec.layers.formats.plain:PlainWeight"
    places = {"pack-quantized": place, "float-quantized": place}
    monkeypatch.setattr(compressed_tensors, "_PLACES", places)


def group(weights=ROWS, targets=("Linear",), **more):
    return {"weights": weights, "targets": list(targets), **more}


def settings(*groups, **more):
    named = {f"group_{index}": each for index, each in enumerate(groups or (group(),))}
    return {"format": "float-quantized", "config_groups": named, "ignore": [], **more}


@pytest.mark.parametrize(
    ("ignored", "paths", "is_quantized"),
    [
        ([], [Q_PROJ, "lm_head"], True),
        (["lm_head"], ["lm_head"], False),
        (["lm_head"], [Q_PROJ, "model.lm_head"], True),
        (["re:.*lm_head"], ["lm_head"], False),
        (["re:.*self_attn.*"], [Q_PROJ], False),
        (["re:self_attn.*"], [Q_PROJ], True),  # patterns begin where the name does
        (["model.layers.3.self_attn"], [Q_PROJ], True),  # and names are whole
        (["model.language_model." + Q_PROJ.removeprefix("model.")], [Q_PROJ], False),
        (["language_model." + Q_PROJ], [Q_PROJ], False),
        (["re:vision_tower.*"], [Q_PROJ], True),
    ],
)
def test_a_module_is_quantized_unless_it_is_ignored(ignored, paths, is_quantized):
    formats = CompressedTensors(settings(ignore=ignored))
    assert [formats.scheme(path) is not None for path in paths] == [is_quantized] * len(paths)


def test_the_nearest_target_gives_the_scheme_and_the_group_its_format():
    formats = CompressedTensors(
        settings(
            group(),
            group(BLOCKS, ["re:.*layers.3.*"]),
            group(FOUR_BITS, [Q_PROJ], format="pack-quantized"),
            group(None, ["re:.*layers.9.*"]),
            format="float-quantized",
        )
    )
    other, third, own = (
        formats.scheme(path) for path in ("lm_head", Q_PROJ.replace("q_", "k_"), Q_PROJ)
    )
    assert (other.strategy, other.format, other.block) == ("channel", "float-quantized", None)
    assert (third.strategy, third.block) == ("block", (128, 128))
    assert (own.num_bits, own.group_size, own.format) == (4, 128, "pack-quantized")
    assert formats.scheme("model.layers.9.mlp.up_proj") is None


@pytest.mark.parametrize(
    ("inputs", "bits", "has_scale"),
    [
        (None, None, False),
        ({"num_bits": 8, "dynamic": True, "strategy": "token"}, 8, False),
        ({"num_bits": 8, "dynamic": False, "strategy": "tensor"}, 8, True),
    ],
)
def test_static_activations_have_a_scale_in_the_file(inputs, bits, has_scale):
    args = CompressedTensors(settings(group(input_activations=inputs))).scheme("lm_head")
    assert (args.input_bits, args.has_input_scale) == (bits, has_scale)


@pytest.mark.parametrize(
    ("size", "strategy"), [(None, "tensor"), (-1, "channel"), (64, "group")], ids=str
)
def test_a_strategy_that_is_left_out_follows_from_the_size_of_groups(size, strategy):
    weights = {**FOUR_BITS, "group_size": size, "strategy": None}
    assert CompressedTensors(settings(group(weights))).scheme("lm_head").strategy == strategy


def test_a_file_may_ask_for_an_fp8_cache_also_if_its_matrices_are_floats():
    assert CompressedTensors(settings()).cache_dtype is None
    assert CompressedTensors(settings(kv_cache_scheme=CACHE)).cache_dtype == torch.float8_e4m3fn
    alone = CompressedTensors(settings(kv_cache_scheme=CACHE, config_groups={}, format="dense"))
    assert alone.cache_dtype == torch.float8_e4m3fn
    assert alone.scheme(Q_PROJ) is None


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        (settings(sparsity_config={"format": "sparse-24-bitmask"}), ["sparsity_config", "24"]),
        (settings(transform_config={"config_groups": {}}), ["transform_config"]),
        (settings(kv_cache_scheme="fp8"), ["kv_cache_scheme='fp8'"]),
        (settings(kv_cache_scheme=ROWS), ["kv_cache_scheme.strategy='channel'"]),
        (settings(kv_cache_scheme={**CACHE, "num_bits": 4}), ["kv_cache_scheme.num_bits=4"]),
        (settings(kv_cache_scheme={**CACHE, "type": "int"}), ["kv_cache_scheme.type='int'"]),
        (settings(kv_cache_scheme={**CACHE, "dynamic": True}), ["kv_cache_scheme.dynamic=True"]),
        (settings(kv_cache_scheme={**CACHE, "symmetric": False}), ["symmetric=False"]),
        (settings(config_groups={}), ["config_groups={}", "no group"]),
        (settings(config_groups={"FP8": ["Linear"]}), ["config_groups.FP8=['Linear']"]),
        (settings(format="nvfp4-pack-quantized"), ["format='nvfp4-pack-quantized'", "bfloat16"]),
        (settings(format="mxfp4-pack-quantized"), ["format='mxfp4-pack-quantized'"]),
        (settings(format="int-quantized"), ["format='int-quantized'"]),
        (settings(format=None), ["format=None"]),
        (settings(ignore="lm_head"), ["ignore='lm_head'"]),
        (settings(ignore=["re:("]), ["ignore='re:('", "no pattern"]),
        (settings(group(), group(BLOCKS)), ["group_1.targets='Linear'", "another group"]),
        (settings(group(targets=[3])), ["group_0.targets=[3]"]),
        (settings(group(output_activations=ROWS)), ["group_0.output_activations"]),
        (settings(group(input_activations={"dynamic": "local"})), ["dynamic='local'"]),
        (settings(group(input_activations={"symmetric": False})), ["symmetric=False"]),
        (settings(group({**ROWS, "type": "complex"})), ["weights.type='complex'"]),
        (settings(group({**ROWS, "strategy": "token"})), ["weights.strategy='token'"]),
        (settings(group({**ROWS, "dynamic": True})), ["weights.dynamic=True"]),
        (settings(group({**FOUR_BITS, "group_size": 0})), ["weights.group_size=0"]),
        (settings(group({**BLOCKS, "block_structure": [128]})), ["block_structure=[128]"]),
        (settings(group({**BLOCKS, "block_structure": None})), ["block_structure=None"]),
    ],
    ids=lambda each: "" if isinstance(each, dict) else each[0],
)
def test_what_is_not_computed_is_refused_by_its_key(changed, words):
    with pytest.raises(CheckpointError) as raised:
        CompressedTensors(changed)
    message = str(raised.value)
    assert message.startswith("config.json: quantization_config.")
    assert ("; " in message, "\n" in message) == (True, False)
    assert [word for word in words if word not in message] == []


def test_parts_of_one_product_have_one_scheme():
    formats = CompressedTensors(settings(ignore=[Q_PROJ]))
    paths = [Q_PROJ, Q_PROJ.replace("q_proj", "k_proj")]
    with pytest.raises(CheckpointError, match=r"q_proj and .*k_proj are one product"):
        formats.of(paths, Matrix({"q_proj": Span(8, 0, 8)}, Span(8, 0, 8)))
