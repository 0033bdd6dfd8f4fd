"""Prompts of a model from a dataset: chosen by category, and rendered with its chat template."""

from __future__ import annotations

import argparse
import json
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, cycle, islice, takewhile, zip_longest

from serve_spec.bench.dataset import ChatPrompt, Columns, by_category, installed, read_dataset
from serve_spec.bench.request_trace import PromptPool
from serve_spec.bench.workload import HELD_OUT_PACKAGES, held_out_prompts
from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.checkpoint import max_positions, text_config
from serve_spec.core.errors import CheckpointError, TextTooLong
from serve_spec.engine.chat_template import (
    ChatTemplate,
    ChatTemplateError,
    ControlTokens,
)
from serve_spec.engine.tokenizer import Tokenizer


@dataclass(frozen=True)
class DatasetPrompts:
    """Token ids of prompts by category, and what they are in words."""

    by_category: Mapping[str, Sequence[Sequence[int]]]
    about: str

    @property
    def longest(self) -> int:
        """Return the tokens of the longest prompt."""
        return max(len(prompt) for prompts in self.by_category.values() for prompt in prompts)

    def repeated(self, category: str, count: int) -> list[Sequence[int]]:
        """Return `count` prompts of a category, again from the first if there are fewer."""
        return list(islice(cycle(self.by_category[category]), count))


class ChatEncoder:
    """Converts chats to token ids with a checkpoint's chat template.

    Without a template the contents are joined by line breaks: raw text.
    """

    def __init__(self, config: ServeSpecConfig) -> None:
        """Read tokenizer and template of a downloaded checkpoint; may raise CheckpointError."""
        model = config.model
        self._tokenizer = Tokenizer(model.tokenizer_folder)
        self.template = ChatTemplate.from_folder(model.tokenizer_folder, model.chat_template)
        self._control = ControlTokens(self._tokenizer, self.template.source)

    def encode(self, prompt: ChatPrompt, max_tokens: int | None = None) -> list[int]:
        """Return the prompt before the model's answer; raise TextTooLong for over `max_tokens`.

        Raises ConfigError: the template refuses the chat.
        """
        mark = self._control.mark
        marked = [{**each, "content": mark(each["content"])} for each in prompt.messages]
        try:
            text = self.template.render(marked)
        except ChatTemplateError as error:
            fix = "leave such chats out, or give another chat_template"
            raise ConfigError(f"--category={prompt.category}: {error}; {fix}") from error
        is_plain = self.template.is_plain
        return self._control.encode(text, add_special_tokens=is_plain, max_tokens=max_tokens)


