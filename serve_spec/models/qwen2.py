"""Qwen2 and Qwen2.5 (arXiv 2407.10671)."""

from __future__ import annotations

from serve_spec.models.family import Biases, DecoderFamily, flagged_windows
from serve_spec.models.interfaces import Config


class Qwen2Family(DecoderFamily):
    """Biases of queries, keys and values; windows in the layers that the config names."""

    def biases(self, config: Config) -> Biases:
        """Return the biases that every checkpoint has."""
        return Biases(qkv=True)

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return the window of each layer."""
        return flagged_windows(config, num_layers)


FAMILY = Qwen2Family()
