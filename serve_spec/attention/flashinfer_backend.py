"""Paged attention by FlashInfer (arXiv 2501.01005), for ragged rounds on GPUs.

The library compiles a kernel for every dtype, head size and use of a window when it is first
needed, and keeps it on disk. Plans are made on the host from lengths the host knows.
"""

from __future__ import annotations

import importlib.util
from functools import cache
from itertools import cycle
from typing import Any

import torch
from torch import Tensor

from serve_spec.attention.page_table import page_table
from serve_spec.attention.torch_backend import HeadShape
from serve_spec.attention.tree_mask import PackedMask, pack_tree_mask
from serve_spec.core.context import KVPool, RaggedBatch, Rotation, Rows
from serve_spec.kvcache.pool import PagedKVPool
from serve_spec.ops import rotary

WORKSPACE_BYTES = 256 * 2**20
"""Partial results of caches that are read in several parts: once per device, for all plans."""

_HEAD_DIMS = (64, 128, 256)
_DTYPES = (torch.bfloat16, torch.float16)

# The library's kernels for Ampere. Its Hopper kernels know no tree masks and take five times as
# long to compile, for attention that is a few percent of a prompt's arithmetic.
_KERNELS = "fa2"
_MIN_CAPABILITY = (8, 0)
# Plans whose forwards may be under way: as far as the host may run ahead of the device.
_NUM_PLANNERS = 4


def why_not(shape: HeadShape, device: torch.device, dtype: torch.dtype) -> str | None:
    """What keeps FlashInfer from serving a model here, with the way out; None if nothing does."""
    if device.type != "cuda":
        return f"device={device.type!r}: it runs on GPUs only; use attention_backend='torch'"
    if dtype not in _DTYPES:
        return f"dtype={_name(dtype)!r}: it computes in bfloat16 or float16; use one of them"
    if shape.head_dim not in _HEAD_DIMS:
        return f"head_dim={shape.head_dim}: it has kernels for {_HEAD_DIMS}; use 'torch'"
    if shape.sliding_window is not None:
        return (
            f"sliding_window={shape.sliding_window}: its results for several sequences were not "
            "always those of the reference (tests/gpu/test_flashinfer.py); use 'torch'"
        )
    if importlib.util.find_spec("flashinfer") is None:
        return "the package is not installed: pip install serve-spec[gpu]"
    if torch.cuda.get_device_capability(device) < _MIN_CAPABILITY:
        return "the GPU is too old: it needs compute capability 8.0; use 'torch'"
    return None


class FlashInferAttention:
    """Plans attention of one model's ragged batches over its pool.

    A plan is good until three more are made: planners take turns, so that the host can prepare the
    next forward while the device is busy with the last. All use one stream.

    Raises:
        Exception: whatever the library's compiler or kernels come up with on this machine.
    """

    name = "flashinfer"

    def __init__(self, shape: HeadShape, device: torch.device, dtype: torch.dtype) -> None:
        self._shape = shape
        planners = [_Planner(shape, device) for _ in range(_NUM_PLANNERS)]
        planners[0].try_out(dtype)
        self._turns = cycle(planners)

    def plan(self, batch: RaggedBatch, pool: KVPool) -> PlannedFlashInfer:
        """Prepares what all layers of one forward share. The host waits for masks of trees."""
        mask = None
        if batch.tree_mask is not None:
            window = self._shape.sliding_window
            mask = pack_tree_mask(
                batch.tree_mask.cpu(), batch.query_lens, batch.kv_lens, batch.tree_lens, window
            )
        return next(self._turns).plan(batch, pool, mask)


class FlashInferLaneAttention:
    """The same kernels in a CUDA graph: one batch size, planned on the host before every replay.

    The first plan sets the most rows of all later ones. `max_pages`: of all sequences together.
    """

    def __init__(
        self, shape: HeadShape, device: torch.device, batch_size: int, max_pages: int
    ) -> None:
        def ints(count: int) -> Tensor:
            return torch.zeros(count, dtype=torch.int32, device=device)

        self._planner = _Planner(
            shape,
            device,
            use_cuda_graph=True,
            qo_indptr_buf=ints(batch_size + 1),
            paged_kv_indptr_buf=ints(batch_size + 1),
            paged_kv_indices_buf=ints(max_pages),
            paged_kv_last_page_len_buf=ints(batch_size),
        )

    def plan(self, batch: RaggedBatch, pool: KVPool) -> PlannedFlashInfer:
        """Fills the graph's buffers; what is returned is good for every replay."""
        return self._planner.plan(batch, pool, None)


