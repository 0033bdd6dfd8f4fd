"""One request while it runs: its tokens, how far they are computed, and the pages it holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from serve_spec.core.logprobs import TokenLogprob
from serve_spec.core.request import FinishReason, SamplingParams, SpeculationStats


@dataclass(eq=False)
class Sequence:
    """A sequence and the two caches' progress through it.

    Positions: `token_ids[j]` sits at absolute position j. The target's cache holds positions
    `0 .. num_computed-1`. Draft entry j is (token j+1, target feature j), so it can exist only for
    `j < num_computed`; the drafter has made entries `.. num_draft_computed-1` and catches up
    lazily, before it drafts. A whole model as a draft begins with entry -1, of the first token.

        prompt [a b c d], two tokens e f generated, decoding:
        token_ids = a b c d e f      num_computed = 5 (f has not been through the target)
        draft entries 0..4 = (b,f0) (c,f1) (d,f2) (e,f3) (f,f4); entry 4 predicts position 6
    """

    request_id: str
    params: SamplingParams
    token_ids: list[int]
    num_prompt_tokens: int
    seed: int
    num_computed: int = 0
    num_draft_computed: int = 0
    page_ids: list[int] = field(default_factory=list)
    request_slot: int = -1
    """Its place among the running sequences; -1 while it waits."""
    held_token_ids: tuple[int, ...] = ()
    """What may not be drawn before `min_tokens` are generated; empty without such a limit."""
    num_cached_tokens: int | None = None
    """Tokens it began with that others had computed; None before it is first admitted."""
    has_broken_draft: bool = False
    """Its draft gave NaN or no token of the vocabulary: it speculates no more."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Of prompt tokens 1 .., as far as they are known; empty unless they are asked for."""
    finish_reason: FinishReason | None = None
    stats: SpeculationStats = field(default_factory=SpeculationStats)

    def __len__(self) -> int:
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The generated tokens."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_prompt_rows(self) -> int:
        """Tokens of the prompt that were computed for this request alone."""
        return self.num_prompt_tokens - (self.num_cached_tokens or 0)

    @property
    def num_pending(self) -> int:
        """Committed tokens the target has not seen: 1 while decoding, more during prefill."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Whether the prompt is done and everything but the last token is computed."""
        return self.num_computed >= self.num_prompt_tokens and self.num_pending == 1

    @property
    def num_remaining(self) -> int:
        """Tokens `max_tokens` still allows."""
        return self.params.max_tokens + self.num_prompt_tokens - len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Whether the text has ended."""
        return self.finish_reason is not None

    def unscored(self, start: int, end: int) -> range:
        """Return the prompt positions whose log-probabilities a chunk `start .. end - 1` adds.

        Preemption forgets none of them, and those before a chunk are known or in flight.
        """
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(len(self.prompt_logprobs), start) + 1
        return range(first, min(end + 1, self.num_prompt_tokens))

    def forget_computed(self) -> None:
        """Preemption: the tokens stay, everything computed from them is to be made anew."""
        self.num_computed = 0
        self.num_draft_computed = 0
