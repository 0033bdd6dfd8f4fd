"""What every draft method is made of: a family that reads its checkpoints, and a head that drafts.

`DraftFamily` and `DraftHead` are public: a package adds a method by a subclass of each and one call
of `serve_spec.config.drafts.register_draft`.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, NamedTuple

import torch
from torch import Tensor

from serve_spec.config import SpeculativeConfig
from serve_spec.config.drafts import METHODS, draft_models
from serve_spec.core.caches import CacheSpec
from serve_spec.core.context import ForwardContext
from serve_spec.core.errors import CheckpointError, PluginError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.module import Layer, finish_loading, tensor_defaults
from serve_spec.models.dummy import dummy_checkpoint
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.models.weights import Checkpoint
from serve_spec.parallel.group import SINGLE, TensorParallel

Config = Mapping[str, Any]
"""A `config.json`, with all keys at the top."""

Shapes = Mapping[str, tuple[int, ...]]
"""Shapes of a checkpoint's tensors, by name."""

Facts = dict[str, str]
"""Lines of `serve-spec check-config --draft`, by their labels."""


class Draft(Layer):
    """A draft model with the tensors of a checkpoint (`DraftModel`).

    hidden_size: width of its hidden states, H. caches: what each of its layers keeps of a token, on
    this rank. capture: the hidden states that the target's forward records (None: none).
    feature_dim: width of a target feature, F (0 without). num_ids: real draft ids, logits of others
    are -inf (None: all are real). dtype: of hidden states and of the pool.
    """

    drafter = "autoregressive"
    """See `DraftModel`."""
    target_ids: Tensor | None = None
    """The target's id of each draft id, int64 [Vd]; None if both are the same."""
    max_steps: int | None = None
    """The most drafts it can make of one feature; None: no limit."""
    read_elsewhere: tuple[str, ...] = ()
    """Tensors of its checkpoint that `tensors` does not name."""

    def __init__(
        self,
        hidden_size: int,
        caches: Sequence[CacheSpec],
        capture: FeatureCapture | None,
        feature_dim: int,
        num_ids: int | None = None,
    ) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.caches = tuple(caches)
        self.capture = capture
        self.feature_dim = feature_dim
        self.num_ids = num_ids
        self.dtype = torch.get_default_dtype()

    @property
    def sizes(self) -> str:
        """Return its sizes in a few words, for the log."""
        return f"{len(self.caches)} layers, hidden {self.hidden_size}"

    def load(self, checkpoint: Checkpoint) -> None:
        """Fill all tensors from a checkpoint; raise CheckpointError if they do not fit."""
        checkpoint.load_into(self.tensors(), self.read_elsewhere)
        finish_loading(self)


class DraftHead(Draft):
    """A small autoregressive model over (next token, feature) pairs.

    Draft KV entry j pairs token j+1 with the feature of position j, is at position j of the draft's
    KV pool, and predicts token j+2. Features of computed positions come from the target, through
    `encode`; further drafts read the hidden state that `forward` returned.

    A model of its own (`standalone`) reads no features. Its entry j is at the position of token
    j+1, so entry -1 is that of the first token. Medusa heads read only a feature: their drafts do
    not depend on each other, and their pool is empty.
    """

    shift = 0
    """The position of entry j minus j: 0, or 1 for models of their own."""

    @property
    def ends_early(self) -> bool:
        """Return whether `forward` may compute some tokens only: it has at most one layer."""
        return len(self.caches) <= 1

    def encode(self, features: Tensor) -> Tensor:
        """Return hidden [T, H] of target features [T, F]: by default the features themselves."""
        return features.to(self.dtype)

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return next hidden [R, H] of target ids [T] and hidden [T, H], at positions of `ctx`.

        R: the queries of `ctx`, fewer than T only for a head that `ends_early`.
        """
        raise NotImplementedError

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits float32 [R, Vd] of draft `step` from hidden [R, H]."""
        raise NotImplementedError


