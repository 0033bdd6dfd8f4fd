"""The tokenizer in the metadata of a GGUF file, as `tokenizer.json` and its settings.

`tokenizer.ggml.model` names the kind: gpt2 is a byte-level BPE, whose rules for cutting a text are
named by `tokenizer.ggml.pre`; llama is a SentencePiece BPE, whose merges follow from scores.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

# Values of `tokenizer.ggml.token_type`; normal tokens are 1, bytes 6.
_UNKNOWN, _CONTROL, _USER_DEFINED, _UNUSED, _NORMAL = 2, 3, 4, 5, 1
_ADDED = (_UNKNOWN, _CONTROL, _USER_DEFINED)
_STOPS = ("eos", "eot", "eom")
# Names by which llama.cpp knows further control tokens that end a text.
_STOP_NAMES = frozenset(
    {"<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<|end_of_text|>", "<|endoftext|>"}
)
_WORD_START = "▁"

_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class UnsupportedTokenizer(ValueError):
    """What a tokenizer needs that is not supported."""


class _Rules(NamedTuple):
    """How a byte-level BPE cuts a text. pattern: None is that of GPT-2."""

    pattern: str | None
    digits_alone: bool = False
    # Whether a part that is a token stays whole, and whether a text begins with bos by default.
    ignore_merges: bool = False
    adds_bos: bool = False
    normalizer: str | None = None


_LLAMA3_RULES = _Rules(_LLAMA3, ignore_merges=True, adds_bos=True)
_QWEN2_RULES = _Rules(_QWEN2, normalizer="NFC")
_RULES = {
    "gpt-2": _Rules(None),
    "smollm": _Rules(None, digits_alone=True),
    "llama-bpe": _LLAMA3_RULES,
    "llama3": _LLAMA3_RULES,
    "llama-v3": _LLAMA3_RULES,
    "qwen2": _QWEN2_RULES,
    "deepseek-r1-qwen": _QWEN2_RULES,
    "tekken": _Rules(_TEKKEN, ignore_merges=True, adds_bos=True),
}


class _Vocabulary(NamedTuple):
    tokens: Sequence[str]
    kinds: Sequence[int]

    def of_kinds(self, *kinds: int) -> dict[str, int]:
        """Return the ids of tokens of these kinds."""
        pairs = zip(self.tokens, self.kinds, strict=True)
        return {token: index for index, (token, kind) in enumerate(pairs) if kind in kinds}


def tokenizer_files(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return `tokenizer.json` and `tokenizer_config.json`; raise UnsupportedTokenizer."""
    kind = metadata.get("tokenizer.ggml.model")
    if kind not in ("gpt2", "llama"):
        why = "not supported; the supported kinds are gpt2 and llama"
        raise UnsupportedTokenizer(f"tokenizer.ggml.model={kind!r}: {why}")
    vocabulary = _vocabulary(metadata)
    parts = _byte_level(metadata, vocabulary) if kind == "gpt2" else _scored(metadata, vocabulary)
    added = [
        {
            "id": index,
            "content": token,
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": vocabulary.kinds[index] != _USER_DEFINED,
        }
        for token, index in vocabulary.of_kinds(*_ADDED).items()
    ]
    description = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    return description | parts, _settings(metadata, vocabulary)


def stop_tokens(metadata: Mapping[str, Any]) -> list[int]:
    """Return the tokens that end a text: those that metadata or their names call so."""
    ids = [metadata.get(f"tokenizer.ggml.{name}_token_id") for name in _STOPS]
    tokens, kinds = (metadata.get(f"tokenizer.ggml.{key}", ()) for key in ("tokens", "token_type"))
    named = (
        index
        for index, (token, kind) in enumerate(zip(tokens, kinds, strict=False))
        if kind == _CONTROL and token in _STOP_NAMES
    )
    return list(dict.fromkeys(int(token) for token in (*ids, *named) if token is not None))


def _vocabulary(metadata: Mapping[str, Any]) -> _Vocabulary:
    tokens = metadata.get("tokenizer.ggml.tokens")
    if not tokens:
        raise UnsupportedTokenizer("tokenizer.ggml.tokens is missing; use another file")
    kinds = metadata.get("tokenizer.ggml.token_type", [_NORMAL] * len(tokens))
    if len(kinds) != len(tokens):
        why = f"{len(kinds)} values of tokenizer.ggml.token_type for {len(tokens)} tokens"
        raise UnsupportedTokenizer(f"{why}; fetch it again")
    return _Vocabulary(tokens, kinds)


