"""Medusa heads: head h drafts the token h + 1 places after the next from one hidden state.

Each head is a few residual blocks x + SiLU(W·x + b) and an output matrix. There is no draft
KV. The feature is the target's hidden state after its final norm (arXiv 2401.10774).
Source: github.com/FasterDecoding/Medusa, `medusa_model.py`; vLLM's naming and `token_map`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from serve_spec.core.context import ForwardContext
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer, named_parts
from serve_spec.layers.vocabulary import vocab_head
from serve_spec.models.config import positive_integer
from serve_spec.models.drafts.base import (
    Config,
    Draft,
    DraftFamily,
    DraftFile,
    DraftHead,
    DraftOptions,
    Evidence,
    Facts,
    Shapes,
)
from serve_spec.models.drafts.heads import LM_HEAD, PREFIX, QUERY, check_target_ids, yes_no
from serve_spec.models.interfaces import FeatureCapture, Target

_BLOCK = re.compile(r"^blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)$")
_TOKEN_MAP = "token_map"


class MedusaFamily(DraftFamily):
    """Medusa."""

    looks_like = "Medusa heads (blocks.*.layers.*)"
    # In the authors' naming `{head}.{block}.linear` and, last in each head, a plain matrix.
    renames = (
        PREFIX,
        (r"^medusa_heads?\.", ""),
        (r"^(\d+)\.(\d+)\.linear\.", r"blocks.\1.layers.\2."),
        (r"^(\d+)\.\d+\.weight$", r"lm_heads.\1.weight"),
    )
    weight_files = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
    exporters: ClassVar[Mapping[str, str]] = {"blocks.": "vLLM", "": "official"}

    def detect(self, config: Config, shapes: Shapes) -> Evidence | None:
        blocks = _block_weights(shapes)
        if blocks and QUERY in shapes:
            raise CheckpointError(
                "it holds a complete model beside its Medusa heads, which belong to that model and "
                "no other; serve it as the target and keep the heads alone in the draft's folder"
            )
        return Evidence(blocks[:1], " and its like") if blocks else None

    def build(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        shape = medusa_shape(file, target)
        _check_fit(file, shape, target)
        vocab = target.spec.vocab_size
        ids = _read_token_map(file, shape.num_rows or vocab, vocab)
        device = target.embed_tokens.weight.device
        with options.defaults(target):
            ids = None if ids is None else ids.to(device)
            return Medusa(shape, target, ids, options)

    def facts(self, file: DraftFile, target: Target | None, options: DraftOptions) -> Facts:
        shape = medusa_shape(file, target)
        output = "one matrix that all share" if len(shape.outputs) == 1 else "one matrix each"
        if not shape.outputs:
            output = "the target's"
        mapped = file.shapes.get(_TOKEN_MAP)
        num_blocks = f"{shape.num_blocks} residual block(s)"
        return {
            "heads": f"{shape.num_heads} of {num_blocks}, counted by tensors",
            "hidden size": str(shape.hidden_size),
            "biases": yes_no(shape.bias),
            "output": output,
            "vocabulary": "the target's" if mapped is None else f"{mapped[0]} ids by token_map",
            "target layers": "the state after the final norm",
        }


@dataclass(frozen=True)
class MedusaShape:
    """Shape of the heads, from the tensors alone unless they are random.

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
    """All Medusa heads. Uninitialised: `load` fills it."""

    drafter = "heads"
    read_elsewhere = (_TOKEN_MAP,)

    def __init__(
        self,
        shape: MedusaShape,
        target: Target,
        target_ids: Tensor | None,
        options: DraftOptions,
    ) -> None:
        hidden, formats = shape.hidden_size, options.formats
        super().__init__(hidden, (), FeatureCapture(layer_ids=None), hidden)
        self.heads_shape = shape
        self.max_steps = shape.num_heads
        self.target_ids = target_ids
        self.heads = nn.ModuleList(
            ResidualBlocks(shape, formats.under(f"blocks.{index}."))
            for index in range(shape.num_heads)
        )
        self.lm_heads = nn.ModuleList(_output_heads(shape, target, options))
        self.head_dtype = self.dtype if shape.outputs else target.embed_tokens.weight.dtype
        num_rows = shape.num_rows or target.spec.vocab_size
        # A matrix for all of the vocabulary has rows without a draft id.
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


