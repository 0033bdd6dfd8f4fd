"""Configuration of speculative decoding. Keys have SGLang's names."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NoReturn, Self

from pydantic import AfterValidator, Field, ValidationInfo, field_validator, model_validator

from serve_spec.config.adaptive_file import (
    MAX_STEPS,
    MAX_TREE_TOKENS,
    READ_BY,
    AdaptiveSource,
    Preset,
    SlotConfig,
    load_slots,
)
from serve_spec.config.base import CHECKPOINT, ConfigError, Refusal, StrictModel, validate
from serve_spec.config.drafts import METHODS

RejectionMethod = Literal["coupled", "standard", "block"]
STRATEGIES = ("ema", "goodput", "per_request", "static")


def is_plugin(strategy: str) -> bool:
    """Return whether a strategy is a policy of another package, written MODULE:CLASS."""
    module, colon, name = strategy.partition(":")
    return bool(colon) and name.isidentifier() and all(map(str.isidentifier, module.split(".")))


def _known_strategy(strategy: str) -> str:
    if strategy not in STRATEGIES and not is_plugin(strategy):
        fix = f"use one of {', '.join(STRATEGIES)}, or MODULE:CLASS of your own policy"
        raise Refusal("speculative_adaptive_strategy", strategy, fix)
    return strategy


Strategy = Annotated[str, AfterValidator(_known_strategy)]


def max_tree_tokens(topk: int, num_steps: int) -> int:
    """Return the tokens of the largest tree of 1 or more levels, root included."""
    return min(MAX_TREE_TOKENS, 1 + topk + (num_steps - 1) * topk**2)


def _in_range(value: object, low: float, high: float) -> bool:
    # bool is a subclass of int.
    if not isinstance(value, int | float) or isinstance(value, bool):
        return False
    return math.isfinite(value) and low <= value <= high


def _is_acceptance(wanted: object) -> bool:
    if isinstance(wanted, list | tuple):
        return bool(wanted) and all(_in_range(probability, 0, 1) for probability in wanted)
    return _in_range(wanted, 1, math.inf)


def _are_layers(ids: object) -> bool:
    given = list(ids) if isinstance(ids, list | tuple) else []
    return bool(given) and all(_in_range(i, 0, math.inf) for i in given)


# What a type does not say: a predicate of values that are given, and a remedy.
_VALUES: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "speculative_draft_sharpness": (
        lambda scale: _in_range(scale, 0, 2) and scale > 0,
        "give a number in (0, 2], such as 0.85, the default",
    ),
    "speculative_draft_rope_theta": (
        lambda theta: _in_range(theta, 1, math.inf),
        "give a base ≥ 1; if config.json may be wrong, compare accept lengths with its base, 10000 "
        "and the target's",
    ),
    "speculative_draft_aux_layers_mean": (
        lambda mean: mean in ("input", "output"),
        "give 'input' or 'output'; if unsure, compare their accept lengths",
    ),
    "speculative_draft_aux_layer_ids": (
        _are_layers,
        "give layer ids of the target ≥ 0, such as [2, 16, 29]",
    ),
    "synthetic_acceptance": (
        _is_acceptance,
        "give an accept length ≥ 1, such as 2.5, or rates in [0, 1], such as [0.8, 0.6]",
    ),
}


def _loadable(source: AdaptiveSource | None) -> AdaptiveSource | None:
    if source is not None:
        load_slots(source)  # raises if it is invalid
    return source


NO_DRAFT = "off: no draft; try --speculative-algorithm NGRAM"
"""What commands say of a configuration without speculation."""


class SpeculativeConfig(StrictModel):
    """Draft method, and how the number of drafts adapts."""

    speculative_algorithm: str = Field(
        "NONE",
        description=f"Draft method: {', '.join(METHODS)}; NONE: no speculation. If left out, a "
        "draft's config.json tells it.",
    )
    speculative_draft_model_path: Annotated[str | None, CHECKPOINT] = None
    """Checkpoint of the draft; same forms as model.path."""
    speculative_num_steps: int = Field(3, ge=0, le=MAX_STEPS)
    """Draft steps per round, where an adaptive strategy starts; 0: none."""
    speculative_eagle_topk: int | None = Field(None, ge=1)
    """Maximum number of children of a drafted token; 1: chains; more: trees; null: chains, and with
    goodput and an EAGLE draft on a GPU also small trees for few requests."""
    speculative_num_draft_tokens: int | None = Field(None, ge=1, le=MAX_STEPS + 1)
    """Tokens the target verifies per request, root included; null: steps + 1 for a chain, at most
    steps * topk + 1 for a tree."""
    speculative_adaptive: bool = True
    """Adapt the number of draft steps to measurements."""
    speculative_adaptive_config: Annotated[Preset | Path | None, AfterValidator(_loadable)] = None
    """JSON file of candidate steps and trees per batch size, or preset conservative or aggressive;
    null: conservative for ema, no limits for goodput and per_request."""
    speculative_adaptive_strategy: Strategy = "goodput"
    """Strategy that picks the depth: ema, goodput, per_request, static (keeps
    speculative_num_steps), or MODULE:CLASS of a policy of your own (docs/adding-a-policy.md)."""
    speculative_per_sequence: bool = True
    """Let goodput choose which drafts of the batch are verified; false: all."""
    min_dwell_rounds: int = Field(8, ge=0)
    """Minimum number of rounds between two changes of depth by ema or goodput; 0: the published
    rule of ema."""
    speculative_cost_table: Path | None = None
    """Cost table for goodput, from `serve-spec tune`; null: measured at startup and cached."""
    speculative_adaptive_cache: bool = True
    """Keep what an adaptive strategy has learned in the cache folder, and continue from it at the
    next start with the same models, settings and version."""
    speculative_draft_dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    """Data type of the draft; auto: float16 with fp8 weights, float32 with int8, bfloat16 with
    int4, else bfloat16 if the device has native support, else the target's."""
    speculative_draft_model_quantization: Literal["auto", "none", "fp8", "int8", "int4"] = "auto"
    """Quantization of draft weights: fp8 on Hopper GPUs, int8 on CPUs, int4 on both; auto: fp8 if
    it is faster; does not change coupled output."""
    speculative_draft_tp_size: int | None = Field(None, ge=1)
    """Ranks that share the draft's own matrices: 1 puts the whole draft on every rank,
    tensor_parallel_size splits it; null: split if its sizes allow it."""
    speculative_draft_sharpness: float = 0.85
    """Draft temperature as a multiple of the request's temperature; does not change coupled output.
    """
    rejection_sample_method: RejectionMethod = "coupled"
    """How drafts of sampled requests are verified. coupled: drafts share the target's noise, and
    output depends on request and seed alone. standard, block: rejection sampling, which accepts
    more at high temperature; output follows the target's distribution, but the same seed gives
    other text than without speculation, and may change with the batch."""
    speculative_draft_rope_theta: float | None = None
    """Rotary base of an EAGLE or EAGLE3 draft if its config.json is wrong."""
    speculative_draft_aux_layer_ids: tuple[int, ...] | None = None
    """EAGLE3: target layers whose inputs the draft reads, if its config.json is wrong."""
    speculative_draft_aux_layers_mean: Literal["input", "output"] | None = None
    """EAGLE3: whether the layer ids in the draft's config.json mean inputs or outputs of layers;
    null: detected from the checkpoint."""
    speculative_draft_norm_before_residual: bool | None = None
    """EAGLE3: override of norm_before_residual; null: as in its config.json."""
    speculative_draft_norm_output: bool | None = None
    """EAGLE3: feed the draft its own output after the last norm; null: as in the draft's
    config.json."""
    speculative_ngram_first: bool = False
    """With a draft model: use n-gram drafts for requests whose text repeats, and the model for the
    others."""
    speculative_ngram_corpus: Path | None = None
    """Text file, or .npy file of token ids, searched if a request has no n-gram match of its own.
    """
    speculative_ngram_min_match_window_size: int | None = Field(None, ge=1)
    """Minimum length of an n-gram match, in tokens; null: 2, or the maximum with
    speculative_ngram_first."""
    speculative_ngram_max_match_window_size: int = Field(5, ge=1, le=256)
    """Maximum length of an n-gram match, in tokens; the longest match is used."""
    speculative_replay_answers: Path | None = None
    """For benchmarks only: file of saved answers that REPLAY drafts, from `serve-spec bench offline
    --replay FILE`."""
    synthetic_acceptance: float | tuple[float, ...] | None = None
    """For load tests only, since output is no longer the model's: accept length to force (1 or
    more), or acceptance rate of each position (0 to 1; deeper positions use the last)."""

    @field_validator("speculative_algorithm")
    @classmethod
    def _is_known(cls, name: str) -> str:
        if name not in ("NONE", *METHODS):
            raise Refusal("speculative_algorithm", name, f"use NONE or one of {list(METHODS)}")
        return name

    @field_validator(*_VALUES, mode="before")
    @classmethod
    def _is_possible(cls, value: Any, info: ValidationInfo) -> object:
        is_possible, fix = _VALUES[str(info.field_name)]
        if value is not None and not is_possible(value):
            raise Refusal(str(info.field_name), value, fix)
        return value

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
            and self.enabled
            and METHODS[self.speculative_algorithm].adds_small_trees
            and self.speculative_adaptive
            and self.speculative_adaptive_strategy == "goodput"
            and self.rejection_sample_method == "coupled"
            and self.synthetic_acceptance is None
            and self.ngram_algorithm is None
            and self.speculative_cost_table is None
        )

    @property
    def ngram_algorithm(self) -> str | None:
        """Algorithm of n-gram drafts, alone or before a draft model, or None."""
        if not self.enabled:
            return None
        if METHODS[self.speculative_algorithm].is_ngram:
            return self.speculative_algorithm
        return "NGRAM" if self.speculative_ngram_first else None

    @property
    def ngram_min_match(self) -> int:
        """Minimum tokens of an n-gram match; higher before a draft model, which is often better."""
        most = self.speculative_ngram_max_match_window_size
        default = most if self.speculative_ngram_first else min(2, most)
        return self.speculative_ngram_min_match_window_size or default

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
    given = set().union(*(slot.model_fields_set for slot in load_slots(source).values()))
    read = READ_BY.get(strategy, tuple(given))
    ignored = [key for key in SlotConfig.model_fields if key in given and key not in read]
    which = f"strategy {strategy!r}" if config.speculative_adaptive else "a fixed depth"
    told = f"speculative_adaptive_config='{source}': {which} ignores {', '.join(ignored)}"
    return told if ignored else ""


