"""A running request: its tokens, how many are computed, and its pages."""

from __future__ import annotations

import math
from collections.abc import Sequence as SequenceOf
from dataclasses import dataclass, field

from serve_spec.core.request import FinishReason, SamplingParams, TokenLogprob
from serve_spec.core.stats import SpeculationStats


@dataclass(eq=False)
class Sequence:
    """The tokens of a request, and how far target KV and draft KV are computed.

    `token_ids[j]` is at absolute position j. The target KV holds positions `0 .. num_computed-1`.
    Draft KV entry j is made from token j+1 and target feature j, so it needs `j < num_computed`.
    Entries `.. num_draft_computed-1` exist; draft extend makes the missing ones before the request
    drafts. A standalone draft model begins with entry -1, of the first token.

        prompt [a b c d], two tokens e f generated, decoding:
        token_ids = a b c d e f      num_computed = 5 (f has not been through the target)
        draft KV entries 0..4 = (b,f0) (c,f1) (d,f2) (e,f3) (f,f4); entry 4 predicts position 6
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
    """Index in the device's tensors of running requests; -1 while it waits."""
    held_token_ids: tuple[int, ...] = ()
    """Tokens masked until `min_tokens` are generated; empty without such a limit."""
    end_token_ids: frozenset[int] = frozenset()
    """Tokens that end the text."""
    reports_stats: bool = False
    """Every delta carries `stats`, because the text may end within a step: it has stop strings."""
    num_cached_tokens: int | None = None
    """Tokens taken from the prefix cache; None before it is first admitted."""
    admitted_at: float = 0.0
    """`perf_counter` when it was first admitted."""
    prefill_turn: int = 0
    """Order of its prompt among those in prefill, see `scheduler.prompts`."""
    has_broken_draft: bool = False
    """Its draft gave NaN or an unknown token, so it stops drafting."""
    is_recomputed: bool = False
    """Its logits were NaN, so it was computed anew: without drafts and cached pages."""
    has_slow_masks: bool = False
    """A mask of its grammar took long, so it stops drafting."""
    grammar_rate: float = 0.95
    """Fraction of reached grammar drafts that were accepted lately."""
    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)
    """Log-probabilities of prompt tokens 1 .., as far as computed; empty unless wanted."""
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
    def num_uncached_prompt_tokens(self) -> int:
        """Prompt tokens that were computed for this request."""
        return self.num_prompt_tokens - (self.num_cached_tokens or 0)

    @property
    def num_pending(self) -> int:
        """Committed tokens the target has not computed: 1 while decoding, more during prefill."""
        return len(self.token_ids) - self.num_computed

    @property
    def is_decoding(self) -> bool:
        """Return whether everything but the last token is computed."""
        return self.num_computed >= self.num_prompt_tokens and self.num_pending == 1

    @property
    def num_remaining(self) -> int:
        """Tokens `max_tokens` still allows."""
        return self.params.max_tokens + self.num_prompt_tokens - len(self.token_ids)

    @property
    def finished(self) -> bool:
        """Return whether the text has ended."""
        return self.finish_reason is not None

    def cut(self, token_ids: SequenceOf[int]) -> tuple[int, FinishReason | None]:
        """Return how many of the next tokens belong to the text, and why it ends, if it does.

        Stop strings are looked for where the text is made, see `engine.output`.
        """
        room = self.num_remaining
        for count, token in enumerate(token_ids[:room], start=1):
            if token in self.end_token_ids:
                return count, FinishReason.STOP
        if len(token_ids) >= room:
            return room, FinishReason.LENGTH
        return len(token_ids), None

    def learn_grammar_drafts(self, num_verified: int, num_correct: int) -> None:
        """Learn from a step with grammar drafts."""
        for place in range(min(num_verified, num_correct + 1)):
            self.grammar_rate += ((place < num_correct) - self.grammar_rate) / 8.0

    @property
    def most_grammar_drafts(self) -> int:
        """Most grammar drafts that are more likely accepted than not; 0: they never are again."""
        if self.grammar_rate <= 0.5:
            return 0
        return int(math.log(0.5) / math.log(min(self.grammar_rate, 0.99)))

    def unscored(self, start: int, end: int) -> range:
        """Return the prompt positions whose log-probabilities a chunk `start .. end - 1` adds.

        Those before a chunk are known, also after a preemption, or in flight.
        """
        if self.params.prompt_logprobs is None:
            return range(0)
        first = max(len(self.prompt_logprobs), start) + 1
        return range(first, min(end + 1, self.num_prompt_tokens))

    def forget_computed(self) -> None:
        """Drop what is computed after a preemption; the tokens stay."""
        self.num_computed = 0
        self.num_draft_computed = 0
