"""Layer for multi-token prediction of MiMo, stored with its target.

fc([norm(hidden) ; norm(embedding)]), one layer and the target's lm_head. The hidden state is the
target's residual stream before its final norm, or the layer's own output after its final norm.
Source: huggingface.co/XiaomiMiMo/MiMo-7B-Base, `modeling_mimo.py`; vLLM, `mimo_mtp.py`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import ClassVar, TypeAlias

import torch
from torch import Tensor

from serve_spec.core.context import ForwardContext
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.module import Destination, named_parts
from serve_spec.layers.norm import RMSNorm
from serve_spec.models.decoder import DecoderLayer
from serve_spec.models.drafts import heads
from serve_spec.models.drafts.base import (
    Config,
    Draft,
    DraftFamily,
    DraftFile,
    DraftOptions,
    Evidence,
    Facts,
    Shapes,
)
from serve_spec.models.drafts.eagle import Eagle, eagle_shape
from serve_spec.models.interfaces import FeatureCapture, Target
from serve_spec.models.registry import find_family
from serve_spec.models.shape import DecoderShape
from serve_spec.parallel.group import TensorParallel

_STORED, _TOKEN_NORM = "model.mtp_layers.", "layers.0.token_layernorm.weight"


class MtpFamily(DraftFamily):
    """Multi-token prediction."""

    looks_like = "an MTP layer (model.mtp_layers.0.*)"
    renames = (
        (r"^model\.mtp_layers\.0\.input_proj\.", "fc."),
        (r"^model\.mtp_layers\.0\.", "layers.0."),
        heads.PREFIX,
    )
    exporters: ClassVar[Mapping[str, str]] = {"": "MiMo"}

    def current_names(self, stored: Iterable[str]) -> dict[str, str | None]:
        """See `DraftFamily`; the target's own tensors are left out."""
        names = super().current_names(stored)
        if not any(name.startswith(_STORED) for name in names):
            return names
        return {old: new if old.startswith(_STORED) else None for old, new in names.items()}

    def detect(self, config: Config, shapes: Shapes) -> Evidence | None:
        return Evidence([_TOKEN_NORM]) if _TOKEN_NORM in shapes else None

    def build(self, file: DraftFile, target: Target, options: DraftOptions) -> Draft:
        # The config is the target's.
        file = replace(file, config={**file.config, "num_hidden_layers": 1})
        shape = eagle_shape(file, target, options)
        if file.is_dummy:  # biases as in MiMo's other layers
            shape = replace(shape, qkv_bias=True, output_bias=False)
        make_layer = mtp_layer_of(file)
        with options.defaults(target):
            return Mtp(shape, target, make_layer, options)

    def facts(self, file: DraftFile, target: Target | None, options: DraftOptions) -> Facts:
        shape = heads.layer_shape(file, target, options)
        return {
            **heads.facts(file, shape, options),
            "target layers": "the state before the final norm",
            "norms": "of the token, of the state, of the output",
        }


MakeLayer: TypeAlias = Callable[[DecoderShape, TensorParallel, Formats], DecoderLayer]


def mtp_layer_of(file: DraftFile) -> MakeLayer:
    """Return how the family of the target, whose config the draft has, makes its MTP layer.

    Raises CheckpointError: the family has none.
    """
    family, config = find_family(file.config)
    make_layer: Callable[..., DecoderLayer] | None = getattr(family, "mtp_layer", None)
    if make_layer is None:
        package = type(family).__module__.partition(".")[0]
        why = f"{type(family).__name__} of {package} lacks mtp_layer"
        raise file.refusal(why, f"use a version of {package} that defines it, or another draft")
    return partial(make_layer, config)


class Mtp(Eagle):
    """MiMo's layer for multi-token prediction. Uninitialised: `load` fills it."""

    def __init__(
        self,
        shape: DecoderShape,
        target: Target,
        make_layer: MakeLayer,
        options: DraftOptions,
    ) -> None:
        self._make_layer = make_layer
        super().__init__(
            shape, target, fc_bias=False, input_norm=True, own_head=False, options=options
        )
        self.capture = FeatureCapture((target.spec.num_layers,))
        norms = (RMSNorm(shape.hidden_size, shape.rms_norm_eps) for _ in range(3))
        self.token_norm, self.hidden_norm, self.final_norm = norms

    def layer(self, index: int, input_norm: bool, formats: Formats) -> DecoderLayer:
        """See `Eagle`; it is the target family's."""
        return self._make_layer(self.shape, self.parallel, formats)

    def forward(self, token_ids: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        """Return next hidden [R, H] from target ids [T] and hidden [T, H]."""
        return self.final_norm(super().forward(token_ids, hidden, ctx))

    __call__ = forward

    def _inputs(self, embedded: Tensor, hidden: Tensor, ctx: ForwardContext) -> Tensor:
        # The layer was trained without an embedding at position 0.
        embedded = embedded.masked_fill((ctx.positions == 0).unsqueeze(-1), 0.0)
        return torch.cat((self.hidden_norm(hidden), self.token_norm(embedded)), dim=-1)

    def tensors(self) -> dict[str, Destination]:
        """Return destinations by published name, without those shared with the target."""
        norms = named_parts(
            ("layers.0.token_layernorm.", self.token_norm),
            ("layers.0.hidden_layernorm.", self.hidden_norm),
            ("layers.0.final_layernorm.", self.final_norm),
        )
        return {**super().tensors(), **norms}
