"""Replayed drafts: the target's own saved answers, for benchmarks.

What such drafts cost beyond verification is the engine's overhead, because no draft is wrong while
a text follows its saved answer. `serve-spec bench offline --replay FILE` saves the answers.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from serve_spec.config import SpeculativeConfig
from serve_spec.core.draft import DraftShape, NgramDrafts

_FIELDS = ("prompt_token_ids", "token_ids")


class ReplayDrafter:
    """Drafts what followed the same prompt before.

    Of several answers to a prompt, the newest that equals the text so far goes on. Nothing is
    drafted for other prompts, or once a text differs from every answer.

    answers: (token ids of a prompt, token ids of its answer), the newest last. max_steps: most
    drafts.
    """

    def __init__(self, answers: Sequence[tuple[list[int], list[int]]], max_steps: int) -> None:
        self._max_steps = max_steps
        self._answers: dict[tuple[int, ...], list[list[int]]] = {}
        for prompt, answer in reversed(answers):
            self._answers.setdefault(tuple(prompt), []).append(prompt + answer)
        self._lengths = sorted({len(prompt) for prompt in self._answers})
        self._texts: dict[str, _Text] = {}

    def learn(self, request_id: str, token_ids: Sequence[int], most: int) -> int:
        """See `NgramDrafter`."""
        text = self._texts.get(request_id)
        if text is None:
            text = self._texts[request_id] = _Text(list(self._saved(token_ids)))
        return text.read(token_ids, most)

    def _saved(self, token_ids: Sequence[int]) -> Iterator[list[int]]:
        """Yield the saved texts whose prompt begins this text, those of longer prompts first."""
        for length in reversed(self._lengths):
            if length <= len(token_ids):
                yield from self._answers.get(tuple(token_ids[:length]), ())

    def propose(
        self, request_id: str, token_ids: Sequence[int], most: int, first: Sequence[int] = ()
    ) -> tuple[int, ...]:
        """See `NgramDrafter`."""
        text, end = self._texts.get(request_id), len(token_ids)
        if text is None or text.num_tokens < end or not text.saved:
            return ()
        start = end + len(first)
        if text.saved[0][end:start] != [*first]:
            return ()
        return tuple(text.saved[0][start : start + min(most, self._max_steps)])

    def propose_tree(
        self,
        request_id: str,
        token_ids: Sequence[int],
        shape: DraftShape,
        first: Sequence[int] = (),
    ) -> NgramDrafts:
        """Return the chain of `propose` as a tree with one branch."""
        chain = self.propose(request_id, token_ids, shape.depth, first)
        return NgramDrafts(chain, tuple(range(len(chain))))

    def match_length(self, request_id: str) -> int:
        """See `NgramDrafter`: the whole text."""
        text = self._texts.get(request_id)
        return 0 if text is None else text.num_tokens

    def forget(self, request_id: str) -> None:
        """See `NgramDrafter`."""
        self._texts.pop(request_id, None)


class _Text:
    """The saved texts that equal a growing text so far, in the order they are drafted from."""

    def __init__(self, texts: list[list[int]]) -> None:
        self.saved = texts
        self.num_tokens = 0
        """Tokens of the growing text that were compared."""

    def read(self, token_ids: Sequence[int], most: int) -> int:
        """Compare at most `most` new tokens; return their number."""
        before = self.num_tokens
        self.num_tokens = min(len(token_ids), before + most)
        new = list(token_ids[before : self.num_tokens])
        self.saved = [text for text in self.saved if text[before : self.num_tokens] == new]
        return self.num_tokens - before


def build_replay(
    config: SpeculativeConfig, encode: Callable[[str], list[int]], max_steps: int
) -> ReplayDrafter:
    """Return the drafter of the configured answers; raise ValueError if they cannot be read."""
    assert config.speculative_replay_answers is not None, "checked with the configuration"
    return ReplayDrafter(_read(config.speculative_replay_answers), max_steps)


def _read(path: Path) -> list[tuple[list[int], list[int]]]:
    key = f"speculative_replay_answers={str(path)!r}"
    fix = "give a file that `bench offline --replay` wrote"
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeError) as error:
        raise ValueError(f"{key}: cannot be read: {error}; {fix}") from error
    answers: list[tuple[list[int], list[int]]] = []
    for number, line in enumerate(lines, start=1):
        try:
            answer = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{key}: line {number}: invalid JSON: {error}; {fix}") from None
        fields = answer if isinstance(answer, dict) else {}
        for name in _FIELDS:
            if not _are_tokens(fields.get(name)):
                what = f"line {number}, field {name}: not a list of token ids"
                raise ValueError(f"{key}: {what}; {fix}")
        answers.append((fields[_FIELDS[0]], fields[_FIELDS[1]]))
    return answers


def _are_tokens(value: object) -> bool:
    return isinstance(value, list) and all(type(token) is int and token >= 0 for token in value)
