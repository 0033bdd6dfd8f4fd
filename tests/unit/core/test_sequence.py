"""Laws of a sequence's progress."""

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import SamplingParams
from serve_spec.core.sequence import Sequence


def sequence(num_prompt: int, num_output: int, prompt_logprobs: int | None) -> Sequence:
    params = SamplingParams(prompt_logprobs=prompt_logprobs)
    return Sequence("a", params, list(range(num_prompt + num_output)), num_prompt, seed=0)


@given(
    st.integers(1, 12), st.integers(0, 5), st.lists(st.integers(0, 6), max_size=30), st.booleans()
)
def test_every_prompt_token_is_scored_once_whatever_the_chunks_and_the_preemptions(
    num_prompt: int, num_output: int, chunks: list[int], is_ahead: bool
) -> None:
    """A chunk of 0 is a preemption. Scores come one chunk later if the next is planned ahead."""
    seq = sequence(num_prompt, num_output, prompt_logprobs=0)
    in_flight: list[TokenLogprob] = []
    for chunk in [*chunks, len(seq)]:
        if chunk == 0:  # nothing is in flight then
            seq.prompt_logprobs += in_flight
            in_flight = []
            seq.forget_computed()
        end = min(len(seq), seq.num_computed + chunk)
        positions = seq.unscored(seq.num_computed, end)
        assert all(seq.num_computed < p <= end for p in positions), "decided in this chunk"
        scored = [TokenLogprob(seq.token_ids[p], 0.0, 1) for p in positions]
        seq.prompt_logprobs += in_flight if is_ahead else scored
        in_flight = scored if is_ahead else []
        seq.num_computed = end
    seq.prompt_logprobs += in_flight
    assert [entry.token_id for entry in seq.prompt_logprobs] == list(range(1, num_prompt))


def test_a_request_that_does_not_ask_is_not_scored() -> None:
    assert not sequence(8, 2, prompt_logprobs=None).unscored(0, 8)
