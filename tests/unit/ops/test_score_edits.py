"""Score edits against a plain loop: reference and kernels."""

from collections import Counter

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.plan import EditedText, ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.ops import score_edits
from serve_spec.ops.score_edits import LEAST, ScoreEdits
from serve_spec.worker.request_slots import write_edits
from tests.helpers.plain_edits import edited
from tests.helpers.triton import DEVICE, reference

from serve_spec.ops import score_edits_triton  # isort: skip

CPU = torch.device("cpu")
VOCAB = 40
BOTH = [reference(score_edits), score_edits_triton]

ids = st.lists(st.integers(0, VOCAB - 1), max_size=6)
sampling_params = st.builds(
    SamplingParams,
    max_tokens=st.just(20),
    frequency_penalty=st.sampled_from([0.0, 0.3, -2.0, 2.0]),
    presence_penalty=st.sampled_from([0.0, 1.1, -0.7]),
    repetition_penalty=st.sampled_from([1.0, 1.3, 0.6, 100.0, 0.01]),
    logit_bias=st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-100, 100, width=32)),
    allowed_token_ids=st.none() | ids.map(lambda allowed: [0, *allowed]),
    bad_token_ids=ids,
    stop_token_ids=ids,
    min_tokens=st.integers(0, 9),
)
sequences = st.lists(
    st.tuples(
        sampling_params,
        st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=8),  # prompt
        ids,  # generated
        st.lists(st.integers(-1, VOCAB - 1), max_size=4),  # drafts; -1: no token
    ),
    min_size=1,
    max_size=4,
)


