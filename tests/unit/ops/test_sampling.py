"""Laws of the sampling pipeline."""

import pytest
import torch
from scipy import stats

from serve_spec.core.request import SamplingParams
from serve_spec.ops.sampling import SamplingRows, filter_scores, sample, sample_coupled

CPU = torch.device("cpu")


def rows_for(params: list[SamplingParams], seeds: list[int], vocab: int) -> SamplingRows:
    return SamplingRows.create(params, seeds, list(range(len(seeds))), vocab, CPU)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 1.7])
def test_samples_follow_the_tempered_distribution(temperature: float) -> None:
    """Chi-square over 200k draws from 12 tokens; a correct law fails one seed in 10,000."""
    logits = torch.randn(12, generator=torch.Generator().manual_seed(0)) * 1.5
    draws = 200_000
    params = [SamplingParams(temperature=temperature)] * draws
    rows = rows_for(params, [3] * draws, 12)
    counts = sample(logits.expand(draws, -1), rows).bincount(minlength=12)
    expected = (logits.double() / temperature).softmax(0) * draws
    expected *= draws / expected.sum()
    assert stats.chisquare(counts.numpy(), expected.numpy()).pvalue > 1e-4


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_rows_without_a_finite_score_or_with_a_broken_one_draw_no_token(temperature: float) -> None:
    logits = torch.zeros(4, 9)
    logits[0, 5] = torch.nan
    logits[1] = -torch.inf
    logits[2, 3] = torch.inf
    logits[3, :7] = -torch.inf
    rows = rows_for([SamplingParams(temperature=temperature)] * 4, [1] * 4, 9)
    *broken, whole = sample(logits, rows).tolist()
    assert broken == [-1, -1, -1]
    assert whole in (7, 8)


def test_a_row_is_drawn_alike_alone_and_in_any_batch() -> None:
    generator = torch.Generator().manual_seed(1)
    params = [
        SamplingParams(temperature=0.0),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=0.7, top_k=5),
        SamplingParams(temperature=1.3, top_p=0.8, min_p=0.05),
    ] * 8
    logits = torch.randn(32, 100, generator=generator) * 3
    together = sample(logits, SamplingRows.create(params, list(range(32)), [9] * 32, 100, CPU))
    for r in range(32):
        alone = SamplingRows.create([params[r]], [r], [9], 100, CPU)
        assert sample(logits[r : r + 1], alone).item() == together[r].item()


def test_a_temperature_too_small_to_divide_by_is_greedy() -> None:
    logits = torch.randn(4, 50, generator=torch.Generator().manual_seed(5))
    params = [SamplingParams(temperature=t, top_k=2) for t in (0.0, 1e-300, 1e-40, 1e-6)]
    assert torch.equal(sample(logits, rows_for(params, [1, 2, 3, 4], 50)), logits.argmax(-1))


def test_greedy_takes_the_smallest_of_equal_tokens() -> None:
    logits = torch.tensor([[1.0, 4.0, 4.0, 0.0]])
    rows = rows_for([SamplingParams(temperature=0.0)], [0], 4)
    assert sample(logits, rows).tolist() == [1]


def test_filters_keep_exactly_what_their_definition_says() -> None:
    """Against a plain loop over the sorted tokens, on a grid of the three parameters."""
    scores = torch.randn(1, 30, generator=torch.Generator().manual_seed(2)) * 2
    probs = scores[0].double().softmax(0)
    order = sorted(range(30), key=lambda v: -probs[v].item())
    for top_k in (-1, 1, 4, 30):
        for top_p in (0.05, 0.5, 0.95, 1.0):
            for min_p in (0.0, 0.1, 1.0):
                params = SamplingParams(top_k=top_k, top_p=top_p, min_p=min_p)
                kept, mass = set(), 0.0
                for rank, v in enumerate(order):
                    p = probs[v].item()
                    inside = (top_k < 1 or rank < top_k) and (mass < top_p or top_p == 1.0)
                    if rank == 0 or (inside and p >= min_p * probs.max().item()):
                        kept.add(v)
                    mass += p
                found = torch.isfinite(filter_scores(scores, [params]))[0].nonzero().flatten()
                assert set(found.tolist()) == kept, params


def test_a_draft_equal_to_the_target_always_agrees_with_it() -> None:
    """Coupling at sharpness 1: the same logits under the same noise give the same token."""
    logits = torch.randn(64, 50, generator=torch.Generator().manual_seed(3)) * 2
    params = [SamplingParams(temperature=t) for t in (0.0, 0.6, 1.0, 1.5)] * 16
    rows = SamplingRows.create(params, list(range(64)), list(range(64)), 50, CPU, 1.0)
    coupled = sample_coupled(logits, rows, torch.arange(64), None)
    assert torch.equal(coupled, sample(logits, rows))


def test_a_reduced_draft_vocabulary_reads_the_noise_of_its_target_ids() -> None:
    target_ids = torch.tensor([1, 4, 7, 9])
    logits = torch.full((16, 10), -1e9)
    draft_logits = torch.randn(16, 4, generator=torch.Generator().manual_seed(4))
    logits[:, target_ids] = draft_logits
    params = [SamplingParams(temperature=1.0)] * 16
    rows = SamplingRows.create(params, list(range(16)), list(range(16)), 10, CPU, 1.0)
    found = sample_coupled(draft_logits, rows, torch.arange(16), target_ids)
    assert torch.equal(found, sample(logits, rows))
