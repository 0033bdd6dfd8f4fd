"""Types and validators of request fields, some of which accept several forms.

An invalid value raises a ValueError with the remedy; the caller adds the name of the field.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from functools import cache
from typing import Annotated, Any, Literal, TypeAlias

import msgspec
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator
from pydantic_core import CoreSchema

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.grammar import LANGUAGES, MAX_GRAMMAR_CHARS, Grammar, refuse_large
from serve_spec.core.request import MAX_LOGPROBS
from serve_spec.serving.errors import MAX_NAME_CHARS
from serve_spec.serving.messages import Prompt


def about(description: str, **limits: Any) -> Any:
    """Return the `Field` of an optional value, whose default is null."""
    return Field(None, description=description, **limits)


class Unavailable:
    """Annotation of an unsupported field: its neutral values and an alternative."""

    def __init__(self, *neutral: object, instead: str = "") -> None:
        self._neutral = neutral
        shown = " or ".join(_shown(value) for value in (neutral or (None,)))
        self._description = f"Only {shown} is supported."
        self._fix = f"not supported; omit it or use {shown}"
        if instead:
            self._fix = f"{self._fix}; {instead}"

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: Any) -> dict[str, Any]:
        """Return the field's JSON schema."""
        return {**handler(core), "description": self._description}

    def check(self, name: str, value: object) -> None:
        """Raise InvalidRequest unless `value` is neutral, or asks for nothing, as false or []."""
        if value and value not in self._neutral:
            raise InvalidRequest(name, _summary(value), self._fix)


def _shown(value: object) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(repr(value), repr(value))


def _summary(value: object) -> object:
    """Return a short form of a value for an error message."""
    if isinstance(value, list | dict):
        return f"<{type(value).__name__} of {len(value)}>"
    return value[:80] if isinstance(value, str) else value


def _unavailable_all(instead: str, *names: str) -> dict[str, Unavailable]:
    return dict.fromkeys(names, Unavailable(instead=instead))


UNSUPPORTED: Mapping[str, Unavailable] = {
    "beam_width": Unavailable(1),
    "chat_template": Unavailable(instead="chats use the checkpoint's own template"),
    "documents": Unavailable(instead="put them into a message"),
    "extra_key": Unavailable(instead="use cache_salt"),
    "input_ids": Unavailable(instead="send token ids as prompt to /v1/completions"),
    "lora_path": Unavailable(instead="merge the adapter into the checkpoint"),
    "repetition_detection": Unavailable(instead="use repetition_penalty"),
    "return_prompt_text": Unavailable(instead="use return_token_ids"),
    "session_params": Unavailable(instead="send the whole conversation"),
    "stop_regex": Unavailable(instead="use stop"),
    "structural_tag": Unavailable(instead="use structured_outputs"),
    "thinking_token_budget": Unavailable(-1),
    "use_beam_search": Unavailable(instead="use best_of"),
    **_unavailable_all("use logit_bias", "custom_logit_processor", "logits_processors"),
    **_unavailable_all(
        "use logprobs and top_logprobs, or logit_bias", "logprob_token_ids", "token_ids_logprob"
    ),
    **_unavailable_all("this model accepts only text", "audio_data", "image_data", "video_data"),
    **_unavailable_all(
        "", "input_embeds", "prompt_embeds", "return_hidden_states", "return_indexer_topk",
        "return_routed_experts", "return_sampling_mask", "task", "vllm_xargs", "watermark",
        "watermarking",
    ),
}  # fmt: skip
"""Fields of vLLM and SGLang that change the text or the answer, with their neutral values."""

PRESENTATION = frozenset({
    "custom_labels", "custom_params", "data_parallel_rank", "ec_transfer_params",
    "images_config", "kv_transfer_params", "length_penalty", "log_metrics",
    "max_dynamic_patch", "media_io_kwargs", "min_dynamic_patch", "mm_processor_kwargs",
    "return_cached_tokens_details", "return_flat_raw_output_top_logprobs",
    "return_flat_raw_top_logprobs", "return_flat_raw_top_logprobs_b64", "return_meta_info",
    "return_mm_kwargs", "return_text_in_logprobs",
    "return_token_offsets", "rid", "routed_dp_rank", "routed_experts_prompt_start",
    "routed_experts_start_len", "session_id",
    "stream_interval", "stream_reasoning", "use_audio_in_video", "video_config",
})  # fmt: skip
"""Fields of vLLM and SGLang that leave the text as it is; accepted and not counted as unknown."""


