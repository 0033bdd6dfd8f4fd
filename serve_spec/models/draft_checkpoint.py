"""Draft checkpoints of any public layout: a flat config, tensors by their current names.

Published configs are often wrong (number of layers, biases, tied embeddings), so the tensors decide
what their presence or shape tells. Neither file names nor `architectures` tell the family: official
EAGLE-3 heads call themselves LlamaForCausalLM. Only whether `speculators` wrote a file follows from
its config, because the same tensors have another meaning there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from serve_spec.config import SpeculativeConfig
from serve_spec.config.checkpoint import SPECULATORS
from serve_spec.core.errors import CheckpointError
from serve_spec.models.config import check_supported, read_json
from serve_spec.models.dummy import draft_tensors, dummy_checkpoint
from serve_spec.models.interfaces import TargetSpec
from serve_spec.models.registry import class_defaults, known_defaults
from serve_spec.models.weights import (
    Checkpoint,
    PickleFile,
    SafetensorsFile,
    TensorFile,
    open_weights,
)

_NESTED = ("transformer_layer_config", "speculators_config")


def flat_config(directory: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with all keys at the top; raise CheckpointError if it is not supported."""
    kind = config["speculators_model_type"]
    if kind not in SPECULATORS:
        fix = f"use a head of {sorted(SPECULATORS)}"
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


Shapes = Mapping[str, tuple[int, ...]]

_ALIASES = (
    # MiMo's layer for multi-token prediction, stored with its target.
    (re.compile(r"^model\.mtp_layers\.0\.input_proj\."), "fc."),
    (re.compile(r"^model\.mtp_layers\.0\."), "layers.0."),
    (re.compile(r"^model\."), ""),
    (re.compile(r"^midlayer\."), "layers.0."),
    (re.compile(r"^aux_norm_low\."), "fc_norm.0."),
    (re.compile(r"^aux_norm_mid\."), "fc_norm.1."),
    (re.compile(r"^aux_norm_high\."), "fc_norm.2."),
    # speculators' EAGLE-1.
    (re.compile(r"^fusion_fc\."), "fc."),
    (re.compile(r"^transformer\."), "layers.0."),
    # Medusa, in its own naming: `{head}.{block}.linear` and, last in each head, a plain matrix.
    (re.compile(r"^medusa_heads?\."), ""),
    (re.compile(r"^(\d+)\.(\d+)\.linear\."), r"blocks.\1.layers.\2."),
    (re.compile(r"^(\d+)\.\d+\.weight$"), r"lm_heads.\1.weight"),
)
_MEDUSA_BLOCK = re.compile(r"^blocks\.\d+\.layers\.\d+\.weight$")
_QUERY, _OUTPUT = "layers.0.self_attn.q_proj.weight", "layers.0.self_attn.o_proj.weight"
_HIDDEN_NORM, _FC = "layers.0.hidden_norm.weight", "fc.weight"
_MTP, _TOKEN_NORM = "model.mtp_layers.", "layers.0.token_layernorm.weight"
_WHOLE_MODEL = ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight")


@dataclass(frozen=True)
class Recognition:
    """Family and layout of a checkpoint.

    `family`: the `speculative_algorithm` that runs it. `layout`: the exporter.
    `evidence`: the tensors that tell the family, by their stored names.
    """

    family: str
    layout: str
    evidence: str


def current_names(stored: Iterable[str]) -> dict[str, str]:
    """Return the current name of each stored tensor: `layers.0.`, `fc`, `blocks.0.layers.0`, ..."""
    names = {name: name for name in stored}
    for pattern, replacement in _ALIASES:
        names = {old: pattern.sub(replacement, new) for old, new in names.items()}
    return names


