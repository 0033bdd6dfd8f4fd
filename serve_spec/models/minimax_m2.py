"""MiniMax-M2, M2.1, M2.5 and M2.7 (github.com/MiniMax-AI/MiniMax-M2)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from serve_spec.layers.moe import Router
from serve_spec.models.config import positive_integer, split_partial_rotary, wrong
from serve_spec.models.interfaces import Config
from serve_spec.models.mixtral import MixtralFamily
from serve_spec.models.shape import DecoderShape

# What is computed, by keys that may say otherwise.
_KNOWN = {
    "scoring_func": "sigmoid",
    "use_routing_bias": True,
    "use_qk_norm": True,
    "qk_norm_type": "per_layer",
    "shared_intermediate_size": 0,
}
_CORRECTION = "e_score_correction_bias"


class MiniMaxM2Family(MixtralFamily):
    """Experts that sigmoids choose; queries and keys are normalised over all heads.

    A part of every head is rotated.
    """

    norms_jointly = True

    def shape(self, config: Config) -> DecoderShape:
        """Return the sizes in a config; raise as `spec`."""
        for key, known in _KNOWN.items():
            if config.get(key, known) != known:
                raise wrong(f"{key}={config[key]!r}: not supported; only {known!r} is")
        if any(kind != 1 for kind in config.get("attn_type_list") or ()):
            raise wrong("attn_type_list: only 1, full attention, is supported")
        part = 1.0
        if config.get("rotary_dim") is not None:
            part = positive_integer(config, "rotary_dim") / positive_integer(config, "head_dim")
        rotated, config = split_partial_rotary(config, part)
        shape = super().shape(config)
        return replace(shape, rotary_dim=int(shape.head_dim * rotated))

    def router(self, config: Config) -> Router:
        """See `MixtureFamily`."""
        return Router(positive_integer(config, "num_experts_per_tok"), is_sigmoid=True)

    def renames(self, stored: Iterable[str]) -> dict[str, str | None]:
        """Return the names that other families give to router and experts."""
        found = super().renames(stored)
        return {
            name: known and known.replace(f".mlp.{_CORRECTION}", f".mlp.gate.{_CORRECTION}")
            for name, known in found.items()
        }


FAMILY = MiniMaxM2Family()