@dataclass(frozen=True)
class DraftOptions:
    """Settings that override the checkpoint's config; None: as in the checkpoint.

    `rope_theta`: some published heads were trained with 10000 although their config names another.
    `aux_layer_ids`: layers of the target whose inputs the head reads (EAGLE-3). `aux_layers_mean`:
    whether the config's own ids mean a layer's input or its output. `norm_before_residual`,
    `norm_output`: two switches of EAGLE-3 that configs leave out. `load_format`: as in
    `model.load_format`. `dtype`: of computation; None: the target's. `formats`: of its own
    matrices, by their names in the file. `ranks`: 1 gives every rank the whole draft, the target's
    number of ranks shares it; None: shared if its sizes allow it.
    """

    rope_theta: float | None = None
    aux_layer_ids: tuple[int, ...] | None = None
    aux_layers_mean: Literal["input", "output"] | None = None
    norm_before_residual: bool | None = None
    norm_output: bool | None = None
    load_format: str = "auto"
    dtype: torch.dtype | None = None
    formats: Formats = PLAIN
    ranks: int | None = None

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
            ranks=config.speculative_draft_tp_size,
        )

    def defaults(self, target: Target) -> AbstractContextManager[None]:
        """Give layers created inside the draft's dtype and the target's device."""
        weight = target.embed_tokens.weight
        return tensor_defaults(self.dtype or weight.dtype, weight.device)

    def split_over(self, target: Target, can_split: bool = True) -> TensorParallel:
        """Return the ranks that share the draft's own matrices.

        can_split: whether its sizes allow the target's ranks. Raises CheckpointError: they do not,
        and the options want it.
        """
        theirs = target.parallel
        if self.ranks == 1 or theirs.size == 1:
            return SINGLE
        if not can_split and self.ranks is not None:
            why = f"this draft cannot be split over {theirs.size} ranks"
            fix = "use 1 (the whole draft on every rank), or leave it out"
            raise CheckpointError(f"speculative_draft_tp_size={self.ranks}: {why}; {fix}")
        return theirs if can_split else SINGLE


class Evidence(NamedTuple):
    """The tensors that tell a checkpoint's family, and which property of them does."""

    names: Sequence[str]
    reason: str = ""


@dataclass(frozen=True)
class DraftFile:
    """A draft's checkpoint: its config, with all keys at the top, and its tensors.

    Tensors have the family's names: `layers.0.`, `fc`, `blocks.0.layers.0`. family: the name of its
    `DraftFamily`. evidence: what tells the family, by the stored names. exporter: who wrote it.
    checkpoint: None with dummy weights, whose tensors follow from the config. formats: of its
    matrices, if its config asks for some.
    """

    path: Path
    config: Config
    family: str
    evidence: str = ""
    exporter: str = ""
    checkpoint: Checkpoint | None = None
    formats: Formats | None = None

    @property
    def shapes(self) -> Shapes:
        """Return the shapes of its tensors; empty with dummy weights."""
        return {} if self.checkpoint is None else self.checkpoint.shapes

    @property
    def is_dummy(self) -> bool:
        """Return whether its weights are random."""
        return self.checkpoint is None

    @property
    def by_speculators(self) -> bool:
        """Return whether the library `speculators` wrote it, whose tensors mean something else."""
        return bool(self.config.get("speculators_model_type"))

    def stores(self, name: str, *, dummy: bool = False) -> bool:
        """Return whether a tensor is in the files; with dummy weights, return `dummy`."""
        return dummy if self.checkpoint is None else name in self.checkpoint

    def read(self, name: str) -> Tensor:
        """Return a tensor that is in the files, on the CPU, in its stored dtype."""
        assert self.checkpoint is not None, "dummy weights are in no file"
        return self.checkpoint.read(name)

    def setting(self, key: str) -> Any:
        """Return a key of the config, at the top or inside `eagle_config`; None if absent."""
        value = self.config.get(key)
        return self.nested.get(key) if value is None else value

    @property
    def nested(self) -> Config:
        """Return the config's `eagle_config`; empty if absent."""
        return self.config.get("eagle_config") or {}

    def refusal(
        self, problem: str, fix: str = "use a head trained for this target"
    ) -> CheckpointError:
        """Return an error that names the draft, what is wrong and what to do."""
        return CheckpointError(f"{self.path}: {problem}; {fix}")


