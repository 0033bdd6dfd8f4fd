"""Embeddings, norms, the rotation that stores keys and values: kernels against the reference."""

import math

import pytest
import torch

from serve_spec.layers.rope import RotaryTable
from serve_spec.ops import elementwise
from tests.helpers.memory import poisoned_memory
from tests.helpers.triton import DEVICE, reference, relative_error

from serve_spec.ops import elementwise_triton  # isort: skip

NUM_SLOTS = 40
POISON = 1e30
# In float32 an angle of 500 has an error of 3e-5; the others are rounded to their own last place.
TOLERANCE = {torch.float32: 1e-4, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}
BOTH = pytest.mark.parametrize(
    "impl", [reference(elementwise), elementwise_triton], ids=["plain", "kernel"]
)


@BOTH
@pytest.mark.parametrize("width", [24, 1025])
@pytest.mark.parametrize(("first", "dtype"), [(None, None), (None, torch.float16), (4, None)])
def test_a_token_gets_its_row_and_zeros_if_another_rank_has_it(impl, width, first, dtype):
    weight = torch.randn(8, width, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    ids = [7, -1, 0, 5, 4] + ([] if first is None else [11, 12])
    with poisoned_memory():
        column = torch.tensor([[id, 3] for id in ids], device=DEVICE)[:, 0]
        found = impl.embed(weight, column, first, dtype)
    expected = torch.zeros(len(ids), width, device=DEVICE)
    for token, row in zip(ids, expected, strict=True):
        at = max(token, 0) - (first or 0)
        if 0 <= at < 8:
            row.copy_(weight[at])
    assert found.dtype == (dtype or torch.float32)
    assert torch.equal(found, expected.to(found.dtype))


class Scene:
    """Rows of random heads at random positions, and the pool of one layer."""

    def __init__(
        self,
        num_rows,
        num_heads,
        num_kv_heads,
        head_dim,
        dtype=torch.float32,
        rotary_dim=None,
        is_interleaved=False,
        stored=None,
    ):
        generator = torch.Generator().manual_seed(num_rows)
        self.num_heads, self.num_kv_heads = num_heads, num_kv_heads
        width = num_heads + 2 * num_kv_heads
        heads = torch.randn(num_rows, width, head_dim, generator=generator).to(dtype)
        positions = torch.randint(0, 500, (num_rows,), generator=generator)
        slots = torch.randperm(NUM_SLOTS, generator=generator)[:num_rows]
        self.heads, self.slots = heads.to(DEVICE), slots.to(DEVICE)
        with torch.device(DEVICE):
            table = RotaryTable(rotary_dim or head_dim, 10000.0, None, 500, is_interleaved)
        self.rotation = table.at(positions.to(DEVICE))
        pool = (NUM_SLOTS, num_kv_heads, head_dim)
        self.dtype, self.scales = dtype, (0.25, 3.0) if stored else (1.0, 1.0)
        self.keys = torch.full(pool, POISON, device=DEVICE).to(stored or dtype)
        self.values = self.keys.clone()

    def run(self, impl):
        pools = self.keys, self.values
        return impl.rotate_and_store(
            self.heads, self.rotation, self.slots, *pools, self.num_heads, self.dtype, self.scales
        )

    def rotated(self):
        sizes = [self.num_heads, self.num_kv_heads, self.num_kv_heads]
        query, key, value = self.heads.float().split(sizes, dim=1)
        return plainly_rotated(query, self.rotation), plainly_rotated(key, self.rotation), value


def plainly_rotated(x, rotation):
    """Turn each pair of numbers of x [T, heads, d] by its angle."""
    out, rotary_dim = x.clone(), rotation.cos_table.shape[-1]
    for pair in range(rotary_dim // 2):
        first, second = pair, pair + rotary_dim // 2
        if rotation.is_interleaved:
            first, second = 2 * pair, 2 * pair + 1
        angle = rotation.positions.float() * (1.0 / 10000.0 ** (2 * pair / rotary_dim))
        cos, sin = angle.cos().unsqueeze(1), angle.sin().unsqueeze(1)
        out[..., first] = x[..., first] * cos - x[..., second] * sin
        out[..., second] = x[..., second] * cos + x[..., first] * sin
    return out


@BOTH
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "head_dim", "rotary_dim", "is_interleaved"),
    [
        ((4, 2), 16, 16, False),
        ((6, 1), 24, 24, True),
        ((9, 3), 24, 8, False),
        ((4, 2), 32, 20, True),
    ],
)
def test_queries_come_back_and_keys_and_values_are_stored(
    impl, heads, head_dim, rotary_dim, is_interleaved, dtype
):
    scene = Scene(3, *heads, head_dim, dtype, rotary_dim, is_interleaved)
    query = scene.run(impl)
    found = query, scene.keys[scene.slots], scene.values[scene.slots]
    for ours, wanted in zip(found, scene.rotated(), strict=True):
        assert ours.dtype == dtype
        assert torch.allclose(ours.float(), wanted, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])
    assert torch.equal(scene.values[scene.slots], scene.heads[:, -heads[1] :]), "bit for bit"
    others = torch.ones(NUM_SLOTS, dtype=torch.bool)
    others[scene.slots.cpu()] = False
    poison = torch.tensor(POISON).to(dtype)
    assert (scene.keys[others].cpu() == poison).all()
    assert (scene.values[others].cpu() == poison).all()


