"""Time a long prompt by the tokens of its chunks, alone and beside decoding requests.

    python benchmarks/chunks.py --config 8b/pair.yaml --prompt-tokens 14000 --json chunks.jsonl

Every row has the prompt tokens per second of the whole prompt. Beside decoding requests that is
the time of its steps less that of as many steps without it. Chunk sizes take turns. With --profile
the kernels of one late chunk are listed by the time they take.
"""

from __future__ import annotations

import argparse
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from serve_spec import LLM, SamplingParams
from serve_spec.bench.report import environment, print_record
from serve_spec.core.sequence import Sequence as EngineSequence
from serve_spec.engine.engine import SpecEngine

PAGE_SIZE = 16
PLAIN_STEPS = 8
"""Steps of the decoding requests alone, before and after a prompt, for the time to take off."""


def main() -> None:
    """Time all chunk sizes beside all numbers of requests."""
    args = _arguments()
    most, sizes = max(args.beside), [args.prompt_tokens, *args.chunks]
    steps = sum(-(-args.prompt_tokens // size) + 2 * PLAIN_STEPS + 8 for size in sizes)
    steps *= args.turns + 2
    pages = [-(-(tokens + 8) // PAGE_SIZE) for tokens in (args.context + steps, args.prompt_tokens)]
    llm = LLM(
        args.config,
        max_num_seqs=most + 1,
        max_num_batched_tokens=args.prompt_tokens + most,
        max_model_len=max(pages) * PAGE_SIZE,
        page_size=PAGE_SIZE,
        num_pages=most * pages[0] + pages[1],
        prefix_caching=False,
        speculative_algorithm="NONE",
        speculative_draft_model_path=None,
    )
    print_record(args.json, **environment(llm.config))
    for beside in args.beside:
        bench = _Bench(llm.engine, args, beside, steps)
        for row in bench.rows(sizes):
            print_record(args.json, **row)
    llm.shutdown()


class _Bench:
    """Prompts of one length beside `beside` requests that decode `num_tokens`."""

    def __init__(
        self, engine: SpecEngine, args: argparse.Namespace, beside: int, num_tokens: int
    ) -> None:
        self._engine, self._args, self._beside = engine, args, beside
        self._rng = random.Random(beside)
        decoding = [
            self._add(args.context, num_tokens, f"beside {number} of {beside}")
            for number in range(beside)
        ]
        while not all(sequence.is_decoding for sequence in decoding):
            engine.step()
        self._decoding = decoding

    def rows(self, sizes: Sequence[int]) -> Iterator[dict[str, Any]]:
        """Yield a row for each chunk size; the first is the whole prompt."""
        args, times = self._args, defaultdict[int, list[float]](list)
        for turn in range(args.turns + 1):
            for size in sizes:
                ms = self._prompt_ms(size, f"turn {turn} of {size} beside {self._beside}")
                if turn:  # the first is slow
                    times[size].append(ms)
        if args.profile:
            for size in sizes:
                self._profile(size)
        for sequence in self._decoding:
            self._engine.abort(sequence.request_id)
        self._engine.drain()
        whole = median(times[sizes[0]])
        for size, found in times.items():
            yield {
                "beside": self._beside,
                "context": args.context if self._beside else 0,
                "prompt_tokens": args.prompt_tokens,
                "chunk": size,
                "ms": round(median(found), 2),
                "tokens_per_second": round(args.prompt_tokens / median(found) * 1e3),
                "over_whole": round(whole / median(found), 3),
            }

    def _prompt_ms(self, size: int, name: str) -> float:
        """Return the time of a prompt in chunks of `size`, less that of its steps without it."""
        before = self._plain_ms()
        with self._chunked(size):
            sequence = self._add(self._args.prompt_tokens, 1, name)
            times = []
            while not sequence.finished:
                times.append(self._step_ms())
        plain = [*before, *self._plain_ms()]
        return sum(times) - len(times) * (median(plain) if plain else 0.0)

    def _profile(self, size: int) -> None:
        """Print the kernels of a prompt in chunks of `size`, those that take longest first."""
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            self._prompt_ms(size, f"profile of {size} beside {self._beside}")
            torch.cuda.synchronize()
        totals = sorted(profile.key_averages(), key=lambda each: -each.device_time_total)
        print(f"beside {self._beside}, chunk {size}: kernels, ms, calls")
        for each in totals[:14]:
            print(f"  {each.device_time_total / 1e3:9.2f} {each.count:6} {each.key[:110]}")

    def _plain_ms(self) -> list[float]:
        """Return times of steps without prompts; none if nothing decodes."""
        if not self._beside:
            self._engine.drain()
            return []
        return [self._step_ms() for _ in range(PLAIN_STEPS)][2:]

    def _step_ms(self) -> float:
        start = time.perf_counter()
        self._engine.step()
        return (time.perf_counter() - start) * 1e3

    @contextmanager
    def _chunked(self, size: int) -> Iterator[None]:
        scheduler = self._engine.scheduler
        limits = scheduler.limits
        tokens = {"chunked_prefill_size": size, "max_num_batched_tokens": size + self._beside}
        scheduler.limits = limits.model_copy(update=tokens)
        try:
            yield
        finally:
            scheduler.limits = limits

    def _add(self, num_prompt: int, num_output: int, name: str) -> EngineSequence:
        """Return a new request with a random prompt."""
        ids = self._rng.choices(range(1, self._engine.tokenizer.vocab_size), k=num_prompt)
        params = SamplingParams(max_tokens=num_output, temperature=0.0, ignore_eos=True)
        sequence = self._engine.new_sequence(name, ids, params)
        self._engine.add(sequence)
        return sequence


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    several = {"type": int, "nargs": "+"}
    parser.add_argument("--config", default="configs/tiny.yaml", help="configuration or model")
    parser.add_argument("--prompt-tokens", type=int, default=14_000, help="tokens of the prompt")
    parser.add_argument("--chunks", **several, default=[2048, 1024, 640], help="tokens of chunks")
    parser.add_argument("--beside", **several, default=[0, 8], help="requests that decode")
    parser.add_argument("--context", type=int, default=15_000, help="their context tokens")
    parser.add_argument("--turns", type=int, default=3, help="prompts of each chunk size")
    parser.add_argument("--profile", action="store_true", help="list kernels, too (CUDA)")
    parser.add_argument("--json", type=Path, help="file to append every row to (JSON lines)")
    return parser.parse_args()


if __name__ == "__main__":
    main()