def ignored_fields(body: StrictFields, place: str = "") -> Iterator[str]:
    """Yield the dotted names of the unknown fields of a body."""
    for name in body.model_extra or ():
        if name not in UNSUPPORTED and name not in PRESENTATION:
            yield f"{place}{name[:MAX_NAME_CHARS]}"
    for name, value in vars(body).items():
        if isinstance(value, StrictFields):
            yield from ignored_fields(value, f"{place}{name}.")
        elif isinstance(value, list) and value and isinstance(value[0], StrictFields):
            for index, item in enumerate(value):
                if item.model_extra:  # an item with nothing but known fields is not looked into
                    yield from ignored_fields(item, f"{place}{name}.{index}.")


_FORMAT = "response_format"
_NESTED = "structured_outputs"
_SCHEMA_FIELDS = ("name", "description", "schema", "strict")


def grammar_of(
    *,
    response_format: tuple[str, Mapping[str, Any] | None] | None,
    structured_outputs: Mapping[str, Any] | None,
    named: Mapping[str, Any],
) -> Grammar | None:
    """Return the grammar that a request asks for, if any; raise InvalidRequest for several.

    response_format: its `type` and its `json_schema`. named: the values of `GRAMMAR_FIELDS`.
    structured_outputs: the grammar under json, json_object, regex, grammar or choice.
    """
    found = [] if response_format is None else _of_format(*response_format)
    found += [LANGUAGES[GRAMMAR_FIELDS[name]](value, name) for name, value in _given(named)]
    if structured_outputs is not None:
        _check_known(_NESTED, structured_outputs, tuple(LANGUAGES))
        given = _given(structured_outputs)
        found += [LANGUAGES[language](value, f"{_NESTED}.{language}") for language, value in given]
    if len(found) > 1:
        raise found[1].refusal(f"conflicts with {found[0].source}; give only one of them")
    return found[0] if found else None


GRAMMAR_FIELDS = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_grammar": "grammar",
    "guided_choice": "choice",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}
"""Languages of the fields that hold a grammar: those of vLLM, then those of SGLang."""


