"""Stand-ins for `EngineClient`: their tokens are a function of prompt, seed and position.

`FakeLoop` repeats the words of the prompt, two tokens per round; its first word commands:

"hold ..."   one round, then silence until the request is cancelled
"break ..."  one round, then the engine fails
"fail ..."   fails before it accepts
"full ..."   refuses because its queue is full
"die ..."    one round, then the process ends; a replica that continues it goes on
"poison ..." one round, then the process ends, wherever it is continued

A word is a token. The next one is what followed the last one before, or the prompt's first.

`SamplingLoop` samples as the engine: a token is a function of text and seed, and, as with edited
scores, of how much of the text is generated. Its rounds bring one to three tokens,
different ones on different replicas, as speculation does.

Log-probabilities are a function of the text. Text is made by the engine's own `OutputText`.
"""

import asyncio
import os
import random
from itertools import repeat

from serve_spec.config import ConfigError
from serve_spec.core.errors import EngineOverloaded, InvalidRequest, RequestFailed
from serve_spec.core.record import StepTimes
from serve_spec.core.request import FinishReason, TokenDelta, TokenLogprob
from serve_spec.core.round import RoundNotes
from serve_spec.core.sequence import Sequence
from serve_spec.core.stats import SpeculationStats
from serve_spec.engine.output import OutputText
from serve_spec.engine.tokenizer import num_open_bytes
from tests.helpers.rounds import verified_round

MAX_MODEL_LEN = 64
EOS = 0
_ALPHABET = "\x00ab é"


class AnyToken:
    """Every id is a token, and no text ends within a character."""

    def has_text(self, token_id, *, skip_special_tokens):
        return True

    def num_open(self, token_ids):
        return 0


class FakeTokenizer(AnyToken):
    """A word, with the space after it, is a token; ids that are no word's are shown as numbers."""

    def encode(self, text):
        return [int.from_bytes(b"\x01" + word.encode(), "big") for word in text.split()]

    def decode(self, token_ids, *, skip_special_tokens=True):
        return "".join(f"{self._word(token)} " for token in token_ids)

    def _word(self, token):
        data = token.to_bytes((token.bit_length() + 7) // 8, "big")
        mark, spelled = data[:1], data[1:]
        is_word = mark == b"\x01" and spelled
        return spelled.decode(errors="replace") if is_word else f"<{token}>"


class BytesTokenizer(AnyToken):
    """A byte is a token, so that é is two of them."""

    def encode(self, text):
        return list(text.encode())

    def decode(self, token_ids, *, skip_special_tokens=True):
        return bytes(token_ids).decode(errors="replace")

    def num_open(self, token_ids):
        return min(1, num_open_bytes(bytes(token_ids)))


class FakeStream:
    """The deltas of one request."""

    def __init__(self, loop, sequence, command=""):
        self.num_prompt_tokens = sequence.num_prompt_tokens
        self.cancelled = asyncio.Event()
        self._sequence = sequence
        self._loop = loop
        self._command = command
        self._text = OutputText(loop.tokenizer, sequence)
        self._stats = SpeculationStats()

    async def __aiter__(self):
        sizes = self._loop.round_sizes()
        while not self._text.finish_reason:
            yield self._round(next(sizes))
            if self._command == "hold":
                await self.cancelled.wait()
            if self._command == "break":
                raise RuntimeError("the engine thread died: boom")
            if self._command == "die":
                await asyncio.sleep(0.1)  # its items are to leave the process
                os._exit(1)
            await asyncio.sleep(0)
            if self.cancelled.is_set() and not self._text.finish_reason:
                name = self._sequence.request_id
                yield TokenDelta(name, (), "", FinishReason.ABORT, self._stats)
                return

    async def each(self, take):
        async for delta in self:
            take(delta)

    def _round(self, size):
        sequence, params = self._sequence, self._sequence.params
        before = list(sequence.token_ids)
        for _ in range(size):
            sequence.token_ids.append(self._loop.draw(sequence))
        new = sequence.token_ids[len(before) :]
        sequence.token_ids[len(before) :] = []
        count, reason = sequence.cut(new)
        del new[count:]
        is_first = len(before) == self.num_prompt_tokens
        delta = self._text.add(
            TokenDelta(
                sequence.request_id,
                tuple(new),
                "",
                reason,
                None,
                logprobs_of(before, new, params.logprobs),
                prompt_logprobs_of(before, params.prompt_logprobs) if is_first else None,
                prefill_s=1e-6 if is_first else 0.0,
            )
        )
        sequence.token_ids += delta.token_ids
        self._stats.observe(num_steps=3, num_correct_drafts=len(delta.token_ids) - 1)
        return delta._replace(speculation=self._stats if delta.finish_reason else None)


class StandIn:
    """What the stand-ins share; a subclass gives the tokens of a round."""

    eos_token_ids = ()

    def __init__(self):
        self.streams = {}

    async def submit(self, prompt, params, request_id, emitted=(), *, command=""):
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        sequence = Sequence(request_id, params, [*ids, *emitted], len(ids), params.seed or 0)
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self.eos_token_ids)}
        sequence.end_token_ids = frozenset(ends)
        stream = self.streams[request_id] = FakeStream(self, sequence, command)
        return stream

    def cancel(self, request_id):
        stream = self.streams.pop(request_id, None)
        if stream is not None:
            stream.cancelled.set()