def medusa_shape(file: DraftFile, target: Target | None) -> MedusaShape:
    """Count heads and blocks by the tensors, because published configs miscount them.

    target: of dummy weights, whose heads follow from the config.
    """
    if file.is_dummy:
        assert target is not None, "dummy heads are as wide as their target"
        return _configured_shape(file.config, target)
    shapes = file.shapes
    places = [(int(m[1]), int(m[2])) for name in shapes if (m := _BLOCK.match(name))]
    num_heads = 1 + max(head for head, _ in places)
    outputs = _stored_outputs(file, num_heads)
    return MedusaShape(
        num_heads=num_heads,
        num_blocks=1 + max(block for _, block in places),
        hidden_size=shapes[_block_weights(shapes)[0]][-1],
        bias="blocks.0.layers.0.bias" in shapes,
        outputs=outputs,
        num_rows=shapes[f"{outputs[0]}.weight"][0] if outputs else None,
    )


def _block_weights(shapes: Shapes) -> list[str]:
    return [name for name in shapes if (m := _BLOCK.match(name)) and m[3] == "weight"]


def _configured_shape(config: Config, target: Target) -> MedusaShape:
    num_heads = positive_integer(config, "num_heads", config.get("medusa_num_heads", 5))
    return MedusaShape(
        num_heads=num_heads,
        num_blocks=positive_integer(
            config, "num_hidden_layers", config.get("medusa_num_layers", 1)
        ),
        hidden_size=target.spec.hidden_size,
        bias=False,
        outputs=tuple(f"lm_heads.{index}" for index in range(num_heads)),
        num_rows=target.spec.vocab_size,
    )


def _stored_outputs(file: DraftFile, num_heads: int) -> tuple[str, ...]:
    if file.stores("lm_heads.0.weight"):
        # vLLM may give a shared matrix the name of the first one.
        is_shared = file.config.get("original_lm_head")
        if is_shared and not file.stores("lm_heads.1.weight"):
            return ("lm_heads.0",)
        return tuple(f"lm_heads.{index}" for index in range(num_heads))
    return ("lm_head",) if file.stores(LM_HEAD) else ()


def _output_heads(shape: MedusaShape, target: Target, options: DraftOptions) -> list[Linear]:
    width, rows, formats = shape.hidden_size, shape.num_rows or 0, options.formats
    parallel = options.split_over(target)
    stored = [vocab_head(width, rows, parallel, name, formats=formats) for name in shape.outputs]
    stored = stored or [target.lm_head]
    for lm_head in stored:
        lm_head.out_dtype = torch.float32
    return stored if len(stored) > 1 else stored * shape.num_heads


def _check_fit(file: DraftFile, shape: MedusaShape, target: Target) -> None:
    fix, theirs = "use heads trained for this target", target.spec
    if shape.hidden_size != theirs.hidden_size:
        why = f"the heads read hidden states of width {shape.hidden_size}, but the target's"
        raise file.refusal(f"{why} hidden_size is {theirs.hidden_size}", fix)
    if not file.stores(_TOKEN_MAP) and shape.num_rows not in (None, theirs.vocab_size):
        why = f"the heads draft {shape.num_rows} tokens, the target has {theirs.vocab_size}"
        raise file.refusal(f"{why}, and there is no {_TOKEN_MAP}", fix)


def _read_token_map(file: DraftFile, rows: int, vocab: int) -> Tensor | None:
    """Return the target's id of each draft id, int64 [Vd]; None if they are the same.

    rows: output rows, one for each draft id or for each of the target's `vocab` ids.
    """
    if not file.stores(_TOKEN_MAP):
        return None
    ids = file.read(_TOKEN_MAP)
    is_map = ids.dim() == 1 and ids.numel() > 0 and not ids.is_floating_point()
    if not is_map or rows not in (len(ids), vocab):
        raise CheckpointError(
            f"{file.path}: tensor {_TOKEN_MAP} is {list(ids.shape)} of {ids.dtype}, but the output "
            f"has {rows} rows; one integer for each of them, or some of the target's {vocab} ids, "
            "are needed"
        )
    ids = ids.long()
    check_target_ids(file, _TOKEN_MAP, ids, vocab, f"{_TOKEN_MAP} must hold ids of the target")
    return ids