def _given(grammars: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [(key, value) for key, value in grammars.items() if value not in (None, False)]


def _of_format(kind: str, schema: Mapping[str, Any] | None) -> list[Grammar]:
    if kind not in ("text", "json_object", "json_schema"):
        fix = 'use "text", "json_object" or "json_schema"'
        raise InvalidRequest(f"{_FORMAT}.type", kind, fix)
    if kind == "json_schema":
        return [_of_schema(schema or {})]
    if schema is not None:
        fix = 'allowed only with type "json_schema"'
        raise InvalidRequest(f"{_FORMAT}.json_schema", f"<object of {len(schema)}>", fix)
    return [Grammar.json_object(f"{_FORMAT}.type")] if kind == "json_object" else []


def _of_schema(given: Mapping[str, Any]) -> Grammar:
    """Return the grammar of `{"name": ..., "schema": {...}}`.

    Unless `strict` is false, the schema is `closed`: small models go on adding keys.
    """
    field = f"{_FORMAT}.json_schema"
    _check_known(field, given, _SCHEMA_FIELDS)
    if not isinstance(given.get("schema"), dict):
        raise InvalidRequest(f"{field}.schema", None, "give a JSON Schema object")
    refuse_large(given["schema"], f"{field}.schema")
    try:
        schema = given["schema"] if given.get("strict") is False else closed(given["schema"])
    except RecursionError:
        fix = "not a JSON Schema: nested too deeply"
        raise InvalidRequest(f"{field}.schema", "<object>", fix) from None
    return Grammar.json_schema(schema, f"{field}.schema")


_NAMED_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions")
_LISTED_SCHEMAS = ("anyOf", "oneOf", "prefixItems")


_ANNOTATIONS = frozenset({"$comment", "description", "examples", "title"})


def closed(schema: Any) -> Any:
    """Return a JSON Schema, without annotations, whose objects have only the properties it names.

    An object with `additionalProperties` stays as it is, and one whose properties stand elsewhere.
    """
    if not isinstance(schema, dict):
        return schema
    found = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
    for key in _NAMED_SCHEMAS:
        if isinstance(found.get(key), dict):
            found[key] = {name: closed(each) for name, each in found[key].items()}
    for key in _LISTED_SCHEMAS:
        if isinstance(found.get(key), list):
            found[key] = [closed(each) for each in found[key]]
    if "items" in found:
        found["items"] = closed(found["items"])
    is_complete = not {"allOf", "dependentSchemas", "if"} & found.keys()
    if isinstance(found.get("properties"), dict) and is_complete:
        found.setdefault("additionalProperties", False)
    return found


def _check_known(field: str, given: Mapping[str, Any], known: tuple[str, ...]) -> None:
    unknown = next((name for name in given if name not in known), None)
    if unknown is not None:
        raise InvalidRequest(field, unknown[:80], f"unknown key; use {', '.join(known)}")


Variable: TypeAlias = str | int | float | bool | None
"""A value of `chat_template_kwargs`."""

MAX_WORDS = 128
MAX_WORD_CHARS = 256
MAX_STOPS = 16
MAX_STOP_CHARS = 1024
MAX_ITEMS = 1024
MAX_MESSAGES = 2**14
MAX_PROMPTS = 2**14
MAX_LABEL_CHARS = 1024
MAX_VARIABLE_CHARS = 2**15
MAX_BIAS = 100
_TOKEN_IDS = list[Annotated[int, msgspec.Meta(ge=0, lt=2**31)]]
_PROMPT = "give a string, a list of strings, a list of token ids or a list of such lists, not empty"


def unicode(text: str) -> str:
    """Return the text; raise ValueError for a lone surrogate, which JSON can contain."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"not valid Unicode: {error.reason}") from None
    return text


def prompts(value: object) -> list[Prompt]:
    """Validate `prompt` of the completions API: one prompt or a list of one kind."""
    if isinstance(value, str):
        return [unicode(value)]
    if not isinstance(value, list) or not value:
        raise ValueError(_PROMPT)
    if _are_token_ids(value):
        return [value]
    if len(value) > MAX_PROMPTS:
        raise ValueError(f"give at most {MAX_PROMPTS} prompts, not {len(value)}")
    if all(isinstance(item, str) for item in value):
        return [unicode(item) for item in value]
    if all(isinstance(item, list) and item and _are_token_ids(item) for item in value):
        return value
    raise ValueError(_PROMPT)


def given_prompts(value: object) -> object:
    """Return prompts, or None, in the form in which they came; see `prompts`."""
    if value is not None:
        prompts(value)
    return value


def stops(value: object) -> list[str] | None:
    """Validate `stop`: a string, or a list of up to `MAX_STOPS` strings."""
    if value is None:
        return None
    texts = [value] if isinstance(value, str) else value
    if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
        raise ValueError("give a string or a list of strings")
    if len(texts) > MAX_STOPS:
        raise ValueError(f"give at most {MAX_STOPS} strings, not {len(texts)}")
    if any(len(text) > MAX_STOP_CHARS for text in texts):
        raise ValueError(f"give strings of at most {MAX_STOP_CHARS} characters")
    return [unicode(text) for text in texts]


def few(value: object) -> object:
    """Return the value; raise ValueError for a mapping of more than `MAX_ITEMS` keys."""
    if isinstance(value, dict) and len(value) > MAX_ITEMS:
        raise ValueError(f"give at most {MAX_ITEMS} keys, not {len(value)}")
    return value


def biases(value: object) -> dict[int, float] | None:
    """Validate `logit_bias`: numbers in [-100, 100] by token id (strings in JSON)."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("give an object that maps token ids to numbers")
    few(value)
    return {_token_id(key): _bias(key, bias) for key, bias in value.items()}


def _token_id(key: object) -> int:
    if not isinstance(key, str) or not (key.isascii() and key.isdecimal() and len(key) <= 10):
        raise ValueError(f"{str(key)[:40]!r} is not a token id; write it in digits")
    return int(key)


def _bias(key: object, bias: Any) -> float:
    # bool is a subclass of int.
    is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if not is_number or not -MAX_BIAS <= bias <= MAX_BIAS:
        raise ValueError(f"token {key}: give a number in [-{MAX_BIAS}, {MAX_BIAS}]")
    return float(bias)


def variables(value: object) -> dict[str, Variable] | None:
    """Validate `chat_template_kwargs`: plain values by name."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise ValueError("give an object of plain values")
    few(value)
    for name, variable in value.items():
        if len(unicode(name)) > MAX_NAME_CHARS:
            raise ValueError(f"a name has more than {MAX_NAME_CHARS} characters")
        if isinstance(variable, str) and len(unicode(variable)) > MAX_VARIABLE_CHARS:
            raise ValueError(f"{name!r} has more than {MAX_VARIABLE_CHARS} characters")
        if isinstance(variable, float) and not math.isfinite(variable):
            raise ValueError(f"{name!r} is not a finite number")
        if not isinstance(variable, str | int | float | None):
            raise ValueError(f"{name!r} is not a string, number, boolean or null")
    return value


def content(value: object) -> str:
    """Validate `content` of a message; text parts are joined by line breaks."""
    if isinstance(value, str):
        return unicode(value)
    if not isinstance(value, list):
        raise ValueError("give a string or a list of text parts")
    return "\n".join(_part(index, part) for index, part in enumerate(value))


def _part(index: int, part: object) -> str:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ValueError(f"part {index} has type {kind[:40]!r}, but this model accepts only text")
    marked = {"type", "text", "prompt_cache_breakpoint"}
    if not isinstance(part, dict) or not {"type", "text"} <= set(part) <= marked:
        raise ValueError(f'part {index} is not {{"type": "text", "text": ...}}')
    if not isinstance(part["text"], str):
        raise ValueError(f"text of part {index} is not a string")
    return unicode(part["text"])


def _are_token_ids(items: list[object]) -> bool:
    try:
        msgspec.convert(items, _TOKEN_IDS)  # takes 6 ms for a million
    except msgspec.ValidationError:
        return False
    return True


class StrictFields(BaseModel):
    """Base model that rejects type coercion (`"3"`, `true` for a number).

    Unknown fields are accepted and kept in `model_extra`; see `ignored_fields`.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True, allow_inf_nan=False)