def _byte_level(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    name = metadata.get("tokenizer.ggml.pre")
    rules = _RULES.get(str(name))
    if rules is None:
        why = f"not supported; the supported ones are {', '.join(_RULES)}"
        raise UnsupportedTokenizer(f"tokenizer.ggml.pre={name!r}: {why}")
    merges = metadata.get("tokenizer.ggml.merges")
    if merges is None:
        raise UnsupportedTokenizer("tokenizer.ggml.merges is missing; use another file")
    cuts: list[dict[str, Any]] = []
    if rules.digits_alone:
        cuts.append({"type": "Digits", "individual_digits": True})
    if rules.pattern is not None:
        cuts.append(_split(rules.pattern))
    bytes_as_characters = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    uses_gpt2 = {**bytes_as_characters, "use_regex": rules.pattern is None}
    return {
        "normalizer": None if rules.normalizer is None else {"type": rules.normalizer},
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [*cuts, uses_gpt2]},
        "post_processor": _around(metadata, vocabulary, adds_bos=rules.adds_bos),
        "decoder": {**bytes_as_characters, "use_regex": True},
        "model": {
            "type": "BPE",
            **_MODEL,
            "ignore_merges": rules.ignore_merges,
            # Tokens that only fill up the vocabulary are no text.
            "vocab": vocabulary.of_kinds(*set(vocabulary.kinds) - {_UNUSED}),
            "merges": [merge.split(" ", 1) for merge in merges],
        },
    }


_MODEL = {
    "dropout": None,
    "unk_token": None,
    "continuing_subword_prefix": None,
    "end_of_word_suffix": None,
    "fuse_unk": False,
    "byte_fallback": False,
}


def _scored(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    scores = metadata.get("tokenizer.ggml.scores")
    if scores is None or len(scores) != len(vocabulary.tokens):
        raise UnsupportedTokenizer("tokenizer.ggml.scores is missing or too short; fetch it again")
    normal = vocabulary.of_kinds(_NORMAL)
    merges = [
        (scores[index], piece[:end], piece[end:])
        for piece, index in normal.items()
        for end in range(1, len(piece))
        if piece[:end] in normal and piece[end:] in normal
    ]
    merges.sort(key=lambda merge: -merge[0])
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": _WORD_START}
    words = {"type": "Replace", "pattern": {"String": _WORD_START}, "content": " "}
    has_prefix = metadata.get("tokenizer.ggml.add_space_prefix", True)
    prefix = [{"type": "Prepend", "prepend": _WORD_START}] if has_prefix else []
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if has_prefix else []
    unknown = metadata.get("tokenizer.ggml.unknown_token_id")
    return {
        "normalizer": {"type": "Sequence", "normalizers": [*prefix, spaces]},
        "pre_tokenizer": None,
        "post_processor": _around(metadata, vocabulary, adds_bos=True),
        "decoder": {
            "type": "Sequence",
            "decoders": [words, {"type": "ByteFallback"}, {"type": "Fuse"}, *strip],
        },
        "model": {
            "type": "BPE",
            **_MODEL,
            "unk_token": None if unknown is None else vocabulary.tokens[unknown],
            "fuse_unk": True,
            "byte_fallback": True,
            "ignore_merges": False,
            "vocab": vocabulary.of_kinds(*set(vocabulary.kinds) - {_UNUSED}),
            "merges": [[left, right] for _, left, right in merges],
        },
    }


def _split(pattern: str) -> dict[str, Any]:
    return {
        "type": "Split",
        "pattern": {"Regex": pattern},
        "behavior": "Isolated",
        "invert": False,
    }


def _around(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, *, adds_bos: bool
) -> dict[str, Any] | None:
    """Return the step that puts special tokens around a text; None without any."""
    before = _special(metadata, vocabulary, "bos", default=adds_bos)
    after = _special(metadata, vocabulary, "eos", default=False)
    if not (before or after):
        return None
    single = [*_template(before), {"Sequence": {"id": "A", "type_id": 0}}, *_template(after)]
    pair = [*single, {"Sequence": {"id": "B", "type_id": 0}}, *_template(after)]
    specials = {
        token: {"id": token, "ids": [index], "tokens": [token]}
        for token, index in (before | after).items()
    }
    return {
        "type": "TemplateProcessing",
        "single": single,
        "pair": pair,
        "special_tokens": specials,
    }


def _template(tokens: Mapping[str, int]) -> list[dict[str, Any]]:
    return [{"SpecialToken": {"id": token, "type_id": 0}} for token in tokens]


def _special(
    metadata: Mapping[str, Any], vocabulary: _Vocabulary, name: str, *, default: bool
) -> dict[str, int]:
    """Return the token that is put at an end of a text, with its id; empty if none is."""
    index = metadata.get(f"tokenizer.ggml.{name}_token_id")
    if index is None or not metadata.get(f"tokenizer.ggml.add_{name}_token", default):
        return {}
    return {vocabulary.tokens[index]: index}


def _settings(metadata: Mapping[str, Any], vocabulary: _Vocabulary) -> dict[str, Any]:
    names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in names.items()}
    settings: dict[str, Any] = {
        f"{name}_token": vocabulary.tokens[index]
        for name, index in ids.items()
        if index is not None
    }
    template = metadata.get("tokenizer.chat_template")
    return settings if template is None else {**settings, "chat_template": template}
