"""The target's own answers, written by the engine, as rows of whole chats."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from recipes.smollm2.settings import AnswerPlan
from recipes.training.drafts import Batch, most_frequent
from recipes.training.settings import Phase
from serve_spec.bench.harness import ClosedLoop
from serve_spec.bench.workload import TextKind, TextRequest
from serve_spec.engine.llm import LLM

_TOKENS_PER_LOOK = 20_000


@dataclass(frozen=True)
class Chat:
    """A prompt and the answer to it, as token ids."""

    prompt: Sequence[int]
    answer: Sequence[int]


def write_answers(
    llm: LLM, prompts: Sequence[Sequence[int]], plan: AnswerPlan, seed: int, seconds: float
) -> list[Chat]:
    """Return an answer to each prompt at each temperature, as many as `seconds` allow.

    All prompts are answered once before one is answered again. The last answers may be cut.
    """
    kinds = [TextKind("answers", temperature) for temperature in plan.temperatures]
    count = len(prompts)
    turns = [(i % count, (i + i // count) % len(kinds)) for i in range(count * len(kinds))]
    requests = [
        (TextRequest(kinds[kind], prompts[place], seed + i, may_stop=True), plan.max_tokens)
        for i, (place, kind) in enumerate(turns)
    ]
    loop = ClosedLoop(llm.engine, requests, plan.concurrent)
    started, emitted = time.monotonic(), -1
    with tqdm(total=len(turns), desc="answers") as bar:
        while loop.num_emitted > emitted and time.monotonic() - started < seconds:
            emitted = loop.num_emitted
            loop.advance(emitted + _TOKENS_PER_LOOK)
            bar.update(len(loop.texts) - bar.n)
    loop.close()
    pairs = zip(turns, loop.texts, strict=False)
    return [Chat(prompts[place], answer) for (place, _), answer in pairs if answer]


def fill_rows(chats: Iterable[Chat], row_tokens: int, least: int = 128) -> Batch:
    """Return rows [R, row_tokens] of whole chats; the tokens of answers are counted.

    The last chat of a row is cut, or left for the next row if under `least` tokens of room are
    left. Rows are filled up with zeros, which are not counted.
    """
    rows: list[tuple[list[int], list[bool]]] = [([], [])]
    for chat in chats:
        if row_tokens - len(rows[-1][0]) < min(least, len(chat.prompt) + len(chat.answer)):
            rows.append(([], []))
        tokens, marks = rows[-1]
        tokens += [*chat.prompt, *chat.answer]
        marks += [False] * len(chat.prompt) + [True] * len(chat.answer)
    shape = len(rows), row_tokens
    filled, counted = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.bool)
    for place, (tokens, marks) in enumerate(rows):
        length = min(row_tokens, len(tokens))
        filled[place, :length] = torch.tensor(tokens[:length], dtype=torch.int32)
        counted[place, :length] = torch.tensor(marks[:length])
    return Batch(filled, counted)


@dataclass(frozen=True)
class Answers:
    """Rows of chats (`Texts`), on the training device."""

    train: Batch
    held_out: Batch

    def batch(self, step: int, phase: Phase, rng: torch.Generator) -> Batch:
        """Return random rows."""
        return _chosen(self.train, phase.rows, rng)

    def held_out_batch(self, phase: Phase, rng: torch.Generator) -> Batch:
        """Return random held-out rows."""
        return _chosen(self.held_out, phase.rows, rng)

    def draft_ids(self, size: int) -> Tensor:
        """Return the most frequent ids of the answers."""
        assert self.train.counted is not None, "answers are counted"
        return most_frequent(self.train.tokens[self.train.counted], size)

    def coverage(self, ids: Tensor) -> float:
        """Return the fraction of held-out answers' tokens that are in `ids`."""
        assert self.held_out.counted is not None, "answers are counted"
        return float(torch.isin(self.held_out.tokens[self.held_out.counted], ids).float().mean())


def _chosen(rows: Batch, count: int, rng: torch.Generator) -> Batch:
    assert rows.counted is not None, "answers are counted"
    places = torch.randint(0, len(rows.tokens), (count,), generator=rng).to(rows.tokens.device)
    return Batch(rows.tokens[places].long(), rows.counted[places])


def open_target(folder: Path, concurrent: int, device: torch.device) -> LLM:
    """Return an engine without drafts for `concurrent` requests."""
    sizes = {"max_num_seqs": concurrent, "max_num_batched_tokens": max(2048, 4 * concurrent)}
    return LLM(str(folder), device=device.type, prefix_caching=False, **sizes)


def all_tokens(batch: Batch) -> int:
    """Return the number of tokens in rows, without the zeros that fill them up."""
    return int((batch.tokens != 0).sum())


def join(prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor]:
    """Return prompts end to end, int32 [N], and the length of each."""
    lengths = torch.tensor([len(prompt) for prompt in prompts])
    return torch.tensor(list(chain.from_iterable(prompts)), dtype=torch.int32), lengths


def split(tokens: Tensor, lengths: Tensor) -> list[list[int]]:
    """Return what `join` joined."""
    return [part.tolist() for part in tokens.split(lengths.tolist())]