class SamplingLoop(StandIn):
    """`replica` decides how many tokens its rounds bring."""

    tokenizer = BytesTokenizer()
    eos_token_ids = (EOS,)

    def __init__(self, replica):
        super().__init__()
        self.replica = replica

    def round_sizes(self):
        rounds = random.Random(self.replica)
        while True:
            yield rounds.randint(1, 3)

    def draw(self, sequence):
        """A byte of the alphabet; é stays whole, and the end comes seldom."""
        assert sequence.params.seed is not None, "the router fixes the seed"
        prefix = sequence.token_ids
        if prefix[-1] == "é".encode()[0]:
            return "é".encode()[1]
        draws = random.Random(f"{sequence.seed} {sequence.num_prompt_tokens} {prefix}")
        letters = _ALPHABET if draws.random() < 0.1 else _ALPHABET[1:]
        return draws.choice(letters).encode()[0]


class FakeLoop(StandIn):
    """Says words, and fails as it is told to."""

    tokenizer = FakeTokenizer()

    def __init__(self, config=None):
        super().__init__()
        self.knobs = {}
        self.tokens = 0
        self.num_flushes = 0
        self.accept_rates = None

    def round_sizes(self):
        return repeat(2)

    def draw(self, sequence):
        *before, last = sequence.token_ids
        return sequence.token_ids[1 + before.index(last) if last in before else 0]

    async def submit(self, prompt, params, request_id, emitted=(), **options):
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else list(prompt)
        if not ids:
            raise InvalidRequest("prompt", "no words", "give at least one token of text")
        if len(ids) >= MAX_MODEL_LEN:
            fix = f"shorten it to at most {MAX_MODEL_LEN - 1} tokens"
            raise InvalidRequest("prompt", f"<{len(ids)} tokens>", fix, too_long=True)
        command = self.tokenizer.decode(ids[:1]).strip()
        if command == "fail":
            raise RuntimeError("the engine thread died: boom")
        if command == "nothing":
            raise RequestFailed("NaN logits")
        if command == "full":
            raise EngineOverloaded("max_waiting_seqs=0 requests wait")
        if command == "die" and emitted:
            command = "live"
        if command == "poison":
            command = "die"
        self.tokens += params.max_tokens
        return await super().submit(ids, params, request_id, emitted, command=command)

    def check_health(self):
        if self.knobs.get("sick"):
            raise RuntimeError("told to be sick")

    def reconfigure(self, settings):
        if "typo" in settings:
            raise ConfigError("typo: unknown key")
        self.knobs = dict(settings)

    def flush_cache(self):
        self.num_flushes += 1

    def report_to(self, metrics):
        self.metrics = metrics

    def start_from(self, accept_rates):
        self.accept_rates = list(accept_rates)

    def snapshot(self):
        return {
            "speculative_num_steps": 3,
            "avg_spec_accept_length": 2.0,
            "batch_size": len(self.streams),
            "num_running": len(self.streams),
            "num_waiting": 0,
            "kv": {"free_pages": 100 - len(self.streams), "total_pages": 100},
            "counters": {"decode_rows": self.tokens // 2, "decode_tokens": self.tokens},
            "slots": {},
            "reason": "fake",
            "knobs": self.knobs,
        }

    def shutdown(self):
        self.streams.clear()


def entry_of(before, token, num_top):
    """What is reported of `token` after `before`; its rivals are bytes."""
    draws = random.Random(f"{list(before)} {token}")
    rivals = ((byte, -5 * draws.random()) for byte in draws.sample(range(256), num_top))
    top = sorted(rivals, key=lambda rival: -rival[1])
    return TokenLogprob(token, -5 * draws.random(), num_top + 1, tuple(top))


def logprobs_of(before, tokens, num_top):
    """Return log-probabilities of tokens that follow each other; None if none are requested."""
    if num_top is None:
        return None
    known = [*before, *tokens]
    return tuple(entry_of(known[:-i], known[-i], num_top) for i in range(len(tokens), 0, -1))


def prompt_logprobs_of(prompt, num_top):
    """Return those of a prompt, whose first token has none; None if none are requested."""
    rest = logprobs_of(prompt[:1], prompt[1:], num_top)
    return None if rest is None else (None, *rest)


RATES = [0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2]
"""What it reports of acceptance, by position."""

ROUND = verified_round(
    [3, 1],
    batch_size=2,
    num_steps=3,
    times=StepTimes(1.0, 2.0, 4.0, idle_ms=0.2),
    num_running_seqs=3,
    num_waiting_seqs=1,
    num_used_pages=5,
    switch_reason="gain",
    drafted_per_req=[3, 4],
    budget=6,
    notes=RoundNotes(
        is_probe=True, predicted_ms=3.5, slot="1", ema_accept_length=2.5, expected_drafts=3.5
    ),
    speedup=1.5,
    num_broken_drafts=1,
    grammar_drafts=[(4, 2)],
    num_grammar_drafts=4,
    num_grammar_tokens=2,
)
PREFILL = verified_round(
    [],
    batch_size=0,
    num_steps=0,
    times=StepTimes(0.0, 2.0, 3.0),
    num_prefill_tokens=7,
    num_running_seqs=1,
    num_used_pages=1,
    num_prefix_query_tokens=7,
    num_prefix_hit_tokens=4,
)


class PacedStream(FakeStream):
    """Deltas with a pause after each."""

    async def __aiter__(self):
        async for delta in super().__aiter__():
            yield delta
            await asyncio.sleep(0.05)


class ReportingLoop(FakeLoop):
    """Reports two rounds with every request."""

    async def submit(self, *request, **options):
        self.metrics.observe(PREFILL)
        self.metrics.observe(ROUND)
        return await super().submit(*request, **options)

    def snapshot(self):
        positions = [
            {"position": position, "accept_rate": rate, "trials": 50.0}
            for position, rate in enumerate(RATES, start=1)
        ]
        return {
            **super().snapshot(),
            "candidate_steps": list(range(len(RATES) + 1)),
            "acceptance": {"positions": positions},
            "slot": "1",
            "last_reason": "gain",
            "synthetic_acceptance": None,
            "costs": {"state": "measured"},
            "break_even": {"tokens_per_ms": {"0": 1.0, "3": 1.5}},
            "started_from": self.accept_rates,
        }


class PacedLoop(ReportingLoop):
    """Its requests take a while."""

    async def submit(self, *args, **options):
        stream = await super().submit(*args, **options)
        stream.__class__ = PacedStream
        return stream
