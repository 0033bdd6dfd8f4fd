"""Configuration of speculative decoding. Keys have SGLang's names."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from serve_spec.config.adaptive_file import MAX_STEPS, Preset, ignored_keys, load_slots
from serve_spec.config.algorithms import ALGORITHMS
from serve_spec.config.base import ConfigError, Refusal, StrictModel, validate

RejectionMethod = Literal["coupled", "standard", "block"]
Strategy = Literal["ema", "goodput", "per_request", "static"]


MAX_TREE_TOKENS = 64
"""Most tokens of a tree, root included; as `core.draft.MAX_TREE_TOKENS`."""


def max_tree_tokens(topk: int, num_steps: int) -> int:
    """Return the tokens of the largest tree of 1 or more levels, root included."""
    return min(MAX_TREE_TOKENS, 1 + topk + (num_steps - 1) * topk**2)


# Draft methods whose trees pay at small batch sizes.
_SMALL_TREES = ("EAGLE", "EAGLE3")

# Draft methods of the keys that correct a draft's config.json.
_CORRECTIONS = {
    "speculative_draft_rope_theta": ("EAGLE", "EAGLE3"),
    "speculative_draft_aux_layer_ids": ("EAGLE3",),
    "speculative_draft_aux_layers_mean": ("EAGLE3",),
    "speculative_draft_norm_before_residual": ("EAGLE3",),
    "speculative_draft_norm_output": ("EAGLE3",),
}


class SpeculativeConfig(StrictModel):
    """Draft method, and how the number of drafts adapts."""

    speculative_algorithm: str = Field(
        "NONE",
        description=f"Draft method: {', '.join(ALGORITHMS)}; NONE: no speculation.",
    )
    speculative_draft_model_path: Path | None = Field(
        None, description="Folder of the draft checkpoint; same forms as model.path."
    )
    speculative_num_steps: int = Field(
        3,
        ge=0,
        le=MAX_STEPS,
        description="Draft steps per round, where an adaptive strategy starts; 0: none.",
    )
    speculative_eagle_topk: int | None = Field(
        None,
        ge=1,
        description="Maximum number of children of a drafted token; 1: chains; more: trees; null: "
        "chains, and with goodput and an EAGLE draft on a GPU also small trees for few "
        "requests.",
    )
    speculative_num_draft_tokens: int | None = Field(
        None,
        ge=1,
        le=MAX_STEPS + 1,
        description="Tokens the target verifies per request, root included; null: steps + 1 for a "
        "chain, at most steps * topk + 1 for a tree.",
    )
    speculative_adaptive: bool = Field(
        True, description="Adapt the number of draft steps to measurements."
    )
    speculative_adaptive_config: Preset | Path | None = Field(
        None,
        description="JSON file of candidate steps and trees per batch size, or preset conservative "
        "or aggressive; null: conservative for ema, no limits for goodput and "
        "per_request.",
    )
    speculative_adaptive_strategy: Strategy = Field(
        "goodput", description="Strategy that picks the depth; static keeps speculative_num_steps."
    )
    speculative_per_sequence: bool = Field(
        True, description="Let goodput choose which drafts of the batch are verified; false: all."
    )
    min_dwell_rounds: int = Field(
        8,
        ge=0,
        description="Minimum number of rounds between two changes of depth by ema or goodput; 0: "
        "the published rule of ema.",
    )
    speculative_cost_table: Path | None = Field(
        None,
        description="Cost table for goodput, from `serve-spec tune`; null: measured at startup and "
        "cached.",
    )
    speculative_draft_dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto",
        description="Data type of the draft; auto: float16 with fp8 weights, float32 with int8, "
        "bfloat16 with int4, else bfloat16 if the device has native support, else the "
        "target's.",
    )
    speculative_draft_model_quantization: Literal["auto", "none", "fp8", "int8", "int4"] = Field(
        "auto",
        description="Quantization of draft weights: fp8 on Hopper GPUs, int8 on CPUs, int4 on "
        "both; auto: fp8 if it is faster; does not change coupled output.",
    )
    speculative_draft_sharpness: float = Field(
        0.85,
        description="Draft temperature as a multiple of the request's temperature; does not change "
        "coupled output.",
    )
    rejection_sample_method: RejectionMethod = Field(
        "coupled",
        description="How drafts of sampled requests are verified. coupled: drafts share the "
        "target's noise, and output depends on request and seed alone. standard, block: "
        "rejection sampling, which accepts more at high temperature; output follows the "
        "target's distribution, but the same seed gives other text than without "
        "speculation, and may change with the batch.",
    )
    speculative_draft_rope_theta: float | Literal["probe"] | None = Field(
        None,
        description="Rotary base of an EAGLE or EAGLE3 draft if its config.json is wrong; probe: "
        "the value that drafts a sample text best at startup.",
    )
    speculative_draft_aux_layer_ids: tuple[int, ...] | None = Field(
        None,
        description="EAGLE3: target layers whose inputs the draft reads, if its config.json is "
        "wrong.",
    )
    speculative_draft_aux_layers_mean: Literal["input", "output", "probe"] | None = Field(
        None,
        description="EAGLE3: whether the layer ids in the draft's config.json mean inputs or "
        "outputs of layers; null: detected from the checkpoint; probe: the one that "
        "drafts a sample text best at startup.",
    )
    speculative_draft_norm_before_residual: bool | None = Field(
        None,
        description="EAGLE3: override of norm_before_residual; null: as in its config.json.",
    )
    speculative_draft_norm_output: bool | None = Field(
        None,
        description="EAGLE3: feed the draft its own output after the last norm; null: as in the "
        "draft's config.json.",
    )
    speculative_ngram_first: bool = Field(
        False,
        description="With a draft model: use n-gram drafts for requests whose text repeats, "
        "and the model for the others.",
    )
    speculative_ngram_corpus: Path | None = Field(
        None,
        description="Text file, or .npy file of token ids, searched if a request has no n-gram "
        "match of its own.",
    )
    speculative_ngram_min_match_window_size: int | None = Field(
        None,
        ge=1,
        description="Minimum length of an n-gram match, in tokens; null: 2, or the maximum with "
        "speculative_ngram_first.",
    )
    speculative_ngram_max_match_window_size: int = Field(
        5,
        ge=1,
        le=256,
        description="Maximum length of an n-gram match, in tokens; the longest match is used.",
    )
    synthetic_acceptance: float | tuple[float, ...] | None = Field(
        None,
        description="For load tests only, since output is no longer the model's: accept length to "
        "force (1 or more), or acceptance rate of each position (0 to 1; deeper "
        "positions use the last).",
    )

    @field_validator("speculative_algorithm")
    @classmethod
    def _known(cls, name: str) -> str:
        if name not in ("NONE", *ALGORITHMS):
            raise Refusal("speculative_algorithm", name, f"use NONE or one of {list(ALGORITHMS)}")
        return name

    @field_validator("speculative_adaptive_config")
    @classmethod
    def _readable(cls, path: Preset | Path | None) -> Preset | Path | None:
        if path is not None:
            load_slots(path)  # raises if the file is invalid
        return path

    @field_validator("synthetic_acceptance", mode="before")
    @classmethod
    def _forceable(cls, wanted: object) -> object:
        if isinstance(wanted, list | tuple):
            ok = bool(wanted) and all(_in_range(chance, 0, 1) for chance in wanted)
        else:
            ok = wanted is None or _in_range(wanted, 1, math.inf)
        if not ok:
            fix = "give an accept length ≥ 1, such as 2.5, or rates in [0, 1], such as [0.8, 0.6]"
            raise Refusal("synthetic_acceptance", wanted, fix)
        return wanted

    @field_validator("speculative_draft_rope_theta", mode="before")
    @classmethod
    def _theta(cls, wanted: object) -> object:
        ok = wanted is None or wanted == "probe" or _in_range(wanted, 1, math.inf)
        if not ok:
            raise Refusal("speculative_draft_rope_theta", wanted, "give a base ≥ 1, or 'probe'")
        return wanted

    @field_validator("speculative_draft_sharpness", mode="before")
    @classmethod
    def _sharpness(cls, wanted: object) -> object:
        if not (_in_range(wanted, 0, 2) and wanted != 0):
            fix = "give a number in (0, 2], such as 0.85, the default"
            raise Refusal("speculative_draft_sharpness", wanted, fix)
        return wanted

    @field_validator("speculative_draft_aux_layer_ids")
    @classmethod
    def _layers(cls, ids: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if ids is not None and (not ids or min(ids) < 0):
            fix = "give layer ids of the target ≥ 0, such as [2, 16, 29]"
            raise Refusal("speculative_draft_aux_layer_ids", list(ids), fix)
        return ids

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        _check(self)
        # Without drafts there is nothing to adapt.
        return self if self.enabled else self._derive(speculative_adaptive=False)

    @property
    def enabled(self) -> bool:
        """Whether a draft method is set."""
        return self.speculative_algorithm != "NONE"

    @property
    def samples_drafts(self) -> bool:
        """Whether drafts are sampled and verified by rejection sampling."""
        return self.enabled and self.rejection_sample_method != "coupled"

    @property
    def topk(self) -> int:
        """Maximum children of a drafted token; 1: chains."""
        return self.speculative_eagle_topk or 1

    @property
    def adds_small_trees(self) -> bool:
        """Return whether goodput may draft trees for few requests though chains are configured."""
        return (
            self.speculative_eagle_topk is None
            and self.speculative_algorithm in _SMALL_TREES
            and self.speculative_adaptive
            and self.speculative_adaptive_strategy == "goodput"
            and self.rejection_sample_method == "coupled"
            and self.synthetic_acceptance is None
            and self.text_algorithm is None
            and self.speculative_cost_table is None
        )

    @property
    def text_algorithm(self) -> str | None:
        """Algorithm of n-gram drafts, alone or before a draft model, or None."""
        if not self.enabled:
            return None
        if ALGORITHMS[self.speculative_algorithm].from_text:
            return self.speculative_algorithm
        return "NGRAM" if self.speculative_ngram_first else None

    @property
    def ngram_min_match(self) -> int:
        """Minimum tokens of an n-gram match; higher before a draft model, which is often better."""
        given, most = (
            self.speculative_ngram_min_match_window_size,
            self.speculative_ngram_max_match_window_size,
        )
        if given is not None:
            return given
        return most if self.speculative_ngram_first else min(2, most)

    @property
    def num_draft_tokens(self) -> int:
        """Return the tokens verified per request with the initial shape, root included."""
        steps, topk = self.speculative_num_steps, self.topk
        if self.speculative_num_draft_tokens is not None:
            return self.speculative_num_draft_tokens
        return min(MAX_TREE_TOKENS, steps * topk + 1)


def ignored_adaptive_keys(config: SpeculativeConfig) -> str:
    """Return a warning about keys that the strategy does not read; empty if there are none."""
    source = config.speculative_adaptive_config
    if source is None:
        return ""
    strategy = config.speculative_adaptive_strategy if config.speculative_adaptive else "static"
    ignored = ", ".join(ignored_keys(load_slots(source), strategy))
    which = f"strategy {strategy!r}" if config.speculative_adaptive else "a fixed depth"
    return ignored and f"speculative_adaptive_config='{source}': {which} ignores {ignored}"


def _check(config: SpeculativeConfig) -> None:
    """Refuse keys that do not fit together."""
    algorithm = config.speculative_algorithm
    _check_drafter(config)
    least = config.ngram_min_match
    if config.speculative_ngram_max_match_window_size < least:
        raise Refusal(
            "speculative_ngram_max_match_window_size",
            config.speculative_ngram_max_match_window_size,
            f"give at least speculative_ngram_min_match_window_size={least}",
        )
    _check_drafts(config)
    if config.synthetic_acceptance is not None and not config.enabled:
        fix = "speculative_algorithm=NONE drafts nothing; name an algorithm, or leave this out"
        raise Refusal("synthetic_acceptance", config.synthetic_acceptance, fix)
    if config.samples_drafts:
        _check_rejection(config)
    for key, algorithms in _CORRECTIONS.items():
        value = getattr(config, key)
        if value is not None and algorithm not in ("NONE", *algorithms):
            fix = f"only for {' and '.join(algorithms)}; omit it with {algorithm}"
            raise Refusal(key, value, fix)
    mean = config.speculative_draft_aux_layers_mean
    if mean is not None and config.speculative_draft_aux_layer_ids is not None:
        fix = "conflicts with speculative_draft_aux_layer_ids; set only one of them"
        raise Refusal("speculative_draft_aux_layers_mean", mean, fix)
    _check_listed_trees(config)


def _check_drafter(config: SpeculativeConfig) -> None:
    """Refuse keys that the drafter lacks or cannot use."""
    name, path = config.speculative_algorithm, config.speculative_draft_model_path
    if not config.enabled:
        return  # speculation may be turned off without removing the other keys
    from_text = ALGORITHMS[name].from_text
    if not from_text and path is None:
        fix = f"{name} needs a draft checkpoint; name its folder"
        raise Refusal("speculative_draft_model_path", None, fix)
    instead = "omit the key, or set speculative_algorithm to the draft's"
    if from_text and path is not None:
        fix = f"{name} has no draft model; {instead}"
        raise Refusal("speculative_draft_model_path", str(path), fix)
    if from_text and config.speculative_ngram_first:
        fix = f"{name} makes no other drafts; {instead}"
        raise Refusal("speculative_ngram_first", True, fix)
    corpus = config.speculative_ngram_corpus
    if corpus is not None and config.text_algorithm != "NGRAM":
        fix = f"{name} searches no text; leave it out, or set speculative_ngram_first"
        raise Refusal("speculative_ngram_corpus", str(corpus), fix)


def _check_drafts(config: SpeculativeConfig) -> None:
    """Refuse chains or trees that cannot be drafted and verified."""
    steps, topk = config.speculative_num_steps, config.topk
    tokens = config.speculative_num_draft_tokens
    if topk == 1:
        if tokens is not None and tokens != steps + 1:
            fix = (
                f"a chain of speculative_num_steps={steps} has {steps + 1} tokens; give that, or "
                "omit the key"
            )
            raise Refusal("speculative_num_draft_tokens", tokens, fix)
        return
    if topk * max(1, steps - 1) > MAX_TREE_TOKENS:
        fix = (
            f"allows at most {MAX_TREE_TOKENS // topk + 1} steps, but "
            f"speculative_num_steps={steps}; lower one of them"
        )
        raise Refusal("speculative_eagle_topk", topk, fix)
    if steps and tokens is not None:
        most = max_tree_tokens(topk, steps)
        if not steps < tokens <= most:
            fix = (
                f"trees of speculative_num_steps={steps}, speculative_eagle_topk={topk} have "
                f"{steps + 1} to {most} tokens, root included; give one of those, or leave the "
                "key out"
            )
            raise Refusal("speculative_num_draft_tokens", tokens, fix)


def _check_listed_trees(config: SpeculativeConfig) -> None:
    """Refuse trees of the adaptive config that cannot be drafted."""
    file, topk = config.speculative_adaptive_config, config.topk
    slots = load_slots(file) if file is not None and config.enabled else {}
    for key, slot in slots.items():
        for steps, tokens in slot.candidate_trees or ():
            most = max_tree_tokens(topk, steps)
            if topk == 1 or tokens > most or topk * (steps - 1) > MAX_TREE_TOKENS:
                fix = (
                    f"slot {key} lists it, but speculative_eagle_topk={topk} makes "
                    f"{'chains alone' if topk == 1 else f'trees of at most {most} tokens'} of "
                    f"{steps} steps; change one of them"
                )
                raise Refusal("candidate_trees", [steps, tokens], fix)


def _check_rejection(config: SpeculativeConfig) -> None:
    """Refuse what does not work with rejection sampling."""
    key, method = "rejection_sample_method", config.rejection_sample_method
    if config.text_algorithm is not None:
        fix = "n-gram drafts come from no distribution; leave it out, or use coupled"
        raise Refusal(key, method, fix)
    if config.topk > 1:
        fix = (
            "it verifies chains only; give speculative_eagle_topk=1 instead of "
            f"{config.topk}, or use coupled"
        )
        raise Refusal(key, method, fix)
    if config.synthetic_acceptance is not None:
        fix = "synthetic_acceptance decides by itself how many drafts are kept; leave one out"
        raise Refusal(key, method, fix)


def _in_range(value: object, low: float, high: float) -> bool:
    # bool is a subclass of int.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and low <= value <= high


class PolicyUpdate(StrictModel):
    """Settings that may change while the engine runs. Omitted keys keep their configured value."""

    speculative_adaptive: bool = Field(
        True, description="Adapt the number of draft steps to measurements."
    )
    speculative_adaptive_strategy: Strategy = Field(
        "goodput", description="Strategy that picks the depth."
    )
    speculative_per_sequence: bool = Field(
        True, description="Let goodput choose which drafts of the batch are verified."
    )
    speculative_num_steps: int = Field(
        3, ge=0, le=MAX_STEPS, description="Draft steps of strategy static."
    )
    speculative_num_draft_tokens: int | None = Field(
        None,
        ge=2,
        le=MAX_STEPS + 1,
        description="Tokens of the tree of strategy static, root included; null: chains.",
    )
    speculative_adaptive_config: Mapping[str, object] | Preset | Path | None = Field(
        None,
        description="Candidate steps per batch size: a mapping, a JSON file, or a preset.",
    )
    min_dwell_rounds: int = Field(
        8, ge=0, description="Minimum number of rounds between two changes of depth."
    )

    @field_validator("speculative_adaptive_config")
    @classmethod
    def _readable(
        cls, source: Mapping[str, object] | Preset | Path | None
    ) -> Mapping[str, object] | Preset | Path | None:
        if source is not None:
            load_slots(source)
        return source


def parse_update(settings: Mapping[str, object]) -> PolicyUpdate:
    """Validate a change of policy settings.

    Raises:
        ConfigError: a key is unknown or a value invalid.
    """
    if not isinstance(settings, Mapping):
        raise ConfigError(f"policy settings={settings!r}: not a mapping; give keys and values")
    return validate(PolicyUpdate, dict(settings))
