"""What engine, worker and drafts know of a target model, and what a family of targets provides."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from serve_spec.core.caches import CacheSpec, PagedCache
from serve_spec.core.context import ForwardContext
from serve_spec.core.draft import MAX_TREE_TOKENS
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer
from serve_spec.layers.vocabulary import Embedding
from serve_spec.parallel.group import SINGLE, TensorParallel

Config: TypeAlias = Mapping[str, Any]
"""A parsed `config.json` of a text model."""

Shapes: TypeAlias = Mapping[str, tuple[int, ...]]
"""Shapes of a checkpoint's tensors, by name."""


@dataclass(frozen=True)
class TargetSpec:
    """What engine, worker and drafts read of a target's `config.json`.

    `num_ids`: ids from here on pad the vocabulary and are never sampled; None: all are real.
    `max_position_embeddings`: the longest text, as scaled by the rope. `eos_token_ids`: of
    `config.json` and `generation_config.json`. `caches`: what each layer keeps of a token, on one
    rank. `num_experts`: of a layer, of which `num_chosen_experts` compute a token; 0: dense layers.
    """

    vocab_size: int
    num_ids: int | None
    hidden_size: int
    num_layers: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    caches: tuple[CacheSpec, ...]
    num_experts: int = 0
    num_chosen_experts: int = 0

    @property
    def window(self) -> int | None:
        """Return the smallest number of tokens that a layer sees; None if all see everything."""
        windows = (cache.window for cache in self.caches if isinstance(cache, PagedCache))
        return min((window for window in windows if window is not None), default=None)

    @property
    def takes_trees(self) -> bool:
        """Return whether drafted trees of any size can be verified.

        A window must not cut one, and a recurrent state has one successor.
        """
        is_paged = all(isinstance(cache, PagedCache) for cache in self.caches)
        return is_paged and (self.window is None or self.window >= MAX_TREE_TOKENS)


@dataclass(frozen=True)
class FeatureCapture:
    """Hidden states of the target that a draft reads.

    `layer_ids`: the inputs of these layers (residual stream before any norm), concatenated; layer n
    of n is the stream before the final norm. None: the state after it (EAGLE-1, Medusa).
    """

    layer_ids: tuple[int, ...] | None

    def width(self, hidden_size: int) -> int:
        """Return the width of a feature, F."""
        return hidden_size * (1 if self.layer_ids is None else len(self.layer_ids))


class TargetOutput(NamedTuple):
    """`hidden` [T, H] after the final norm; `streams` [T, H] that were to be captured, if any."""

    hidden: Tensor
    streams: tuple[Tensor, ...] = ()

    @property
    def features(self) -> Tensor | None:
        """Return the captured streams side by side, [T, F]; None if there are none."""
        if len(self.streams) > 1:
            return torch.cat(self.streams, dim=1)
        return self.streams[0] if self.streams else None


class Target(Layer):
    """A target model, on one rank. Drafts may share its embedding and its head.

    `max_model_len`: the longest text that its positions allow. `dtype`: compute dtype. `path`: of
    its checkpoint. `cache_scales`: of keys and values in FP8, by layer, as its checkpoint has them.
    """

    spec: TargetSpec
    parallel: TensorParallel
    max_model_len: int
    dtype: torch.dtype
    path: Path | None = None
    cache_scales: Mapping[int, tuple[float, float]] = MappingProxyType({})
    embed_tokens: Embedding
    lm_head: Linear

    def forward(
        self, token_ids: Tensor, ctx: ForwardContext, capture: FeatureCapture | None = None
    ) -> TargetOutput:
        """Return hidden states of `token_ids` [T] (int64) at the positions of `ctx`."""
        raise NotImplementedError

    def logits(self, hidden: Tensor) -> Tensor:
        """Return logits float32 [R, V] of hidden [R, H]; -inf for ids that pad the vocabulary."""
        raise NotImplementedError

    def tensors(self) -> Mapping[str, Destination]:
        """Return where each tensor of its checkpoint goes, by `TargetFamily.renames`."""
        raise NotImplementedError


class DraftModel(Protocol):
    """What engine and worker read of any draft model; the rest is between it and its drafter.

    `drafter`: the kind of its `Drafter`, a name in `worker.drafters.base.DRAFTERS` or the place of
    a class, `package.module:Class`. `capture`: the hidden states that the target's forward records
    for it; None: none. `feature_dim`: width of such a feature, 0 without. `dtype`: compute dtype.
    `target_ids`: the target's id of each draft id, int64 [Vd]; None if both are the same.
    """

    drafter: str
    capture: FeatureCapture | None
    feature_dim: int
    dtype: torch.dtype
    target_ids: Tensor | None

    @property
    def caches(self) -> tuple[CacheSpec, ...]:
        """What each layer keeps of a token, on this rank; empty without draft KV."""

    @property
    def max_steps(self) -> int | None:
        """The deepest chain or tree that it can draft; None: no limit."""


class TargetFamily(Protocol):
    """How the checkpoints of some architectures become targets: the public seam for a model.

    `defaults`: values that the config class of a `model_type` has in transformers; configs of
    multimodal checkpoints and draft heads omit such keys.
    """

    defaults: Mapping[str, Config]

    def spec(self, config: Config, ranks: int = 1) -> TargetSpec:
        """Return what a config says, for one of `ranks` ranks.

        Raises CheckpointError: it is wrong, something in it is not computed, or the ranks cannot
        share the model.
        """

    def renames(self, stored: Iterable[str]) -> Mapping[str, str | None]:
        """Return each stored tensor's name in `Target.tensors`; None for one that is left out."""

    def check(self, config: Config, shapes: Shapes, directory: Path) -> None:
        """Raise CheckpointError if a config claims more than its tensors hold.

        Called before memory is allocated. shapes: by the names of `renames`.
        """

    def build(
        self,
        config: Config,
        max_model_len: int | None = None,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> Target:
        """Return the target with uninitialised weights, of torch's default dtype and device.

        max_model_len: the longest text; None: the config's. formats: of its matrices, by the names
        of `Target.tensors`. Raises as `spec`.
        """
