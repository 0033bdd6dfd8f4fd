"""Sampling in two launches: the best token of every chunk of a row, then the best of the row.

The topk children of a tree are found alike. There, a score and its column form one integer key:
larger keys are better scores, or smaller columns of equal ones.

A score depends on its logit and hash alone, without implicit fused operations, so neither the batch
nor the chunk size changes a draw.

Filters need no sort. Each keeps a prefix of the tokens in order of likelihood. One sweep over the
row gives number and mass of the tokens before the winner, which decide whether it survives. If not,
no token after it does, and the next candidate is the winner among those before. With top-p 0.9 the
first candidate fails at most one time in ten.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from serve_spec.ops.dispatch import dependent_launch
from serve_spec.ops.dispatch_triton import wait_for_previous
from serve_spec.ops.draw import DrawParams
from serve_spec.ops.noise import Stream
from serve_spec.ops.noise_triton import gumbel_noise_of, load_noise_keys, load_stream_keys

_SMALLEST_CHUNK = 1024
# Sums over a row have the same order in every batch.
_SWEEP_BLOCK = 8192
_SWEEP_WARPS = 16
_SWEEP_STAGES = 1
_NO_ID = tl.constexpr(2**31 - 1)
_NO_KEY = tl.constexpr(-(2**63))
_DRAFT = tl.constexpr(int(Stream.DRAFT))


def draw_tokens(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    *,
    num_ids: int | None = None,
) -> Tensor:
    """See `serve_spec.ops.draw.draw_tokens`."""
    width = logits.shape[1] if num_ids is None else num_ids
    values, tokens, tops = _best_of_chunks(logits, owners, positions, params, width)
    drawn = torch.empty(len(owners), dtype=torch.int64, device=logits.device)
    _draw_kernel[(len(owners),)](
        drawn, values, tokens, tops, values.shape[1], logits, logits.stride(0), owners, positions,
        *params, width,
        CHUNKS=_most_chunks(width), BLOCK=_SWEEP_BLOCK, STAGES=_SWEEP_STAGES,
        num_warps=_SWEEP_WARPS, enable_fp_fusion=False, **dependent_launch(logits.device),
    )  # fmt: skip
    return drawn


def sample_drafts(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    roots: Tensor,
    params: DrawParams,
    target_ids: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """See `serve_spec.ops.draw.sample_drafts`."""
    num_rows, width = logits.shape
    masses = torch.empty(
        (num_rows, triton.cdiv(width, _choose_chunk(num_rows, width)[0])),
        dtype=torch.float32,
        device=logits.device,
    )
    values, tokens, tops = _best_of_chunks(logits, owners, positions, params, width, roots, masses)
    drafts = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    peaks = torch.empty(num_rows, dtype=torch.float32, device=logits.device)
    _draft_kernel[(num_rows,)](
        drafts, peaks, values, tokens, tops, masses, values.shape[1], owners, target_ids,
        CHUNKS=_most_chunks(width),
        num_warps=1, **dependent_launch(logits.device),
    )  # fmt: skip
    return drafts, peaks


def draw_children(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    sharpness: Tensor,
    target_ids: Tensor | None,
    topk: int,
) -> tuple[Tensor, Tensor]:
    """See `serve_spec.ops.draw.draw_children`."""
    num_rows, width = logits.shape
    chunk, num_warps = _choose_chunk(num_rows, width)
    num_chunks, most_chunks = triton.cdiv(width, chunk), _most_chunks(width)
    places, columns = triton.next_power_of_2(topk), triton.next_power_of_2(most_chunks * topk)
    device = logits.device
    keys = torch.empty((num_rows, num_chunks, topk), dtype=torch.int64, device=device)
    masses = torch.empty((num_rows, num_chunks), dtype=torch.float32, device=device)
    ids = torch.empty((num_rows, topk), dtype=torch.int64, device=device)
    likely = torch.empty((num_rows, topk), dtype=torch.float32, device=device)
    _child_chunk_kernel[(num_chunks, num_rows)](
        keys, masses, logits, logits.stride(0), owners, positions,
        params.inverse_temperature, params.seeds, target_ids, sharpness, width,
        TOPK=topk, PLACES=places, CHUNK=chunk,
        num_warps=num_warps, enable_fp_fusion=False, **dependent_launch(device),
    )  # fmt: skip
    _children_kernel[(num_rows,)](
        ids, likely, keys, masses, num_chunks, target_ids,
        TOPK=topk, PLACES=places, CHUNKS=most_chunks, COLUMNS=columns,
        num_warps=1 if columns <= 128 else 4, **dependent_launch(device),
    )  # fmt: skip
    return ids, likely


def _choose_chunk(num_rows: int, num_ids: int) -> tuple[int, int]:
    """Return tokens per program and its warps: just enough programs to fill the device."""
    chunk = _SMALLEST_CHUNK
    while chunk < 8192 and num_rows * num_ids > 512 * chunk:
        chunk *= 2
    return chunk, 4 if chunk < 4096 else 8


def _most_chunks(num_ids: int) -> int:
    """Return a power of two ≥ the chunks of any batch, so that one kernel serves all."""
    return int(triton.next_power_of_2(triton.cdiv(num_ids, _SMALLEST_CHUNK)))


def _best_of_chunks(
    logits: Tensor,
    owners: Tensor,
    positions: Tensor,
    params: DrawParams,
    num_ids: int,
    roots: Tensor | None = None,
    masses: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the largest perturbed score, its column and the largest score of every chunk: [T, C].

    roots: see `sample_drafts`; None: the noise is that of the target's draws. masses: [T, C],
    written: the sum of exp(score - largest score).
    """
    num_rows = len(owners)
    chunk, num_warps = _choose_chunk(num_rows, num_ids)
    shape = (num_rows, triton.cdiv(num_ids, chunk))
    values = torch.empty(shape, dtype=torch.float32, device=logits.device)
    tokens = torch.empty(shape, dtype=torch.int32, device=logits.device)
    tops = torch.empty_like(values)
    _chunk_kernel[(shape[1], shape[0])](
        values, tokens, tops, masses, logits, logits.stride(0), owners, positions, roots,
        params.inverse_temperature, params.seeds, num_ids,
        CHUNK=chunk,
        num_warps=num_warps, enable_fp_fusion=False, **dependent_launch(logits.device),
    )  # fmt: skip
    return values, tokens, tops


