"""Decoders of transformers (github.com/huggingface/transformers): its modules over our cache.

Their attention modules call a registered function with rotated queries and keys; ours writes keys
and values to the pool and attends as for any other model. Which heads, windows, scales, soft caps
and sinks a layer has is what it asks of that function, once at load on the meta device.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from huggingface_hub.errors import StrictDataclassError
from torch import Tensor, nn
from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from serve_spec.core.caches import CacheSpec, PagedCache
from serve_spec.core.context import ForwardContext, Rotation
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.layers.linear import Linear
from serve_spec.layers.module import Destination, Layer, tensor_defaults
from serve_spec.layers.vocabulary import Embedding, vocab_head
from serve_spec.models.config import eos_token_ids, wrong
from serve_spec.models.family import text_names
from serve_spec.models.interfaces import (
    Config,
    FeatureCapture,
    Shapes,
    Target,
    TargetOutput,
    TargetSpec,
)
from serve_spec.parallel.group import SINGLE, TensorParallel

_ATTENTION = "serve_spec"
_OUTPUT = "lm_head"
# What models of transformers do with logits, by keys of their configs.
_TAILS: Mapping[str, Callable[[Tensor, float], Tensor]] = {
    "logit_scale": lambda logits, scale: logits.mul_(scale),
    "logits_scaling": lambda logits, scale: logits.div_(scale),
    "final_logit_softcapping": lambda logits, cap: logits.div_(cap).tanh_().mul_(cap),
}
# What transformers raises for a config that it does not take.
_MISTAKES = (
    *(AttributeError, LookupError, RuntimeError, TypeError, ValueError),
    StrictDataclassError,
)
# Tables that old checkpoints store and modules compute.
_COMPUTED = ("rotary_emb.inv_freq", "masked_bias")


class _Defaults(Mapping[str, Config]):
    """What the config classes of transformers fill in, by `model_type`."""

    def __getitem__(self, model_type: str) -> Config:
        if model_type not in CONFIG_MAPPING:
            raise KeyError(model_type)
        known = CONFIG_MAPPING[model_type]()
        return {"tie_word_embeddings": bool(getattr(known, "tie_word_embeddings", False))}

    def __iter__(self) -> Iterator[str]:
        return iter(CONFIG_MAPPING)

    def __len__(self) -> int:
        return len(CONFIG_MAPPING)


class TransformersFamily:
    """Decoders of full and sliding attention, on one rank."""

    defaults: Mapping[str, Config] = _Defaults()

    def spec(self, config: Config, ranks: int = 1) -> TargetSpec:
        """See `TargetFamily`."""
        if ranks > 1:
            why = f"tensor_parallel_size={ranks}: models that transformers computes have one rank"
            raise CheckpointError(f"{why}; leave it out")
        return _probed(json.dumps(config, sort_keys=True))

    def renames(self, stored: Iterable[str]) -> Mapping[str, str | None]:
        """Return the same names; None for tables that are computed."""
        names = list(stored)
        kept = text_names(names) or {name: name for name in names}
        return {name: None if name.endswith(_COMPUTED) else known for name, known in kept.items()}

    def check(self, config: Config, shapes: Shapes, directory: Path) -> None:
        """See `TargetFamily`."""
        with tensor_defaults(torch.float32, "meta"):
            wanted = self.build(config).tensors()
        for name, tensor in wanted.items():
            if name in shapes and shapes[name] != tuple(tensor.shape):
                raise CheckpointError(
                    f"{directory}/config.json: tensor {name} is {list(shapes[name])}, expected "
                    f"{list(tensor.shape)}; correct config.json or fetch the right file"
                )

    def build(
        self,
        config: Config,
        max_model_len: int | None = None,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> Target:
        """See `TargetFamily`."""
        spec = self.spec(config, parallel.size)
        model = _made(config)
        return TransformersTarget(model, config, spec, formats, max_model_len)


class TransformersTarget(Target):
    """A decoder of transformers, whose products are ours. `spec`: of `config`."""

    def __init__(
        self,
        model: Any,
        config: Config,
        spec: TargetSpec,
        formats: Formats,
        max_model_len: int | None,
    ) -> None:
        super().__init__()
        self.spec, self.parallel = spec, SINGLE
        self.dtype = torch.get_default_dtype()
        self.max_model_len = max_model_len or spec.max_position_embeddings
        self.decoder: Any = model.base_model
        self._prefix = f"{model.base_model_prefix}."
        table = self.decoder.get_input_embeddings().weight
        with torch.device("meta"):
            self.embed_tokens = Embedding(*table.shape)
        self.embed_tokens.weight = table
        self._is_tied = bool(config.get("tie_word_embeddings", False))
        sizes = spec.hidden_size, spec.vocab_size, SINGLE
        tied = self.embed_tokens if self._is_tied else None
        self.lm_head = vocab_head(*sizes, formats=formats, tied=tied)
        self.lm_head.out_dtype = torch.float32
        self._products = _replace_products(self.decoder, formats.under(self._prefix))
        tails = ((apply, getattr(model.config, key, None)) for key, apply in _TAILS.items())
        self._tails = [(apply, float(number)) for apply, number in tails if number is not None]
        self._streams: dict[int, Tensor] = {}
        norm = getattr(self.decoder, "norm", None) or self.decoder.final_layernorm
        for index, layer in enumerate([*self.decoder.layers, norm]):
            layer.register_forward_pre_hook(self._keep(index), with_kwargs=True)
        self._attention = _Paged()
        _attach(self.decoder, self._attention)

    def forward(
        self, token_ids: Tensor, ctx: ForwardContext, capture: FeatureCapture | None = None
    ) -> TargetOutput:
        """See `Target`."""
        self._attention.start(ctx)
        self._streams.clear()
        ids = token_ids.clamp(min=0)[None]
        found = self.decoder(input_ids=ids, position_ids=ctx.positions[None], use_cache=False)
        hidden = found.last_hidden_state[0]
        if capture is None:
            return TargetOutput(hidden)
        if capture.layer_ids is None:
            return TargetOutput(hidden, (hidden,))
        return TargetOutput(hidden, tuple(self._streams[index] for index in capture.layer_ids))

    __call__ = forward

    def logits(self, hidden: Tensor) -> Tensor:
        """See `Target`."""
        logits = self.lm_head(hidden)
        for apply, number in self._tails:
            logits = apply(logits, number)
        return logits

    def tensors(self) -> Mapping[str, Destination]:
        """See `Target`."""
        ours = {f"{path}." for path in self._products}
        tensors: dict[str, Destination] = {
            f"{self._prefix}{name}": tensor
            for name, tensor in self.decoder.state_dict(keep_vars=True).items()
            if not name.startswith(tuple(ours))
        }
        for path, product in self._products.items():
            parent = f"{self._prefix}{path}".rpartition(".")[0]
            tensors |= {f"{parent}.{name}": to for name, to in product.tensors().items()}
        return tensors if self._is_tied else {**tensors, **self.lm_head.tensors()}

    def _keep(self, index: int) -> Callable[..., None]:
        def keep(module: nn.Module, given: tuple[Tensor, ...], named: Mapping[str, Any]) -> None:
            entering = given[0] if given else named["hidden_states"]
            self._streams[index] = entering[0]

        return keep


class _Product(Layer):
    """`Linear` in place of a module of transformers, for inputs [..., in]."""

    def __init__(self, name: str, replaced: nn.Linear, formats: Formats) -> None:
        super().__init__()
        parts, bias = {name: replaced.out_features}, replaced.bias is not None
        self.linear = Linear(replaced.in_features, parts, bias, formats=formats)

    def forward(self, x: Tensor) -> Tensor:
        """Return the product."""
        product: Tensor = self.linear(x.flatten(0, -2)).unflatten(0, x.shape[:-1])
        return product

    __call__ = forward

    def tensors(self) -> Mapping[str, Destination]:
        """Return its tensors, by names that begin with its own."""
        return self.linear.tensors()


def _replace_products(decoder: nn.Module, formats: Formats) -> dict[str, _Product]:
    """Replace all products of a decoder by ours; return them by path."""
    products = {}
    for path, module in [*decoder.named_modules()]:
        if isinstance(module, nn.Linear):
            parent, _, name = path.rpartition(".")
            products[path] = _Product(name, module, formats.under(f"{parent}."))
            setattr(decoder.get_submodule(parent), name, products[path])
    return products


class _Paged:
    """The attention of all layers in one forward."""

    def start(self, ctx: ForwardContext) -> None:
        """Take the plan of the next forward."""
        assert ctx.queries is None, "a target computes all tokens"
        self._ctx = ctx

    def attend(self, module: Any, heads: Tensor, asked: Mapping[str, Any]) -> Tensor:
        """Return the attention of heads [T, heads + 2·kv_heads, d]: [T, heads, d]."""
        ctx = self._ctx
        whole = torch.ones(1, 1, heads.shape[2], dtype=torch.float32, device=heads.device)
        still = Rotation(whole, whole * 0, torch.zeros_like(ctx.positions))
        return ctx.attention.run(module.layer_idx, heads, still, asked.get("s_aux"))


class _Probe:
    """Notes what every layer asks for."""

    def __init__(self) -> None:
        self.caches: dict[int, CacheSpec] = {}

    def note(self, module: Any, key: Tensor, value: Tensor, asked: Mapping[str, Any]) -> None:
        """Add a layer; key, value: [1, kv_heads, T, d]."""
        if key.shape != value.shape:
            raise wrong("keys and values of different widths are not supported; use another model")
        self.caches[module.layer_idx] = PagedCache(
            key.shape[1],
            key.shape[3],
            value.shape[3],
            window=asked.get("sliding_window"),
            scale=asked.get("scaling"),
            softcap=asked.get("softcap"),
            has_sinks=asked.get("s_aux") is not None,
        )


def _attend(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **asked: Any
) -> tuple[Tensor, None]:
    """Attend as transformers asks: query [1, H, T, d] -> [1, T, H, d]. There is no mask."""
    attention = module.serve_spec
    if isinstance(attention, _Probe):
        attention.note(module, key, value, asked)
        return query.transpose(1, 2), None
    heads = torch.cat([part[0].transpose(0, 1) for part in (query, key, value)], dim=1)
    return attention.attend(module, heads, asked)[None], None


AttentionInterface.register(_ATTENTION, _attend)


def _attach(decoder: nn.Module, attention: object) -> None:
    for module in decoder.modules():
        if hasattr(module, "layer_idx"):
            module.serve_spec = attention  # type: ignore[assignment]


def _refused(config: Config, error: Exception) -> CheckpointError:
    reason = str(error).partition("\n")[0] or type(error).__name__
    return wrong(f"model_type={config.get('model_type')!r}: transformers: {reason}; correct it")


def _made(config: Config) -> Any:
    """Return the model of a config, of torch's default dtype and device, without weights.

    Raises CheckpointError: transformers does not take the config, or it is a mixture of experts.
    """
    keys = {key: value for key, value in config.items() if key not in ("architectures", "dtype")}
    try:
        known = AutoConfig.for_model(**keys)
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                known, attn_implementation=_ATTENTION, dtype=torch.get_default_dtype()
            )
    except _MISTAKES as error:
        raise _refused(config, error) from error
    if any(tensor.dim() > 2 for tensor in model.parameters()):
        raise wrong("experts or convolutions without a family of their own are not supported")
    names = config.get("architectures")
    if names and type(model).__name__ not in names:
        is_another = f"architectures={names!r}, but model_type is that of {type(model).__name__}"
        raise wrong(f"{is_another}; correct one")
    model.eval().requires_grad_(False)
    return model


@cache
def _probed(config: str) -> TargetSpec:
    """Return what a config, as JSON, says; raise CheckpointError."""
    keys: Config = json.loads(config)
    with tensor_defaults(torch.float32, "meta"):
        model, probe = _made(keys), _Probe()
        decoder, known = model.base_model, model.config
        _attach(decoder, probe)
        ids = torch.zeros(1, 1, dtype=torch.int64)
        try:
            decoder(input_ids=ids, position_ids=ids, use_cache=False)
        except _MISTAKES as error:
            raise _refused(keys, error) from error
    if sorted(probe.caches) != list(range(len(decoder.layers))):
        raise wrong("some layers do not attend through transformers' interface: not supported")
    return TargetSpec(
        vocab_size=known.vocab_size,
        num_ids=None,
        hidden_size=known.hidden_size,
        num_layers=len(probe.caches),
        max_position_embeddings=known.max_position_embeddings,
        eos_token_ids=eos_token_ids(keys),
        caches=tuple(probe.caches[index] for index in sorted(probe.caches)),
    )


FAMILY = TransformersFamily()