# The engine's tensors are int32.
Int32: TypeAlias = Annotated[int, Field(ge=-(2**31), lt=2**31)]
NumLogprobs: TypeAlias = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
Int64: TypeAlias = Annotated[int, Field(ge=-(2**63), lt=2**63)]
Text: TypeAlias = Annotated[str, AfterValidator(unicode)]
Name: TypeAlias = Annotated[Text, Field(max_length=MAX_NAME_CHARS)]
Label: TypeAlias = Annotated[Text, Field(max_length=MAX_LABEL_CHARS)]


def refuse_unavailable(fields: StrictFields, place: str = "") -> None:
    """Raise InvalidRequest for an unsupported field whose value is not neutral."""
    for name, unavailable in _unavailable(type(fields)):
        unavailable.check(f"{place}{name}", getattr(fields, name))
    for name, value in (fields.model_extra or {}).items():
        if name in UNSUPPORTED:
            UNSUPPORTED[name].check(f"{place}{name}", value)


@cache
def _unavailable(model: type[StrictFields]) -> list[tuple[str, Unavailable]]:
    return [
        (name, note)
        for name, field in model.model_fields.items()
        for note in field.metadata
        if isinstance(note, Unavailable)
    ]


class TextPart(StrictFields):
    """One part of a message's content."""

    type: Literal["text"]
    text: Text
    prompt_cache_breakpoint: dict[str, Any] | None = about(
        "Accepted and ignored: every prefix is cached."
    )


_TokenId: TypeAlias = Annotated[int, Field(ge=0, lt=2**31)]
TokenIds: TypeAlias = Annotated[list[_TokenId], Field(min_length=1, fail_fast=True)]
_Texts: TypeAlias = Annotated[list[Text], Field(min_length=1)]
_Prompts: TypeAlias = Annotated[list[TokenIds], Field(min_length=1)]
_Stop: TypeAlias = Annotated[Text, Field(max_length=MAX_STOP_CHARS)]
_Stops: TypeAlias = Annotated[list[_Stop], Field(max_length=MAX_STOPS)]
_Variable: TypeAlias = Annotated[Text, Field(max_length=MAX_VARIABLE_CHARS)]
_Parts: TypeAlias = list[TextPart]

Prompts: TypeAlias = Annotated[
    list[Prompt],
    PlainValidator(prompts, json_schema_input_type=Text | _Texts | TokenIds | _Prompts),
]
GivenPrompts: TypeAlias = Annotated[
    str | list[Any] | None,
    PlainValidator(
        given_prompts, json_schema_input_type=Text | _Texts | TokenIds | _Prompts | None
    ),
]
Stops: TypeAlias = Annotated[
    list[str] | None, PlainValidator(stops, json_schema_input_type=_Stop | _Stops | None)
]
Variables: TypeAlias = Annotated[
    dict[str, Variable] | None,
    PlainValidator(
        variables, json_schema_input_type=dict[Name, _Variable | int | float | bool | None] | None
    ),
]
FEW = BeforeValidator(few)
IGNORED = Field(description="Accepted and ignored.")
Biases: TypeAlias = Annotated[
    dict[int, float] | None, PlainValidator(biases, json_schema_input_type=dict[str, float] | None)
]
FewTokenIds: TypeAlias = Annotated[list[_TokenId], Field(max_length=MAX_ITEMS, fail_fast=True)]
_Word: TypeAlias = Annotated[Text, Field(min_length=1, max_length=MAX_WORD_CHARS)]
FewWords: TypeAlias = Annotated[list[_Word], Field(max_length=MAX_WORDS, fail_fast=True)]
Choices: TypeAlias = Annotated[list[Text], Field(max_length=MAX_GRAMMAR_CHARS, fail_fast=True)]
Salt: TypeAlias = Annotated[Label, Field(min_length=1)]
FewInts: TypeAlias = Annotated[list[Int32], Field(max_length=MAX_ITEMS, fail_fast=True)]
Content: TypeAlias = Annotated[str, PlainValidator(content, json_schema_input_type=Text | _Parts)]
