"""GLM-4.5, 4.6 and 4.7 (arXiv 2508.06471)."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from serve_spec.layers.moe import Router
from serve_spec.models.config import positive_integer, split_partial_rotary, wrong
from serve_spec.models.family import Biases
from serve_spec.models.interfaces import Config
from serve_spec.models.mixture import Mixture, MixtureFamily
from serve_spec.models.shape import DecoderShape

# The router that is computed, by the keys with which other models of this kind name theirs.
_ROUTER = {"scoring_func": "sigmoid", "topk_method": "noaux_tc"}
# A matrix that only the layers for multi-token prediction have.
_MTP_MATRIX = "eh_proj.weight"


class Glm4MoeFamily(MixtureFamily):
    """Dense layers, then a sigmoid router with groups and experts that every token enters.

    A part of every head is rotated. Layers for multi-token prediction are left out.
    """

    experts_keys = ("n_routed_experts", "num_local_experts")

    def biases(self, config: Config) -> Biases:
        """Return the biases that `attention_bias` turns on."""
        return Biases(qkv=bool(config.get("attention_bias")))

    def norms_heads(self, config: Config) -> bool:
        """Return whether queries and keys are normalised."""
        return bool(config.get("use_qk_norm"))

    def shape(self, config: Config) -> DecoderShape:
        """Return the sizes in a config; raise as `spec`."""
        rotated, config = split_partial_rotary(config, 0.5)
        shape = super().shape(config)
        return replace(shape, rotary_dim=int(shape.head_dim * rotated))

    def router(self, config: Config) -> Router:
        """See `MixtureFamily`."""
        for key, known in _ROUTER.items():
            if config.get(key, known) != known:
                raise wrong(f"{key}={config[key]!r}: not supported; only {known!r} is")
        groups = positive_integer(config, "n_group", 1)
        kept = positive_integer(config, "topk_group", 1)
        experts = positive_integer(config, self.experts_key(config))
        num_chosen = positive_integer(config, "num_experts_per_tok")
        size, rest = divmod(experts, groups)
        if rest or kept > groups or num_chosen > kept * size or (groups > 1 and size < 2):
            what = f"n_group={groups} and topk_group={kept}"
            why = f"{what} do not fit {num_chosen} chosen of {experts} experts"
            raise wrong(f"{why}; correct config.json")
        return Router(
            num_chosen,
            is_sigmoid=True,
            renormalises=bool(config.get("norm_topk_prob", True)),
            scale=float(config.get("routed_scaling_factor", 1.0)),
            num_groups=groups,
            num_kept_groups=kept,
        )

    def mixture(self, config: Config) -> Mixture:
        """Return the experts of every layer that has some."""
        mixture = super().mixture(config)
        num_shared = positive_integer(config, "n_shared_experts", 1)
        size = num_shared * mixture.intermediate_size
        return replace(mixture, shared="shared_experts", shared_size=size)

    def has_experts(self, config: Config, index: int) -> bool:
        """Return whether layer `index` comes after the first, dense ones."""
        first = config.get("first_k_dense_replace", 1)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise wrong(f"first_k_dense_replace is {first!r}; a number of layers is needed")
        return index >= first

    def renames(self, stored: Iterable[str]) -> dict[str, str | None]:
        """Return each tensor's name; None for those of layers for multi-token prediction."""
        found = super().renames(stored)
        layers = tuple(
            name.removesuffix(_MTP_MATRIX) for name in found if name.endswith(_MTP_MATRIX)
        )
        return {name: None if name.startswith(layers) else known for name, known in found.items()}


FAMILY = Glm4MoeFamily()
