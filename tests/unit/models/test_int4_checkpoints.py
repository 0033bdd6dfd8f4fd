"""Checkpoints with weights in four bits: AWQ, GPTQ and compressed-tensors."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import serve_spec
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Matrix
from serve_spec.layers.formats.grouped_int4 import Groups, PackedInt4, nibbles
from serve_spec.layers.formats.registry import formats_of
from serve_spec.layers.module import Span
from serve_spec.models.loader import load_target
from serve_spec.models.weights import open_checkpoint
from serve_spec.ops.int4_linear import packed_codes, unpacked_codes
from serve_spec.parallel.group import SINGLE
from tests.helpers import packed
from tests.helpers.checkpoints import make_target, read_checkpoint, write_checkpoint
from tests.helpers.paged import PagedSequences
from tests.helpers.ranks import on_ranks

TINY = Path(serve_spec.__file__).parent / "assets" / "tiny" / "target"
IDS = torch.arange(40) * 7 % 251
SIZES = {"layers": 2, "hidden": 128, "num_key_value_heads": 4}


def logprobs(folder, parallel=SINGLE):
    model = load_target(folder, torch.float32, parallel=parallel)
    context = PagedSequences(model.spec.caches, 1, len(IDS)).extend([(0, len(IDS))])
    return model.logits(model.forward(IDS, context).hidden).log_softmax(dim=-1)


def test_random_weights_may_have_the_shape_of_a_packed_file(tmp_path):
    folder, _ = packed.repack(make_target(tmp_path / "made", "qwen2"), tmp_path, "awq")
    (folder / "model.safetensors").unlink()
    codes = load_target(folder, torch.float32, load_format="dummy", finish=False)
    words = codes.layers[0].mlp.down.format.codes
    assert len(words.unique()) > 0.9 * words.numel()


@pytest.mark.parametrize("name", packed.FORMATS)
@pytest.mark.parametrize("family", ["llama3", "qwen2"])
def test_a_packed_checkpoint_gives_the_log_probabilities_of_the_floats_it_stands_for(
    tmp_path, family, name
):
    """Tied and with an output matrix of floats, without biases and with them."""
    source = make_target(tmp_path / "source", family, **SIZES)
    stored, floats = packed.repack(source, tmp_path, name)
    expected = logprobs(floats)
    torch.testing.assert_close(logprobs(stored), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(expected, logprobs(source), rtol=0, atol=1e-2), "they are rounded"


@pytest.mark.parametrize("name", packed.FORMATS)
def test_the_shipped_target_in_four_bits_is_what_its_numbers_stand_for(tmp_path, name):
    stored, floats = packed.repack(TINY, tmp_path, name)
    expected = logprobs(floats)
    torch.testing.assert_close(logprobs(stored), expected, rtol=0, atol=1e-4)
    assert not torch.allclose(expected, logprobs(TINY), rtol=0, atol=1e-2), "they are rounded"


@pytest.mark.parametrize("name", [name for name in packed.FORMATS if name not in packed.ORDERED])
def test_ranks_share_a_packed_checkpoint(tmp_path, name):
    source = make_target(tmp_path / "source", "qwen2", **SIZES)
    stored, floats = packed.repack(source, tmp_path, name)
    expected = logprobs(floats)
    for found in on_ranks(2, lambda ranks: logprobs(stored, ranks)):
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", packed.FORMATS)
def test_the_resident_form_multiplies_as_the_floats_do(tmp_path, name):
    """As on a GPU: three stacked matrices, which must then have one order of columns."""
    generator = torch.Generator().manual_seed(0)
    rows = {"q_proj": 48, "k_proj": 16, "v_proj": 16}
    weights = {
        f"m.{part}.weight": torch.randn(n, 192, generator=generator) for part, n in rows.items()
    }
    stored, exact = packed.pack(weights, name)
    write_checkpoint(tmp_path, {}, stored)
    formats = formats_of({"quantization_config": packed.FORMATS[name][2]})
    parts = {f"m.{part}": Span(n, 0, n) for part, n in rows.items()}
    weight = formats.of([*parts], Matrix(parts, Span(192, 0, 192)))
    open_checkpoint(tmp_path).load_into(weight.tensors())
    resident = PackedInt4.of(weight.int4_matrix())
    assert resident.num_bytes < 80 * 192, "less than a byte each, with scales"
    for num_rows in (1, 7, 200):
        x = torch.randn(num_rows, 192, generator=generator)
        expected = x @ torch.cat([*exact.values()]).T
        torch.testing.assert_close(resident.linear(x), expected, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(weight.linear(x), expected, rtol=1e-5, atol=1e-4)
        assert resident.partials(x).shape[-2:] == expected.shape


def test_modules_that_are_not_converted_stay_floats(tmp_path):
    source = make_target(tmp_path / "source", "qwen2", **SIZES)
    for name, settings in {
        "awq": {"modules_to_not_convert": ["mlp.down_proj", "v_proj", "k_proj", "q_proj"]},
        "gptq": {
            "modules_in_block_to_quantize": [["self_attn.o_proj"], ["mlp.gate_proj", "mlp.up_proj"]]
        },
    }.items():
        skipped = ("down_proj", "q_proj", "k_proj", "v_proj")
        stored, floats = packed.repack(source, tmp_path / name, name, skipped, **settings)
        torch.testing.assert_close(logprobs(stored), logprobs(floats), rtol=0, atol=1e-4)


def test_gptq_may_pack_the_output_matrix(tmp_path):
    config, tensors = read_checkpoint(make_target(tmp_path / "source", "qwen2", **SIZES))
    own, exact = packed.pack_gptq(tensors.pop("lm_head.weight"))
    head = {f"lm_head.{key}": tensor for key, tensor in own.items()}
    stored, floats = packed.pack(tensors, "gptq")
    settings = packed.gptq(lm_head=True)
    write_checkpoint(
        tmp_path / "packed", {**config, "quantization_config": settings}, stored | head
    )
    write_checkpoint(tmp_path / "floats", config, {**floats, "lm_head.weight": exact})
    expected = logprobs(tmp_path / "floats")
    torch.testing.assert_close(logprobs(tmp_path / "packed"), expected, rtol=0, atol=1e-4)


CODES = st.integers(1, 3).flatmap(
    lambda rows: st.integers(1, 40).map(lambda eighths: (rows, 8 * eighths))
)


@given(CODES, st.integers(0, 2**31))
def test_codes_survive_every_packing(shape, seed):
    codes = torch.randint(16, shape, generator=torch.Generator().manual_seed(seed))
    codes = codes.to(torch.uint8)
    assert torch.equal(nibbles(packed.words(codes)), codes)
    assert torch.equal(unpacked_codes(packed_codes(codes), shape[1]), codes)


@given(
    st.sampled_from(["awq", "gptq", "gptq v2", "compressed asymmetric"]),
    st.sampled_from([16, 32, -1]),
    st.integers(0, 2**31),
)
def test_a_file_is_unpacked_to_its_codes_zeros_and_scales(name, size, seed):
    """Of any code and zero point; those of the first GPTQ format are stored less 1."""
    rows, columns = 16, 64
    generator = torch.Generator().manual_seed(seed)
    num_groups = 1 if size == -1 else columns // size
    offset = 1 if name == "gptq" else 0
    codes = torch.randint(16, (rows, columns), generator=generator)
    zeros = torch.randint(offset, 16 + offset, (rows, num_groups), generator=generator)
    scale = torch.rand(rows, num_groups, generator=generator).half()
    order = packed._AWQ_ORDER if name == "awq" else range(8)
    if name == "compressed asymmetric":
        stored = {
            "weight_packed": packed.words(codes),
            "weight_zero_point": packed.words(zeros.T).T,
            "weight_scale": scale,
            "weight_shape": torch.tensor([rows, columns]),
        }
        settings = packed.compressed(size, symmetric=False)
    else:
        along_rows = packed.words(codes.T, order)
        stored = {
            "qweight": along_rows if name == "awq" else packed.words(codes).T,
            "qzeros": packed.words((zeros - offset).T, order),
            "scales": scale.T,
        }
        settings = {**packed.FORMATS[name][2], "group_size": size}
    if name.startswith("gptq"):
        stored["g_idx"] = torch.arange(columns, dtype=torch.int32) // (columns // num_groups)
    formats = formats_of({"quantization_config": settings})
    weight = formats.of(
        ["m.up_proj"], Matrix({"up": Span(rows, 0, rows)}, Span(columns, 0, columns))
    )
    destinations = weight.tensors()
    assert {f"up.{key}" for key in stored} == set(destinations)
    for key, tensor in stored.items():
        destinations[f"up.{key}"].copy_(tensor)
    matrix = weight.int4_matrix()
    assert torch.equal(matrix.codes, codes.to(torch.uint8))
    assert torch.equal(matrix.zeros, zeros.to(torch.uint8))
    assert torch.equal(matrix.scale, scale.float())


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (packed.awq(bits=8), ["bits=8"]),
        (packed.awq(version="gemv"), ["version='gemv'"]),
        (packed.awq(zero_point=False), ["zero_point=False"]),
        (packed.awq(lm_head=True), ["lm_head=True"]),
        (packed.awq(group_size=40), ["group_size=40", "multiple of 16"]),
        (packed.awq(group_size=None), ["group_size=None"]),
        (packed.awq(modules_to_not_convert="lm_head"), ["modules_to_not_convert='lm_head'"]),
        (packed.gptq(bits=3), ["bits=3"]),
        (packed.gptq(bits=8), ["bits=8"]),
        (packed.gptq(checkpoint_format="marlin"), ["checkpoint_format='marlin'"]),
        (packed.gptq(dynamic={"-:.*down.*": {}}), ["dynamic="]),
        (packed.gptq(pack_dtype="int16"), ["pack_dtype='int16'"]),
        (packed.gptq(group_size=0), ["group_size=0"]),
        (packed.gptq(modules_to_not_convert=3), ["modules_to_not_convert=3"]),
        (packed.compressed(num_bits=8), ["weights.num_bits=8"]),
        (packed.compressed(type="float"), ["weights.type='float'"]),
        (packed.compressed(strategy="tensor"), ["weights.strategy='tensor'"]),
        (packed.compressed(group_size=40), ["weights.group_size=40"]),
        (packed.awq(group_size=96), ["group_size=96", "128 columns of q_proj", "of 96"]),
        (
            packed.awq(modules_to_not_convert=["v_proj"]),
            ["q_proj and model.layers.0.self_attn.v_proj are one product"],
        ),
    ],
    ids=lambda each: "" if isinstance(each, dict) else each[0],
)
def test_what_is_not_computed_is_refused_by_its_key_before_weights_are_read(
    tmp_path, monkeypatch, settings, words
):
    source = make_target(tmp_path / "source", "qwen2", **SIZES)
    config, tensors = read_checkpoint(source)
    folder = write_checkpoint(tmp_path / "a", {**config, "quantization_config": settings}, tensors)
    monkeypatch.setattr("serve_spec.models.weights.SafetensorsFile.read", None)
    with pytest.raises(CheckpointError) as raised:
        load_target(folder, torch.float32)
    message = str(raised.value)
    assert "config.json: quantization_config" in message
    assert ("; " in message, "\n" in message) == (True, False)
    assert [word for word in words if word not in message] == []


Q = "model.layers.0.self_attn.q_proj"
NINTH_GROUP = torch.full((128,), 9, dtype=torch.int32)


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("awq", {f"{Q}.scales": None}, [f"missing {Q}.scales"]),
        ("awq", {f"{Q}.qweight": torch.zeros(128, 16)}, [f"{Q}.qweight", "expected torch.int32"]),
        ("awq", {f"{Q}.scales": torch.zeros(2, 128)}, [f"{Q}.scales is [2, 128]", "[4, 128]"]),
        ("gptq", {f"{Q}.qzeros": None}, [f"missing {Q}.qzeros"]),
        (
            "gptq",
            {f"{Q}.g_idx": NINTH_GROUP},
            ["g_idx of q_proj", "4"],
        ),
        ("gptq", {f"{Q}.weight": torch.zeros(128, 128)}, [f"surplus {Q}.weight"]),
        (
            "compressed",
            {f"{Q}.weight_shape": torch.tensor([128, 64])},
            ["q_proj.weight_shape is [128, 64]", "[128, 128]"],
        ),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
def test_tensors_that_contradict_the_config_are_refused_by_name(tmp_path, name, changes, words):
    source = make_target(tmp_path / "source", "qwen2", **SIZES)
    stored, _ = packed.repack(source, tmp_path, name)
    config, tensors = read_checkpoint(stored)
    changed = {key: value for key, value in (tensors | changes).items() if value is not None}
    write_checkpoint(stored, config, changed)
    with pytest.raises(CheckpointError) as raised:
        load_target(stored, torch.float32)
    assert [word for word in words if word not in str(raised.value)] == []


def test_biases_of_0_that_exporters_of_gptq_write_for_all_matrices_are_ignored(tmp_path):
    source = make_target(tmp_path / "source", "qwen2", **SIZES)
    stored, floats = packed.repack(source, tmp_path, "gptq")
    config, tensors = read_checkpoint(stored)
    name = Q.replace("q_proj", "o_proj.bias")
    write_checkpoint(stored, config, {**tensors, name: torch.zeros(128)})
    torch.testing.assert_close(logprobs(stored), logprobs(floats), rtol=0, atol=1e-4)
    write_checkpoint(stored, config, {**tensors, name: torch.ones(128)})
    with pytest.raises(CheckpointError, match=f"surplus {name}"):
        logprobs(stored)


@pytest.mark.parametrize(
    ("row_unit", "size", "rows", "columns", "words"),
    [
        (8, 32, Span(12, 12, 24), Span(64, 0, 64), ["12 of 24 rows of a", "word of 8", "1, 3"]),
        (1, 64, Span(8, 0, 8), Span(96, 96, 192), ["96 of 192 columns", "group of 64", "1, 3"]),
        (1, None, Span(8, 0, 8), Span(4, 4, 8), ["4 of 8 columns", "word of 8", "size 1"]),
        (8, None, Span(12, 0, 12), Span(64, 0, 64), ["12 rows of a", "word of 8", "bfloat16"]),
    ],
)
def test_an_edge_of_ranks_inside_a_group_or_word_is_refused_with_sizes_that_work(
    row_unit, size, rows, columns, words
):
    with pytest.raises(CheckpointError) as raised:
        Groups(size).check(Matrix({"a": rows}, columns), row_unit, column_unit=8)
    message = str(raised.value)
    assert f"quantization_config.group_size={size or -1}" in message
    assert [word for word in words if word not in message] == []


@pytest.mark.parametrize("name", packed.ORDERED)
def test_ordered_columns_are_for_one_rank(tmp_path, name):
    source = make_target(tmp_path / "source", "qwen2", **SIZES)
    stored, _ = packed.repack(source, tmp_path, name)
    with pytest.raises(CheckpointError, match=r"(desc_act=True|actorder='group').*_size=1"):
        on_ranks(2, lambda ranks: logprobs(stored, ranks))


def test_parts_of_one_product_that_order_columns_differently_are_floats_only():
    weight = formats_of({"quantization_config": packed.gptq(desc_act=True)}).of(
        ["m.gate_proj", "m.up_proj"],
        Matrix({"gate": Span(8, 0, 8), "up": Span(8, 0, 8)}, Span(64, 0, 64)),
    )
    weight.g_idx.copy_(torch.stack([torch.arange(64) // 32, torch.arange(64) % 2]))
    weight.scale.fill_(1.0)
    assert torch.equal(weight.linear(torch.eye(64)).T, torch.full((16, 64), -1.0))
    with pytest.raises(CheckpointError, match="g_idx: the parts of one product differ"):
        PackedInt4.of(weight.int4_matrix())