def _refuse(config: SpeculativeConfig, key: str, fix: str) -> NoReturn:
    value = getattr(config, key)
    raise Refusal(key, str(value) if isinstance(value, Path) else value, fix)


def _check(config: SpeculativeConfig) -> None:
    least = config.ngram_min_match
    if config.enabled:  # speculation may be turned off without removing the other keys
        _check_drafter(config)
    if config.speculative_ngram_max_match_window_size < least:
        fix = f"give at least speculative_ngram_min_match_window_size={least}"
        _refuse(config, "speculative_ngram_max_match_window_size", fix)
    _check_drafts(config)
    if config.synthetic_acceptance is not None and not config.enabled:
        fix = "speculative_algorithm=NONE drafts nothing; name an algorithm, or leave this out"
        _refuse(config, "synthetic_acceptance", fix)
    if config.samples_drafts:
        _check_rejection(config)
    _check_corrections(config)
    _check_listed_trees(config)


def _check_corrections(config: SpeculativeConfig) -> None:
    algorithm, methods = config.speculative_algorithm, METHODS.values()
    for key in dict.fromkeys(key for method in methods for key in method.corrections):
        names = [method.name for method in methods if key in method.corrections]
        if getattr(config, key) is not None and algorithm not in ("NONE", *names):
            _refuse(config, key, f"only for {' and '.join(names)}; omit it with {algorithm}")
    ids, mean = config.speculative_draft_aux_layer_ids, config.speculative_draft_aux_layers_mean
    if ids is not None and mean is not None:
        fix = "conflicts with speculative_draft_aux_layer_ids; set only one of them"
        _refuse(config, "speculative_draft_aux_layers_mean", fix)


