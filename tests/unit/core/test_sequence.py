"""Laws of a sequence's progress."""

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence


def sequence(num_prompt: int, num_output: int, prompt_logprobs: int | None) -> Sequence:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Sequence("a", params, list(range(num_prompt + num_output)), num_prompt, seed=0)


@given(st.integers(1, 12), st.integers(0, 5), st.lists(st.integers(0, 6), max_size=30))
def test_every_prompt_token_is_scored_once_whatever_the_pieces_and_the_preemptions(
    num_prompt: int, num_output: int, pieces: list[int]
) -> None:
    """A piece of 0 is a preemption; the last piece is whatever is left."""
    seq = sequence(num_prompt, num_output, prompt_logprobs=0)
    for piece in [*pieces, len(seq)]:
        if piece == 0:
            seq.forget_computed()
        end = min(len(seq), seq.num_computed + piece)
        for position in seq.unscored(end):
            assert seq.num_computed < position <= end, "the row before it is in this piece"
            seq.prompt_logprobs.append(TokenLogprob(seq.token_ids[position], 0.0, 1))
        seq.num_computed = end
    assert [entry.token_id for entry in seq.prompt_logprobs] == list(range(1, num_prompt))


def test_nobody_is_scored_who_did_not_ask() -> None:
    assert not sequence(8, 2, prompt_logprobs=None).unscored(8)
