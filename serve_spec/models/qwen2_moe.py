"""Qwen1.5-MoE and Qwen2-MoE (arXiv 2407.10671)."""

from __future__ import annotations

from dataclasses import replace

from serve_spec.layers.moe import Router
from serve_spec.models.config import positive_integer, wrong
from serve_spec.models.family import Biases
from serve_spec.models.interfaces import Config
from serve_spec.models.mixture import Mixture, MixtureFamily


class QwenMixtureFamily(MixtureFamily):
    """Probabilities among all experts unless `norm_topk_prob`; dense layers that the config lists.

    Their windows are refused: no published checkpoint has one.
    """

    def router(self, config: Config) -> Router:
        """See `MixtureFamily`."""
        num_chosen = positive_integer(config, "num_experts_per_tok")
        return Router(num_chosen, renormalises=bool(config.get("norm_topk_prob")))

    def has_experts(self, config: Config, index: int) -> bool:
        """Return whether layer `index` is a `decoder_sparse_step`-th one not listed as dense."""
        step, dense = (
            positive_integer(config, "decoder_sparse_step", 1),
            config.get("mlp_only_layers"),
        )
        if not isinstance(dense, list | None):
            raise wrong(f"mlp_only_layers is {dense!r}; a list of layers is needed")
        return (index + 1) % step == 0 and index not in (dense or ())

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return no window for any layer; raise CheckpointError if the config has one."""
        if config.get("use_sliding_window"):
            raise wrong("use_sliding_window=true: not supported for experts; set false")
        return super().windows(config, num_layers)


class Qwen2MoeFamily(QwenMixtureFamily):
    """Biases of queries, keys and values, and a gated expert that every token enters."""

    def biases(self, config: Config) -> Biases:
        """Return the biases of attention, which only `qkv_bias` turns off."""
        return Biases(qkv=bool(config.get("qkv_bias", True)))

    def mixture(self, config: Config) -> Mixture:
        """Return the experts of every layer that has some."""
        return replace(
            super().mixture(config),
            shared="shared_expert",
            shared_size=positive_integer(config, "shared_expert_intermediate_size"),
            gates_shared=True,
        )


FAMILY = Qwen2MoeFamily()
