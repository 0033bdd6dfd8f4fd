"""Text to tokens and back, with Hugging Face `tokenizers` files; the bytes of tokens."""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from importlib.util import find_spec
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Encoding
from tokenizers import Tokenizer as HFTokenizer

from serve_spec.core.errors import CheckpointError, TextTooLong

# A text with more characters per token than prose or code is counted in parts first.
_USUAL_CHARS_PER_TOKEN = 8
_PART_CHARS = 65_536
# Cutting a text adds tokens at the cuts, far fewer than this factor allows for.
_CUT_FACTOR = 1.25
# Steps that never drop or shorten text. Split and Replace depend on their settings.
_HARMLESS = frozenset({"ByteLevel", "Digits", "Metaspace", "Prepend"})
_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_WORD_START = "▁"
REPLACEMENT = "\ufffd"
"""Stands for bytes that are no character."""
_MOST_OPEN_BYTES = 3  # a character has at most 4
# Vocabularies of tokenizers saved without tokenizer.json: SentencePiece's, and byte-level BPE's.
_OLD_FILES = ("tokenizer.model", "vocab.json")


class TokenBytes(NamedTuple):
    """Bytes of a token. Special tokens have those of their name, and add no text.

    `label` is shown instead of the token's text, if it is set.
    """

    data: bytes
    is_special: bool = False
    label: str | None = None