def table(rows):
    """Return the edits of requests as a worker keeps them; the last slot stays empty."""
    edits = ScoreEdits.create(len(rows) + 1, VOCAB, DEVICE)
    for field in edits[1:]:
        field.fill_(99)  # what requests before left
    for place, (params, prompt, generated, _) in enumerate(rows):
        text = tuple(prompt + generated)
        known = EditedText(len(prompt), text, tuple(params.stop_token_ids))
        row = ScheduledRequest("a", text[-1:], len(text) - 1, True, (), params, 0, edited=known)
        write_edits(edits, place, row)
    return edits


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("ops", BOTH)
@settings(max_examples=8, deadline=None)
@given(rows=sequences, data=st.data(), seed=st.integers(0, 2**32))
def test_scores_are_edited_by_the_text_and_the_drafts_on_their_path_alone(
    ops, rows, data, seed, is_tree
):
    num_rows = sum(len(drafts) + 1 for *_, drafts in rows) + 2
    logits = torch.randn(num_rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 5
    columns: list[tuple[int, int, int, int, int]] = []
    expected = []
    for place, (params, prompt, generated, drafts) in enumerate(rows):
        text, paths = prompt + generated, [list[int]()]
        for offset, token in enumerate([text[-1], *drafts]):
            parent = max(offset - 1, 0)
            if is_tree:
                parent = data.draw(st.integers(0, parent))
            if offset:
                paths.append([*paths[parent], token])
            depth = len(paths[offset])
            columns.append((place, len(text) + depth, token, depth, offset - parent))
            row = logits[len(columns) - 1].tolist()
            expected.append(edited(row, prompt, generated + paths[offset], params))
    columns += [(-1, 0, -1, 0, 0), (len(rows), 1000, 3, 0, 0)]
    owners, positions, token_ids, depths, backs = torch.tensor(columns, device=DEVICE).t().unbind()
    owners, depths, backs = (x.to(torch.int32) for x in (owners, depths, backs))
    arguments = owners, positions.contiguous(), token_ids.contiguous(), depths, table(rows)
    found = logits.to(DEVICE)
    ops.edit_scores(found, *arguments, backs if is_tree else None)
    torch.testing.assert_close(found[:-2].cpu(), torch.tensor(expected), rtol=1e-5, atol=2e-5)
    assert torch.equal(found[-2:].cpu(), logits[-2:])


def wide_round(device):
    """Rows over several blocks of a vocabulary, the last one broken; every third edits."""
    vocab, num_rows = 5000, 9
    generator = torch.Generator().manual_seed(3)
    edits = ScoreEdits.create(num_rows, vocab, CPU)
    edits.is_on[::3] = 1
    edits.bias.normal_(generator=generator)[:, ::7] = float("-inf")
    edits.marks.random_(0, 30, generator=generator)
    edits.repetition.uniform_(0.5, 2, generator=generator)
    edits.frequency.uniform_(-2, 2, generator=generator)
    edits.presence.uniform_(-2, 2, generator=generator)
    edits.min_lengths.fill_(4)
    logits = torch.randn(num_rows, vocab, generator=generator) * 8
    rows = torch.arange(num_rows)
    owners, positions = rows.to(torch.int32) // 3 * 3, rows % 6
    token_ids = torch.randint(vocab, (num_rows,), generator=generator)
    tensors = (logits, owners, positions, token_ids, (rows % 3).to(torch.int32), *edits)
    return tuple(tensor.to(device) for tensor in tensors)


def test_the_kernel_edits_to_the_last_bit_as_the_reference_does():
    expected, *inputs = wide_round(CPU)
    found, *on_device = wide_round(DEVICE)
    reference(score_edits).edit_scores(expected, *inputs[:4], ScoreEdits(*inputs[4:]))
    score_edits_triton.edit_scores(found, *on_device[:4], ScoreEdits(*on_device[4:]))
    assert torch.equal(found.cpu(), expected)


@pytest.mark.parametrize("count", [ops.count_tokens for ops in BOTH])
@settings(max_examples=25, deadline=None)
@given(
    st.lists(st.lists(st.integers(-1, VOCAB - 1), min_size=1, max_size=5), min_size=1, max_size=4),
    st.data(),
)
def test_emitted_tokens_are_counted_for_requests_that_edit(count, emitted, data):
    members = data.draw(st.permutations(range(5)))[: len(emitted)]
    is_on = data.draw(st.lists(st.booleans(), min_size=5, max_size=5))
    edits = ScoreEdits.create(5, VOCAB, DEVICE)
    edits.is_on.copy_(torch.tensor(is_on))
    results = [[len(t) - 1, 0, *t, *[7] * (5 - len(t))] for t in emitted]
    count(
        torch.tensor(members, dtype=torch.int32, device=DEVICE),
        torch.tensor(results, dtype=torch.int32, device=DEVICE),
        edits,
    )
    expected = torch.zeros(5, VOCAB, dtype=torch.int32)
    for member, tokens in zip(members, emitted, strict=True):
        for token, times in Counter(tokens).items():
            if is_on[member] and token >= 0:
                expected[member, token] = score_edits.GENERATED_ONCE * times
    assert torch.equal(edits.marks.cpu(), expected)


WIDE = 2500  # several blocks, the last one broken


def packed(allowed):
    """Masks [M, V] of booleans as words."""
    num_masks, vocab = allowed.shape
    words = torch.zeros(num_masks, -(-vocab // 32), dtype=torch.int64)
    for token in range(vocab):
        words[:, token // 32] += allowed[:, token].long() << token % 32
    return words.to(torch.int32)  # the highest bit becomes the sign


@pytest.mark.parametrize("ops", BOTH)
@settings(max_examples=12, deadline=None)
@given(
    st.lists(st.tuples(st.integers(-1, 3), st.integers(0, 9)), min_size=1, max_size=6, unique=True),
    st.lists(st.integers(-1, 3), min_size=6, max_size=6),
    st.integers(0, 2**32),
)
def test_a_token_keeps_the_scores_that_its_mask_allows_and_no_other(ops, tokens, places, seed):
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(tokens), WIDE, generator=generator)
    allowed = torch.rand(4, WIDE, generator=generator) < 0.5
    found = logits.to(DEVICE)
    owners, offsets = torch.tensor(tokens, dtype=torch.int32, device=DEVICE).unbind(1)
    table = torch.tensor(places, dtype=torch.int32, device=DEVICE).view(2, 3)
    layout = owners.contiguous(), offsets.contiguous()
    ops.mask_scores(found, *layout, table, packed(allowed).to(DEVICE))
    for row, (owner, offset) in enumerate(tokens):
        # Others are padding, or tokens of prompts.
        place = places[3 * owner + offset] if 0 <= owner < 2 and offset < 3 else -1
        keep = torch.ones(WIDE, dtype=torch.bool) if place < 0 else allowed[place]
        expected = logits[row].masked_fill(~keep, float("-inf"))
        assert torch.equal(found[row].cpu(), expected)


@pytest.mark.parametrize("ops", BOTH)
def test_what_is_allowed_can_be_drawn_though_nothing_else_wants_it(ops):
    logits = torch.full((3, WIDE), float("-inf"), device=DEVICE)
    logits[1, 3] = 2.0
    logits[2, 3] = float("nan")
    allowed = torch.zeros(1, WIDE, dtype=torch.bool)
    allowed[0, [3, 60]] = True
    numbers = torch.arange(3, dtype=torch.int32, device=DEVICE)
    places = torch.zeros(1, 3, dtype=torch.int32, device=DEVICE)
    words = packed(allowed).to(DEVICE)
    ops.mask_scores(logits, numbers * 0, numbers, places, words)
    kept = logits[:, [3, 60]].cpu()
    assert torch.equal(kept[:2], torch.tensor([[LEAST, LEAST], [2.0, LEAST]]))
    assert kept[2].isnan().tolist() == [True, False], "a broken model is still told from a ban"
    assert (logits[:, 4:60] == float("-inf")).all()
