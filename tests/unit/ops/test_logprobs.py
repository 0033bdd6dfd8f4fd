"""Log-probabilities of rows: those of the draw's distribution, in any grouping of the rows."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from serve_spec.core.request import SamplingParams
from serve_spec.ops import logprobs
from serve_spec.ops.draw import draw_tokens
from serve_spec.ops.logprobs import score_in_slices, score_tokens
from tests.helpers.plain_logprobs import processed
from tests.helpers.plain_sampling import draw_params

CPU = torch.device("cpu")
VOCAB = 40

params_of_rows = st.lists(
    st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.2, 0.7, 1.0, 2.0]),
        top_k=st.sampled_from([-1, 1, 5, VOCAB]),
        top_p=st.sampled_from([1.0, 0.95, 0.5]),
        min_p=st.sampled_from([0.0, 0.1, 1.0]),
    ),
    min_size=1,
    max_size=6,
)


def scored(logits: Tensor, tokens: Tensor, params: list[SamplingParams], num_top: int) -> Tensor:
    rows = draw_params(params, [0] * len(params), CPU)
    return score_tokens(logits, tokens, rows, num_top, has_filters=any(p.filters for p in params))


@given(params_of_rows, st.integers(0, 2**31), st.integers(0, 20))
def test_a_drawn_token_has_its_place_in_the_distribution_it_was_drawn_from(
    params: list[SamplingParams], seed: int, num_top: int
) -> None:
    count = len(params)
    logits = torch.randn(count, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3
    rows = draw_params(params, [seed + r for r in range(count)], CPU)
    owners = torch.arange(count, dtype=torch.int32)
    tokens = draw_tokens(logits, owners, torch.full((count,), 7), rows)
    table = scored(logits, tokens, params, num_top)
    floats = table.view(torch.float32)
    for r, row_params in enumerate(params):
        expected = processed(logits[r].double().tolist(), row_params)
        order = list(expected)
        token = int(tokens[r])
        assert float(floats[r, 0]) == pytest.approx(expected[token], abs=2e-5)
        assert int(table[r, 1]) == order.index(token) + 1
        shown = min(num_top, len(order))
        assert table[r, 2 : 2 + shown].tolist() == order[:shown]
        found = floats[r, 2 + num_top :].tolist()
        assert found[:shown] == pytest.approx([expected[v] for v in order[:shown]], abs=2e-5)
        assert all(value == -math.inf for value in found[shown:])


def test_equal_tokens_rank_by_id() -> None:
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]] * 4)
    table = scored(logits, torch.arange(4), [SamplingParams(temperature=0.0)] * 4, 0)
    assert table[:, 1].tolist() == [4, 1, 2, 3]


def test_rows_looked_at_in_pieces_give_what_they_give_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    params = [SamplingParams(temperature=0.5 + r / 10, top_k=r) for r in range(1, 12)]
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(4))
    tokens = logits.argmax(-1)
    together = scored(logits, tokens, params, 3)
    seen: list[int] = []

    def logits_of(piece: slice) -> Tensor:
        seen.append(len(logits[piece]))
        return logits[piece]

    monkeypatch.setattr(logprobs, "_MAX_LOGITS", 4 * VOCAB)
    rows = draw_params(params, [0] * 11, CPU)
    found = score_in_slices(logits_of, VOCAB, tokens, rows, 3, has_filters=True)
    assert seen == [4, 4, 3]
    assert torch.equal(found, together)
