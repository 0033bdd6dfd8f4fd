"""Llama 2 and 3 (arXiv 2307.09288, 2407.21783)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from serve_spec.models.config import wrong
from serve_spec.models.family import Biases, DecoderFamily
from serve_spec.models.interfaces import Config

DEFAULTS = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "rms_norm_eps": 1e-6,
    "vocab_size": 32000,
}
"""Values of transformers' `LlamaConfig`."""


class LlamaFamily(DecoderFamily):
    """Biases where the config says so, and no windows."""

    defaults: ClassVar[Mapping[str, Config]] = {"llama": DEFAULTS}

    def biases(self, config: Config) -> Biases:
        """Return the biases that `attention_bias` and `mlp_bias` turn on."""
        in_attention = bool(config.get("attention_bias"))
        return Biases(in_attention, in_attention, bool(config.get("mlp_bias")))

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return no window for any layer; raise CheckpointError if the config has one."""
        window = config.get("sliding_window")
        if window is not None:
            raise wrong(f"sliding_window={window!r}: not supported for LlamaForCausalLM; set null")
        return super().windows(config, num_layers)


FAMILY = LlamaFamily()
