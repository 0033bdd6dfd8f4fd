"""What the families of mixtures of experts have in common."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.module import Destination, named_parts
from serve_spec.layers.moe import Experts, Gate, Router
from serve_spec.models.config import positive_integer, wrong
from serve_spec.models.decoder import MLP, DecoderLayer, GatedMLP
from serve_spec.models.family import DecoderFamily
from serve_spec.models.interfaces import Config, TargetSpec
from serve_spec.models.shape import DecoderShape, SizeCheck
from serve_spec.ops.linear import sum_partials
from serve_spec.parallel.group import SINGLE, TensorParallel

_MOST_EXPERTS = 1023  # of a grouped product


@dataclass(frozen=True)
class Mixture:
    """The experts of a layer, by all ranks.

    `intermediate_size`: of each. `router_bias`: the router's logits have a bias. `shared`: the name
    of an expert that every token enters, of `shared_size`; None: there is none. `gates_shared`: it
    is weighed by the sigmoid of a product of its own.
    """

    num_experts: int
    intermediate_size: int
    router: Router
    router_bias: bool = False
    shared: str | None = None
    shared_size: int = 0
    gates_shared: bool = False


class SparseMLP(MLP):
    """The weighted sum of the experts that the router chooses, and of the shared one if any.

    shape: one rank's.
    """

    def __init__(
        self,
        shape: DecoderShape,
        mixture: Mixture,
        experts: Experts,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> None:
        super().__init__()
        self.gate = Gate(
            mixture.router,
            shape.hidden_size,
            mixture.num_experts,
            bias=mixture.router_bias,
            gates_shared=mixture.gates_shared,
        )
        self.experts = experts
        self._shared_name = f"{mixture.shared}."
        self.shared: GatedMLP | None = None
        if mixture.shared is not None:
            of_rank = replace(shape, intermediate_size=mixture.shared_size // parallel.size)
            self.shared = GatedMLP(of_rank, parallel, formats.under(self._shared_name))

    def forward(self, x: Tensor) -> Tensor:
        """Return [T, H] -> [T, H], this rank's addend."""
        routing = self.gate(x)
        total = self.experts(x, routing)
        if self.shared is not None:
            result = sum_partials(self.shared(x), x)
            total = total + (result if routing.shared is None else result * routing.shared)
        return total.to(x.dtype)

    __call__ = forward

    def tensors(self) -> dict[str, Destination]:
        """Return the router, the experts, and the shared expert if any."""
        return named_parts(
            ("", self.gate), ("experts.", self.experts), (self._shared_name, self.shared)
        )