@triton.jit
def _chunk_kernel(
    values, tokens, tops, masses,
    logits, row_stride, owners, positions, roots, inverse_temperature, seeds, num_ids,
    CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, row): see `_best_of_chunks`."""
    chunk, row = tl.program_id(0), tl.program_id(1)
    wait_for_previous(DEPENDENT)
    owner = tl.load(owners + row)
    if owner >= 0:
        ids = chunk * CHUNK + tl.arange(0, CHUNK)
        scores, perturbed = _scores(
            logits + row.to(tl.int64) * row_stride, ids, num_ids, owner, positions + row,
            None if roots is None else roots + row,
            inverse_temperature, seeds, None, None,
        )  # fmt: skip
        best = tl.max(perturbed, axis=0)
        at = row * tl.num_programs(0) + chunk
        tl.store(values + at, best)
        tl.store(tokens + at, tl.min(tl.where(perturbed == best, ids, _NO_ID), axis=0))
        top = tl.max(scores, axis=0)
        tl.store(tops + at, top)
        if masses is not None:
            top = tl.where(top > float("-inf"), top, 0.0)
            tl.store(masses + at, tl.sum(tl.exp(scores - top), axis=0))


@triton.jit
def _child_chunk_kernel(
    keys, masses,
    logits, row_stride, owners, positions, inverse_temperature, seeds, target_ids, sharpness,
    num_ids, TOPK: tl.constexpr, PLACES: tl.constexpr, CHUNK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, row): its best keys, and the sum of exp(perturbed - its best)."""
    chunk, row = tl.program_id(0), tl.program_id(1).to(tl.int64)
    wait_for_previous(DEPENDENT)
    ids = chunk * CHUNK + tl.arange(0, CHUNK)
    _, perturbed = _scores(
        logits + row * row_stride, ids, num_ids, tl.maximum(tl.load(owners + row), 0),
        positions + row, None, inverse_temperature, seeds, target_ids, sharpness,
    )  # fmt: skip
    at = row * tl.num_programs(0) + chunk
    top = tl.max(perturbed, axis=0)
    top = tl.where(top > float("-inf"), top, 0.0)
    tl.store(masses + at, tl.sum(tl.exp(perturbed - top), axis=0))
    places = tl.arange(0, PLACES)
    best = _best_keys(_keys(perturbed, ids), places, TOPK)
    tl.store(keys + at * TOPK + places, best, mask=places < TOPK)


