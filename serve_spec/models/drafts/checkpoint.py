"""Opening a draft checkpoint: a flat config, the family that its tensors tell, its tensor names.

Published configs are often wrong (number of layers, biases, tied embeddings), so the tensors decide
what their presence or shape tells. Neither file names nor `architectures` tell the family: official
EAGLE-3 heads call themselves LlamaForCausalLM. Only whether `speculators` wrote a file follows from
its config, because the same tensors have another meaning there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_spec.config.drafts import draft_models, method_of_speculators
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import StoredFormats
from serve_spec.layers.formats.registry import formats_of
from serve_spec.layers.module import FLOATS
from serve_spec.models.config import check_supported, read_json, read_settings
from serve_spec.models.drafts.base import (
    Config,
    DraftFamily,
    DraftFile,
    Evidence,
    Shapes,
    load_family,
)
from serve_spec.models.gguf import open_files
from serve_spec.models.kv_cache import take_scales
from serve_spec.models.registry import class_defaults, known_defaults
from serve_spec.models.weights import (
    Checkpoint,
    PickleFile,
    SafetensorsFile,
    TensorFile,
)

_NESTED = ("transformer_layer_config", "speculators_config")


def open_draft(
    path: Path | str, algorithm: str | None = None, load_format: str = "auto"
) -> DraftFile:
    """Open the draft in `path`, which must be one for `algorithm` (None: any).

    It reads no weight. load_format: as in `model.load_format`; dummy opens no file but the config,
    and needs an algorithm.
    Raises CheckpointError: the files are absent, damaged, of another family, or not supported.
    """
    directory = Path(path)
    config = read_config(directory)
    if load_format == "dummy":
        assert algorithm is not None, "random weights do not tell their family"
        return DraftFile(directory, config, load_family(algorithm).name)
    file = _recognised(directory, config, _open(directory, load_format))
    if algorithm is not None and file.family != algorithm:
        raise CheckpointError(
            f"{directory} is of family {file.family} by its tensors ({file.evidence}), but "
            f"speculative_algorithm={algorithm!r}; set it to {file.family!r}"
        )
    return file


def read_config(directory: Path) -> Config:
    """Return a draft's config with all keys at the top, or raise CheckpointError."""
    config = read_settings(directory)
    if isinstance(config.get("model"), dict):
        # Early vLLM conversions wrap the head's config: {"model_type": "eagle", "model": {...}}.
        config = {**config, **config["model"]}
    if config.get("speculators_model_type"):
        config = _flat_config(directory, config)
    check_supported(config)
    return config


def _flat_config(directory: Path, config: Config) -> dict[str, Any]:
    kind = config["speculators_model_type"]
    if method_of_speculators(kind) is None:
        kinds = [method.speculators_type for method in draft_models() if method.speculators_type]
        fix = f"use a head of {sorted(kinds)}"
        raise CheckpointError(f"{directory}: speculators_model_type={kind!r}: not supported; {fix}")
    if config.get("layernorms"):
        why = f"{directory}: layernorms=true: not supported, because implementations differ"
        raise CheckpointError(f"{why}; use an EAGLE head without extra norms, or an EAGLE-3 head")
    layers = config.get("transformer_layer_config") or {}
    model_type = layers.get("model_type", "llama")
    defaults = class_defaults(model_type)
    if defaults is None:
        why = f"{directory}: transformer_layer_config.model_type={model_type!r}: not supported"
        raise CheckpointError(f"{why}; use a head with layers of {known_defaults()}")
    own = {key: value for key, value in config.items() if key not in _NESTED and value is not None}
    return {**defaults, **layers, **own}


def _open(directory: Path, load_format: str) -> Checkpoint:
    for name in (name for family in _families() for name in family.weight_files):
        path = directory / name
        if path.exists():
            is_safe = path.suffix == ".safetensors"
            file: TensorFile = SafetensorsFile(path) if is_safe else PickleFile(path)
            return Checkpoint([file], directory)
    return open_files(directory, load_format)