def max_model_len(config: ServeSpecConfig) -> int:
    """Return the longest text of a downloaded checkpoint; raise CheckpointError without config."""
    if config.model.max_model_len is not None:
        return config.model.max_model_len
    path = config.model.metadata_folder / "config.json"
    try:
        return max_positions(text_config(json.loads(path.read_text(encoding="utf-8"))))
    except (OSError, ValueError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def read_chats(args: argparse.Namespace, names: Sequence[str]) -> dict[str, list[ChatPrompt]]:
    """Return the wanted chats of files and datasets by category, in random order.

    Raises ConfigError: a dataset cannot be read, or a category is empty.
    """
    columns = Columns(args.column, args.category_column)
    every = chain.from_iterable(read_dataset(name, columns) for name in names)
    return by_category(list(every), args.category, args.seed)


def refuse_unused(args: argparse.Namespace, *others: str) -> None:
    """Raise ConfigError for flags of datasets without --dataset, or `others` beside it."""
    if args.dataset is None:
        for name in ("column", "category"):
            if (value := getattr(args, name)) is not None:
                raise ConfigError(f"--{name}={value}: needs --dataset, which it selects from")
    for name in others:
        if args.dataset is not None and getattr(args, name) is not None:
            value = getattr(args, name)
            flag = f"--{name.replace('_', '-')}={value}"
            raise ConfigError(f"{flag}: chooses no prompts of --dataset; leave one out")


def dataset_prompts(
    args: argparse.Namespace,
    config: ServeSpecConfig,
    count: int,
    *,
    output_tokens: int,
    others: Sequence[str] = (),
) -> DatasetPrompts | None:
    """Return up to `count` prompts of every wanted category; None: source files are the prompts.

    Without --dataset, and without one of `others`, which choose other prompts, a model with a chat
    template gets all datasets that are installed, as far as they have short enough prompts.
    config: of a downloaded checkpoint. output_tokens: most that follow a prompt, drafts included.
    Raises ConfigError: a dataset cannot be read, or has no prompt of a category that is short
    enough.
    """
    refuse_unused(args, *others)
    encoder = ChatEncoder(config)
    names = args.dataset
    if names is None and not encoder.template.is_plain:
        names = None if any(getattr(args, name) is not None for name in others) else installed()
    if not names:
        return None
    most = min(args.max_prompt_tokens, max_model_len(config) - output_tokens)
    found = {
        category: encode_chats(encoder, prompts, count, most)
        for category, prompts in read_chats(args, names).items()
    }
    for category, prompts in found.items():
        if not prompts and args.dataset is not None:
            fix = "raise it (or max_model_len), or leave the category out"
            why = f"no prompt of category {category} is that short"
            raise ConfigError(f"--max-prompt-tokens={most}: {why}; {fix}")
    found = {category: prompts for category, prompts in found.items() if prompts}
    if not found:
        return None
    form = (
        "as raw text: the model has no chat template" if encoder.template.is_plain else "as chats"
    )
    counts = ", ".join(f"{len(prompts)} {category}" for category, prompts in found.items())
    return DatasetPrompts(found, f"prompts of {' '.join(names)} ({counts}), {form}")


def encode_chats(
    encoder: ChatEncoder, prompts: Sequence[ChatPrompt], count: int, most: int
) -> list[list[int]]:
    """Return the first `count` prompts that have at most `most` tokens."""
    found: list[list[int]] = []
    for prompt in prompts:
        if len(found) == count:
            break
        try:
            token_ids = encoder.encode(prompt, max(most, 1))
        except TextTooLong:
            continue
        if 0 < len(token_ids) <= most:
            found.append(token_ids)
    return found


POOL_SIZE = 256
"""Texts of a pool."""
_TEXT_TOKENS = 256
"""Tokens of a text from source files, and of a random one."""


def prompt_pool(args: argparse.Namespace, config: ServeSpecConfig) -> PromptPool:
    """Return random texts, those of a dataset, or source files, chosen as by `dataset_prompts`.

    config: of a downloaded checkpoint. Raises ConfigError: a dataset cannot be read.
    """
    refuse_unused(args, "random_prompts")
    tokenizer = Tokenizer(config.model.tokenizer_folder)
    if args.random_prompts:
        rng, ids = random.Random(args.seed), range(tokenizer.vocab_size)
        texts = [rng.choices(ids, k=_TEXT_TOKENS) for _ in range(POOL_SIZE)]
        return PromptPool(texts, "prompts of random tokens")
    encoder = ChatEncoder(config)
    names = args.dataset
    if names is None and not encoder.template.is_plain:
        names = installed()
    if names:
        return _chat_pool(args, encoder, names)
    texts = held_out_prompts(
        tokenizer.encode, count=POOL_SIZE, num_tokens=_TEXT_TOKENS, seed=args.seed
    )
    return PromptPool(texts, f"prompts of source files ({', '.join(HELD_OUT_PACKAGES)})")


def _chat_pool(args: argparse.Namespace, encoder: ChatEncoder, names: Sequence[str]) -> PromptPool:
    """Return texts of each category in turn, without the chat template around them."""

    def encode(text: str) -> list[int]:
        return encoder.encode(ChatPrompt("", ({"role": "user", "content": text},)))

    # The template is what two chats have in common.
    one, other = encode("x"), encode("y")
    before = _common(one, other)
    rest = (each[len(before) :][::-1] for each in (one, other))
    after = _common(*rest)[::-1]
    texts: list[list[int]] = []
    in_turn = zip_longest(*read_chats(args, names).values())
    for chat in filter(None, chain.from_iterable(in_turn)):
        if len(texts) < POOL_SIZE:
            ids = encode("\n\n".join(message["content"] for message in chat.messages))
            texts.append(ids[len(before) : len(ids) - len(after)])
    form = "raw text" if encoder.template.is_plain else "chats"
    return PromptPool(texts, f"prompts of {' '.join(names)}, joined, as {form}", before, after)


def _common(one: Sequence[int], other: Sequence[int]) -> list[int]:
    """Return what two sequences begin with."""
    pairs = takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False))
    return [token_id for token_id, _ in pairs]