class PlannedFlashInfer:
    """Attention of one forward."""

    def __init__(self, wrapper: Any, pool: KVPool, slots: Tensor, asked: Rows | None) -> None:
        self._wrapper = wrapper
        self._pool = pool
        self._slots = slots
        self._asked = asked

    def run(self, layer: int, heads: Tensor, rotation: Rotation) -> Tensor:
        """See `LayerAttention`: [T, num_heads + 2·kv_heads, d] -> [R, num_heads, d]."""
        keys, values = self._pool.keys[layer], self._pool.values[layer]
        num_heads = heads.shape[-2] - 2 * keys.shape[1]
        query = rotary.rotate_and_store(heads, rotation, self._slots, keys, values, num_heads)
        if self._asked is not None:
            query = query[self._asked]
        return self.attend(layer, query) if len(query) else query

    def attend(self, layer: int, query: Tensor) -> Tensor:
        """Rotated query [T, heads, d] over what the pool holds; [T, heads, d]."""
        pages = (-1, self._pool.page_size, *self._pool.keys.shape[2:])
        paged = self._pool.keys[layer].view(pages), self._pool.values[layer].view(pages)
        out = query.new_empty(query.shape)
        self._wrapper.run(query, paged, out=out)
        return out


class _Planner:
    """One wrapper of the library.

    It plans in pinned memory of its own, from which the device copies later: a plan that came
    before that copy would corrupt its predecessor, hence the event.
    """

    def __init__(self, shape: HeadShape, device: torch.device, **buffers: object) -> None:
        from flashinfer import BatchPrefillWithPagedKVCacheWrapper

        self._shape = shape
        self._device = device
        self._wrapper = BatchPrefillWithPagedKVCacheWrapper(
            _workspace(device), "NHD", backend=_KERNELS, **buffers
        )
        self._copied = torch.cuda.Event()

    def plan(self, batch: RaggedBatch, pool: KVPool, mask: PackedMask | None) -> PlannedFlashInfer:
        """Plans the batch; the device learns of it in the stream's order."""
        planned = PlannedFlashInfer(self._wrapper, pool, batch.slots, batch.asked)
        if not batch.query_lens:
            return planned  # nobody attends
        shape = self._shape
        assert pool.keys.shape[2] == shape.num_kv_heads, (
            f"a backend for {shape.num_kv_heads} key heads was given a pool of "
            f"{pool.keys.shape[2]}: every model needs a backend of its own"
        )
        table = page_table(batch, pool.page_size)
        # A mask has the window in it.
        window = shape.sliding_window if mask is None else None
        self._copied.synchronize()
        self._wrapper.plan(
            table.query_starts,
            table.page_starts,
            table.pages,
            table.last_page_lens,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            pool.page_size,
            packed_custom_mask=None if mask is None else mask.bits,
            causal=mask is None,
            # The library does not count the row itself.
            window_left=-1 if window is None else window - 1,
            q_data_type=pool.keys.dtype,
            max_token_per_sequence=max(batch.query_lens),
        )
        if mask is not None:
            # For a mask that comes packed, version 0.6 counts offsets in bits and reads in bytes.
            self._wrapper._mask_indptr_buf = mask.byte_starts.to(self._device, non_blocking=True)
        self._copied.record()
        return planned

    def try_out(self, dtype: torch.dtype) -> None:
        """Compiles the kernel, if nobody has on this machine, and runs it over a single entry."""
        shape, device = self._shape, self._device
        pool = PagedKVPool(1, 1, 1, shape.num_kv_heads, shape.head_dim, dtype, device)
        pool.values.fill_(1)
        zero = torch.zeros(1, dtype=torch.int64, device=device)
        batch = RaggedBatch(zero, zero, (1,), (1,), zero.view(1, 1))
        query = torch.zeros(1, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
        attended = self.plan(batch, pool, None).attend(0, query)
        if not bool((attended == 1).all()):
            raise RuntimeError("FlashInfer's kernel gives wrong numbers on this machine")


@cache
def _workspace(device: torch.device) -> Tensor:
    return torch.empty(WORKSPACE_BYTES, dtype=torch.uint8, device=device)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
