"""Stand-alone drafts: whole small models with the target's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serve_spec.core.context import ForwardContext
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.log import get_logger
from serve_spec.models.decoder import Decoder
from serve_spec.models.draft import DraftHead
from serve_spec.models.draft_checkpoint import DraftOptions, check_same_tokens, open_draft
from serve_spec.models.interfaces import Target, TargetSpec
from serve_spec.models.loader import divides, load_target, read_spec
from serve_spec.parallel.group import SINGLE

_log = get_logger(__name__)


class Standalone(DraftHead):
    """A whole model: it reads tokens and no features.

    Models of one family pad their vocabularies differently. It drafts ids that both have, and reads
    an id that only the target has as its own last.
    """

    shift = 1

    def __init__(self, model: Decoder, vocab_size: int | None = None) -> None:
        """Wrap `model`. vocab_size: the target's; None: the model's own."""
        shape = replace(model.rank_shape, num_ids=model.spec.num_ids)
        super().__init__(shape, capture=None, feature_dim=0)
        own = model.spec.vocab_size
        self.num_shared = own if vocab_size is None else min(own, vocab_size)
        self.is_shorter = vocab_size is not None and own < vocab_size
        weight = model.embed_tokens.weight
        if self.is_shorter:
            self.target_ids = torch.arange(own, device=weight.device)
        self.model = model
        self.dtype = weight.dtype
        self.ends_early = False

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden [T, H] of ids [T], at the positions of `ctx`."""
        if self.is_shorter:
            token_ids = token_ids.clamp_max(self.num_shared - 1)
        return self.model.forward(token_ids, ctx).hidden

    __call__ = forward

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits float32 [R, Vd] of hidden [R, H], for ids that both have."""
        return self.model.logits(hidden)[:, : self.num_shared]


def load_standalone(
    path: Path | str,
    target: Target,
    options: DraftOptions,
    dtype: torch.dtype,
    formats: Formats = PLAIN,
) -> Standalone:
    """Load the model in `path` to draft for `target`; ids that only one has are never drafted."""
    assert target.path is not None, "a target that was loaded has a path"
    if options.load_format != "dummy":
        open_draft(path, "STANDALONE", options.load_format)
    spec = read_spec(path)
    num_ids = shared_ids(spec, Path(path), target.spec, target.path)
    device = target.embed_tokens.weight.device
    parallel = target.parallel if divides(path, target.parallel.size) else SINGLE
    model = load_target(
        path,
        dtype,
        device,
        target.max_model_len,
        parallel,
        load_format=options.load_format,
        formats=formats,
    )
    assert isinstance(model, Decoder)
    model.spec = replace(model.spec, num_ids=num_ids)
    if spec.max_position_embeddings < target.max_model_len:
        _log.warning(
            "%s: made for %d positions, drafts up to %d: fewer drafts are accepted beyond",
            path, spec.max_position_embeddings, target.max_model_len,
        )  # fmt: skip
    return Standalone(model, target.spec.vocab_size)


def shared_ids(
    draft: TargetSpec, draft_path: Path, target: TargetSpec, target_path: Path
) -> int | None:
    """Return how many ids of the draft are the target's (`TargetSpec.num_ids`); None: all.

    Sizes may differ by padding, but tokenizers must then agree, or CheckpointError is raised.
    """
    is_proven = check_same_tokens(draft_path, target_path)
    if draft.vocab_size != target.vocab_size and not is_proven:
        raise CheckpointError(
            f"{draft_path}: vocab_size={draft.vocab_size}, but the target's is "
            f"{target.vocab_size}; use a draft of the same family, or put tokenizer.json into both "
            "folders to prove that only padding differs"
        )
    real = min(draft.num_ids or draft.vocab_size, target.num_ids or target.vocab_size)
    return None if real == draft.vocab_size else real
