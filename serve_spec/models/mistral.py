"""Mistral (arXiv 2310.06825)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from serve_spec.models.config import positive_integer
from serve_spec.models.family import DecoderFamily, listed_windows
from serve_spec.models.interfaces import Config
from serve_spec.models.llama import DEFAULTS

_DEFAULT_WINDOW = 4096


class MistralFamily(DecoderFamily):
    """One window for all layers, unless the config's is null."""

    defaults: ClassVar[Mapping[str, Config]] = {
        "mistral": {**DEFAULTS, "intermediate_size": 14336, "num_key_value_heads": 8}
    }

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return the window of each layer; transformers' default if the key is absent."""
        if config.get("sliding_window", _DEFAULT_WINDOW) is None:
            return super().windows(config, num_layers)
        window = positive_integer(config, "sliding_window", _DEFAULT_WINDOW)
        return listed_windows(config, num_layers, window)


FAMILY = MistralFamily()