def recognise(stored: Shapes, config: Mapping[str, Any]) -> Recognition:
    """Return family and layout of tensors, shapes by stored name; may raise CheckpointError."""
    origin = {new: old for old, new in current_names(stored).items()}
    shapes = {new: stored[old] for new, old in origin.items()}
    _refuse_foreign_layouts(shapes)
    family, names, why = _family(shapes)
    claimed = SPECULATORS.get(config.get("speculators_model_type", ""))
    if claimed not in (None, family):
        raise CheckpointError(
            f"speculators_model_type={config['speculators_model_type']!r} in config.json, but the "
            f"tensors are of {family}; fetch the matching file"
        )
    evidence = ", ".join(origin[name] for name in names) + why
    return Recognition(family, _layout(family, stored, config), evidence)


def _family(shapes: Shapes) -> tuple[str, list[str], str]:
    """Return the family, the tensors that tell it, and which property of them does."""
    blocks = [name for name in shapes if _MEDUSA_BLOCK.match(name)]
    if blocks:
        return "MEDUSA", blocks[:1], " and its like"
    if _TOKEN_NORM in shapes:
        return "MTP", [_TOKEN_NORM], ""
    if _HIDDEN_NORM in shapes:
        return "EAGLE3", [_HIDDEN_NORM], ""
    if _reads_two(shapes.get(_QUERY, ()), shapes.get(_OUTPUT, ())[:1]):
        return "EAGLE3", [_QUERY], f" reads two states (width {shapes[_QUERY][1]})"
    fc = shapes.get(_FC, ())
    if _reads_two(fc, fc[:1]):
        return "EAGLE", [_FC], f" reads a token and a feature (width {fc[1]})"
    if all(name in shapes for name in _WHOLE_MODEL) and _FC not in shapes:
        return "STANDALONE", list(_WHOLE_MODEL), ""
    raise CheckpointError(
        f"neither an EAGLE or EAGLE-3 head (fc.weight with layers.0.*), nor Medusa heads "
        f"(blocks.*.layers.*), nor a stand-alone model (embed_tokens, norm, layers.*) is here; "
        f"the first tensors are {sorted(shapes)[:4]}"
    )


def _reads_two(matrix: tuple[int, ...], width: tuple[int, ...]) -> bool:
    """Return whether the matrix [out, in] reads two vectors of the given width."""
    return len(matrix) == 2 and matrix[1:] == tuple(2 * size for size in width)


def _layout(family: str, stored: Shapes, config: Mapping[str, Any]) -> str:
    if config.get("speculators_model_type"):
        return "speculators"
    if isinstance(config.get("model"), dict):
        return "vLLM's early wrapping"
    if family == "MEDUSA":
        return "vLLM" if any("blocks." in name for name in stored) else "official"
    if family == "EAGLE3":
        is_official = any("midlayer." in name for name in stored)
        return "official, SpecForge, AngelSlim" if is_official else "vLLM, ModelOpt"
    return "official" if family == "EAGLE" else "MiMo" if family == "MTP" else "Hugging Face"


def _refuse_foreign_layouts(shapes: Shapes) -> None:
    if "eagle_linear.weight" in shapes or "layers.0.attention.wq.weight" in shapes:
        raise CheckpointError(
            "its tensors have Mistral's own names (eagle_linear, attention.wq), whose rotary "
            "layout and norms differ; convert it to Hugging Face's names"
        )
    if any(_MEDUSA_BLOCK.match(name) for name in shapes) and _QUERY in shapes:
        raise CheckpointError(
            "it holds a whole model beside its Medusa heads, so these belong to that model and no "
            "other; serve it as the target and keep the heads alone in the draft's folder"
        )


_MEDUSA_FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")


