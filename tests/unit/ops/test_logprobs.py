"""Log-probabilities of rows: those of the draw's distribution, in any grouping of the rows."""

from __future__ import annotations

import torch

from serve_spec.core.request import SamplingParams
from serve_spec.ops import logprobs
from serve_spec.ops.logprobs import score_in_slices, score_tokens
from tests.helpers.plain_sampling import draw_params

CPU = torch.device("cpu")
VOCAB = 40


def scored(logits, tokens, params, num_top):
    rows = draw_params(params, [0] * len(params), CPU)
    return score_tokens(logits, tokens, rows, num_top, has_filters=any(p.filters for p in params))


def test_equal_tokens_rank_by_id():
    logits = torch.tensor([[1.0, 3.0, 3.0, 3.0]] * 4)
    table = scored(logits, torch.arange(4), [SamplingParams(temperature=0.0)] * 4, 0)
    assert table[:, 1].tolist() == [4, 1, 2, 3]


def test_rows_looked_at_in_pieces_give_what_they_give_together(monkeypatch):
    params = [SamplingParams(temperature=0.5 + r / 10, top_k=r) for r in range(1, 12)]
    logits = torch.randn(11, VOCAB, generator=torch.Generator().manual_seed(4))
    tokens = logits.argmax(-1)
    together = scored(logits, tokens, params, 3)
    seen: list[int] = []

    def logits_of(piece):
        seen.append(len(logits[piece]))
        return logits[piece]

    monkeypatch.setattr(logprobs, "_MAX_LOGITS", 4 * VOCAB)
    rows = draw_params(params, [0] * 11, CPU)
    found = score_in_slices(logits_of, VOCAB, tokens, rows, 3, has_filters=True)
    assert seen == [4, 4, 3]
    assert torch.equal(found, together)
