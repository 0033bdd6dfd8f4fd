"""Registry of draft methods, the values of `speculative_algorithm`; none of them is imported.

A method with a checkpoint has one file, `models/drafts/NAME.py`, with its `DraftFamily`. Its row
here is what a configuration needs without torch. A package adds a method with `register_draft`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from serve_spec.core.errors import PluginError
from serve_spec.core.registry import Registry, import_object

MTP_KEY = "num_nextn_predict_layers"
"""Number of draft layers that a target's checkpoint holds."""

Claim = Callable[[Mapping[str, Any]], bool]
"""Return whether a `config.json` alone names a method."""


def _never(config: Mapping[str, Any]) -> bool:
    return False


@dataclass(frozen=True)
class DraftMethod:
    """A draft method, as the configuration sees it.

    path: MODULE:NAME, imported on first use. For a draft model, the `DraftFamily` (a class of
    `models.drafts.base`). With `is_ngram`, a function (SpeculativeConfig, encode, maximum drafts)
    -> `core.draft.NgramDrafter`; `encode` converts text to token ids.
    claims: whether a draft's `config.json` names this method. speculators_type: its
    `speculators_model_type`, if `speculators` can write it. is_in_target: the target's own
    checkpoint holds the draft.
    corrections: the keys of `SpeculativeConfig` that correct a draft's `config.json`.
    allows_trees: False if it drafts chains alone. adds_small_trees: its trees pay at small batch
    sizes.
    replays: its drafts are the answers in `speculative_replay_answers`, for benchmarks alone.
    """

    name: str
    path: str
    is_ngram: bool = False
    claims: Claim = _never
    speculators_type: str | None = None
    is_in_target: bool = False
    corrections: tuple[str, ...] = ()
    allows_trees: bool = True
    replays: bool = False
    adds_small_trees: bool = False

    def load(self) -> Any:
        """Return the object that `path` names; raise PluginError if it cannot be imported."""
        try:
            return import_object(self.path)
        except PluginError as error:
            fix = "install a version of its package that fits, or uninstall it"
            raise PluginError(f"draft method {self.name!r}: {error}; {fix}") from error


METHODS: dict[str, DraftMethod] = {}
"""Draft methods by name, from the general to the special."""

_PATHS: Registry[Any] = Registry("draft method")


def register_draft(method: DraftMethod) -> None:
    """Add a method; the newest is asked first which checkpoints it takes.

    Raises PluginError: another one has its name.
    """
    _PATHS.add(method.name, method.path)
    METHODS[method.name] = method


def draft_models() -> list[DraftMethod]:
    """Return the methods with a checkpoint, in the order they are asked which one they take."""
    return [method for method in reversed(METHODS.values()) if not method.is_ngram]


def detect_method(config: Mapping[str, Any]) -> DraftMethod | None:
    """Return the method of a draft by its `config.json` alone; None if no method claims it.

    The tensors decide when the draft is opened: `models.drafts.checkpoint`.
    """
    if "speculators_model_type" in config:
        return method_of_speculators(config["speculators_model_type"])
    return next((method for method in draft_models() if method.claims(config)), None)


def method_of_speculators(kind: object) -> DraftMethod | None:
    """Return the method of a `speculators_model_type`; None if it is not supported."""
    methods = (method for method in draft_models() if method.speculators_type is not None)
    return next((method for method in methods if method.speculators_type == kind), None)


def draft_in_target(config: Mapping[str, Any]) -> str | None:
    """Return the method of the draft that a target's checkpoint holds; None without one."""
    methods = (method for method in draft_models() if method.is_in_target)
    return next((method.name for method in methods if method.claims(config)), None)


def _kind(config: Mapping[str, Any]) -> str:
    """Return what a config calls itself, in small letters."""
    return f"{config.get('model_type')} {config.get('architectures')}".lower()


def _flat(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a config with the one that early conversions for vLLM wrap into it."""
    wrapped = config.get("model")
    return {**config, **wrapped} if isinstance(wrapped, Mapping) else config


def _claims_standalone(config: Mapping[str, Any]) -> bool:
    return "ForCausalLM" in str(config.get("architectures"))


def _claims_eagle(config: Mapping[str, Any]) -> bool:
    # Official heads call themselves LlamaForCausalLM, and no complete model has one layer.
    return "eagle" in _kind(config) or _flat(config).get("num_hidden_layers") == 1


def _claims_eagle3(config: Mapping[str, Any]) -> bool:
    # Official heads have a vocabulary of their own or an `eagle_config`.
    keys = ("draft_vocab_size", "truncated_vocab_size", "eagle_config")
    return "eagle3" in _kind(config) or any(_flat(config).get(key) for key in keys)


def _claims_medusa(config: Mapping[str, Any]) -> bool:
    return "medusa" in _kind(config) or "medusa_num_heads" in config


def _claims_mtp(config: Mapping[str, Any]) -> bool:
    return config.get("model_type") == "mimo" and bool(config.get(MTP_KEY))


_ROPE_THETA = "speculative_draft_rope_theta"

for _method in (
    DraftMethod(
        "STANDALONE",
        "serve_spec.models.drafts.standalone:StandaloneFamily",
        claims=_claims_standalone,
    ),
    DraftMethod(
        "EAGLE",
        "serve_spec.models.drafts.eagle:EagleFamily",
        claims=_claims_eagle,
        speculators_type="eagle",
        corrections=(_ROPE_THETA,),
        adds_small_trees=True,
    ),
    DraftMethod(
        "EAGLE3",
        "serve_spec.models.drafts.eagle3:Eagle3Family",
        claims=_claims_eagle3,
        speculators_type="eagle3",
        corrections=(
            _ROPE_THETA,
            "speculative_draft_aux_layer_ids",
            "speculative_draft_aux_layers_mean",
            "speculative_draft_norm_before_residual",
            "speculative_draft_norm_output",
        ),
        adds_small_trees=True,
    ),
    DraftMethod("MEDUSA", "serve_spec.models.drafts.medusa:MedusaFamily", claims=_claims_medusa),
    DraftMethod(
        "MTP",
        "serve_spec.models.drafts.mtp:MtpFamily",
        claims=_claims_mtp,
        is_in_target=True,
    ),
    DraftMethod("NGRAM", "serve_spec.worker.drafters.ngram:build_ngram", is_ngram=True),
    DraftMethod(
        "REPLAY",
        "serve_spec.worker.drafters.replay:build_replay",
        is_ngram=True,
        allows_trees=False,
        replays=True,
    ),
):
    register_draft(_method)
