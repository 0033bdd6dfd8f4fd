"""Medusa heads: head h drafts the token h + 1 places after the next from one hidden state.

Each head is a few residual blocks x + SiLU(W·x + b) and an output matrix. There is no draft
KV. The feature is the target's hidden state after its final norm (arXiv 2401.10774).
Source: github.com/FasterDecoding/Medusa, `medusa_model.py`; vLLM's naming and `token_map`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import (
    Destination,
    Layer,
    finish_loading,
    named_parts,
    tensor_defaults,
)
from serve_spec.layers.vocabulary import vocab_head
from serve_spec.log import get_logger
from serve_spec.models.draft import DraftHead
from serve_spec.models.draft_checkpoint import DraftFile, DraftOptions, open_draft
from serve_spec.models.draft_shape import TOKEN_MAP, read_token_map
from serve_spec.models.interfaces import FeatureCapture, Target

_log = get_logger(__name__)


@dataclass(frozen=True)
class MedusaShape:
    """Shape of the heads, from the tensors alone.

    `num_heads` heads of `num_blocks` residual blocks. `outputs`: the stored output matrices, one
    for each head or one that all share, of `num_rows` rows; empty (None rows): the target's.
    """

    num_heads: int
    num_blocks: int
    hidden_size: int
    bias: bool
    outputs: tuple[str, ...]
    num_rows: int | None


class ResidualBlocks(Layer):
    """x + SiLU(W·x + b), several times: [T, H] -> [T, H]."""

    def __init__(self, shape: MedusaShape, formats: Formats = PLAIN) -> None:
        super().__init__()
        hidden = shape.hidden_size
        names = [f"layers.{index}" for index in range(shape.num_blocks)]
        self.blocks = nn.ModuleList(
            Linear(hidden, {name: hidden}, bias=shape.bias, formats=formats) for name in names
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return all blocks applied to x [T, H]."""
        for block in self.blocks:
            x = x + F.silu(block(x))
        return x

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return destinations `layers.<block>.{weight,bias}`."""
        return named_parts(*(("", block) for block in self.blocks))


class Medusa(DraftHead):
    """All Medusa heads. Uninitialised: `load_medusa` fills it."""

    drafter = "heads"
    read_elsewhere = (TOKEN_MAP,)

    def __init__(
        self,
        shape: MedusaShape,
        target: Target,
        target_ids: Tensor | None,
        formats: Formats = PLAIN,
    ) -> None:
        no_layers = replace(target.shape, num_layers=0, windows=(), num_ids=None)
        super().__init__(no_layers, FeatureCapture(layer_ids=None), shape.hidden_size)
        self.heads_shape = shape
        self.max_steps = shape.num_heads
        self.target_ids = target_ids
        self.heads = nn.ModuleList(
            ResidualBlocks(shape, formats.under(f"blocks.{index}."))
            for index in range(shape.num_heads)
        )
        self.lm_heads = nn.ModuleList(_output_heads(shape, target, formats))
        self.head_dtype = self.dtype if shape.outputs else target.embed_tokens.weight.dtype
        num_rows = shape.num_rows or target.spec.vocab_size
        # A matrix for the whole vocabulary has rows without a draft id.
        has_idle_rows = target_ids is not None and num_rows > len(target_ids)
        self._rows = target_ids if has_idle_rows else None
        self._is_padding: Tensor | None = None
        if (num_ids := target.spec.num_ids) is not None:
            ids = torch.arange(target.spec.vocab_size) if target_ids is None else target_ids
            self._is_padding = ids >= num_ids

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the features of the queries [R, H]: no head reads tokens."""
        return ctx.select_queries(hidden)

    __call__ = forward

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits float32 [R, V or Vd] of head `step` from target features [R, H]."""
        head, lm_head = self.heads[step], self.lm_heads[step]
        logits: Tensor = lm_head(head(hidden.to(self.dtype)).to(self.head_dtype))
        if self._rows is not None:
            logits = logits.index_select(1, self._rows)
        if self._is_padding is not None:
            logits.masked_fill_(self._is_padding, float("-inf"))
        return logits

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by vLLM's names, without those shared with the target."""
        own = self.lm_heads[: len(self.heads_shape.outputs)]
        return named_parts(
            *((f"blocks.{index}.", head) for index, head in enumerate(self.heads)),
            *(("", lm_head) for lm_head in own),
        )