def _check_drafter(config: SpeculativeConfig) -> None:
    name, path = config.speculative_algorithm, "speculative_draft_model_path"
    instead = "omit the key, or set speculative_algorithm to the draft's"
    if not METHODS[name].is_ngram:
        if config.speculative_draft_model_path is None:
            _refuse(config, path, f"{name} needs a draft checkpoint; name its folder")
    elif config.speculative_draft_model_path is not None:
        _refuse(config, path, f"{name} has no draft model; {instead}")
    elif config.speculative_ngram_first:
        _refuse(config, "speculative_ngram_first", f"{name} makes no other drafts; {instead}")
    if config.speculative_ngram_corpus is not None and config.ngram_algorithm != "NGRAM":
        fix = f"{name} searches no text; leave it out, or set speculative_ngram_first"
        _refuse(config, "speculative_ngram_corpus", fix)
    replays = METHODS[name].replays
    if replays != (config.speculative_replay_answers is not None):
        fix = (
            f"{name} is for benchmarks, it drafts saved answers; name their file (serve-spec bench "
            "offline --replay FILE writes one), or use another speculative_algorithm"
            if replays
            else f"{name} replays no answers; leave it out, or set speculative_algorithm=REPLAY"
        )
        _refuse(config, "speculative_replay_answers", fix)


