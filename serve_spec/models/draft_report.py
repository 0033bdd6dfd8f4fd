"""Description of a draft checkpoint, for `serve-spec check-config --draft`.

Everything is read as the engine reads it. With a configuration the draft is compared with its
target, tensor by tensor; without one, facts that depend on the target stay open.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from serve_spec.config import ServeSpecConfig
from serve_spec.models import draft_shape
from serve_spec.models.draft_checkpoint import DraftFile, DraftOptions, read_draft
from serve_spec.models.eagle import make_eagle
from serve_spec.models.interfaces import Target
from serve_spec.models.loader import open_target, read_spec
from serve_spec.models.medusa import make_medusa, medusa_shape
from serve_spec.models.shape import DecoderShape
from serve_spec.models.standalone import shared_ids

Facts = dict[str, str]

_TRAINER_THETA = "10000"
"""Rotary base that the official EAGLE-3 trainer always used."""


def describe_draft(path: Path, config: ServeSpecConfig | None) -> str:
    """Return one line per fact about a draft, for `config`'s target; may raise CheckpointError."""
    options = DraftOptions()
    if config is not None:
        options = DraftOptions.of(config.speculative, config.model.load_format)
    file = read_draft(path, options.load_format)
    target_path = None if config is None else config.model.folder
    target = None if target_path is None else check_target(target_path, options.load_format)
    family = file.recognition.family
    facts = {
        "draft": str(file.path),
        "family": f"{family}, layout: {file.recognition.layout}",
        "recognised by": file.recognition.evidence,
    }
    if family == "MEDUSA":
        facts |= _medusa(file, target)
    elif family == "STANDALONE":
        facts |= _standalone(file, target_path, options.load_format)
    else:
        facts |= _head(file, target, options)
    facts["target"] = _fit(config, family)
    width = max(map(len, facts)) + 2
    return "\n".join(f"{name + ':':<{width}}{text}" for name, text in facts.items())


def _head(file: DraftFile, target: Target | None, options: DraftOptions) -> Facts:
    """Return facts about an EAGLE, EAGLE-3 or MTP head; raise as loading it would."""
    shape = draft_shape.layer_shape(
        file, options, None if target is None else target.spec.vocab_size
    )
    is_eagle3 = file.recognition.family == "EAGLE3"
    if target is not None:
        head = make_eagle(file, target, options, torch.float32)
        file.checkpoint.check(head.tensors(), head.read_elsewhere)
    own = "in the file; the target's is used where both are the same"
    facts = {
        "layers": _layers(shape),
        "rope theta": _theta(file, shape, options),
        "biases": _biases(file, shape),
        "vocabulary": _vocabulary(file, shape),
        "embedding": own if "embed_tokens.weight" in file.checkpoint else "the target's",
    }
    if is_eagle3:
        facts["target layers"] = _captured(file, target, options)
        facts["norms"] = _norms(file, options)
    elif file.recognition.family == "MTP":
        facts["target layers"] = "the state before the final norm"
        facts["norms"] = "of the token, of the state, of the output"
    else:
        facts["target layers"] = "the state after the final norm"
        has_norm = "layers.0.input_layernorm.weight" in file.checkpoint
        facts["norms"] = f"input_layernorm before the first layer {_yes(has_norm)}, no final norm"
    return facts


def _medusa(file: DraftFile, target: Target | None) -> Facts:
    if target is not None:
        medusa = make_medusa(file, target, torch.float32)
        file.checkpoint.check(medusa.tensors(), medusa.read_elsewhere)
    shape = medusa_shape(file)
    output = "one matrix that all share" if len(shape.outputs) == 1 else "one matrix each"
    if not shape.outputs:
        output = "the target's"
    mapped = file.checkpoint.shapes.get("token_map")
    return {
        "heads": f"{shape.num_heads} of {shape.num_blocks} residual block(s), counted by tensors",
        "hidden size": str(shape.hidden_size),
        "biases": _yes(shape.bias),
        "output": output,
        "vocabulary": "the target's" if mapped is None else f"{mapped[0]} ids by token_map",
        "target layers": "the state after the final norm",
    }


def _standalone(file: DraftFile, target_path: Path | None, load_format: str) -> Facts:
    draft = check_target(file.path, load_format)
    shape = draft.shape
    vocabulary = f"{shape.vocab_size} tokens"
    if target_path is not None:
        target = read_spec(target_path)
        num_ids = shared_ids(draft.spec, file.path, target, target_path)
        vocabulary += ", the target's" if num_ids is None else f", {num_ids} of them the target's"
    return {
        "architecture": file.config["architectures"][0],
        "layers": _layers(shape),
        "rope theta": f"{shape.rope_theta:g}",
        "vocabulary": vocabulary,
    }