@BOTH
@pytest.mark.parametrize("kind", [{}, {"rotary_dim": 6, "is_interleaved": True}])
def test_heads_may_be_part_of_wider_rows_or_come_as_addends(impl, kind):
    scene, wide = (Scene(4, 4, 2, 16, **kind) for _ in range(2))
    expected = scene.run(impl)
    padding = torch.full_like(wide.heads, POISON)
    wide.heads = torch.cat((wide.heads, padding), dim=1)[:, :8]
    assert torch.equal(wide.run(impl), expected)
    assert torch.equal(wide.keys, scene.keys)
    scene, other = (Scene(4, 4, 2, 16, torch.bfloat16, **kind) for _ in range(2))
    generator = torch.Generator().manual_seed(0)
    partials = torch.randn(3, *scene.heads.shape, generator=generator).to(DEVICE)
    scene.heads = (partials[0] + partials[1] + partials[2]).bfloat16()
    other.heads = partials
    assert torch.equal(scene.run(impl), other.run(impl))
    assert torch.equal(scene.keys, other.keys)
    assert torch.equal(scene.values, other.values)


FP8 = torch.float8_e4m3fn


@BOTH
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("kind", [{}, {"rotary_dim": 6, "is_interleaved": True}])
def test_keys_and_values_in_fp8_are_divided_and_rounded_to_nearest(impl, kind, dtype):
    scene, wide = Scene(4, 4, 2, 16, dtype, **kind), Scene(4, 4, 2, 16, dtype, stored=FP8, **kind)
    for each in (scene, wide):
        values = each.heads[:, -2:]
        values[0, 0, :6] = torch.tensor([math.nan, math.inf, -math.inf, 2000.0, -1e4, 0.0])
        # Between two numbers, the even one; and the smallest ones.
        values[1, 0, :6] = 3 * torch.tensor([17.0, 19.0, -1.0625, 2.0**-9, 2.0**-10, 3 * 2.0**-10])
    query = scene.run(impl)
    assert torch.equal(wide.run(impl), query)
    for stored, exact, scale in zip(
        (wide.keys, wide.values), (scene.keys, scene.values), (0.25, 3.0), strict=True
    ):
        expected = (exact[scene.slots].float() / scale).clamp(-448, 448).to(FP8)
        assert torch.equal(stored[scene.slots].view(torch.uint8), expected.view(torch.uint8))
    numbers = wide.values[wide.slots[:2], 0, :6].float().tolist()
    assert numbers[0][1:] == [448, -448, 448, -448, 0]
    assert math.isnan(numbers[0][0])
    assert numbers[1] == [16, 20, -1, 2.0**-9, 0, 2.0**-8]


