"""What every trained draft head offers a drafter, and how one is loaded."""

from __future__ import annotations

from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import Tensor

from serve_spec.config.algorithms import ALGORITHMS
from serve_spec.core.context import ForwardContext
from serve_spec.layers.int4_weight import Int4Weight, int4_works
from serve_spec.layers.int8_weight import Int8Weight, int8_works
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Layer
from serve_spec.log import get_logger
from serve_spec.models.draft_checkpoint import DraftOptions
from serve_spec.models.llama import FeatureCapture, Llama
from serve_spec.models.shape import ModelShape

_log = get_logger(__name__)

DraftWeights = Literal["plain", "fp8", "int8", "int4"]
"""What a draft reads its matrices in."""

__all__ = [
    "DraftHead",
    "DraftOptions",
    "DraftWeights",
    "FeatureCapture",
    "load_draft",
]


class DraftHead(Protocol):
    """A small autoregressive model over (next token, feature) pairs.

    Entry j pairs token j+1 with the feature of position j, sits at position j of its own KV pool,
    and predicts token j+2. Features of computed positions come from the target, through `encode`;
    while drafting ahead, the hidden state `forward` returned takes their place as it is.

    A whole model (`standalone`) reads no features. Its entry j sits where token j+1 does, and so
    there is an entry -1, of the first token. Medusa's heads read a feature and nothing else: what
    they draft does not depend on the drafts before it, and their pool holds nothing.
    """

    @property
    def shift(self) -> int:
        """Where entry j sits, less j: 0, or 1 for whole models."""
        ...

    @property
    def capture(self) -> FeatureCapture | None:
        """What the target's forward must record, if anything."""
        ...

    @property
    def feature_dim(self) -> int:
        """Numbers per token of a target feature, F; 0 without features."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """What it computes in: the dtype of its hidden states and of its KV pool."""
        ...

    @property
    def hidden_size(self) -> int:
        """Width of the recurrent hidden state, H."""
        ...

    @property
    def shape(self) -> ModelShape:
        """Layers, heads and head size: what its KV pool and attention backend are made for."""
        ...

    @property
    def target_ids(self) -> Tensor | None:
        """int64 [Vd]: the target's id of each draft id; None when the vocabularies are the same."""
        ...

    @property
    def num_ids(self) -> int | None:
        """Draft ids from here on are padding: their logits are -inf. None when all are real."""
        ...

    def encode(self, features: Tensor) -> Tensor:
        """Target features [T, F] -> hidden [T, H]."""
        ...

    @property
    def ends_early(self) -> bool:
        """Whether `forward` may be asked for some rows only: of one layer, or none, it is made."""
        ...

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Target ids [T] and hidden [T, H], at the positions of `ctx` -> next hidden [R, H].

        R: the rows asked for, which only of a head that `ends_early` may be fewer than all.
        """
        ...

    @property
    def max_steps(self) -> int | None:
        """Most drafts it can make of one feature; None: as many as are wanted."""
        ...

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Hidden [R, H] as `forward` returned it -> float32 [R, Vd], of the draft number `step`."""
        ...


def load_draft(
    path: Path | str,
    target: Llama,
    algorithm: str,
    options: DraftOptions | None = None,
    dtype: torch.dtype | None = None,
    *,
    weights: DraftWeights = "plain",
) -> DraftHead:
    """Loads the draft head in `path` for `target`, on its device and in `dtype` (None: its own).

    weights: what its matrices are read in. fp8: products of few rows; int8, int4: all, and only
    these are kept.

    `algorithm` is one of `ALGORITHMS`; the files decide what they are, and a disagreement is
    refused.

    Raises:
        ValueError: no such algorithm, or no products with such integers here.
        CheckpointError: what cannot be used, and the way out.
    """
    models = {name: known for name, known in ALGORITHMS.items() if not known.from_text}
    if algorithm not in models:
        raise ValueError(
            f"speculative_algorithm={algorithm!r} has no draft head here; use one of "
            f"{sorted(models)}"
        )
    dtype = dtype or target.embed_tokens.weight.dtype
    head: DraftHead = models[algorithm].load()(path, target, options or DraftOptions(), dtype)
    own = own_matrices(head, target)
    if weights == "fp8":
        for matrix in own:
            matrix.add_eight_bit()
    elif weights != "plain":
        _keep_integers(weights, own, target.embed_tokens.weight.device, path)
    return head


def _keep_integers(
    weights: Literal["int8", "int4"], matrices: list[Linear], device: torch.device, path: Path | str
) -> None:
    if not (int4_works(device) if weights == "int4" else int8_works()):
        raise ValueError(
            f"speculative_draft_model_quantization={weights!r}: torch {torch.__version__} has no "
            f"such products for {device}; use 'none'"
        )
    integers = Int4Weight if weights == "int4" else Int8Weight
    num_bytes = [matrix.turn_into(integers) for matrix in matrices]
    num_plain = num_bytes.count(0)
    _log.info(
        "%s: %d matrices in %s, %.1f MiB",
        path, len(matrices) - num_plain, weights, sum(num_bytes) / 2**20,
    )  # fmt: skip
    if num_plain:
        _log.warning(
            "%s: %d of %d draft matrices stay as they are: %s products can not take their shape",
            path, num_plain, len(matrices), weights,
        )  # fmt: skip
    if device.type == "cuda":
        torch.cuda.empty_cache()  # what was freed is room for pages


def own_matrices(head: DraftHead, target: Llama) -> list[Linear]:
    """The matrices of a draft, but for those it shares with the target."""
    assert isinstance(head, Layer), "every head is made of layers"
    shared = set(target.modules())
    return [m for m in head.modules() if isinstance(m, Linear) and m not in shared]
