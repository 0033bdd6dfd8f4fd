"""Pools and their memory: what the caches of a model's layers say."""

import pytest
import torch

from serve_spec.core.caches import PagedCache, RecurrentCache
from serve_spec.kvcache.memory import CacheMemory
from serve_spec.kvcache.pool import PagedKVPool

WIDE = PagedCache(2, 24, 16)
RECURRENT = RecurrentCache(state=(4, 8, 16), conv=(32, 3), input_width=40)


def test_memory_is_counted_by_page_and_by_request_slot():
    caches = [WIDE, RECURRENT, PagedCache(1, 8, 8, dtype=torch.float8_e4m3fn), RECURRENT]
    memory = CacheMemory.of(caches, page_size=4, compute_dtype=torch.bfloat16, ring=5)
    # Two bytes for 2 · (24 + 16) numbers, one byte for 8 + 8 numbers.
    assert memory.per_page == 4 * (160 + 16)
    # Four bytes for 4 · 8 · 16 + 32 · 3 + 5 · 40 numbers.
    assert memory.per_slot == 2 * 4 * (512 + 96 + 200)
    assert memory.total(10, 3) == 10 * memory.per_page + 3 * memory.per_slot
    budget = memory.total(10, 3)
    assert memory.most_pages(budget, 3) == 10
    assert memory.most_pages(budget - 1, 3) == 9
    assert memory.most_pages(budget, 10**6) == 0, "the slots leave nothing"


def test_a_pool_takes_the_memory_that_was_planned_for_its_pages():
    fp8 = PagedCache(4, 16, 16, dtype=torch.float8_e4m3fn, key_scale=0.5)
    caches = [WIDE, PagedCache(4, 16, 16, window=3), WIDE, PagedCache(4, 16, 16), fp8]
    pool = PagedKVPool(caches, num_pages=6, page_size=4, dtype=torch.float16, device="cpu")
    planned = CacheMemory.of(caches, 4, torch.float16, ring=0)
    with_scratch_page = planned.total(6 + 1, num_slots=1)
    assert sum(tensor.nbytes for tensor in pool.tensors) == with_scratch_page
    assert len(pool.tensors) == 6, "keys and values of three kinds of layers"
    assert pool.keys[-1].dtype == pool.values[-1].dtype == torch.float8_e4m3fn
    places = {part.data_ptr() for layers in (pool.keys, pool.values) for part in layers}
    assert len(places) == 2 * len(caches), "each layer has its own"
    for cache, keys, values in zip(caches, pool.keys, pool.values, strict=True):
        assert keys.shape == (28, cache.num_heads, cache.key_dim)
        assert values.shape == (28, cache.num_heads, cache.value_dim)


@pytest.mark.parametrize(
    ("cache", "message"),
    [
        (RECURRENT, "layer 1 keeps recurrent state: not supported; use a model"),
        (
            PagedCache(2, 16, 16, dtype=torch.float8_e5m2),
            "layer 1 keeps keys and values in float8_e5m2: not supported; only the compute dtype",
        ),
    ],
)
def test_caches_that_no_pool_holds_are_refused_by_name(cache, message):
    with pytest.raises(ValueError, match=message):
        PagedKVPool([WIDE, cache], 2, 4, torch.float32, "cpu")
