"""What the families of decoders have in common; each overrides what it does otherwise."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import ClassVar, NamedTuple

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.base import Formats
from serve_spec.layers.formats.choices import PLAIN
from serve_spec.models.config import check_supported, eos_token_ids, positive_integer, wrong
from serve_spec.models.decoder import Decoder, DecoderLayer
from serve_spec.models.interfaces import Config, Shapes, TargetSpec
from serve_spec.models.loader import read_target
from serve_spec.models.shape import (
    NUM_IDS_KEY,
    DecoderShape,
    SizeCheck,
    check_size,
    check_sizes,
    gate_size,
    layer_sizes,
)
from serve_spec.parallel.group import SINGLE, TensorParallel

_MOST_LAYERS = 4096
_TEXT_MODEL = ("model.embed_tokens.", "model.layers.", "model.norm.", "lm_head.")
# Prefixes that only multimodal checkpoints have.
_MULTIMODAL = ("model.language_model.", "language_model.", "visual.")


class Biases(NamedTuple):
    """Which projections carry biases: of queries, keys and values; of attention; of the MLP."""

    qkv: bool = False
    output: bool = False
    mlp: bool = False


class DecoderFamily:
    """A `TargetFamily` of pre-norm decoders with paged attention and gated feed-forward layers.

    `has_qk_norm`: queries and keys are normalised head by head; `norms_jointly`: over all heads.
    `beside`: prefixes of tensors in its checkpoints that the target leaves out.
    """

    defaults: ClassVar[Mapping[str, Config]] = {}
    has_qk_norm = False
    norms_jointly = False
    beside: tuple[str, ...] = ()

    def biases(self, config: Config) -> Biases:
        """Return which projections carry biases."""
        return Biases()

    def norms_heads(self, config: Config) -> bool:
        """Return whether queries and keys are normalised head by head."""
        return self.has_qk_norm

    def windows(self, config: Config, num_layers: int) -> tuple[int | None, ...]:
        """Return how many tokens each layer sees, as `DecoderShape.windows`."""
        return (None,) * num_layers

    def shape(self, config: Config) -> DecoderShape:
        """Return the sizes in a config; raise as `spec`."""
        check_supported(config)
        num_layers = positive_integer(config, "num_hidden_layers")
        if num_layers > _MOST_LAYERS:
            raise wrong(f"num_hidden_layers={num_layers}: more than {_MOST_LAYERS}; correct it")
        biases = self.biases(config)
        has_padding = config.get(NUM_IDS_KEY) is not None
        return DecoderShape(
            **layer_sizes(config),
            qkv_bias=biases.qkv,
            output_bias=biases.output,
            mlp_bias=biases.mlp,
            num_layers=num_layers,
            vocab_size=positive_integer(config, "vocab_size"),
            qk_norm=self.norms_heads(config),
            joint_qk_norm=self.norms_jointly,
            windows=self.windows(config, num_layers),
            num_ids=positive_integer(config, NUM_IDS_KEY) if has_padding else None,
        )

    def spec(self, config: Config, ranks: int = 1) -> TargetSpec:
        """Return what a config says; see `TargetFamily`."""
        return self._spec_of(config, self.shape(config), ranks)

    def renames(self, stored: Iterable[str]) -> dict[str, str | None]:
        """Return each tensor's name in `Decoder.tensors`; None for one that is left out."""
        names = {name: None if name.startswith(self.beside) else name for name in stored}
        return text_names(stored) or names

    def check(self, config: Config, shapes: Shapes, directory: Path) -> None:
        """Raise CheckpointError if a config claims more than its tensors hold."""
        shape = self.shape(config)
        check_size(shapes, directory, "model.embed_tokens.weight", "vocab_size", shape.vocab_size)
        check_sizes(shape, shapes, directory, "model.", self.mlp_sizes(config, shape))
        if not any(name.startswith(f"model.layers.{shape.num_layers - 1}.") for name in shapes):
            raise CheckpointError(
                f"{directory}/config.json: num_hidden_layers={shape.num_layers}: missing "
                f"model.layers.{shape.num_layers - 1}; correct config.json or fetch the right file"
            )

    def mlp_sizes(self, config: Config, shape: DecoderShape) -> list[SizeCheck]:
        """Return sizes of the MLPs for `check`, by names without `model.`."""
        return [gate_size(shape)]

    def build(
        self,
        config: Config,
        max_model_len: int | None = None,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> Decoder:
        """Return the target, uninitialised; see `TargetFamily`."""
        shape = self.shape(config)
        shape = shape.for_texts_of(max_model_len or shape.max_position_embeddings)
        return Decoder(
            shape,
            self._spec_of(config, shape, parallel.size),
            [
                self.layer(
                    config,
                    self.layer_shape(config, shape, index).on_rank_of(parallel.size),
                    index,
                    parallel,
                    formats.under(f"model.layers.{index}."),
                )
                for index in range(shape.num_layers)
            ],
            is_tied=bool(config.get("tie_word_embeddings", False)),
            max_model_len=max_model_len,
            parallel=parallel,
            formats=formats,
        )

    def layer_shape(self, config: Config, shape: DecoderShape, index: int) -> DecoderShape:
        """Return the shape of layer `index`, whose heads may differ from those of others."""
        return shape

    def layer(
        self,
        config: Config,
        shape: DecoderShape,
        index: int,
        parallel: TensorParallel = SINGLE,
        formats: Formats = PLAIN,
    ) -> DecoderLayer:
        """Return layer `index`. shape: one rank's. formats: by names within the layer."""
        return DecoderLayer(shape, index, parallel=parallel, formats=formats)

    def _spec_of(self, config: Config, shape: DecoderShape, ranks: int) -> TargetSpec:
        layers = (self.layer_shape(config, shape, index) for index in range(shape.num_layers))
        return TargetSpec(
            vocab_size=shape.vocab_size,
            num_ids=shape.num_ids,
            hidden_size=shape.hidden_size,
            num_layers=shape.num_layers,
            max_position_embeddings=shape.max_position_embeddings,
            eos_token_ids=eos_token_ids(config),
            caches=tuple(layer.on_rank_of(ranks).caches[i] for i, layer in enumerate(layers)),
        )


def read_shape(folder: Path | str) -> DecoderShape:
    """Return the sizes of the decoder in a directory. Raises CheckpointError: it holds none."""
    family, config = read_target(folder)
    if not isinstance(family, DecoderFamily):
        raise CheckpointError(f"{folder}/config.json: no decoder; use a model with a DecoderFamily")
    return family.shape(config)


def text_names(stored: Iterable[str]) -> dict[str, str | None]:
    """Return the names of the text model's tensors in a multimodal checkpoint, None for others.

    Empty for another checkpoint.
    """
    names = list(stored)
    if not any(name.startswith(_MULTIMODAL) for name in names):
        return {}
    return {name: _text_name(name) for name in names}


def _text_name(stored: str) -> str | None:
    name = stored.replace("model.language_model.", "model.").removeprefix("language_model.")
    return name if name.startswith(_TEXT_MODEL) else None


def flagged_windows(config: Config, num_layers: int) -> tuple[int | None, ...]:
    """Return the windows of Qwen's configs, which are off unless `use_sliding_window` is true.

    Without `layer_types`, layers `max_window_layers` .. n-1 use the window (transformers).
    """
    if not config.get("use_sliding_window", False) or config.get("sliding_window") is None:
        return (None,) * num_layers
    first = int(config.get("max_window_layers", 28))
    return listed_windows(config, num_layers, positive_integer(config, "sliding_window"), first)


def listed_windows(
    config: Config, num_layers: int, window: int, first: int = 0
) -> tuple[int | None, ...]:
    """Return `window` for the layers that `layer_types` names, without it for those from `first`.

    Raises CheckpointError: `layer_types` has another length.
    """
    kinds = config.get("layer_types")
    if not kinds:
        return tuple(window if index >= first else None for index in range(num_layers))
    if len(kinds) != num_layers:
        raise wrong(
            f"layer_types has {len(kinds)} values for num_hidden_layers={num_layers}; "
            "correct config.json"
        )
    return tuple(window if kind == "sliding_attention" else None for kind in kinds)
