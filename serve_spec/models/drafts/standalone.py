"""Stand-alone drafts: small models with the target's tokens."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from serve_spec.core.context import ForwardContext
from serve_spec.core.errors import CheckpointError
from serve_spec.log import get_logger
from serve_spec.models.decoder import Decoder
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
from serve_spec.models.drafts.checkpoint import check_same_tokens
from serve_spec.models.drafts.heads import EMBEDDING, FC, PREFIX, layers_fact
from serve_spec.models.interfaces import Target, TargetSpec
from serve_spec.models.loader import check_target, divides, load_target, read_spec

_log = get_logger(__name__)


_WHOLE_MODEL = (EMBEDDING, "norm.weight", "layers.0.input_layernorm.weight")


class StandaloneFamily(DraftFamily):
    """Models of the families that serve as targets."""

    looks_like = "a stand-alone model (embed_tokens, norm, layers.*)"
    renames = (PREFIX,)

    def detect(self, config: Config, shapes: Shapes) -> Evidence | None:
        is_one = all(name in shapes for name in _WHOLE_MODEL) and FC not in shapes
        return Evidence(_WHOLE_MODEL) if is_one else None

    def build(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        """See `DraftFamily`; a model that is not on meta has its weights."""
        assert target.path is not None, "a target that was loaded has a path"
        spec, weight = read_spec(file.path), target.embed_tokens.weight
        num_ids = shared_ids(spec, file.path, target.spec, target.path)
        if weight.device.type == "meta":
            model = check_target(file.path, options.load_format)
        else:
            model = load_target(
                file.path,
                options.dtype or weight.dtype,
                weight.device,
                target.max_model_len,
                options.split_over(target, divides(file.path, target.parallel.size)),
                load_format=options.load_format,
                formats=None if options.formats is file.formats else options.formats,
            )
        model.spec = replace(model.spec, num_ids=num_ids)
        return Standalone(model, target.spec.vocab_size)

    def load(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        """See `DraftFamily`; ids that only one of both has are never drafted."""
        head = self.build(file, target, options)
        longest = read_spec(file.path).max_position_embeddings
        if longest < target.max_model_len:
            _log.warning(
                "%s: made for %d positions, drafts up to %d: fewer drafts are accepted beyond",
                file.path, longest, target.max_model_len,
            )  # fmt: skip
        return head

    def check(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        return self.build(file, target, options)

    def facts(self, file: DraftFile, target: Target | None, options: DraftOptions) -> Facts:
        model = check_target(file.path, options.load_format)
        vocabulary = f"{model.spec.vocab_size} tokens"
        if target is not None:
            assert target.path is not None, "a target from files has a path"
            num_ids = shared_ids(model.spec, file.path, target.spec, target.path)
            shared = "the target's" if num_ids is None else f"{num_ids} of them the target's"
            vocabulary += f", {shared}"
        facts = {"architecture": ", ".join(file.config["architectures"])}
        if isinstance(model, Decoder):
            facts |= {
                "layers": layers_fact(model.shape),
                "rope theta": f"{model.shape.rope_theta:g}",
            }
        return {**facts, "vocabulary": vocabulary}


class Standalone(DraftHead):
    """A model of its own: it reads tokens and no features.

    Models of one family pad their vocabularies differently. It drafts ids that both have, and reads
    an id that only the target has as its own last.
    """

    shift = 1
    ends_early = False

    def __init__(self, model: Target, vocab_size: int | None = None) -> None:
        """Wrap `model`. vocab_size: the target's; None: the model's own."""
        spec = model.spec
        super().__init__(
            spec.hidden_size,
            spec.caches,
            capture=None,
            feature_dim=0,
            num_ids=spec.num_ids,
        )
        own = spec.vocab_size
        self.num_shared = own if vocab_size is None else min(own, vocab_size)
        self.is_shorter = vocab_size is not None and own < vocab_size
        weight = model.embed_tokens.weight
        if self.is_shorter:
            self.target_ids = torch.arange(own, device=weight.device)
        self.model = model
        self.dtype = weight.dtype

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return hidden [T, H] of ids [T], at the positions of `ctx`."""
        if self.is_shorter:
            token_ids = token_ids.clamp_max(self.num_shared - 1)
        return self.model.forward(token_ids, ctx).hidden

    __call__ = forward

    def logits(self, hidden: Tensor, step: int = 0) -> Tensor:
        """Return logits float32 [R, Vd] of hidden [R, H], for ids that both have."""
        return self.model.logits(hidden)[:, : self.num_shared]


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
