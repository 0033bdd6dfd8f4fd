"""Chat templates: render a conversation as the prompt of a checkpoint.

Templates are Jinja programs that come with a checkpoint. They run in Jinja's sandbox, with the
variables that transformers defines (transformers/utils/chat_template_utils.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from serve_spec.core.errors import CheckpointError, TextTooLong
from serve_spec.engine.tokenizer import Tokenizer

# A Unicode noncharacter, which valid text does not contain.
_MARK = "\ufdd0"
_NEVER = "(?!)"


class ControlTokens:
    """Special tokens of a tokenizer, and added tokens that the chat template contains.

    Inside client text they are marked before rendering, so that they are encoded as plain text.
    """

    def __init__(self, tokenizer: Tokenizer, template: str) -> None:
        self._tokenizer = tokenizer
        names = [
            name
            for name, special in tokenizer.added_tokens.items()
            if special or (name in template and not name.isspace())
        ]
        # Longest first, because one token may be a prefix of another.
        names.sort(key=len, reverse=True)
        self._names = re.compile("|".join(map(re.escape, names)) or _NEVER)
        names_or = "|".join(re.escape(_marked(name)) for name in names) or _NEVER
        # A template may split a marked token; the remaining marks keep its parts plain text.
        self._marks = re.compile(f"({names_or})|{_MARK}")

    def mark(self, text: str) -> str:
        """Return a client's text with control tokens marked."""
        return self._names.sub(lambda found: _marked(found[0]), text.replace(_MARK, ""))

    def mark_all(self, value: object) -> object:
        """Return a client's JSON value with control tokens marked in its texts and keys."""
        if isinstance(value, str):
            return self.mark(value)
        if isinstance(value, dict):
            return {self.mark(key): self.mark_all(item) for key, item in value.items()}
        return [self.mark_all(item) for item in value] if isinstance(value, list) else value

    def encode(
        self, text: str, *, add_special_tokens: bool, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a rendered template; raise TextTooLong for over `max_tokens`."""
        # Text and marked tokens alternate; None is a mark on its own.
        first, *rest = self._marks.split(text)
        token_ids = self._tokenizer.encode(
            first, add_special_tokens=add_special_tokens, max_tokens=max_tokens
        )
        for index, part in enumerate(rest):
            if part:
                plain, is_marked = part.replace(_MARK, ""), index % 2 == 0
                token_ids += self._inner(plain, max_tokens, is_marked=is_marked)
            if max_tokens is not None and len(token_ids) > max_tokens:
                raise TextTooLong(len(token_ids))
        return token_ids

    def _inner(self, part: str, max_tokens: int | None, *, is_marked: bool) -> list[int]:
        """Return the token ids of part of a text; some tokenizers prepend a space to any input."""
        before = self._encode("\n", None, is_marked=is_marked)
        most = None if max_tokens is None else max_tokens + len(before)
        token_ids = self._encode(f"\n{part}", most, is_marked=is_marked)
        if token_ids[: len(before)] == before:
            return token_ids[len(before) :]
        return self._encode(part, max_tokens, is_marked=is_marked)

    def _encode(self, text: str, max_tokens: int | None, *, is_marked: bool) -> list[int]:
        if is_marked:
            return self._tokenizer.encode_literally(text)
        return self._tokenizer.encode(text, add_special_tokens=False, max_tokens=max_tokens)


def _marked(name: str) -> str:
    """Return a token with marks around it and after its first character."""
    return _MARK.join(("", name[:1], *([name[1:]] if name[1:] else []), ""))


PLAIN = "{{ messages | map(attribute='content') | join('\\n') }}"
"""Template for checkpoints without one: the contents, joined by line breaks, without roles."""

RESERVED = frozenset({"messages", "tools", "documents", "add_generation_prompt"})
"""Template variables that a request cannot set; it cannot set special tokens either."""

# Marks the end of the last message. The space shows whether the template strips contents.
_OPEN_END = "\ufdd1 "


class ChatTemplateError(ValueError):
    """The template cannot render this conversation."""


class _GenerationTag(Extension):
    """The tag `{% generation %}`, which matters in training only; its content is kept."""

    tags = {"generation"}  # noqa: RUF012 - as Jinja declares it

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template and its special tokens by name (`bos_token`)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        self.source = source
        self._special_tokens = dict(special_tokens or {})
        try:
            self._template = _environment().from_string(source)
        except TemplateError as error:
            raise CheckpointError(f"chat_template cannot be compiled: {error}") from error

    @classmethod
    def from_folder(cls, folder: Path, file: Path | None = None) -> ChatTemplate:
        """Return the template in `file`, else the checkpoint's, else `PLAIN`.

        Raises CheckpointError: a file cannot be read, or the template is invalid.
        """
        settings = _read_json(folder / "tokenizer_config.json")
        source = _source(folder, settings.get("chat_template")) if file is None else _read(file)
        special_tokens = _special_tokens(_read_json(folder / "special_tokens_map.json") | settings)
        return cls(PLAIN if source is None else source, special_tokens)

    def with_source(self, source: str) -> ChatTemplate:
        """Return another template with the same special tokens, or raise CheckpointError."""
        return ChatTemplate(source, self._special_tokens)

    @property
    def is_plain(self) -> bool:
        """Whether the checkpoint has no template; the tokenizer then adds special tokens."""
        return self.source == PLAIN

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        variables: Mapping[str, object] | None = None,
    ) -> str:
        """Return the conversation as one text, or raise ChatTemplateError.

        messages: at least one, each with `role`, `content` and what else the template may read. The
            role `developer` becomes `system` if the template does not know it.
        tools: definitions of functions as in the OpenAI API; ignored by templates without tools.
        continue_final_message: end the text with the last message.
        """
        conversation = [self._known_role(message) for message in messages]
        if continue_final_message:
            conversation[-1]["content"] += _OPEN_END
        try:
            text = self._template.render(
                {
                    **(variables or {}),
                    **self._special_tokens,
                    "messages": conversation,
                    "tools": tools,
                    "documents": None,
                    "add_generation_prompt": add_generation_prompt,
                }
            )
        except Exception as error:  # the template may raise anything
            raise ChatTemplateError(f"the model's chat template failed: {error}") from error
        return _up_to_open_end(text) if continue_final_message else text

    def _known_role(self, message: Mapping[str, Any]) -> dict[str, Any]:
        unknown = message["role"] == "developer" and "developer" not in self.source
        return {**message, "role": "system"} if unknown else dict(message)


def _up_to_open_end(text: str) -> str:
    end = text.rfind(_OPEN_END.strip())
    if end < 0:
        raise ChatTemplateError("the model's chat template omits the last message")
    is_stripped = not text.startswith(_OPEN_END, end)
    return text[:end].rstrip() if is_stripped else text[:end]


def _environment() -> ImmutableSandboxedEnvironment:
    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationTag, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: object,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; Jinja's own filter would escape it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> None:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _source(folder: Path, setting: Any) -> str | None:
    """Return the template's text, from its own files or from the tokenizer's settings."""
    named = {"default": setting}
    if isinstance(setting, list):
        named = {each["name"]: each["template"] for each in setting}
    for name, path in (
        ("default", folder / "chat_template.jinja"),
        ("tool_use", folder / "additional_chat_templates" / "tool_use.jinja"),
    ):
        if path.is_file():
            named[name] = path.read_text(encoding="utf-8")
    default, tool_use = (
        text if isinstance(text := named.get(name), str) else None
        for name in ("default", "tool_use")
    )
    if default is None or tool_use is None:
        return default
    return f"{{% if tools %}}{tool_use}{{% else %}}{default}{{% endif %}}"


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: not a readable chat template: {error}") from None


def _special_tokens(settings: Mapping[str, Any]) -> dict[str, str]:
    tokens = {}
    for name, value in settings.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            tokens[name] = content
    return tokens


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path}: invalid JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return value
