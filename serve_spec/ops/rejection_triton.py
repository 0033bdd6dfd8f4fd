"""Rejection sampling on logits: four launches, five for block verification.

A distribution is its logits and four numbers: largest score, sum, and where filters cut it, because
every filter keeps a prefix of the tokens in order of likelihood. No probabilities are written. One
sweep finds the largest score and the sum, about ten more the cut. Block verification sweeps both
distributions of every row but the first once more, and a rejected draft's row is swept for the
recovered token. Greedy requests and those without drafts are skipped.
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
from serve_spec.ops.noise_triton import gumbel_noise_of, load_stream_keys
from serve_spec.ops.rejection import Chains, DraftLogits

_SWEEP_BLOCK = 8192
_SWEEP_WARPS = 16
_CHUNK = 2048
_NO_ID = tl.constexpr(2**31 - 1)
_ACCEPT = tl.constexpr(int(Stream.ACCEPT))
_RECOVER = tl.constexpr(int(Stream.RECOVER))
_NO_MASS = tl.constexpr(104.0)
"""Scores so far below the largest are 0 in float32."""


def reject_drafts(
    logits: Tensor,
    chains: Chains,
    drawn: Tensor,
    positions: Tensor,
    params: DrawParams,
    drafted: DraftLogits,
    method: str,
) -> Tensor:
    """See `serve_spec.ops.rejection.reject_drafts`."""
    input_ids, query_starts, request_slots = chains
    num_sequences, num_ids, device = len(request_slots), logits.shape[1], logits.device
    _, depth, num_draft_ids = drafted.logits.shape
    num_chunks = triton.cdiv(num_ids, _CHUNK)
    is_block = method == "block"

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty((num_sequences, *shape), dtype=dtype, device=device)

    # Of each sequence's K + 1 target distributions, then of its K draft distributions.
    tops, totals = empty(2 * depth + 1), empty(2 * depth + 1)
    cut_scores, cut_ids = empty(2 * depth + 1), empty(2 * depth + 1, dtype=torch.int32)
    steps, counts = empty(dtype=torch.int32), empty(dtype=torch.int32)
    probabilities, weights = empty(depth), empty(depth + 1)
    values, tokens = empty(2, num_chunks), empty(2, num_chunks, dtype=torch.int32)
    inputs = (
        logits, logits.stride(0), query_starts, request_slots, params.inverse_temperature,
        drafted.logits, drafted.draft_ids,
    )  # fmt: skip
    distributions = tops, totals, cut_scores, cut_ids
    noise = params.seeds, positions
    columns = triton.next_power_of_2(depth + 1)
    sizes = {"DEPTH": depth, "NUM_IDS": num_ids, "NUM_DRAFT_IDS": num_draft_ids}
    few = {"COLUMNS": columns, "BLOCK_RULE": is_block}
    launch = dependent_launch(device)
    _distribution_kernel[(2 * depth + 1, num_sequences)](
        *distributions, *inputs, params.top_k, params.top_p, params.min_p,
        **sizes, BLOCK=_SWEEP_BLOCK, CUT_BLOCK=_SWEEP_BLOCK // 2,
        num_warps=_SWEEP_WARPS, enable_fp_fusion=False, **launch,
    )  # fmt: skip
    _probability_kernel[(num_sequences,)](
        steps, probabilities, weights, input_ids, *distributions, *inputs,
        **sizes, **few, num_warps=1, enable_fp_fusion=False, **launch,
    )  # fmt: skip
    if is_block and depth > 1:
        _surplus_kernel[(depth - 1, num_sequences)](
            probabilities, steps, weights, *distributions, *inputs,
            **sizes, BLOCK=_SWEEP_BLOCK, num_warps=_SWEEP_WARPS, enable_fp_fusion=False, **launch,
        )  # fmt: skip
    _replace_kernel[(num_chunks, num_sequences)](
        values, tokens, steps, probabilities, weights, *noise, *distributions, *inputs,
        **sizes, **few, CHUNK=_CHUNK, num_warps=4, enable_fp_fusion=False, **launch,
    )  # fmt: skip
    _result_kernel[(num_sequences,)](
        counts, drawn, input_ids, values, tokens, num_chunks, steps, probabilities, *noise,
        tops, totals,
        query_starts, request_slots, params.inverse_temperature,
        DEPTH=depth, CHUNKS=triton.next_power_of_2(num_chunks), **few, num_warps=1, **launch,
    )  # fmt: skip
    return counts


@triton.jit
def _distribution_kernel(
    tops, totals, cut_scores, cut_ids,
    logits, row_stride, query_starts, request_slots, inverse_temperature, draft_logits, draft_ids,
    top_k, top_p, min_p,
    DEPTH: tl.constexpr, NUM_IDS: tl.constexpr, NUM_DRAFT_IDS: tl.constexpr,
    BLOCK: tl.constexpr, CUT_BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per distribution: its largest score, the sum of exp(score - it), and its cut.

    The sum of a target distribution is over the tokens that its filters keep.
    """
    place, b = tl.program_id(0), tl.program_id(1)
    wait_for_previous(DEPENDENT)
    begin = tl.load(query_starts + b)
    num_drafts = tl.load(query_starts + b + 1) - begin - 1
    request_slot = tl.load(request_slots + b)
    scale = tl.load(inverse_temperature + request_slot)
    is_target = place <= DEPTH
    step = tl.where(is_target, place, place - DEPTH - 1)
    is_asked = (scale > 0) & (num_drafts > 0) & (step < num_drafts + is_target.to(tl.int32))
    if is_asked:
        at = b * (2 * DEPTH + 1) + place
        if is_target:
            row = logits + (begin + step).to(tl.int64) * row_stride
            top, total = _sum_of(row, scale, NUM_IDS, BLOCK)
            rank_end = tl.load(top_k + request_slot)
            mass_end = tl.load(top_p + request_slot)
            ratio = tl.load(min_p + request_slot)
            cut, cut_id = top - _NO_MASS, tl.zeros([], dtype=tl.int32)
            if (rank_end > 0) | (mass_end < 1.0) | (ratio > 0):
                if ratio > 0:
                    cut = tl.maximum(cut, top + tl.log(tl.maximum(ratio, 1e-30)))
                if mass_end < 1.0:
                    # All scores below this hold less mass than the filter removes.
                    mass_cut = top + tl.log((1.0 - mass_end) * total / NUM_IDS)
                    cut = tl.maximum(cut, mass_cut)
                else:  # keeps all tokens, whatever the rounding of their sum
                    mass_end = 2.0
                cut, cut_id, total = _cut_of(
                    row, scale, top, total, cut, rank_end, mass_end, NUM_IDS, CUT_BLOCK
                )
            tl.store(cut_scores + at, cut)
            tl.store(cut_ids + at, cut_id)
        else:
            row = draft_logits + (b.to(tl.int64) * DEPTH + step) * NUM_DRAFT_IDS
            top, total = _sum_of(row, scale, NUM_DRAFT_IDS, BLOCK)
        tl.store(tops + at, top)
        tl.store(totals + at, total)