class Tokenizer:
    """The tokenizer of a checkpoint folder."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            self._tokenizer = _converted(folder)
            return
        try:
            self._tokenizer = HFTokenizer.from_file(str(path))
        except Exception as error:  # the library raises bare Exception for a malformed file
            raise CheckpointError(f"{path} cannot be read: {error}") from error

    @property
    def vocab_size(self) -> int:
        """Number of token ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size())

    @property
    def base_vocab_size(self) -> int:
        """Number of token ids without those of added tokens behind them."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=False).values(), default=-1)

    @property
    def added_tokens(self) -> dict[str, bool]:
        """Tokens matched before the text is tokenized, and whether they are special."""
        return {token.content: bool(token.special) for token in self._added.values()}

    def encode(
        self, text: str, *, add_special_tokens: bool = True, max_tokens: int | None = None
    ) -> list[int]:
        """Return the token ids of a text, without the GIL; fail early if they are too many.

        add_special_tokens: add the special tokens the checkpoint puts around a text.
        max_tokens: most tokens the caller has room for, or TextTooLong is raised; None: no limit.
        """
        if max_tokens is not None:
            self.refuse_long(text, max_tokens)
        encoding = _encoding(self._tokenizer, text, add_special_tokens=add_special_tokens)
        if max_tokens is not None and len(encoding) > max_tokens:
            raise TextTooLong(len(encoding))
        return list(encoding.ids)

    def encode_literally(self, text: str) -> list[int]:
        """Return the token ids of a text in which added tokens are ordinary characters."""
        return list(_encoding(self._literal, text, add_special_tokens=False).ids)

    def decode(self, token_ids: list[int], *, skip_special_tokens: bool = True) -> str:
        """Return the text, by default without special tokens; bytes of no character are U+FFFD.

        Characters among such bytes stay, as in SentencePiece. The library replaces the whole run
        of byte tokens, so that a text would change when a byte follows.
        """
        text = str(self._tokenizer.decode(token_ids, skip_special_tokens=skip_special_tokens))
        if REPLACEMENT not in text or not self._has_byte_tokens:
            return text
        shown = [i for i in token_ids if self.has_text(i, skip_special_tokens=skip_special_tokens)]
        names = [str(self._tokenizer.id_to_token(token_id)) for token_id in shown]
        return str(self._tokenizer.decoder.decode(_without_wrong_bytes(names)))

    def decode_joined(self, token_ids: list[int], first: int) -> str:
        """Return the text with special tokens; added tokens directly after one get no space.

        first: index of the first token of the answer; tokens before it keep their spaces.
        """
        parts: list[str] = []
        start = 0
        for index in range(first + 1, len(token_ids)):
            added = self._added.get(token_ids[index])
            if added is not None and token_ids[index - 1] in self._added:
                before = self.decode(token_ids[:index], skip_special_tokens=False)
                parts += before[start:], str(added.content)
                start = len(self.decode(token_ids[: index + 1], skip_special_tokens=False))
        return "".join([*parts, self.decode(token_ids, skip_special_tokens=False)[start:]])

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Return whether `decode` reads the token."""
        if skip_special_tokens and (added := self._added.get(token_id)) is not None:
            return not added.special
        return self._tokenizer.id_to_token(token_id) is not None

    def num_open(self, token_ids: Sequence[int]) -> int:
        """Return the length of the end of their text that a later token may make a character.

        token_ids: those with text.
        """
        data = b""
        for token_id in reversed(token_ids[-_MOST_OPEN_BYTES:]):
            name = self._tokenizer.id_to_token(token_id) or ""
            byte = _BYTE.fullmatch(name) if self._has_byte_tokens else None
            if not (byte or self._is_byte_level):
                break
            data = (bytes.fromhex(byte[1]) if byte else _level_bytes(name)) + data
        num_bytes = num_open_bytes(data)
        return min(num_bytes, 1) if self._is_byte_level else num_bytes

    def describe(self, vocab_size: int) -> str:
        """Return its tokenizer.json without truncation, padding and ids from `vocab_size` on."""
        description = json.loads(self._tokenizer.to_str())
        added = [token for token in description["added_tokens"] if token["id"] < vocab_size]
        changes = {"truncation": None, "padding": None, "added_tokens": added}
        return json.dumps({**description, **changes})

    def refuse_long(self, text: str, max_tokens: int) -> None:
        """Raise TextTooLong for a text that is far too long."""
        if len(text) <= _USUAL_CHARS_PER_TOKEN * max_tokens:
            return
        num_bytes = len(text.encode())
        if self.max_token_bytes and num_bytes > max_tokens * self.max_token_bytes:
            raise TextTooLong(-(-num_bytes // self.max_token_bytes))
        count = 0
        for start in range(0, len(text), _PART_CHARS):
            part = text[start : start + _PART_CHARS]
            count += len(_encoding(self._tokenizer, part, add_special_tokens=False))
            if count > _CUT_FACTOR * max_tokens + 1:
                raise TextTooLong(max_tokens + 1)

    @cached_property
    def max_token_bytes(self) -> int | None:
        """Most bytes of a text that one token covers; None without a bound."""
        return max_token_bytes(json.loads(self._tokenizer.to_str()))

    def token_bytes(self, token_id: int) -> TokenBytes:
        """Return the bytes of one token; none for unknown ids.

        Vocabularies are byte-level, or converted from SentencePiece: there words begin with a mark
        for the space, and bytes are named `<0x0A>`.
        """
        added = self._added.get(token_id)
        if added is not None:
            return TokenBytes(added.content.encode(), bool(added.special))
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return TokenBytes(b"")
        if self._is_byte_level:
            return TokenBytes(_level_bytes(token))
        byte = _BYTE.fullmatch(token)
        if byte:
            return TokenBytes(bytes.fromhex(byte[1]))
        return TokenBytes(token.replace(_WORD_START, " ").encode())

    @cached_property
    def _added(self) -> dict[int, AddedToken]:
        return dict(self._tokenizer.get_added_tokens_decoder())

    @cached_property
    def _is_byte_level(self) -> bool:
        return self._decodes_with("ByteLevel")

    @cached_property
    def _has_byte_tokens(self) -> bool:
        return self._decodes_with("ByteFallback")

    def _decodes_with(self, name: str) -> bool:
        decoder = self._tokenizer.decoder
        # The parts of a sequence of decoders are visible in this form only.
        return decoder is not None and f'"{name}"'.encode() in decoder.__getstate__()

    @cached_property
    def _literal(self) -> HFTokenizer:
        # The library can ignore special tokens only, and only for a whole tokenizer.
        description = json.loads(self._tokenizer.to_str())
        for token in description["added_tokens"]:
            token["special"] = True
        literal = HFTokenizer.from_str(json.dumps(description))
        literal.encode_special_tokens = True
        return literal


def num_open_bytes(data: bytes) -> int:
    """Return how many bytes at the end may be the beginning of a character."""
    end = data[-_MOST_OPEN_BYTES:]
    return len(end) - codecs.utf_8_decode(end, "replace", False)[1]


def _level_bytes(name: str) -> bytes:
    """Return the bytes of a token of a byte-level vocabulary, as its decoder reads them."""
    try:
        return bytes(BYTE_CHARACTERS[character] for character in name)
    except KeyError:
        return name.encode()


def _without_wrong_bytes(names: Sequence[str]) -> list[str]:
    """Return tokens for the decoder: bytes of no character, next to other bytes, are U+FFFD."""
    replaced: list[str] = []
    for byte, run in groupby(names, lambda name: bool(_BYTE.fullmatch(name))):
        if not byte:
            replaced += run
            continue
        data = bytes.fromhex("".join(token[3:5] for token in run))
        for character in data.decode(errors="surrogateescape"):
            if "\udc80" <= character <= "\udcff":
                replaced.append(REPLACEMENT)
            else:
                replaced += [f"<0x{each:02X}>" for each in character.encode()]
    return replaced


def _converted(folder: Path) -> HFTokenizer:
    """Return the tokenizer of a folder without tokenizer.json, as transformers converts it."""
    old = next((name for name in _OLD_FILES if (folder / name).is_file()), None)
    if old is None:
        why = f"{folder / 'tokenizer.json'} is missing, and so are {' and '.join(_OLD_FILES)}"
        raise CheckpointError(f"{why}; save the model with its tokenizer, or give tokenizer_path")
    is_sentencepiece = old == "tokenizer.model"
    if is_sentencepiece and find_spec("sentencepiece") is None:
        raise CheckpointError(
            f"{folder / old}: reading it needs a package; run `pip install sentencepiece`, or save "
            "the model with a fast tokenizer (tokenizer.json)"
        )
    from transformers import AutoTokenizer, LlamaTokenizer  # takes seconds to import

    # AutoTokenizer needs tokenizer_config.json to add the space before a text.
    kind = LlamaTokenizer if is_sentencepiece else AutoTokenizer
    try:
        file = folder / "tokenizer_config.json"
        is_silent = not file.is_file() or "add_bos_token" not in json.loads(file.read_text())
        # Such checkpoints rely on the default before transformers 5.
        defaults: dict[str, Any] = {"add_bos_token": True} if is_silent and is_sentencepiece else {}
        loaded = kind.from_pretrained(folder, local_files_only=True, **defaults)
        converted: HFTokenizer = loaded.backend_tokenizer
        if is_sentencepiece:
            converted = _merging_by_score(converted, folder / old)
            _check_converted(converted, folder / old)
    except Exception as error:  # of the libraries beneath, and of their own classes
        fix = "save the model with a fast tokenizer (tokenizer.json)"
        raise CheckpointError(f"{folder / old} cannot be converted ({error}); {fix}") from error
    return converted


def _merging_by_score(converted: HFTokenizer, model: Path) -> HFTokenizer:
    """Return the tokenizer with the merges of a SentencePiece model, the highest score first.

    transformers orders them by id, which is another order if ids were assigned anew (Mistral).
    """
    from sentencepiece import SentencePieceProcessor

    pieces = SentencePieceProcessor(model_file=str(model))
    scores = {
        pieces.id_to_piece(token): pieces.get_score(token)
        for token in range(pieces.get_piece_size())
        if not (pieces.is_control(token) or pieces.is_unknown(token) or pieces.is_byte(token))
    }
    merges = [
        (score, piece[:end], piece[end:])
        for piece, score in scores.items()
        for end in range(1, len(piece))
        if piece[:end] in scores and piece[end:] in scores
    ]
    merges.sort(key=lambda merge: -merge[0])
    description = json.loads(converted.to_str())
    description["model"]["merges"] = [(left, right) for _, left, right in merges]
    return HFTokenizer.from_str(json.dumps(description))


def _check_converted(converted: HFTokenizer, model: Path) -> None:
    """Raise ValueError if a converted SentencePiece model makes other tokens than the library."""
    from sentencepiece import SentencePieceProcessor

    text = "The  quick brown fox\n\tdef f(x): return 123 é 語"
    if converted.encode(text, add_special_tokens=False).ids != SentencePieceProcessor(
        model_file=str(model)
    ).encode(text):
        raise ValueError("its tokens would differ")


def _encoding(tokenizer: HFTokenizer, text: str, *, add_special_tokens: bool) -> Encoding:
    # Only the library's batch functions release the GIL.
    return tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0]


def max_token_bytes(tokenizer: Mapping[str, Any]) -> int | None:
    """Return the bound, or None for a tokenizer that may drop or merge text without a bound.

    tokenizer: the content of tokenizer.json, as the `tokenizers` library writes it.
    """
    model = tokenizer["model"]
    added = tokenizer["added_tokens"]
    steps = [*_steps(tokenizer.get("normalizer")), *_steps(tokenizer.get("pre_tokenizer"))]
    if not all(map(_keeps_text, steps)):
        return None
    if any(token["lstrip"] or token["rstrip"] for token in added):
        return None  # such a token takes the white space around it
    vocab = model.get("vocab", ())
    names = vocab if isinstance(vocab, Mapping) else [name for name, _ in vocab]
    is_byte_level = any(step["type"] == "ByteLevel" for step in steps)
    every_byte = is_byte_level and set(BYTE_CHARACTERS).issubset(names)
    if not (model.get("byte_fallback") or every_byte):
        return None  # one token, or none, may stand for any unknown text
    lengths = [len(name) if is_byte_level else _num_bytes(name) for name in names]
    return max([*lengths, *(len(token["content"].encode()) for token in added)], default=None)


def _num_bytes(name: str) -> int:
    return 1 if _BYTE.fullmatch(name) else len(name.encode())


def _steps(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    if step["type"] != "Sequence":
        return [step]
    parts = step.get("normalizers") or step.get("pretokenizers") or []
    return [inner for part in parts for inner in _steps(part)]


def _keeps_text(part: Mapping[str, Any]) -> bool:
    if part["type"] == "Split":
        return bool(part["behavior"] != "Removed")
    if part["type"] == "Replace":
        found = part["pattern"].get("String")
        return found is not None and len(part["content"].encode()) >= len(found.encode())
    return part["type"] in _HARMLESS


def _byte_characters() -> dict[str, int]:
    """Return bytes by the character that stands for them in byte-level vocabularies (GPT-2)."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [byte for byte in range(256) if byte not in printable]
    characters = {chr(256 + place): byte for place, byte in enumerate(hidden)}
    return characters | {chr(byte): byte for byte in printable}


BYTE_CHARACTERS = _byte_characters()
"""See `_byte_characters`."""