@dataclass(frozen=True)
class DraftOptions:
    """Settings that override the checkpoint's config; None: as in the checkpoint.

    `rope_theta`: some published heads were trained with 10000 although their config names another.
    `aux_layer_ids`: layers of the target whose inputs the head reads (EAGLE-3). `aux_layers_mean`:
    whether the config's own ids mean a layer's input or its output. `norm_before_residual`,
    `norm_output`: two switches of EAGLE-3 that configs leave out. `load_format`: as in
    `model.load_format`.
    """

    rope_theta: float | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    aux_layers_mean: Literal["input", "output"] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    load_format: str = "auto"

    @staticmethod
    def of(config: SpeculativeConfig, load_format: str) -> DraftOptions:
        """Return the options of a configuration."""
        return DraftOptions(
            rope_theta=config.speculative_draft_rope_theta,
            aux_layer_ids=config.speculative_draft_aux_layer_ids,
            aux_layers_mean=config.speculative_draft_aux_layers_mean,
            norm_before_residual=config.speculative_draft_norm_before_residual,
            norm_output=config.speculative_draft_norm_output,
            load_format=load_format,
        )


@dataclass(frozen=True)
class DraftFile:
    """A draft's config (flat) and tensors (by their current names: `layers.0.`, `fc`, ...)."""

    path: Path
    config: Mapping[str, Any]
    checkpoint: Checkpoint
    recognition: Recognition

    def setting(self, key: str) -> Any:
        """Return a key of the config, at the top or inside `eagle_config`; None if absent."""
        value = self.config.get(key)
        return self.nested.get(key) if value is None else value

    def refusal(
        self, problem: str, fix: str = "use a head trained for this target"
    ) -> CheckpointError:
        """Return an error that names the draft, what is wrong and what to do."""
        return CheckpointError(f"{self.path}: {problem}; {fix}")

    @property
    def nested(self) -> Mapping[str, Any]:
        """Return the config's `eagle_config`; empty if absent."""
        return self.config.get("eagle_config") or {}


def open_draft(
    path: Path | str, algorithm: str, load_format: str = "auto", target: TargetSpec | None = None
) -> DraftFile:
    """Open the draft in `path`, which must be one for `algorithm`, or raise CheckpointError.

    It reads no weight. load_format: as in `model.load_format`; dummy needs the target's shape.
    """
    dummy = None
    if load_format == "dummy":
        assert target is not None, "random weights need the target's shape"
        dummy = (algorithm, target)
    file = read_draft(path, load_format, dummy)
    family = file.recognition.family
    if family != algorithm:
        raise CheckpointError(
            f"{file.path} is of family {family} by its tensors ({file.recognition.evidence}), but "
            f"speculative_algorithm={algorithm!r}; set it to {family!r}"
        )
    return file


def read_draft(
    path: Path | str, load_format: str = "auto", dummy: tuple[str, TargetSpec] | None = None
) -> DraftFile:
    """Open the draft in `path`, of any family and layout, or raise CheckpointError.

    It reads no weight. load_format: as in `model.load_format`. dummy: algorithm and target of
    random weights, in place of the file's.
    """
    directory = Path(path)
    config = read_json(directory / "config.json")
    if isinstance(config.get("model"), dict):
        # Early vLLM conversions wrap the head's config: {"model_type": "eagle", "model": {...}}.
        config = {**config, **config["model"]}
    if config.get("speculators_model_type"):
        config = flat_config(directory, config)
    check_supported(config)
    if dummy is None:
        checkpoint = _open(directory, load_format)
    else:
        checkpoint = dummy_checkpoint(directory, draft_tensors(config, *dummy))
    stored = checkpoint.shapes
    if any(name.startswith(_MTP) for name in stored):
        checkpoint.rename({name: None for name in stored if not name.startswith(_MTP)})
        stored = checkpoint.shapes
    checkpoint.rename(current_names(stored))
    try:
        recognition = recognise(stored, config)
    except CheckpointError as error:
        raise CheckpointError(f"{directory}: {error}") from None
    return DraftFile(directory, config, checkpoint, recognition)


def _open(directory: Path, load_format: str) -> Checkpoint:
    for name in _MEDUSA_FILES:
        path = directory / name
        if path.exists():
            is_safe = path.suffix == ".safetensors"
            file: TensorFile = SafetensorsFile(path) if is_safe else PickleFile(path)
            return Checkpoint([file], directory)
    return open_weights(directory, load_format)