@triton.jit
def _probability_kernel(
    steps, probabilities, weights, input_ids, tops, totals, cut_scores, cut_ids,
    logits, row_stride, query_starts, request_slots, inverse_temperature, draft_logits, draft_ids,
    DEPTH: tl.constexpr, NUM_IDS: tl.constexpr, NUM_DRAFT_IDS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_RULE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per sequence: its valid drafts, and the acceptance probability of each.

    For blocks: the probability of the whole chain, and the weights of its beginnings.
    """
    b = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    begin = tl.load(query_starts + b)
    num_drafts = tl.load(query_starts + b + 1) - begin - 1
    scale = tl.load(inverse_temperature + tl.load(request_slots + b))
    columns = tl.arange(0, COLUMNS)
    tokens = tl.load(input_ids + begin + 1 + columns, mask=columns < num_drafts, other=-1)
    tokens = tokens.to(tl.int32)
    num_valid = tl.min(tl.where(tokens < 0, columns, DEPTH), axis=0)
    num_valid = tl.where(scale > 0, num_valid, 0)
    tl.store(steps + b, num_valid)
    if num_valid > 0:
        inside = columns < num_valid
        at = b * (2 * DEPTH + 1) + columns
        row = logits + (begin + columns).to(tl.int64) * row_stride
        p = _likelihood(
            tl.load(row + tokens, mask=inside, other=0.0) * scale, tokens,
            tl.load(tops + at, mask=inside, other=0.0),
            tl.load(totals + at, mask=inside, other=1.0),
            tl.load(cut_scores + at, mask=inside, other=0.0),
            tl.load(cut_ids + at, mask=inside, other=0),
        )  # fmt: skip
        ids = tl.load(draft_ids + tokens, mask=inside, other=0)
        at += DEPTH + 1
        row = draft_logits + (b.to(tl.int64) * DEPTH + columns) * NUM_DRAFT_IDS
        score = tl.load(row + ids, mask=inside & (ids >= 0), other=float("-inf")) * scale
        top = tl.load(tops + at, mask=inside, other=0.0)
        total = tl.load(totals + at, mask=inside, other=1.0)
        q = tl.math.div_rn(tl.exp(score - top), total)
        ratio = tl.where(q > 0, tl.math.div_rn(p, tl.where(q > 0, q, 1.0)), 0.0)
        # NaN stays, and rejects.
        probability = tl.where(ratio >= 1, 1.0, ratio)
        if BLOCK_RULE:
            weight = tl.full([], 1.0, dtype=tl.float32)
            tl.store(weights + b * (DEPTH + 1), weight)
            for step in range(DEPTH):
                weight *= tl.sum(tl.where(columns == step, ratio, 0.0), axis=0)
                weight = tl.where(weight >= 1, 1.0, weight)
                tl.store(weights + b * (DEPTH + 1) + step + 1, weight)
                probability = tl.where(columns == step, weight, probability)
        tl.store(probabilities + b * DEPTH + columns, probability, mask=inside)


@triton.jit
def _surplus_kernel(
    probabilities, steps, weights, tops, totals, cut_scores, cut_ids,
    logits, row_stride, query_starts, request_slots, inverse_temperature, draft_logits, draft_ids,
    DEPTH: tl.constexpr, NUM_IDS: tl.constexpr, NUM_DRAFT_IDS: tl.constexpr,
    BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per draft but the last: the probability to accept those up to it, and no more."""
    step, b = tl.program_id(0) + 1, tl.program_id(1)
    wait_for_previous(DEPENDENT)
    if step < tl.load(steps + b):
        scale = tl.load(inverse_temperature + tl.load(request_slots + b))
        weight = tl.load(weights + b * (DEPTH + 1) + step)
        row = logits + (tl.load(query_starts + b) + step).to(tl.int64) * row_stride
        draft_row = draft_logits + (b.to(tl.int64) * DEPTH + step) * NUM_DRAFT_IDS
        at = b * (2 * DEPTH + 1) + step
        residual = tl.zeros([BLOCK], dtype=tl.float32)
        for start in range(0, NUM_IDS, BLOCK):
            ids = start + tl.arange(0, BLOCK)
            p, q = _both(
                ids, scale, row, draft_row, draft_ids, at, tops, totals, cut_scores, cut_ids,
                NUM_IDS, DEPTH,
            )  # fmt: skip
            residual += tl.maximum(weight * p - q, 0.0)
        left = tl.sum(residual, axis=0)
        missing = left + 1 - weight
        probability = tl.where(
            missing > 0, tl.math.div_rn(left, tl.where(missing > 0, missing, 1.0)), 1.0
        )
        tl.store(probabilities + b * DEPTH + step - 1, probability)


@triton.jit
def _replace_kernel(
    values, tokens, steps, probabilities, weights, seeds, positions, tops, totals, cut_scores,
    cut_ids,
    logits, row_stride, query_starts, request_slots, inverse_temperature, draft_logits, draft_ids,
    DEPTH: tl.constexpr, NUM_IDS: tl.constexpr, NUM_DRAFT_IDS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_RULE: tl.constexpr, CHUNK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per (chunk, sequence) with a rejection: its best recovered token, and of p."""
    chunk, b = tl.program_id(0), tl.program_id(1)
    wait_for_previous(DEPENDENT)
    num_valid = tl.load(steps + b)
    if num_valid > 0:
        begin = tl.load(query_starts + b)
        request_slot = tl.load(request_slots + b)
        root = tl.load(positions + begin)
        kept = _kept(
            probabilities + b * DEPTH, num_valid, seeds, request_slot, root, COLUMNS, BLOCK_RULE
        )
        if kept < num_valid:
            scale = tl.load(inverse_temperature + request_slot)
            weight = tl.full([], 1.0, dtype=tl.float32)
            if BLOCK_RULE:
                weight = tl.load(weights + b * (DEPTH + 1) + kept)
            ids = chunk * CHUNK + tl.arange(0, CHUNK)
            p, q = _both(
                ids, scale,
                logits + (begin + kept).to(tl.int64) * row_stride,
                draft_logits + (b.to(tl.int64) * DEPTH + kept) * NUM_DRAFT_IDS,
                draft_ids, b * (2 * DEPTH + 1) + kept, tops, totals, cut_scores, cut_ids,
                NUM_IDS, DEPTH,
            )  # fmt: skip
            first, second = load_stream_keys(seeds, request_slot, root, root, _RECOVER)
            noise = gumbel_noise_of(ids, first, second)
            at = b * 2 * tl.num_programs(0) + chunk
            _store_best(values + at, tokens + at, weight * p - q, noise, ids)
            at += tl.num_programs(0)
            _store_best(values + at, tokens + at, p, noise, ids)


@triton.jit(do_not_specialize=["num_chunks"])
def _result_kernel(
    counts, drawn, input_ids, values, tokens, num_chunks, steps, probabilities, seeds, positions,
    tops, totals, query_starts, request_slots, inverse_temperature,
    DEPTH: tl.constexpr, CHUNKS: tl.constexpr,
    COLUMNS: tl.constexpr, BLOCK_RULE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One program per sequence: accepted drafts and recovered token."""
    b = tl.program_id(0)
    wait_for_previous(DEPENDENT)
    begin = tl.load(query_starts + b)
    num_drafts = tl.load(query_starts + b + 1) - begin - 1
    num_valid = tl.load(steps + b)
    kept = tl.zeros([], dtype=tl.int32)
    if num_valid > 0:
        request_slot = tl.load(request_slots + b)
        root = tl.load(positions + begin)
        kept = _kept(
            probabilities + b * DEPTH, num_valid, seeds, request_slot, root, COLUMNS, BLOCK_RULE
        )
        if kept < num_valid:
            chunks = tl.arange(0, CHUNKS)
            inside = chunks < num_chunks
            at = b * 2 * num_chunks + chunks
            best, token = _best_of(values + at, tokens + at, inside)
            if best == float("-inf"):  # p equals q, and rounding rejected a draft
                best, token = _best_of(values + at + num_chunks, tokens + at + num_chunks, inside)
            place = b * (2 * DEPTH + 1) + kept
            mass = tl.load(tops + place) + tl.load(totals + place)
            usable = (tl.abs(best) < float("inf")) & (tl.abs(mass) < float("inf"))
            tl.store(drawn + begin + kept, tl.where(usable, token, -1).to(tl.int64))
    elif num_drafts > 0:
        columns = tl.arange(0, COLUMNS)
        inside = columns < num_drafts
        draft = tl.load(input_ids + begin + 1 + columns, mask=inside, other=-1)
        draw = tl.load(drawn + begin + columns, mask=inside, other=-1)
        fits = inside & (draft >= 0) & (draft == draw)
        kept = tl.min(tl.where(fits, DEPTH, columns), axis=0)
    tl.store(counts + b, kept)


@triton.jit
def _sum_of(row, scale, NUM_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the largest score of a row, and the sum of exp(score - it); NaN if one is NaN."""
    tops = tl.full([BLOCK], float("-inf"), dtype=tl.float32)
    sums = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, NUM_IDS, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(row + ids, mask=ids < NUM_IDS, other=float("-inf")) * scale
        scores = tl.where(scores == scores, scores, float("inf"))
        larger = tl.maximum(tops, scores)
        base = tl.where(larger > float("-inf"), larger, 0.0)
        sums = sums * tl.exp(tops - base) + tl.exp(scores - base)
        tops = larger
    top = tl.max(tops, axis=0)
    return top, tl.sum(tl.where(tops > float("-inf"), sums * tl.exp(tops - top), 0.0), axis=0)


@triton.jit
def _cut_of(
    row, scale, top, total, floor, rank_end, mass_end,
    NUM_IDS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Return where filters cut a distribution, (score, id), and the sum of exp(score - top) before.

    The cut is between `low` and `high`: after the tokens above `high` the filters keep another one,
    after those above `low` none. A sweep quarters that interval, until it holds one token, or
    several of one score, of which the smallest ids are kept.
    """
    low, high = _next_below(floor), top
    cut, cut_id = low, tl.zeros([], dtype=tl.int32)
    low_count, low_mass = _before(row, scale, top, cut, cut_id, NUM_IDS, BLOCK)
    high_count = tl.zeros([], dtype=tl.int32)
    # With a NaN among the scores there is no cut.
    if (_keeps_more(low_count, low_mass, rank_end, mass_end * total) == 0) & (
        tl.abs(top) < float("inf")
    ):
        b = (low + high) * 0.5
        while (low_count > high_count + 1) & (b > low) & (b < high):
            a, c = (low + b) * 0.5, (b + high) * 0.5
            a_count, b_count, c_count, a_mass, b_mass, c_mass = _above(
                row, scale, top, a, b, c, NUM_IDS, BLOCK
            )
            if _keeps_more(a_count, a_mass, rank_end, mass_end * total):
                high, high_count = a, a_count
            elif _keeps_more(b_count, b_mass, rank_end, mass_end * total):
                high, high_count = b, b_count
                low, low_count, low_mass = a, a_count, a_mass
            elif _keeps_more(c_count, c_mass, rank_end, mass_end * total):
                high, high_count = c, c_count
                low, low_count, low_mass = b, b_count, b_mass
            else:
                low, low_count, low_mass = c, c_count, c_mass
            b = (low + high) * 0.5
        cut = low
        if low_count > high_count + 1:
            cut, cut_id = high, tl.full([], NUM_IDS, dtype=tl.int32)
            first_id = tl.zeros([], dtype=tl.int32)
            while (low_count > high_count + 1) & (cut_id > first_id + 1):
                middle_id = (first_id + cut_id) // 2
                count, mass = _before(row, scale, top, cut, middle_id, NUM_IDS, BLOCK)
                if _keeps_more(count, mass, rank_end, mass_end * total):
                    first_id, high_count = middle_id, count
                else:
                    cut_id, low_count, low_mass = middle_id, count, mass
    return cut, cut_id, low_mass


@triton.jit
def _keeps_more(counts, masses, rank_end, mass_end):
    """Return whether filters keep a token after so many tokens of so much mass."""
    by_rank = (rank_end < 1) | (counts < rank_end)
    return (counts == 0) | (by_rank & (masses < mass_end))


@triton.jit
def _next_below(x):
    """Return the largest float32 below x."""
    bits = x.to(tl.int32, bitcast=True)
    bits = tl.where(x > 0, bits - 1, tl.where(x < 0, bits + 1, -(2**31) + 1))
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def _above(row, scale, top, a, b, c, NUM_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return the numbers of scores above a, b and c, and their sums of exp(score - top)."""
    a_counts = tl.zeros([BLOCK], dtype=tl.int32)
    b_counts, c_counts = a_counts, a_counts
    a_masses = tl.zeros([BLOCK], dtype=tl.float32)
    b_masses, c_masses = a_masses, a_masses
    for start in range(0, NUM_IDS, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(row + ids, mask=ids < NUM_IDS, other=float("-inf")) * scale
        masses = tl.exp(scores - top)
        a_counts += (scores > a).to(tl.int32)
        b_counts += (scores > b).to(tl.int32)
        c_counts += (scores > c).to(tl.int32)
        a_masses += tl.where(scores > a, masses, 0.0)
        b_masses += tl.where(scores > b, masses, 0.0)
        c_masses += tl.where(scores > c, masses, 0.0)
    return (
        tl.sum(a_counts, axis=0), tl.sum(b_counts, axis=0), tl.sum(c_counts, axis=0),
        tl.sum(a_masses, axis=0), tl.sum(b_masses, axis=0), tl.sum(c_masses, axis=0),
    )  # fmt: skip


@triton.jit
def _before(row, scale, top, cut, cut_id, NUM_IDS: tl.constexpr, BLOCK: tl.constexpr):
    """Return number and sum of the tokens before (cut, cut_id), by score, then id."""
    counts = tl.zeros([BLOCK], dtype=tl.int32)
    masses = tl.zeros([BLOCK], dtype=tl.float32)
    for start in range(0, NUM_IDS, BLOCK):
        ids = start + tl.arange(0, BLOCK)
        scores = tl.load(row + ids, mask=ids < NUM_IDS, other=float("-inf")) * scale
        before = (scores > cut) | ((scores == cut) & (ids < cut_id))
        counts += before.to(tl.int32)
        masses += tl.where(before, tl.exp(scores - top), 0.0)
    return tl.sum(counts, axis=0), tl.sum(masses, axis=0)


@triton.jit
def _likelihood(scores, ids, top, total, cut, cut_id):
    """Return p of tokens; 0 past the cut."""
    before = (scores > cut) | ((scores == cut) & (ids < cut_id))
    return tl.where(before, tl.math.div_rn(tl.exp(scores - top), total), 0.0)


@triton.jit
def _both(
    ids, scale, row, draft_row, draft_ids, at, tops, totals, cut_scores, cut_ids,
    NUM_IDS: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Return p and q of target ids; 0 past the vocabulary. at: index of the target distribution."""
    inside = ids < NUM_IDS
    scores = tl.load(row + ids, mask=inside, other=float("-inf")) * scale
    p = _likelihood(
        scores, ids,
        tl.load(tops + at), tl.load(totals + at), tl.load(cut_scores + at), tl.load(cut_ids + at),
    )  # fmt: skip
    at += DEPTH + 1
    of_draft = tl.load(draft_ids + ids, mask=inside, other=-1)
    scores = tl.load(draft_row + of_draft, mask=of_draft >= 0, other=float("-inf")) * scale
    return p, tl.math.div_rn(tl.exp(scores - tl.load(tops + at)), tl.load(totals + at))


@triton.jit
def _kept(
    probabilities,
    num_valid,
    seeds,
    request_slot,
    root,
    COLUMNS: tl.constexpr,
    BLOCK_RULE: tl.constexpr,
):
    """Return how many drafts are accepted; see `keep_in_order` and `keep_longest`."""
    columns = tl.arange(0, COLUMNS)
    probability = tl.load(probabilities + columns, mask=columns < num_valid, other=0.0)
    _, word = load_stream_keys(seeds, request_slot, root, root + columns, _ACCEPT)
    uniform = (word.to(tl.int32, bitcast=True).to(tl.float64) + 0.5) * 2.0**-32 + 0.5
    accepted = (uniform < probability.to(tl.float64)) & (columns < num_valid)
    if BLOCK_RULE:
        return tl.max(tl.where(accepted, columns + 1, 0), axis=0)
    return tl.min(tl.where(accepted, COLUMNS, columns), axis=0)


@triton.jit
def _store_best(value, token, mass, noise, ids):
    """Store the best of log(mass) + noise, and its id; -inf without mass."""
    is_some = mass > 0
    scores = tl.where(is_some, tl.log(tl.where(is_some, mass, 1.0)) + noise, float("-inf"))
    best = tl.max(scores, axis=0)
    tl.store(value, best)
    tl.store(token, tl.min(tl.where(scores == best, ids, _NO_ID), axis=0))


@triton.jit
def _best_of(values, tokens, inside):
    """Return the largest value and its token, the smallest of equals."""
    value = tl.load(values, mask=inside, other=float("-inf"))
    token = tl.load(tokens, mask=inside, other=_NO_ID)
    best = tl.max(value, axis=0)
    return best, tl.min(tl.where(value == best, token, _NO_ID), axis=0)
