"""What a draft checkpoint is, by its tensors: its family, its layout, and the names it is read by.

Neither file names nor `architectures` say it: official EAGLE-3 heads call themselves
LlamaForCausalLM. Only whether `speculators` wrote a file is up to its config, for the same tensors
mean something else there.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_spec.core.errors import CheckpointError
from serve_spec.models.speculators import FAMILIES as SPECULATORS_FAMILIES

Shapes = Mapping[str, tuple[int, ...]]

_ALIASES = (
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
_WHOLE_MODEL = ("embed_tokens.weight", "norm.weight", "layers.0.input_layernorm.weight")


@dataclass(frozen=True)
class Recognition:
    """What a checkpoint turned out to be.

    `family`: the `speculative_algorithm` that runs it. `layout`: whose files look like this.
    `evidence`: the tensors that said so, by their stored names.
    """

    family: str
    layout: str
    evidence: str


def current_names(stored: Iterable[str]) -> dict[str, str]:
    """The name each stored tensor is read by: `layers.0.`, `fc`, `blocks.0.layers.0`, ..."""
    return {name: _current_name(name) for name in stored}


def recognise(stored: Shapes, config: Mapping[str, Any]) -> Recognition:
    """Family and layout of the tensors `stored`, shapes by stored name.

    Raises:
        CheckpointError: no family that this project knows.
    """
    origin = {new: old for old, new in current_names(stored).items()}
    shapes = {new: stored[old] for new, old in origin.items()}
    _refuse_foreign_layouts(shapes)
    family, names, why = _family(shapes)
    claimed = SPECULATORS_FAMILIES.get(config.get("speculators_model_type", ""))
    if claimed not in (None, family):
        raise CheckpointError(
            f"speculators_model_type={config['speculators_model_type']!r} in config.json, but the "
            f"tensors are of {family}; fetch the matching file"
        )
    evidence = ", ".join(origin[name] for name in names) + why
    return Recognition(family, _layout(family, stored, config), evidence)


def _family(shapes: Shapes) -> tuple[str, list[str], str]:
    """The family, the tensors that tell it, and what about them does."""
    blocks = [name for name in shapes if _MEDUSA_BLOCK.match(name)]
    if blocks:
        return "MEDUSA", blocks[:1], " and its like"
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
    """Whether the matrix [out, in] reads two vectors of the given width."""
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
    return "official" if family == "EAGLE" else "Hugging Face"


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


def _current_name(name: str) -> str:
    for pattern, replacement in _ALIASES:
        name = pattern.sub(replacement, name)
    return name