def _recognised(directory: Path, config: Config, checkpoint: Checkpoint) -> DraftFile:
    """Return the draft under its family's names of tensors, or raise CheckpointError."""
    stored = checkpoint.shapes
    try:
        family, evidence = recognise(config, stored)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    names = family.current_names(stored)
    told = ", ".join(old for name in evidence.names for old, new in names.items() if new == name)
    checkpoint.rename(names)
    if checkpoint.quantization is not None:
        config = {**config, "quantization_config": checkpoint.quantization}
    take_scales(checkpoint)  # the draft's own cache is not in FP8
    formats = _formats(config, names, checkpoint)
    return DraftFile(
        directory,
        config,
        family.name,
        evidence=told + evidence.reason,
        exporter=_exporter(family, config, stored),
        checkpoint=checkpoint,
        formats=formats,
    )


def _formats(
    config: Config, names: Mapping[str, str | None], checkpoint: Checkpoint
) -> Formats | None:
    """Return the formats that a config asks for, which name modules as the file does.

    names: the family's name of each stored tensor, which the checkpoint has now.
    """
    formats = formats_of(config)
    if formats is None:
        return None
    modules = {_module(new): _module(old) for old, new in names.items() if new is not None}
    checkpoint.rename(formats.renames(checkpoint.shapes))
    weights = (name for name in checkpoint.shapes if name.endswith(".weight"))
    floats = {_module(name) for name in weights if checkpoint.dtype(name) in FLOATS}
    return StoredFormats(formats, modules, floats)


def _module(tensor: str) -> str:
    return tensor.rpartition(".")[0]


def recognise(config: Config, stored: Shapes) -> tuple[DraftFamily, Evidence]:
    """Return the family of tensors, and what tells it; the newest registered is asked first.

    stored: shapes by stored name. Raises CheckpointError: no family takes them, or their config
    names another one.
    """
    families = _families()
    for family in families:
        names = family.current_names(stored)
        shapes = {new: stored[old] for old, new in names.items() if new is not None}
        evidence = family.detect(config, shapes)
        if evidence is not None:
            _check_claim(config, family.name)
            return family, evidence
    known = ", nor ".join(family.looks_like or f"a draft of {family.name}" for family in families)
    raise CheckpointError(f"neither {known} is here; the first tensors are {sorted(stored)[:4]}")


def _families() -> list[DraftFamily]:
    return [load_family(method.name) for method in draft_models()]


def _check_claim(config: Config, family: str) -> None:
    kind = config.get("speculators_model_type")
    claimed = method_of_speculators(kind) if kind else None
    if claimed is not None and claimed.name != family:
        raise CheckpointError(
            f"speculators_model_type={kind!r} in config.json, but the tensors are of {family}; "
            "fetch the matching file"
        )


def _exporter(family: DraftFamily, config: Mapping[str, Any], stored: Shapes) -> str:
    if config.get("speculators_model_type"):
        return "speculators"
    if isinstance(config.get("model"), dict):
        return "vLLM's early wrapping"
    return family.exporter(stored)


def read_vocabulary(folder: Path) -> dict[str, int] | None:
    """Return the id of every token in `tokenizer.json`, None without that file.

    May raise CheckpointError.
    """
    path = folder / "tokenizer.json"
    if not path.exists():
        return None
    content = read_json(path)
    try:
        listed: Any = content["model"]["vocab"]
        if isinstance(listed, list):  # Unigram: [piece, score] by id
            listed = {piece: index for index, (piece, _) in enumerate(listed)}
        added = {token["content"]: token["id"] for token in content.get("added_tokens", ())}
        return {**listed, **added}
    except (KeyError, TypeError, ValueError) as error:
        raise CheckpointError(f"{path} holds no vocabulary ({error!r}); fetch it again") from error


def check_same_tokens(draft: Path, target: Path) -> bool:
    """Return whether both have a tokenizer; raise CheckpointError if those differ."""
    ours, theirs = read_vocabulary(draft), read_vocabulary(target)
    if ours is None or theirs is None:
        return False
    for token in (*ours, *theirs):
        if ours.get(token) != theirs.get(token):
            why = f"token {token!r} has id {ours.get(token)}, but {theirs.get(token)} in {target}"
            raise CheckpointError(f"{draft}: {why}; use a draft with the target's own tokenizer")
    return True
