"""gpt-oss (arXiv 2508.10925), with experts in bfloat16."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from torch import Tensor

from serve_spec.layers.module import Destination, Shard, Span, parameter
from serve_spec.layers.moe import Experts, Router
from serve_spec.models.config import positive_integer
from serve_spec.models.family import Biases, listed_windows
from serve_spec.models.interfaces import Config
from serve_spec.models.mixture import Mixture, MixtureFamily
from serve_spec.models.shape import DecoderShape, SizeCheck
from serve_spec.ops.elementwise import sigmoid
from serve_spec.parallel.group import SINGLE, TensorParallel


class GptOssExperts(Experts):
    """Experts with biases and clamped products, stored as stacks of transposed matrices.

    The rows of gate and up take turns. A gate g and an up u become (u + 1) · g · sigmoid(gain · g),
    where g is at most `limit` and u lies between -limit and limit.
    """

    def __init__(
        self,
        num_experts: int,
        shape: DecoderShape,
        gain: float,
        limit: float,
        parallel: TensorParallel = SINGLE,
    ) -> None:
        super().__init__(num_experts, shape.hidden_size, shape.intermediate_size, parallel)
        self.gate_up_bias = parameter(num_experts, 2 * shape.intermediate_size)
        self.down_bias = parameter(num_experts, shape.hidden_size)
        if parallel.rank:
            self.down_bias.zero_()  # of ranks whose results are summed one adds it
        self._adds_bias = not parallel.rank
        self._gain, self._limit = gain, limit

    def activate(self, gate_up: Tensor) -> Tensor:
        """Return what enters the second product: [S, 2·I] -> [S, I]."""
        gate, up = gate_up.unflatten(-1, (-1, 2)).unbind(-1)
        gate, up = gate.clamp(max=self._limit), up.clamp(-self._limit, self._limit)
        activated: Tensor = (up + 1) * (gate * sigmoid(gate * self._gain))
        return activated

    def tensors(self) -> dict[str, Destination]:
        """Return both stacks and their biases, as the checkpoint orders their dimensions."""
        assert self.gate_up_bias is not None, "these experts have biases"
        assert self.down_bias is not None, "these experts have biases"
        span = self._span
        both = Span(2 * span.length, 2 * span.start, 2 * span.total)
        down_bias: Destination = self.down_bias
        if not self._adds_bias:
            down_bias = Shard(self.down_bias[:, :0], 1, 0, self.down_bias.shape[1])
        return {
            "gate_up_proj": both.of(self.gate_up.mT, 2),
            "gate_up_proj_bias": both.of(self.gate_up_bias, 1),
            "down_proj": span.of(self.down.mT, 1),
            "down_proj_bias": down_bias,
        }


class GptOssFamily(MixtureFamily):
    """Sinks, biases, and windows in every other layer unless the config lists them."""

    experts_keys = ("num_local_experts",)
    size_key = "intermediate_size"

    def biases(self, config: Config) -> Biases:
        """Return the biases of attention, which only `attention_bias` turns off."""
        in_attention = bool(config.get("attention_bias", True))
        return Biases(in_attention, in_attention)

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return the window of each layer."""
        turns = ("sliding_attention", "full_attention")
        kinds = config.get("layer_types") or [turns[index % 2] for index in range(num_layers)]
        window = positive_integer(config, "sliding_window", 128)
        return listed_windows({**config, "layer_types": kinds}, num_layers, window)

    def shape(self, config: Config) -> DecoderShape:
        """Return the sizes in a config; raise as `spec`."""
        return replace(super().shape(config), has_sinks=True)

    def router(self, config: Config) -> Router:
        """See `MixtureFamily`."""
        return Router(positive_integer(config, "num_experts_per_tok", 4))

    def mixture(self, config: Config) -> Mixture:
        """Return the experts of every layer."""
        return replace(super().mixture(config), router_bias=True)

    def expert_sizes(self, prefix: str, mixture: Mixture) -> list[SizeCheck]:
        """Return the sizes of tensors below `prefix`, of one layer's experts."""
        return [
            SizeCheck(f"{prefix}down_proj", self.size_key, mixture.intermediate_size, dim=1),
        ]

    def experts(
        self, config: Config, shape: DecoderShape, parallel: TensorParallel = SINGLE
    ) -> Experts:
        """Return the experts of a layer. shape: one rank's."""
        gain, limit = (
            float(config.get(f"swiglu_{key}", default))
            for key, default in (("alpha", 1.702), ("limit", 7.0))
        )
        return GptOssExperts(self.mixture(config).num_experts, shape, gain, limit, parallel)

    def renames(self, stored: Iterable[str]) -> dict[str, str | None]:
        """Return the name that other families give to the router."""
        found = super().renames(stored)
        return {
            n: known and known.replace(".mlp.router.", ".mlp.gate.") for n, known in found.items()
        }


FAMILY = GptOssFamily()