class DraftFamily(ABC):
    """A draft method: how its checkpoints are recognised, read, built and described.

    name: the `speculative_algorithm`. looks_like: its tensors in a few words, for errors.
    renames: (pattern, replacement) pairs, applied one after another to stored names.
    weight_files: names of its weight files beside the usual `model.safetensors` and its like.
    exporters: who writes its checkpoints, by a part of a stored name. The first that occurs tells;
    every name contains "".
    """

    looks_like: ClassVar[str] = ""
    renames: ClassVar[Sequence[tuple[str, str]]] = ()
    weight_files: ClassVar[Sequence[str]] = ()
    exporters: ClassVar[Mapping[str, str]] = {"": "Hugging Face"}

    def __init__(self, name: str) -> None:
        self.name = name

    def current_names(self, stored: Iterable[str]) -> dict[str, str | None]:
        """Return the family's name of each stored tensor; None for one that it leaves out."""
        names: dict[str, str | None] = {}
        for old in stored:
            new = old
            for pattern, replacement in self.renames:
                new = re.sub(pattern, replacement, new)
            names[old] = new
        return names

    @abstractmethod
    def detect(self, config: Config, shapes: Shapes) -> Evidence | None:
        """Return what tells that tensors are of this family; None if they are of another.

        shapes: by the family's names.
        Raises CheckpointError: they are, in a layout that is not supported.
        """

    def exporter(self, stored: Iterable[str]) -> str:
        """Return who writes tensors under these stored names, for the report."""
        names = "\n".join(stored)
        return next((who for part, who in self.exporters.items() if part in names), "unknown")

    @abstractmethod
    def build(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        """Return the head without weights, on the target's device, which may be meta.

        Reads no weight but maps of ids.
        Raises CheckpointError: config and tensors do not fit each other or the target.
        """

    def load(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        """Return the head with its weights, random ones of a dummy file; raise as `build`."""
        head = self.build(file, target, options)
        head.load(file.checkpoint or dummy_checkpoint(file.path, head.tensors()))
        return head

    def check(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        """Return the head without weights; raise CheckpointError as `load` would.

        Reads the files' headers alone. target: on the meta device.
        """
        head = self.build(file, target, options)
        if file.checkpoint is not None:
            file.checkpoint.check(head.tensors(), head.read_elsewhere)
        return head

    @abstractmethod
    def facts(self, file: DraftFile, target: Target | None, options: DraftOptions) -> Facts:
        """Describe a draft, for `target` if given; raise CheckpointError as `build`."""


def load_family(name: str) -> DraftFamily:
    """Return the family of a registered draft model, imported now.

    Raises ValueError: `name` is no draft model. PluginError: its class lacks something.
    """
    models = [method.name for method in draft_models()]
    if name not in models:
        raise ValueError(
            f"speculative_algorithm={name!r}: has no draft model; use one of {sorted(models)}"
        )
    method = METHODS[name]
    found, where = method.load(), f"draft method {name!r}: {method.path}"
    if not (isinstance(found, type) and issubclass(found, DraftFamily)):
        fix = "derive a class from serve_spec.models.drafts.base.DraftFamily"
        raise PluginError(f"{where} is no draft family; {fix}")
    if missing := sorted(found.__abstractmethods__):
        raise PluginError(f"{where} lacks {', '.join(missing)}; define it as in DraftFamily")
    family: DraftFamily = found(name)
    return family