def load_medusa(
    path: Path | str,
    target: Target,
    options: DraftOptions,
    dtype: torch.dtype,
    formats: Formats = PLAIN,
) -> Medusa:
    """Load the heads in `path` for `target` in `dtype`, or raise CheckpointError."""
    file = open_draft(path, "MEDUSA", options.load_format, target.spec)
    medusa = make_medusa(file, target, dtype, formats)
    file.checkpoint.load_into(medusa.tensors(), medusa.read_elsewhere)
    finish_loading(medusa)
    _log.info("Medusa heads %s: %s", file.path, medusa.heads_shape)
    return medusa


def make_medusa(
    file: DraftFile, target: Target, dtype: torch.dtype, formats: Formats = PLAIN
) -> Medusa:
    """Return the heads without weights, on the target's device, or raise CheckpointError."""
    shape = medusa_shape(file)
    _check_fit(file, shape, target)
    vocab = target.spec.vocab_size
    target_ids = read_token_map(file, shape.num_rows or vocab, vocab)
    device = target.embed_tokens.weight.device
    with tensor_defaults(dtype, device):
        ids = None if target_ids is None else target_ids.to(device)
        return Medusa(shape, target, ids, formats)


def medusa_shape(file: DraftFile) -> MedusaShape:
    """Count heads and blocks by the tensors; published configs miscount them."""
    shapes = file.checkpoint.shapes
    places = [
        (int(match[1]), int(match[2]))
        for name in shapes
        if (match := re.match(r"blocks\.(\d+)\.layers\.(\d+)\.", name))
    ]
    num_heads = 1 + max(head for head, _ in places)
    outputs = _stored_outputs(file, num_heads)
    return MedusaShape(
        num_heads=num_heads,
        num_blocks=1 + max(block for _, block in places),
        hidden_size=shapes[f"blocks.{places[0][0]}.layers.{places[0][1]}.weight"][-1],
        bias="blocks.0.layers.0.bias" in shapes,
        outputs=outputs,
        num_rows=shapes[f"{outputs[0]}.weight"][0] if outputs else None,
    )


def _stored_outputs(file: DraftFile, num_heads: int) -> tuple[str, ...]:
    if "lm_heads.0.weight" in file.checkpoint:
        # vLLM may give a shared matrix the name of the first one.
        is_shared = file.config.get("original_lm_head")
        if is_shared and "lm_heads.1.weight" not in file.checkpoint:
            return ("lm_heads.0",)
        return tuple(f"lm_heads.{index}" for index in range(num_heads))
    return ("lm_head",) if "lm_head.weight" in file.checkpoint else ()


def _output_heads(shape: MedusaShape, target: Target, formats: Formats) -> list[Linear]:
    width, rows = shape.hidden_size, shape.num_rows or 0
    stored = [vocab_head(width, rows, target.parallel, name, formats) for name in shape.outputs]
    stored = stored or [target.lm_head]
    for lm_head in stored:
        lm_head.out_dtype = torch.float32
    return stored if len(stored) > 1 else stored * shape.num_heads


def _check_fit(file: DraftFile, shape: MedusaShape, target: Target) -> None:
    fix, theirs = "use heads trained for this target", target.spec
    if shape.hidden_size != theirs.hidden_size:
        why = f"the heads read hidden states of width {shape.hidden_size}, but the target's"
        raise file.refusal(f"{why} hidden_size is {theirs.hidden_size}", fix)
    if TOKEN_MAP not in file.checkpoint and shape.num_rows not in (None, theirs.vocab_size):
        why = f"the heads draft {shape.num_rows} tokens, the target has {theirs.vocab_size}"
        raise file.refusal(f"{why}, and there is no {TOKEN_MAP}", fix)
