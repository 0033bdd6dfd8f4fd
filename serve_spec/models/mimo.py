"""MiMo (arXiv 2505.07608): Qwen2 with a layer for multi-token prediction, which is its draft."""

from __future__ import annotations

from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.models.decoder import DecoderLayer
from serve_spec.models.interfaces import Config
from serve_spec.models.qwen2 import Qwen2Family
from serve_spec.models.shape import DecoderShape
from serve_spec.parallel.group import SINGLE, TensorParallel


class MiMoFamily(Qwen2Family):
    """The target leaves out the draft's layers; `models/drafts/mtp.py` reads them."""

    beside = ("model.mtp_layers.",)

    def mtp_layer(
        self,
        config: Config,
        shape: DecoderShape,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> DecoderLayer:
        """Return the layer that drafts. shape: one rank's."""
        return self.layer(config, shape, 0, parallel, formats)


FAMILY = MiMoFamily()
