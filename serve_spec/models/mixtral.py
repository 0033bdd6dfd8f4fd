"""Mixtral (arXiv 2401.04088)."""

from __future__ import annotations

import re
from collections.abc import Iterable

from serve_spec.layers.moe import Router
from serve_spec.models.config import positive_integer
from serve_spec.models.family import listed_windows
from serve_spec.models.interfaces import Config
from serve_spec.models.mixture import MixtureFamily

_PARTS = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_PART = re.compile(r"(?<=\.)w[123](?=\.)")


class MixtralFamily(MixtureFamily):
    """Mistral with experts of `intermediate_size` in every layer."""

    experts_keys = ("num_local_experts",)
    size_key = "intermediate_size"

    def router(self, config: Config) -> Router:
        """See `MixtureFamily`."""
        return Router(positive_integer(config, "num_experts_per_tok", 2))

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return the window of each layer, `sliding_window` or none."""
        if config.get("sliding_window") is None:
            return super().windows(config, num_layers)
        return listed_windows(config, num_layers, positive_integer(config, "sliding_window"))

    def renames(self, stored: Iterable[str]) -> dict[str, str | None]:
        """Return the names that other families give to router and experts."""
        found = super().renames(stored)
        return {name: known and _renamed(known) for name, known in found.items()}


def _renamed(name: str) -> str:
    if ".block_sparse_moe." not in name:
        return name
    name = name.replace(".block_sparse_moe.", ".mlp.")
    return _PART.sub(lambda part: _PARTS[part[0]], name)


FAMILY = MixtralFamily()