@BOTH
def test_padding_rows_may_share_a_slot(impl):
    scene = Scene(6, 4, 2, 16)
    scene.slots[3:] = NUM_SLOTS - 1
    query, key, value = scene.rotated()
    assert torch.allclose(scene.run(impl), query, atol=1e-4)
    assert torch.allclose(scene.keys[scene.slots[:3]], key[:3], atol=1e-4)
    assert torch.equal(scene.values[scene.slots[:3]], value[:3])


def test_a_rotation_is_gathered_once_and_only_if_asked():
    rotation = Scene(3, 4, 2, 16).rotation
    assert rotation.cos is rotation.cos
    assert torch.equal(rotation.sin, rotation.sin_table[rotation.positions])


plain = reference(elementwise)

NORM_TOLERANCE = {torch.bfloat16: 1e-3, torch.float16: 1e-4, torch.float32: 1e-6}
EPS = 1e-5


def random(*shape, dtype=torch.float32, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


@pytest.mark.parametrize("dtype", NORM_TOLERANCE)
@pytest.mark.parametrize("shape", [(1, 1), (5, 48), (2, 3, 300), (3, 4096)])
def test_the_kernels_follow_the_reference(shape, dtype):
    x, residual = random(*shape, dtype=dtype), random(*shape, dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    before = x.clone(), residual.clone()
    with poisoned_memory():
        normed, total = elementwise_triton.add_rms_norm(x, residual, weight, EPS)
        alone = elementwise_triton.rms_norm(x, weight, EPS)
    expected, sums = plain.add_rms_norm(x, residual, weight, EPS)
    assert (alone.shape, alone.dtype) == (normed.shape, normed.dtype) == (shape, dtype)
    assert relative_error(alone, plain.rms_norm(x, weight, EPS)) < NORM_TOLERANCE[dtype]
    assert torch.equal(total, sums), "the sum is rounded alike on both ways"
    assert relative_error(normed, expected) < NORM_TOLERANCE[dtype]
    assert torch.equal(x, before[0])
    assert torch.equal(residual, before[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(2, 1, 8), (3, 5, 48), (4, 3, 4096)])
def test_addends_are_added_up_in_order_and_rounded_before_the_residual_is(shape, dtype):
    partials, residual = random(*shape), random(*shape[1:], dtype=dtype, seed=1)
    weight = random(shape[-1], dtype=dtype, seed=2)
    whole = partials[0]
    for addend in partials[1:]:
        whole = whole + addend
    expected = residual + whole.to(dtype)
    for impl in (plain, elementwise_triton):
        normed, total = impl.add_rms_norm(partials, residual, weight, EPS)
        assert torch.equal(total, expected)
        assert relative_error(normed, plain.rms_norm(expected, weight, EPS)) < NORM_TOLERANCE[dtype]


def test_rows_may_be_part_of_wider_tensors_and_none_give_none():
    wide, weight = random(4, 150), random(48, seed=1)
    x, residual = wide[:, :48], wide[:, 60:108]
    normed, total = elementwise_triton.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(total, x + residual)
    assert relative_error(normed, plain.rms_norm(total, weight, EPS)) < 1e-6
    alone = elementwise_triton.rms_norm(residual, weight, EPS)
    assert relative_error(alone, plain.rms_norm(residual, weight, EPS)) < 1e-6
    for impl, out in zip((elementwise_triton, plain), random(4, 96).chunk(2, 1), strict=True):
        assert impl.rms_norm(residual, weight, EPS, out) is out
        assert relative_error(out, alone) < 1e-6
    x, weight = torch.empty(0, 16, device=DEVICE), random(16)
    results = elementwise_triton.add_rms_norm(x, x, weight, EPS)
    assert {y.shape for y in (elementwise_triton.rms_norm(x, weight, EPS), *results)} == {(0, 16)}


@pytest.mark.parametrize("scale", [0.0, 1e-4, 1e3])
def test_rows_of_any_size_are_normed_in_float32(scale):
    """Squares of a thousand overflow float16."""
    x = (scale * random(2, 64)).half()
    weight = random(64, seed=1).half()
    exact = plain.rms_norm(x.double(), weight.double(), EPS)
    assert torch.isfinite(exact).all()
    found = elementwise_triton.rms_norm(x, weight, EPS)
    assert torch.allclose(found.double(), exact, rtol=2e-3, atol=1e-6)
