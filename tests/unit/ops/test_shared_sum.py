"""Sums in shared memory: the kernels beside ranks that have come before them."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.helpers.ranks import shared_memory
from tests.helpers.triton import DEVICE, kernels_in_threads, reference

from serve_spec.ops import shared_sum as plain  # isort: skip
from serve_spec.ops.elementwise_triton import add_rms_norm  # isort: skip
from serve_spec.ops.shared_sum_triton import (  # isort: skip
    broadcast_words,
    gather_columns,
    sum_add_norm,
    sum_over_ranks,
)
from serve_spec.ops.shared_sum import (  # isort: skip
    CAPACITY_BYTES,
    DTYPES,
    EMPTY,
    NUM_PROGRAMS,
    SHARD_ALIGNMENT,
    SHARD_WORDS,
    SLOT_WORDS,
    as_words,
    fits,
    num_gather_programs,
    part_words,
    residual_fits,
    shard_words,
    shared_sum,
)


EPS = 1e-5
one_thread_each = pytest.mark.skipif(
    DEVICE.type == "cuda", reason="on one stream they would wait for each other"
)


@pytest.fixture(params=[False, True], ids=["at_once", "in_shards"])
def in_shards(request, monkeypatch):
    monkeypatch.setattr(plain, "_LEAST_SPARED", 0 if request.param else 1 << 62)
    return bool(request.param)


either_way = pytest.mark.usefixtures("in_shards")


def drawn(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    # Far apart in size, so that another order or precision of the sum would show.
    sizes = 10.0 ** torch.randint(-2, 3, shape, generator=generator)
    return (torch.randn(shape, generator=generator) * sizes).to(DEVICE, dtype)


def all_drawn(size, *shape, dtype, seed=0):
    return [drawn(*shape, dtype=dtype, seed=seed * size + rank) for rank in range(size)]


def norm_drawn(size, num_rows, width, dtype, seed=0):
    """Return the parts of a norm over ranks, its residual, its weight and its result."""
    parts = all_drawn(size, num_rows, width, dtype=dtype, seed=seed)
    residual = drawn(num_rows, width, dtype=dtype, seed=seed + 100)
    weight = drawn(width, dtype=dtype, seed=seed + 101)
    return parts, residual, weight, add_rms_norm(shared_sum(parts), residual, weight, EPS)


class Rank:
    """The rank under test; all others have sent their words before it begins."""

    def __init__(self, rank, size):
        self.memory = shared_memory(size, DEVICE)[rank]
        self.others = [other for other in range(size) if other != rank]
        self.counts = [0] * NUM_PROGRAMS

    def sum(self, parts):
        self.receive(parts)
        x = parts[self.memory.rank].clone()
        sum_over_ranks(x, self.memory)
        return x

    def receive(self, parts):
        """Write what the others send of a sum."""
        words = [as_words(part) for part in parts]
        size = part_words(len(words[0]))
        self._receive([each.split(size) for each in words], size, parts[0].dtype)

    def add_norm(self, parts, residual, weight):
        self.receive_rows(parts)
        x = parts[self.memory.rank]
        return sum_add_norm(x, residual, weight, EPS, self.memory)

    def receive_rows(self, parts):
        """Write what the others send of a norm."""
        rows = [list(as_words(part).view(len(part), -1)) for part in parts]
        self._receive(rows, len(rows[0][0]), parts[0].dtype)

    def _receive(self, chunks, size, dtype):
        """Write what goes into slots; chunks: of each rank, by program, at most `size` words."""
        own, num_words = self.memory.rank, sum(map(len, chunks[0]))
        in_shards = plain.goes_in_shards(4 * num_words, len(chunks))
        shard = shard_words(size, len(chunks))
        for program, parts in enumerate(zip(*chunks, strict=True)):
            self.counts[program] += 1
            slots = self.memory.slots[own][self.counts[program] % 2, program]
            total = as_words(shared_sum([part.view(dtype) for part in parts]))
            for other in self.others:
                if in_shards:
                    write(slots[other], parts[other][own * shard :][:shard])
                    write(slots[other, SHARD_WORDS:], total[other * shard :][:shard])
                else:
                    write(slots[other], parts[other])


def write(place, words):
    place[: len(words)] = torch.where(words == EMPTY, 0, words)


def assert_normed(found, expected, dtype):
    """The stream to the bit; its norm within a rounding, as squares are added in any order."""
    assert torch.equal(found[1], expected[1])
    assert found[0].dtype == dtype
    rounding = max(torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(found[0], expected[0], rtol=rounding, atol=1e-30)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_parts_are_rounded_once_and_not_every_time(dtype):
    parts = all_drawn(4, 3000, dtype=dtype)
    in_turn = parts[0] + parts[1] + parts[2] + parts[3]
    exact = sum(part.double() for part in parts).to(dtype)
    found = shared_sum(parts)
    assert (found != exact).sum() < (in_turn != exact).sum() / 10


@either_way
@pytest.mark.parametrize(("rank", "size", "dtype"), [(1, 2, torch.bfloat16), (2, 4, torch.float16)])
def test_what_a_rank_adds_may_come_as_addends(rank, size, dtype):
    addends = drawn(3, 5, 1000, dtype=torch.float32, seed=7)
    parts, residual, weight, _ = norm_drawn(size, 5, 1000, dtype)
    parts[rank] = (addends[0] + addends[1] + addends[2]).to(dtype)
    expected = Rank(rank, size).add_norm(parts, residual, weight)
    one = Rank(rank, size)
    one.receive_rows(parts)
    found = sum_add_norm(addends, residual, weight, EPS, one.memory)
    assert all(map(torch.equal, found, expected))


@pytest.mark.parametrize(("own", "size"), [(0, 2), (1, 2), (2, 4)])
def test_sums_and_norms_of_any_sizes_follow_each_other_either_way(own, size, monkeypatch):
    """Programs that small ones leave out keep their own count, so their slots still alternate."""
    rank = Rank(own, size)
    for turn, count in enumerate((6, 4096, 2, 9000, 2048, 4, 9000, 9000, 1026)):
        monkeypatch.setattr(plain, "_LEAST_SPARED", turn % 2 << 62)
        dtype = DTYPES[turn % len(DTYPES)]
        parts = all_drawn(size, count, dtype=dtype, seed=turn)
        assert torch.equal(rank.sum(parts), shared_sum(parts))
        num_rows, width = 1 + 3 * turn % 7, 2 * (1 + turn * 37 % 300)
        *inputs, expected = norm_drawn(size, num_rows, width, dtype, seed=50 + turn)
        before = inputs[0][own].clone(), inputs[1].clone()
        assert_normed(rank.add_norm(*inputs), expected, dtype)
        assert all(map(torch.equal, before, (inputs[0][own], inputs[1]))), "inputs stay as they are"
        assert (rank.memory.slots[own] == EMPTY).all()
    sum_over_ranks(torch.empty(0, 4096, device=DEVICE), rank.memory)  # runs no program
    assert rank.memory.counts.tolist() == rank.counts
    assert len(set(rank.counts)) > 4


def test_two_exchanges_have_places_of_their_own_and_leave_them_empty():
    rank = Rank(0, 2)
    theirs, mine = rank.memory.slots[1][:, 0, 0], rank.memory.slots[0][:, 0, 1]
    sums = [all_drawn(2, 500, dtype=torch.float32, seed=turn) for turn in range(3)]
    sent = [as_words(parts[0]) for parts in sums]
    for turn, parts in enumerate(sums):
        rank.sum(parts)
        assert torch.equal(theirs[(turn + 1) % 2, :500], sent[turn])
        assert not turn or torch.equal(theirs[turn % 2, :500], sent[turn - 1])
        assert (mine == EMPTY).all()


@either_way
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_minus_zeros_arrive_too(dtype):
    parts = [torch.full((600,), -0.0, dtype=dtype, device=DEVICE) for _ in range(2)]
    assert torch.equal(as_words(Rank(1, 2).sum(parts)), as_words(shared_sum(parts)))


@given(st.integers(2, 8), st.integers(1, SLOT_WORDS))
def test_shards_are_aligned_and_have_room_and_make_up_the_whole(size, num_words):
    shard = shard_words(num_words, size)
    assert num_words <= shard * size
    assert shard % SHARD_ALIGNMENT == 0
    assert shard <= SHARD_WORDS


@one_thread_each
@pytest.mark.parametrize(
    ("least_spared", "missing", "sent"),
    [(1, 0, 499), (1, 499, 499), (0, 255, 243), (0, SHARD_WORDS + 243, SHARD_WORDS + 255)],
    ids=["first", "last", "addend", "result"],
)
def test_a_word_is_waited_for_until_it_is_there(least_spared, missing, sent, monkeypatch):
    monkeypatch.setattr(plain, "_LEAST_SPARED", least_spared)
    rank = Rank(0, 2)
    for turn in range(2):
        rank.sum(all_drawn(2, 500, dtype=torch.float32, seed=turn))
    parts = all_drawn(2, 500, dtype=torch.float32, seed=2)
    rank.receive(parts)
    mine, theirs = rank.memory.slots[0][1, 0, 1], rank.memory.slots[1][1, 0, 0]
    word = mine[missing].clone()
    mine[missing] = theirs[sent] = EMPTY
    x = parts[0].clone()
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(sum_over_ranks, x, rank.memory)
        while theirs[sent] == EMPTY:
            assert not running.done()
        mine[missing] = word
        running.result()
    assert torch.equal(x, shared_sum(parts))


@one_thread_each
@pytest.mark.parametrize("source", range(3))
def test_all_ranks_keep_the_words_of_one(source):
    ranks = shared_memory(3, DEVICE)
    plain_ranks = reference(plain).broadcast_words
    with ThreadPoolExecutor(3) as pool:
        for turn, count in enumerate((1, 300, 3000)):
            ids = torch.arange(count) - 1
            sent = [ids + 100 * rank + turn for rank in range(3)]
            ways = [plain_ranks, plain_ranks, broadcast_words]
            list(pool.map(lambda each, x, own: each(x, source, own), ways, sent, ranks))
            assert all(torch.equal(x, ids + 100 * source + turn) for x in sent)


@pytest.mark.parametrize("is_kernel", [False, True])
@pytest.mark.parametrize(("columns", "padding"), [(5, 0), (2500, 3), (2, 3)])
def test_columns_of_all_ranks_are_one_tensor(columns, padding, is_kernel):
    rank = Rank(1, 3)
    parts = all_drawn(3, 4, columns, dtype=torch.float32)
    width = 3 * columns - padding
    expected = torch.cat(parts, 1)[:, :width]
    for other in rank.others:
        first, last = other * columns, min((other + 1) * columns, width)
        result = rank.memory.gathered[1][: 4 * width].view(4, width)
        result[:, first:last] = expected[:, first:last]
        rank.memory.flags[1][:, other] = 1
    gather = gather_columns if is_kernel else reference(plain).gather_columns
    assert torch.equal(gather(parts[1], columns, width, rank.memory), expected)
    programs = num_gather_programs(parts[1])
    for other in rank.others:
        sent = rank.memory.gathered[other][: 4 * width].view(4, width)
        assert torch.equal(sent[:, columns : 2 * columns], expected[:, columns : 2 * columns])
        assert (rank.memory.flags[other][:programs, 1] == 1).all()


@either_way
def test_once_released_a_rank_waits_for_nothing():
    rank = Rank(0, 2)
    rank.memory.released.fill_(1)
    x = drawn(3, 1000, dtype=torch.bfloat16, seed=0)
    weight = torch.ones(1000, dtype=x.dtype, device=DEVICE)
    for _ in range(3):
        sum_over_ranks(x.clone(), rank.memory)
        sum_add_norm(x, x, weight, EPS, rank.memory)
    assert rank.memory.counts[:4].tolist() == [6, 6, 6, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tensor_that_fits_has_room_for_each_of_its_parts(dtype):
    capacity = CAPACITY_BYTES // dtype.itemsize
    assert fits(torch.empty(capacity, dtype=dtype))
    assert not fits(torch.empty(capacity + 2, dtype=dtype))
    for count in (2, 1000, 1026, 4096, 128 * 1024, 128 * 1024 + 2, capacity - 2, capacity):
        num_words = count * dtype.itemsize // 4
        part = part_words(num_words)
        assert part & (part - 1) == 0
        assert part <= SLOT_WORDS
        assert part * NUM_PROGRAMS >= num_words


def test_other_tensors_do_not_fit():
    assert not fits(torch.zeros(4, dtype=torch.int64))
    assert not fits(torch.zeros(4, 4)[:, :2])
    assert not fits(torch.zeros(4, dtype=torch.float64))
    assert not fits(torch.zeros(5, dtype=torch.bfloat16)), "half a word"
    assert not fits(torch.zeros(5, dtype=torch.bfloat16)[1:]), "words begin at their own places"
    assert not residual_fits(torch.zeros(4, 3, dtype=torch.bfloat16)), "every other row would not"


def test_the_largest_sum_uses_every_program():
    parts = all_drawn(2, CAPACITY_BYTES // 2, dtype=torch.bfloat16)
    rank = Rank(0, 2)
    assert torch.equal(rank.sum(parts), shared_sum(parts))
    assert rank.counts == [1] * NUM_PROGRAMS


@either_way
def test_the_widest_row_fills_its_slot():
    *inputs, expected = norm_drawn(2, 2, 2 * SLOT_WORDS, torch.bfloat16)
    assert residual_fits(inputs[1])
    assert_normed(Rank(0, 2).add_norm(*inputs), expected, torch.bfloat16)


def test_what_is_sent_in_shards_lies_where_the_others_look_for_it(monkeypatch):
    monkeypatch.setattr(plain, "_LEAST_SPARED", 0)
    parts, rank = all_drawn(3, 900, dtype=torch.bfloat16), Rank(1, 3)
    rank.sum(parts)
    shard = shard_words(part_words(450), 3)
    own = as_words(shared_sum(parts)).split(shard)[1]
    for other in (0, 2):
        theirs = as_words(parts[1]).split(shard)[other]
        sent = rank.memory.slots[other][1, 0, 1]
        assert torch.equal(sent[: len(theirs)], theirs)
        assert torch.equal(sent[SHARD_WORDS:][:shard], own)
        assert (sent != EMPTY).sum() == len(theirs) + shard


@one_thread_each
def test_a_rank_of_the_kernels_and_two_of_the_reference_sum_together():
    kernel, *others = shared_memory(3, DEVICE)
    plain_ranks = reference(plain)
    for turn, num_rows in enumerate((3, 1, 5, 2)):
        dtype = DTYPES[turn % len(DTYPES)]
        parts, residual, gain, normed = norm_drawn(3, num_rows, 1000, dtype, seed=turn)
        expected = shared_sum(parts)
        with ThreadPoolExecutor(2) as pool:
            norms = [
                pool.submit(plain_ranks.sum_add_norm, part, residual, gain, EPS, memory)
                for part, memory in zip(parts[1:], others, strict=True)
            ]
            own = sum_add_norm(parts[0], residual, gain, EPS, kernel)
            for one in (own, *(norm.result() for norm in norms)):
                assert_normed(one, normed, dtype)
            sums = pool.map(plain_ranks.sum_over_ranks, parts[1:], others)
            sum_over_ranks(parts[0], kernel)
            assert list(sums) == [None, None]
        assert all(torch.equal(part, expected) for part in parts)


@one_thread_each
def test_three_ranks_of_the_kernels_sum_in_shards_together(monkeypatch):
    ranks, x = shared_memory(3, DEVICE), torch.ones(1, 600, dtype=torch.bfloat16)
    with kernels_in_threads(), ThreadPoolExecutor(3) as pool:
        for turn in range(6):
            monkeypatch.setattr(plain, "_LEAST_SPARED", (turn == 3) << 62)
            parts = all_drawn(3, 1, 600, dtype=x.dtype, seed=turn)
            expected = shared_sum(parts)
            norms = pool.map(sum_add_norm, parts, [x] * 3, [x[0]] * 3, [EPS] * 3, ranks)
            assert all(torch.equal(total, expected + 1) for _, total in norms)
            list(pool.map(sum_over_ranks, parts, ranks))
            assert all(torch.equal(part, expected) for part in parts)
    assert all((rank.slots[rank.rank] == EMPTY).all() for rank in ranks)