def _layers(shape: DecoderShape) -> str:
    window = f", window {shape.sliding_window}" if shape.sliding_window else ""
    return (
        f"{shape.num_layers}, hidden {shape.hidden_size}, {shape.num_heads} heads and "
        f"{shape.num_kv_heads} key heads of {shape.head_dim}, mlp {shape.intermediate_size}{window}"
    )


def _theta(file: DraftFile, shape: DecoderShape, options: DraftOptions) -> str:
    theta = f"{shape.rope_theta:g}"
    if options.rope_theta is not None:
        return f"{theta}, from speculative_draft_rope_theta"
    config = file.config
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if "rope_theta" not in {**config, **rope}:
        return f"{theta}, the default: config.json has none"
    hint = ""
    is_speculators = file.recognition.layout == "speculators"
    if file.recognition.family == "EAGLE3" and not is_speculators and theta != _TRAINER_THETA:
        hint = (
            f"; the official trainer used {_TRAINER_THETA} even if it wrote another, so compare "
            f"accept lengths with speculative_draft_rope_theta: {_TRAINER_THETA}"
        )
    return f"{theta}, from config.json{hint}"


def _biases(file: DraftFile, shape: DecoderShape) -> str:
    return (
        f"fc {_yes('fc.bias' in file.checkpoint)}, qkv {_yes(shape.qkv_bias)}, "
        f"o_proj {_yes(shape.output_bias)}, head norms {_yes(shape.qk_norm)}"
    )


def _vocabulary(file: DraftFile, shape: DecoderShape) -> str:
    rows = file.checkpoint.shapes.get("lm_head.weight")
    if rows is None:
        return f"{shape.vocab_size} tokens, through the target's lm_head"
    if rows[0] == shape.vocab_size:
        return f"{shape.vocab_size} tokens, own lm_head"
    return f"{rows[0]} of {shape.vocab_size} tokens, own lm_head, ids mapped by d2t (offsets)"


def _captured(file: DraftFile, target: Target | None, options: DraftOptions) -> str:
    if options.aux_layer_ids is not None:
        return f"inputs of {list(options.aux_layer_ids)}, from speculative_draft_aux_layer_ids"
    ids = draft_shape.configured_ids(file)
    given = "config.json names none" if ids is None else f"config.json: {ids}"
    if target is None:
        return f"{given}; its meaning depends on the target: name a configuration file"
    num_layers = target.spec.num_layers
    mean = draft_shape.aux_layers_mean(file, options)
    resolved = (
        f"inputs of {list(draft_shape.capture_layers(ids, num_layers, mean))} of {num_layers}"
    )
    if ids is None:
        return f"{resolved}, the common default; {given}"
    if options.aux_layers_mean is not None:
        why = "set by speculative_draft_aux_layers_mean"
    elif mean is not None:
        why = "as in speculators"
    else:
        mean, why = draft_shape.convention(ids, num_layers)
    return f"{resolved}; {given}, read as {mean}s: {why}"


def _norms(file: DraftFile, options: DraftOptions) -> str:
    facts = []
    for name in ("norm_before_residual", "norm_output"):
        if getattr(options, name) is not None:
            source = f"speculative_draft_{name}"
        else:
            source = "left out" if file.setting(name) is None else "config.json"
        facts.append(f"{name} {_yes(draft_shape.switch(file, options, name))} ({source})")
    is_speculators = file.recognition.layout == "speculators"
    if (
        draft_shape.switch(file, options, "norm_output")
        and options.norm_output is None
        and not is_speculators
    ):
        facts[-1] += (
            ": the last norm's output is fed back, as SGLang reads it; SpecForge's class means "
            "only that the norm is there, so if later drafts fail, try "
            "speculative_draft_norm_output: false"
        )
    before = [name for name in ("input_norm", "fc_norm.0") if f"{name}.weight" in file.checkpoint]
    facts.append(f"before fc: {before[0].removesuffix('.0') if before else 'none'}")
    return ", ".join(facts)


def _fit(config: ServeSpecConfig | None, family: str) -> str:
    if config is None:
        return "not compared: name a configuration file"
    asked = config.speculative.speculative_algorithm
    fix = "" if asked == family else f"; speculative_algorithm={asked!r}: set it to {family!r}"
    return f"{config.model.path}: fits{fix}"


def check_target(path: Path, load_format: str = "auto") -> Target:
    """Return the model in `path` on the meta device; raise CheckpointError as loading it would."""
    file = open_target(path, load_format)
    model = file.skeleton()
    model.spec = replace(model.spec, num_ids=None)
    file.checkpoint.check(model.tensors())
    return model


def _yes(is_so: bool) -> str:
    return "yes" if is_so else "no"