class MixtureFamily(DecoderFamily):
    """A `DecoderFamily` with experts in place of some layers' MLPs.

    `experts_keys`: keys of their number in `config.json`, of which any one is given. `size_key`:
    that of their width.
    """

    experts_keys: tuple[str, ...] = ("num_experts", "num_local_experts")  # transformers 4 and 5
    size_key = "moe_intermediate_size"

    def experts_key(self, config: Config) -> str:
        """Return the key of the number of experts in a config."""
        given = (key for key in self.experts_keys if config.get(key) is not None)
        return next(given, self.experts_keys[0])

    def router(self, config: Config) -> Router:
        """Return the router of every layer; raise CheckpointError for one that is not computed."""
        raise NotImplementedError

    def mixture(self, config: Config) -> Mixture:
        """Return the experts of every layer that has some; may raise CheckpointError."""
        key, router = self.experts_key(config), self.router(config)
        num_experts = positive_integer(config, key)
        if num_experts > _MOST_EXPERTS:
            raise wrong(f"{key}={num_experts}: more than {_MOST_EXPERTS}; correct it")
        if router.num_chosen > num_experts:
            why = f"num_experts_per_tok={router.num_chosen}: more than {key}={num_experts}"
            raise wrong(f"{why}; correct it")
        return Mixture(num_experts, positive_integer(config, self.size_key), router)

    def has_experts(self, config: Config, index: int) -> bool:
        """Return whether layer `index` has experts; by default all have."""
        return True

    def shape(self, config: Config) -> DecoderShape:
        """Return the sizes in a config; raise as `spec`.

        `intermediate_size` is that of layers without experts, or that of the experts if all have.
        """
        settings = config.get("quantization_config")
        if settings:
            method = settings.get("quant_method")
            why = f"quantization_config.quant_method={method!r}: not supported for experts"
            raise wrong(f"{why}; use the float32, bfloat16 or float16 checkpoint")
        mixture = self.mixture(config)
        shape = super().shape({"intermediate_size": mixture.intermediate_size, **config})
        if all(self.has_experts(config, index) for index in range(shape.num_layers)):
            return replace(shape, intermediate_size=mixture.intermediate_size)
        return shape

    def spec(self, config: Config, ranks: int = 1) -> TargetSpec:
        """Return what a config says; see `TargetFamily`."""
        mixture = self.mixture(config)
        sizes = {self.size_key: mixture.intermediate_size, mixture.shared: mixture.shared_size}
        uneven = [f"{key}={size}" for key, size in sizes.items() if size % ranks]
        if uneven:
            why = f"tensor_parallel_size={ranks} does not divide {', '.join(uneven)} of this model"
            raise CheckpointError(f"{why}; use a divisor of {math.gcd(*sizes.values())}")
        return super().spec(config, ranks)

    def _spec_of(self, config: Config, shape: DecoderShape, ranks: int) -> TargetSpec:
        mixture = self.mixture(config)
        return replace(
            super()._spec_of(config, shape, ranks),
            num_experts=mixture.num_experts,
            num_chosen_experts=mixture.router.num_chosen,
        )

    def mlp_sizes(self, config: Config, shape: DecoderShape) -> list[SizeCheck]:
        """Return the sizes of the first layer's MLP and of the first experts."""
        mixture = self.mixture(config)
        has_experts = [self.has_experts(config, index) for index in range(shape.num_layers)]
        checks = [] if has_experts[0] else super().mlp_sizes(config, shape)
        if not any(has_experts):
            return checks
        mlp = f"layers.{has_experts.index(True)}.mlp."
        return [
            *checks,
            SizeCheck(f"{mlp}gate.weight", self.experts_key(config), mixture.num_experts),
            *self.expert_sizes(f"{mlp}experts.", mixture),
        ]

    def expert_sizes(self, prefix: str, mixture: Mixture) -> list[SizeCheck]:
        """Return the sizes of tensors below `prefix`, of one layer's experts."""
        name = f"{prefix}0.gate_proj.weight"
        return [SizeCheck(name, self.size_key, mixture.intermediate_size)]

    def layer_shape(self, config: Config, shape: DecoderShape, index: int) -> DecoderShape:
        """Return the shape of layer `index`; `intermediate_size` is that of its experts, if any."""
        if not self.has_experts(config, index):
            return shape
        return replace(shape, intermediate_size=self.mixture(config).intermediate_size)

    def layer(
        self,
        config: Config,
        shape: DecoderShape,
        index: int,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> DecoderLayer:
        """Return layer `index`. shape: one rank's. formats: by names within the layer."""
        if not self.has_experts(config, index):
            return super().layer(config, shape, index, parallel, formats)
        experts = self.experts(config, shape, parallel)
        mlp = SparseMLP(shape, self.mixture(config), experts, parallel, formats.under("mlp."))
        return DecoderLayer(shape, index, parallel=parallel, formats=formats, mlp=mlp)

    def experts(
        self, config: Config, shape: DecoderShape, parallel: TensorParallel = SINGLE
    ) -> Experts:
        """Return the experts of a layer. shape: one rank's."""
        num_experts = self.mixture(config).num_experts
        return Experts(num_experts, shape.hidden_size, shape.intermediate_size, parallel)
