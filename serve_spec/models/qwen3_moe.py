"""Qwen3-MoE (arXiv 2505.09388)."""

from __future__ import annotations

from serve_spec.models.family import Biases
from serve_spec.models.interfaces import Config
from serve_spec.models.qwen2_moe import QwenMixtureFamily
from serve_spec.models.qwen3 import FAMILY as DENSE


class Qwen3MoeFamily(QwenMixtureFamily):
    """Qwen3 with experts, none of which every token enters."""

    has_qk_norm = True

    def biases(self, config: Config) -> Biases:
        """Return the biases of the dense Qwen3."""
        return DENSE.biases(config)


FAMILY = Qwen3MoeFamily()
