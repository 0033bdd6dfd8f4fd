"""Qwen3 (arXiv 2505.09388)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from serve_spec.models.family import Biases, DecoderFamily, flagged_windows
from serve_spec.models.interfaces import Config
from serve_spec.models.llama import DEFAULTS


class Qwen3Family(DecoderFamily):
    """Norms of queries and keys; biases and windows where the config says so."""

    defaults: ClassVar[Mapping[str, Config]] = {
        "qwen3": {
            **DEFAULTS,
            "intermediate_size": 22016,
            "num_key_value_heads": 32,
            "head_dim": 128,
            "vocab_size": 151936,
            "use_sliding_window": False,
        }
    }
    has_qk_norm = True

    def biases(self, config: Config) -> Biases:
        """Return the biases that `attention_bias` turns on."""
        in_attention = bool(config.get("attention_bias"))
        return Biases(in_attention, in_attention)

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return the window of each layer."""
        return flagged_windows(config, num_layers)


FAMILY = Qwen3Family()
