"""Formats of weights: what a layer multiplies by is what was loaded."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats import scaled as scaled_format
from serve_spec.layers.formats.awq import AwqWeight
from serve_spec.layers.formats.base import Formats, WeightFormat
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.formats.fp16 import Fp16Weight, fp16_works, lossless_exponent
from serve_spec.layers.formats.gguf import BLOCKS, BlockWeight
from serve_spec.layers.formats.gptq import GptqWeight
from serve_spec.layers.formats.grouped_int4 import Groups
from serve_spec.layers.formats.int8 import quantized_rows
from serve_spec.layers.formats.onednn import OneDnnWeight, onednn_rows, onednn_works
from serve_spec.layers.formats.packed_int4 import PackQuantizedWeight
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.formats.scaled import ScaledWeight, Scales
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import tensor_defaults
from serve_spec.models.loader import load_target
from serve_spec.models.weights import open_checkpoint
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import make_target, read_checkpoint, write_checkpoint
from tests.helpers.gguf import pack_gguf
from tests.helpers.packed import pack_awq, pack_compressed, pack_gptq
from tests.helpers.paged import PagedSequences
from tests.helpers.quantized import fp8_blocks, fp8_matrix, fp8_rows, int8_rows
from tests.helpers.ranks import on_ranks


def filled(linear, dtype=torch.float32):
    generator = torch.Generator().manual_seed(0)
    for parameter in linear.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator).to(dtype))
    return linear


@pytest.mark.parametrize(
    ("num_rows", "bias"), [(1, False), (2, True), (8, False), (9, True), (100, False)]
)
@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16, torch.float16])
def test_a_packed_linear_is_the_same_linear(num_rows, bias, stored):
    plain, packed = (filled(Linear(256, {"a": 300, "b": 20}, bias=bias), stored) for _ in range(2))
    packed.finish()
    if stored != torch.float32 and fp16_works():
        assert isinstance(packed.format, Fp16Weight), "half the bytes hold all of it"
    else:
        assert isinstance(packed.format, OneDnnWeight) == onednn_works(torch.float32)
    # Every other half of longer rows.
    x = torch.randn(num_rows, 512, generator=torch.Generator().manual_seed(1))[:, :256]
    once = packed(x)
    assert torch.allclose(once, plain(x), rtol=1e-5, atol=1e-4)
    packed.finish()
    assert torch.equal(packed(x), once), "finishing twice changes nothing"
    small = filled(Linear(16, {"a": 16}))
    small.finish()
    assert isinstance(small.format, PlainWeight), "a small linear is not packed"


@pytest.mark.parametrize("stored", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("in_features", "out_features"), [(256, 640), (1408, 640), (2048, 640), (64, 20011)]
)
def test_a_row_of_a_packed_linear_has_the_same_bits_alone_and_among_others(
    in_features, out_features, stored
):
    """Or a text would depend on how many drafts are verified with it."""
    linear = filled(Linear(in_features, {"a": out_features}), stored)
    linear.finish()
    x = torch.randn(100, in_features, generator=torch.Generator().manual_seed(1))
    among = linear(x)
    for count in (0, 1, 2, 3, 7, 8, 9, 16, 33, 64):
        assert torch.equal(linear(x[:count]), among[:count])
    x[4], x[6] = float("nan"), float("inf")
    broken = linear(x)
    assert broken[4].isnan().all()
    assert not broken[6].isfinite().any()
    others = [row for row in range(len(x)) if row not in (4, 6)]
    assert torch.equal(broken[others], among[others])


def bfloat16_weight(largest):
    """A weight whose rows have numbers from 2^-15 of `largest` on, as checkpoints have."""
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(300, 256, generator=generator).bfloat16().float()
    return weight * 2.0 ** -torch.randint(16, weight.shape, generator=generator) * largest


@pytest.mark.skipif(not fp16_works(), reason="torch has no float16 products here")
@pytest.mark.parametrize("largest", [2.0**-40, 2.0**-6, 1.0, 2.0**20])
def test_float16_keeps_every_number_of_bfloat16(largest):
    weight = bfloat16_weight(largest)
    kept = Fp16Weight(weight, None, lossless_exponent(weight))
    assert kept.num_bytes == weight.nbytes // 2
    assert torch.equal(kept.linear(torch.eye(256)).T, weight)


@pytest.mark.parametrize(
    ("change", "exponent"),
    [
        ({}, 16),  # the largest is below 1/2
        ({"bits": torch.float16}, 0),
        ({"row": 0.0}, 16),
        ({"number": 2.0**-60}, 16),  # nothing beside the others of its row
        ({"bits": torch.float32}, None),
        ({"row": 2.0**-30}, None),
        ({"number": float("inf")}, None),
        ({"number": float("nan")}, None),
    ],
    ids=str,
)
def test_a_weight_that_would_lose_more_than_a_sum_rounds_is_not_kept_in_float16(change, exponent):
    generator = torch.Generator().manual_seed(0)
    weight = (0.49 * torch.rand(300, 256, generator=generator)).clamp_(min=0.01)
    weight[5, 7] = 0.49
    weight = weight.to(change.get("bits", torch.bfloat16)).float()
    if change.get("bits") is None:
        weight[2, 2] = 2.0**-26 * 1.25  # float16 has it only times a power of two
    weight[3] *= change.get("row", 1.0)
    weight[4, 4] = change.get("number", weight[4, 4])
    assert lossless_exponent(weight) == exponent


def test_padding_adds_at_most_an_eighth_and_leaves_few_sizes():
    sizes = [onednn_rows(num_rows) for num_rows in range(4097)]
    assert all(num_rows <= size <= num_rows * 9 / 8 for num_rows, size in enumerate(sizes))
    assert sizes[:17] == list(range(17))
    assert all(onednn_rows(size) == size for size in sizes)
    assert len(set(sizes)) < 100


def test_bfloat16_products_accumulate_in_float32():
    with tensor_defaults(torch.bfloat16, "cpu"):
        linear = filled(Linear(1024, {"a": 256}), torch.bfloat16)
    exact_weight = linear.format.weight.float()
    linear.finish()
    x = torch.randn(3, 1024, generator=torch.Generator().manual_seed(1)).bfloat16()
    expected = x.float() @ exact_weight.T
    assert ((linear(x).float() - expected).abs() / expected.abs().clamp_min(1.0)).max() < 1e-2


class RowScaled(WeightFormat):
    """A format of this file: integers of eight bits, with a factor for each row."""

    def __init__(self, matrix):
        super().__init__()
        self.matrix = matrix
        sizes = (matrix.out_features, matrix.in_features)
        self.values = torch.zeros(sizes, dtype=torch.int8)
        self.factors = torch.zeros(sizes[0])
        self.bias = torch.zeros(sizes[0])

    @property
    def num_bytes(self):
        return self.values.nbytes + self.factors.nbytes

    def tensors(self):
        return {
            **self.matrix.destinations(".weight", self.values),
            **self.matrix.destinations(".row_factors", self.factors, columns=None),
            **(self.matrix.bias_destinations(self.bias) if self.matrix.bias else {}),
        }

    def linear(self, x, out_dtype=None):
        out = x.float() @ self.values.float().T * self.factors + self.bias
        return out.to(out_dtype or x.dtype)


class PackedColumns(RowScaled):
    """The same numbers as [in / 4, out] of int32, four columns each, under a name of its own."""

    def __init__(self, matrix):
        super().__init__(matrix)
        rows, columns = self.values.shape
        self.packed = torch.zeros(columns // 4, rows, dtype=torch.int32)

    def tensors(self):
        tensors = {n: t for n, t in super().tensors().items() if not n.endswith(".weight")}
        return tensors | self.matrix.destinations(".packed", self.packed, rows=1, columns=0)

    def finish(self):
        self.values = self.packed.T.contiguous().view(torch.int8)
        return self


class ToyFormats(Formats):
    """One format for all matrices but the output matrix. Notes what it was asked for."""

    def __init__(self, kind):
        self.kind, self.paths = kind, []

    def of(self, paths, matrix):
        self.paths += paths
        return PLAIN.of(paths, matrix) if matrix.tied is not None else self.kind(matrix)


def quantized(weight):
    values, factors = quantized_rows(weight)
    return values, factors, values.float() * factors[:, None]


def as_floats(weight):
    return {"weight": weight}, weight


def as_rows(weight):
    values, factors, exact = quantized(weight)
    return {"weight": values, "row_factors": factors}, exact


def as_packed_columns(weight):
    values, factors, exact = quantized(weight)
    return {"packed": values.view(torch.int32).T.contiguous(), "row_factors": factors}, exact


def scaled(pack, **scales):
    """Return a format of eight bits, and how a matrix is stored in it."""

    def stored(weight):
        values, scale, exact = pack(weight)
        inputs = {"input_scale": torch.tensor(2.0)} if "inputs" in scales else {}
        return {"weight": values, "weight_scale": scale, **inputs}, exact

    return lambda matrix: ScaledWeight(matrix, Scales(**scales)), stored


def int4(kind, pack, **keywords):
    """Return a format of four bits, and how a matrix is stored in it."""
    return kind, partial(pack, **keywords)


def gguf(kind):
    """Return a type of GGUF, and how a matrix is stored in it."""
    return lambda matrix: BlockWeight(matrix, BLOCKS[kind]), partial(pack_gguf, kind=kind)


# Blocks of 3 rows and 5 columns end inside the shards of two ranks.
KINDS = {
    "floats": (PlainWeight, as_floats),
    "rows": (RowScaled, as_rows),
    "packed columns": (PackedColumns, as_packed_columns),
    "fp8 rows": scaled(fp8_rows, per_row=True),
    "fp8 matrix": scaled(fp8_matrix, inputs="input_scale"),
    "fp8 blocks": scaled(lambda w: fp8_blocks(w, (2, 4)), block=(2, 4)),
    "fp8 ragged blocks": scaled(lambda w: fp8_blocks(w, (3, 5)), block=(3, 5)),
    "fp8 one block": scaled(fp8_blocks, block=(128, 128)),
    "int8 rows": scaled(int8_rows, per_row=True, dtype=torch.int8),
    "awq": int4(lambda m: AwqWeight(m, Groups(16)), pack_awq, size=16),
    "gptq": int4(lambda m: GptqWeight(m, Groups(16), 1), pack_gptq, size=16, symmetric=False),
    "gptq one group": int4(lambda m: GptqWeight(m, Groups(None), 1), pack_gptq, size=-1),
    "packed int4": int4(
        lambda m: PackQuantizedWeight(m, Groups(16), has_zeros=True, has_order=False),
        pack_compressed,
        size=16,
        symmetric=False,
    ),
    "gguf Q4_0": gguf("Q4_0"),
    "gguf Q4_1": gguf("Q4_1"),
    "gguf Q8_0": gguf("Q8_0"),
}


# As on a GPU.
KINDS |= {f"resident {name}": KINDS[name] for name in KINDS if "8" in name}


@pytest.mark.parametrize("is_row_parallel", [False, True])
@pytest.mark.parametrize("name", KINDS)
def test_ranks_of_any_format_give_the_product_of_the_whole_matrix(
    name, is_row_parallel, tmp_path, monkeypatch
):
    """Stacked matrices with biases, stored by names, layouts and dtypes of the format's own."""
    monkeypatch.setattr(scaled_format, "fits_kernel", lambda *_: "resident" in name)
    num_in, parts = 64, {"left": 32, "right": 16}
    kind, pack = KINDS[name]
    generator = torch.Generator().manual_seed(0)
    stored, weights, biases = {}, [], []
    for part, rows in parts.items():
        tensors, weight = pack(torch.randn(rows, num_in, generator=generator))
        bias = torch.randn(rows, generator=generator)
        stored |= {f"{part}.{each}": tensor for each, tensor in tensors.items()}
        stored[f"{part}.bias"] = bias
        weights.append(weight)
        biases.append(bias)
    write_checkpoint(tmp_path, {}, stored)
    x = torch.randn(3, num_in, generator=generator)

    def run(parallel):
        row_shards, column_shards = (1, parallel.size) if is_row_parallel else (parallel.size, 1)
        width = num_in // column_shards
        layer = Linear(
            width,
            {name: rows // row_shards for name, rows in parts.items()},
            True,
            parallel,
            is_row_parallel,
            ToyFormats(kind),
        )
        open_checkpoint(tmp_path).load_into(layer.tensors())
        layer.finish()
        first = parallel.rank * width if is_row_parallel else 0
        out = layer.partials(x[:, first : first + width])
        return out, layer.gate_up(x[:, first : first + width])

    expected = [x @ weight.T + bias for weight, bias in zip(weights, biases, strict=True)]
    found, gated = run(SINGLE)
    torch.testing.assert_close(found, torch.cat(expected, dim=1))
    gate, up = found.chunk(2, dim=1)
    torch.testing.assert_close(gated, F.silu(gate) * up)
    outs = [out for out, _ in on_ranks(2, run)]
    if is_row_parallel:
        torch.testing.assert_close(sum(outs), torch.cat(expected, dim=1))
    else:
        halves = [out.split([16, 8], dim=1) for out in outs]
        for whole, both in zip(expected, zip(*halves, strict=True), strict=True):
            torch.testing.assert_close(torch.cat(both, dim=1), whole)


@pytest.mark.parametrize(
    ("stored", "words"),
    [
        (torch.ones(4, 8), ["torch.float32", "expected torch.int8"]),
        (torch.ones(4, 8, dtype=torch.int16), ["torch.int16", "expected torch.int8"]),
    ],
)
def test_a_tensor_of_a_dtype_that_the_format_does_not_take_is_refused_by_name(
    tmp_path, stored, words
):
    write_checkpoint(tmp_path, {}, {"a.weight": stored, "a.row_factors": torch.ones(4)})
    layer = Linear(8, {"a": 4}, formats=ToyFormats(RowScaled))
    with pytest.raises(CheckpointError) as raised:
        open_checkpoint(tmp_path).load_into(layer.tensors())
    assert [word for word in ("a.weight", *words) if word not in str(raised.value)] == []


@pytest.mark.parametrize("family", ["llama3", "mistral"])
def test_a_model_loads_a_format_by_the_names_of_its_matrices_on_all_ranks(tmp_path, family):
    """Also with a tied output matrix, which is plain, and with one that has padding on a rank."""
    sizes = {"layers": 2, "hidden": 32, "vocab": 261, "num_key_value_heads": 4}
    config, tensors = read_checkpoint(make_target(tmp_path / "floats", family, **sizes))
    matrices = [name for name in tensors if name.endswith("_proj.weight") or "lm_head" in name]
    stored, rounded = dict(tensors), dict(tensors)
    for name in matrices:
        stored[name], factors, rounded[name] = quantized(tensors[name])
        stored[name.replace(".weight", ".row_factors")] = factors
    write_checkpoint(tmp_path / "toy", config, stored)
    write_checkpoint(tmp_path / "rounded", config, rounded)
    ids = torch.arange(12)

    def logits(folder, formats, parallel):
        model = load_target(tmp_path / folder, torch.float32, parallel=parallel, formats=formats)
        context = PagedSequences(model.spec.caches, 1, 12).extend([(0, 12)])
        return model.logits(model.forward(ids, context).hidden)

    toys = ToyFormats(RowScaled)
    expected = logits("rounded", PLAIN, SINGLE)
    torch.testing.assert_close(logits("toy", toys, SINGLE), expected, rtol=1e-4, atol=1e-4)
    assert {name.removesuffix(".weight") for name in matrices} | {"lm_head"} == set(toys.paths)
    for found in on_ranks(2, lambda ranks: logits("toy", toys, ranks)):
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)