def _check_drafts(config: SpeculativeConfig) -> None:
    steps, topk = config.speculative_num_steps, config.topk
    tokens, key = config.speculative_num_draft_tokens, "speculative_num_draft_tokens"
    if topk == 1:
        if tokens not in (None, steps + 1):
            had = f"a chain of speculative_num_steps={steps} has {steps + 1} tokens"
            _refuse(config, key, f"{had}; give that, or omit the key")
        return
    if config.enabled and not METHODS[config.speculative_algorithm].allows_trees:
        fix = f"{config.speculative_algorithm} drafts chains alone; give 1, or omit the key"
        _refuse(config, "speculative_eagle_topk", fix)
    if topk * max(1, steps - 1) > MAX_TREE_TOKENS:
        most = f"allows at most {MAX_TREE_TOKENS // topk + 1} steps"
        fix = f"{most}, but speculative_num_steps={steps}; lower one of them"
        _refuse(config, "speculative_eagle_topk", fix)
    most_tokens = max_tree_tokens(topk, steps)
    if steps and tokens is not None and not steps < tokens <= most_tokens:
        made = f"trees of speculative_num_steps={steps}, speculative_eagle_topk={topk}"
        have = f"have {steps + 1} to {most_tokens} tokens, root included"
        _refuse(config, key, f"{made} {have}; give one of those, or leave the key out")


def _check_listed_trees(config: SpeculativeConfig) -> None:
    file, topk = config.speculative_adaptive_config, config.topk
    slots = load_slots(file) if file is not None and config.enabled else {}
    for key, slot in slots.items():
        for steps, tokens in slot.candidate_trees or ():
            most = max_tree_tokens(topk, steps)
            if topk == 1 or tokens > most or topk * (steps - 1) > MAX_TREE_TOKENS:
                makes = "chains alone" if topk == 1 else f"trees of at most {most} tokens"
                fix = (
                    f"slot {key} lists it, but speculative_eagle_topk={topk} makes {makes} of "
                    f"{steps} steps; change one of them"
                )
                raise Refusal("candidate_trees", [steps, tokens], fix)


def _check_rejection(config: SpeculativeConfig) -> None:
    key = "rejection_sample_method"
    if config.ngram_algorithm is not None:
        fix = "n-gram drafts come from no distribution; leave it out, or use coupled"
        _refuse(config, key, fix)
    if config.topk > 1:
        chain = f"give speculative_eagle_topk=1 instead of {config.topk}"
        _refuse(config, key, f"it verifies chains only; {chain}, or use coupled")
    if config.synthetic_acceptance is not None:
        fix = "synthetic_acceptance decides by itself how many drafts are kept; leave one out"
        _refuse(config, key, fix)


class _PolicyUpdate(StrictModel):
    """Settings that may change while the engine runs."""

    speculative_adaptive: bool = True
    """Adapt the number of draft steps to measurements."""
    speculative_adaptive_strategy: Strategy = "goodput"
    """Strategy that picks the depth, or MODULE:CLASS of a policy."""
    speculative_per_sequence: bool = True
    """Let goodput choose which drafts of the batch are verified."""
    speculative_num_steps: int = Field(3, ge=0, le=MAX_STEPS)
    """Draft steps of strategy static."""
    speculative_num_draft_tokens: int | None = Field(None, ge=2, le=MAX_STEPS + 1)
    """Tokens of the tree of strategy static, root included; null: chains."""
    speculative_adaptive_config: Annotated[
        Mapping[str, object] | Preset | Path | None, AfterValidator(_loadable)
    ] = None
    """Candidate steps per batch size: a mapping, a JSON file, or a preset."""
    min_dwell_rounds: int = Field(8, ge=0)
    """Minimum number of rounds between two changes of depth."""


def parse_update(settings: Mapping[str, object]) -> dict[str, Any]:
    """Return the given keys of a change of policy settings, or raise ConfigError."""
    if not isinstance(settings, Mapping):
        raise ConfigError(f"policy settings={settings!r}: not a mapping; give keys and values")
    return validate(_PolicyUpdate, dict(settings)).explicit_fields()