@triton.jit(do_not_specialize=["num_chunks"])
def _children_kernel(
    children, likely, keys, masses, num_chunks, target_ids,
    TOPK: tl.constexpr, PLACES: tl.constexpr, CHUNKS: tl.constexpr, COLUMNS: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row: the best keys of its chunks, as target ids and log probabilities."""
    row = tl.program_id(0).to(tl.int64)
    wait_for_previous(DEPENDENT)
    keys += row * num_chunks * TOPK
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    tops = _score_of(tl.load(keys + chunks * TOPK, mask=inside, other=0))
    mass = tl.load(masses + row * num_chunks + chunks, mask=inside, other=0.0)
    top = tl.max(tl.where(inside, tops, float("-inf")), axis=0)
    # In a row of -inf only, or with a +inf, this is NaN, and so are all log probabilities.
    total = tl.sum(tl.where(inside, mass * tl.exp(tops - top), 0.0), axis=0)
    columns, places = tl.arange(0, COLUMNS), tl.arange(0, PLACES)
    candidates = tl.load(keys + columns, mask=columns < num_chunks * TOPK, other=_NO_KEY)
    best = _best_keys(candidates, places, TOPK)
    logprob = _score_of(best) - (top + tl.log(total))
    usable = (places < TOPK) & (tl.abs(logprob) < float("inf"))
    ids = _NO_ID - (best & _NO_ID)
    if target_ids is not None:
        ids = tl.load(target_ids + ids, mask=usable, other=-1)
    at = row * TOPK + places
    tl.store(children + at, tl.where(usable, ids, -1), mask=places < TOPK)
    tl.store(likely + at, logprob, mask=places < TOPK)


@triton.jit
def _keys(scores, ids):
    """Return int64 keys that sort as (score, smaller id)."""
    bits = tl.where(scores == 0.0, 0.0, scores).to(tl.int32, bitcast=True)
    order = bits ^ ((bits >> 31) & _NO_ID)
    return (order.to(tl.int64) << 32) | (_NO_ID - ids)


@triton.jit
def _score_of(keys):
    """Return the scores of keys."""
    order = (keys >> 32).to(tl.int32)
    return (order ^ ((order >> 31) & _NO_ID)).to(tl.float32, bitcast=True)


@triton.jit
def _best_keys(keys, places, TOPK: tl.constexpr):
    """Return the TOPK largest of distinct keys, the largest first, then `_NO_KEY`."""
    best = tl.full(places.shape, _NO_KEY, dtype=tl.int64)
    for place in range(TOPK):
        largest = tl.max(keys, axis=0)
        best = tl.where(places == place, largest, best)
        keys = tl.where(keys == largest, _NO_KEY, keys)
    return best


@triton.jit
def _scores(
    logits, ids, num_ids, owner, position, root,
    inverse_temperature, seeds, target_ids, sharpness,
):  # fmt: skip
    """Return the tempered scores of `ids`, without and with noise."""
    inverse = tl.load(inverse_temperature + owner)
    scale = inverse
    if sharpness is not None:
        scale = tl.math.div_rn(inverse, tl.load(sharpness))
    scale = tl.where(inverse > 0, scale, 1.0)
    scores = _tempered(logits, ids, num_ids, scale)
    perturbed = scores
    if inverse > 0:
        if root is None:
            first, second = load_noise_keys(seeds, owner, tl.load(position))
        else:
            first, second = load_stream_keys(seeds, owner, tl.load(root), tl.load(position), _DRAFT)
        noise_ids = ids
        if target_ids is not None:
            noise_ids = tl.load(target_ids + ids, mask=ids < num_ids, other=0).to(tl.int32)
        perturbed = scores + gumbel_noise_of(noise_ids, first, second)
    return scores, perturbed


@triton.jit(do_not_specialize=["num_chunks"])
def _draft_kernel(
    drafts, peaks, values, tokens, tops, masses, num_chunks, owners, target_ids,
    CHUNKS: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row: the best of its chunks, as a target id, and its largest probability."""
    row = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    token = tl.zeros([], dtype=tl.int64)
    if tl.load(owners + row) >= 0:
        token = _best_of_row(values, tokens, row, num_chunks, CHUNKS).to(tl.int64)
        if target_ids is not None:
            token = tl.where(token < 0, token, tl.load(target_ids + tl.maximum(token, 0)))
        chunks = tl.arange(0, CHUNKS)
        at, inside = row * num_chunks + chunks, chunks < num_chunks
        top = tl.load(tops + at, mask=inside, other=float("-inf"))
        mass = tl.load(masses + at, mask=inside, other=0.0)
        largest = tl.max(top, axis=0)
        mass = tl.where(mass > 0.0, mass * tl.exp(top - largest), 0.0)
        tl.store(peaks + row, -tl.log(tl.sum(mass, axis=0)))
    tl.store(drafts + row, token)


@triton.jit(do_not_specialize=["num_chunks"])
def _draw_kernel(
    drawn, values, tokens, tops, num_chunks,
    logits, row_stride, owners, positions, inverse_temperature, seeds, top_k, top_p, min_p,
    NUM_IDS: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per row: the best of its chunks that the row's filters keep."""
    row = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    owner = tl.load(owners + row)
    token = tl.zeros([], dtype=tl.int32)
    if owner >= 0:
        token = _best_of_row(values, tokens, row, num_chunks, CHUNKS)
        scale = tl.load(inverse_temperature + owner)
        rank_end = tl.load(top_k + owner)
        mass_end = tl.load(top_p + owner)
        ratio = tl.load(min_p + owner)
        ranked = (rank_end > 0) | (mass_end < 1.0)
        if (scale > 0) & (token >= 0) & (ranked | (ratio > 0)):
            chunks = tl.arange(0, CHUNKS)
            chunk_tops = tl.load(
                tops + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf")
            )
            top = tl.max(chunk_tops, axis=0)
            floor = tl.where(ratio > 0, top + tl.log(tl.maximum(ratio, 1e-30)), float("-inf"))
            first, second = load_noise_keys(seeds, owner, tl.load(positions + row))
            logits += row.to(tl.int64) * row_stride
            survives = False
            while survives == 0:
                score = tl.load(logits + token).to(tl.float32) * scale
                survives = score >= floor
                if ranked & survives:
                    count, mass, total = _before(
                        logits, scale, score, token, top, NUM_IDS, BLOCK, STAGES
                    )
                    survives = (rank_end < 1) | (count < rank_end)
                    survives = survives & ((mass_end >= 1.0) | (mass < mass_end * total))
                    survives = survives | (count == 0)
                if survives == 0:
                    token = _best_before(
                        logits, scale, score, token, floor, first, second, NUM_IDS, BLOCK, STAGES
                    )
    tl.store(drawn + row, token.to(tl.int64))


@triton.jit
def _tempered(logits, ids, num_ids, scale):
    """Return scores of `ids`, -inf past the vocabulary; NaN becomes +inf, which is never drawn."""
    scores = tl.load(logits + ids, mask=ids < num_ids, other=float("-inf")).to(tl.float32) * scale
    return tl.where(scores == scores, scores, float("inf"))


@triton.jit
def _best_of_row(values, tokens, row, num_chunks, CHUNKS: tl.constexpr):
    """Return the token of the largest value, the smallest of equals; -1 if it is not finite."""
    chunks = tl.arange(0, CHUNKS)
    inside = chunks < num_chunks
    at = row * num_chunks + chunks
    value = tl.load(values + at, mask=inside, other=float("-inf"))
    token = tl.load(tokens + at, mask=inside, other=_NO_ID)
    best = tl.max(value, axis=0)
    token = tl.min(tl.where(value == best, token, _NO_ID), axis=0)
    return tl.where(tl.abs(best) < float("inf"), token, -1)


@triton.jit
def _before(
    logits, scale, score, token, top,
    NUM_IDS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return number and mass of the tokens likelier than `token`, and the total; the top's is 1."""
    count = tl.zeros([BLOCK], dtype=tl.int32)
    mass = tl.zeros([BLOCK], dtype=tl.float32)
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for start in tl.range(0, NUM_IDS, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        scores = _tempered(logits, ids, NUM_IDS, scale)
        before = (scores > score) | ((scores == score) & (ids < token))
        likelihood = tl.exp(scores - top)
        count += before.to(tl.int32)
        mass += tl.where(before, likelihood, 0.0)
        total += likelihood
    return tl.sum(count, axis=0), tl.sum(mass, axis=0), tl.sum(total, axis=0)


@triton.jit
def _best_before(
    logits, scale, score, token, floor, first, second,
    NUM_IDS: tl.constexpr, BLOCK: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Return the best token among those likelier than `token` and not below `floor`."""
    best = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    winner = tl.full([BLOCK], _NO_ID, dtype=tl.int32)
    for start in tl.range(0, NUM_IDS, BLOCK, num_stages=STAGES):
        ids = start + tl.arange(0, BLOCK)
        scores = _tempered(logits, ids, NUM_IDS, scale)
        before = (scores > score) | ((scores == score) & (ids < token))
        before = before & (scores >= floor)
        # The noise is expensive, and few blocks hold a likely token.
        if tl.max(before.to(tl.int32), axis=0) > 0:
            perturbed = scores + gumbel_noise_of(ids, first, second)
            perturbed = tl.where(before, perturbed, float("-inf"))
            winner = tl.where(perturbed > best, ids, winner)
            best = tl.maximum(best, perturbed)
    value = tl.max(best, axis=0)
    return tl.min(tl.where(best == value, winner, _NO_ID), axis=0)
