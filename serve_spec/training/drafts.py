"""New drafts for a target: the inference models of `serve_spec.models` with initial weights."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from serve_spec.core.errors import CheckpointError
from serve_spec.layers.module import Layer, tensor_defaults
from serve_spec.models import FeatureCapture, Llama, ModelShape
from serve_spec.models.draft import DraftHead
from serve_spec.models.draft_shape import Eagle3Shape, capture_layers
from serve_spec.models.eagle import Eagle, Eagle3
from serve_spec.models.medusa import Medusa, MedusaShape
from serve_spec.models.shape import read_json
from serve_spec.training.settings import Recipe
from serve_spec.training.weights import MasterWeights, initialise, new_llama


@dataclass(frozen=True)
class NewDraft:
    """A draft to train: the inference model, its trainable weights and its config.json."""

    model: Eagle | Eagle3 | Medusa | Llama
    weights: MasterWeights
    config: dict[str, Any]

    @property
    def head(self) -> DraftHead:
        """The model of a draft that reads target features."""
        assert not isinstance(self.model, Llama), "a stand-alone draft reads no features"
        return self.model


def new_draft(name: str, target: Llama, recipe: Recipe) -> NewDraft:
    """Return the draft `name`: "eagle3", "eagle", "medusa" or "standalone".

    Raises:
        ValueError: an unknown name.
    """
    builders = {
        "eagle3": _new_eagle3,
        "eagle": _new_eagle,
        "medusa": _new_medusa,
        "standalone": _new_standalone,
    }
    if name not in builders:
        raise ValueError(f"drafter={name!r}: unknown; use one of {sorted(builders)}")
    with torch.no_grad():
        return builders[name](target, recipe)


def target_config(target: Llama) -> dict[str, Any]:
    """Return the config.json of the folder that `target` was loaded from."""
    assert target.path is not None, "the target of drafts comes from a folder"
    return read_json(target.path / "config.json")


def _new_eagle3(target: Llama, recipe: Recipe) -> NewDraft:
    """Initialize from the target's last layer, reading the target's highest feature."""
    shape, generator = _draft_layer(target), torch.Generator().manual_seed(recipe.seed)
    hidden = shape.hidden_size
    whole = Eagle3Shape(
        layers=shape,
        capture=FeatureCapture(capture_layers(None, target.shape.num_layers)),
        target_hidden_size=hidden,
        num_features=3,
        draft_vocab_size=shape.vocab_size,
        fc_bias=False,
        input_norm=False,
        fc_norm=False,
        norm_before_residual=False,
        norm_output=False,
    )
    weight = target.embed_tokens.weight
    with tensor_defaults(weight.dtype, weight.device):
        head = Eagle3(whole, target, None)
    head.lm_head.out_dtype = None
    # Official EAGLE-3 files call their only layer `midlayer`.
    masters = MasterWeights(head, lambda name: name.replace("layers.0.", "midlayer."))
    last = _last_layer(target)
    fc = torch.zeros(hidden, 3 * hidden)
    fc[:, 2 * hidden :] = torch.eye(hidden)
    masters.fill({"fc.weight": fc + _noise(fc.shape, generator)})
    wide = {}
    for part in ("q", "k", "v"):
        name = f"self_attn.{part}_proj.weight"
        wide[name] = torch.cat([_noise(last[name].shape, generator), last[name]], dim=1)
    same = ("self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
    layer = {
        **wide,
        **{f"{part}.weight": last[f"{part}.weight"] for part in same},
        "hidden_norm.weight": last["input_layernorm.weight"],
        "post_attention_layernorm.weight": last["post_attention_layernorm.weight"],
        "input_layernorm.weight": torch.ones(hidden),
    }
    masters.fill({f"midlayer.{name}": tensor for name, tensor in layer.items()})
    masters.fill({"norm.weight": target.norm.weight, "lm_head.weight": target.lm_head.weight})
    config = {
        **_layer_config(target, "LlamaForCausalLMEagle3"),
        "draft_vocab_size": shape.vocab_size,
        "target_hidden_size": hidden,
        "tie_word_embeddings": False,
    }
    return NewDraft(head, masters, config)


def _new_eagle(target: Llama, recipe: Recipe) -> NewDraft:
    """Initialize as a copy of the feature, with output matrices of zero.

    The layer is initialized from the target's last one. EAGLE-1 does not normalize its input, and
    features are far larger than that layer's usual input, so with its own output matrices the loss
    diverges. The token half of fc is scaled to half the size of a feature, because embeddings are
    small and a draft that ignores the token learns slowly.
    """
    shape, generator = _draft_layer(target), torch.Generator().manual_seed(recipe.seed)
    hidden, weight = shape.hidden_size, target.embed_tokens.weight
    with tensor_defaults(weight.dtype, weight.device):
        head = Eagle(shape, target, fc_bias=False, input_norm=False, own_head=False)
    head.lm_head.out_dtype = None
    masters = MasterWeights(head)
    feature_rms = target.norm.weight.float().pow(2).mean().sqrt()
    token_norm = weight.float().pow(2).mean().sqrt() * hidden**0.5
    token_half = torch.randn(hidden, hidden, generator=generator)
    token_half *= (0.5 * feature_rms / token_norm).cpu()
    masters.fill({"fc.weight": torch.cat([token_half, torch.eye(hidden)], dim=1)})
    silent = ("self_attn.o_proj.weight", "mlp.down_proj.weight")
    for name, tensor in _last_layer(target).items():
        if name != "input_layernorm.weight":
            value = torch.zeros_like(tensor) if name in silent else tensor
            masters.fill({f"layers.0.{name}": value})
    config = {
        **_layer_config(target, "LlamaForCausalLMEagle"),
        "bias": False,
        "tie_word_embeddings": False,
    }
    return NewDraft(head, masters, config)


def _new_medusa(target: Llama, recipe: Recipe) -> NewDraft:
    """Initialize the residual blocks as the identity."""
    shape, weight = target.shape, target.embed_tokens.weight
    blocks = MedusaShape(
        num_heads=recipe.medusa_heads,
        num_blocks=1,
        hidden_size=shape.hidden_size,
        bias=True,
        outputs=(),
        num_rows=None,
    )
    with tensor_defaults(weight.dtype, weight.device):
        heads = Medusa(blocks, target, None)
    target.lm_head.out_dtype = None
    config = {
        "architectures": ["MedusaModel"],
        "model_type": "medusa",
        "num_heads": recipe.medusa_heads,
        "num_hidden_layers": 1,
        "hidden_size": shape.hidden_size,
        "vocab_size": shape.vocab_size,
        "truncated_vocab_size": shape.vocab_size,
        "medusa_fc_bias": True,
        "original_lm_head": True,
        "torch_dtype": "bfloat16",
    }
    return NewDraft(heads, MasterWeights(heads), config)


def _new_standalone(target: Llama, recipe: Recipe) -> NewDraft:
    """Initialize a small random Llama with the target's vocabulary."""
    config = {**recipe.standalone, "vocab_size": target.shape.vocab_size}
    # Activations are float32 under autocast, as the target's are in its own training.
    draft = new_llama(config, target.embed_tokens.weight.device, torch.float32)
    masters = MasterWeights(draft)
    generator = torch.Generator().manual_seed(recipe.seed)
    initialise(masters, draft.shape.num_layers, generator)
    return NewDraft(draft, masters, config)


def _draft_layer(target: Llama) -> ModelShape:
    """Return the shape of a one-layer head with the sizes of the target's layers."""
    shape = target.shape
    if shape.qkv_bias or shape.output_bias or shape.qk_norm:
        raise CheckpointError(
            f"architecture={shape.architecture!r}: the target's last layer, which initializes the "
            "draft, has biases or head norms; train a Medusa or a stand-alone draft"
        )
    return replace(shape, num_layers=1, tie_word_embeddings=False, eos_token_ids=())


def _layer_config(target: Llama, architecture: str) -> dict[str, Any]:
    config = target_config(target)
    return {**config, "architectures": [architecture], "num_hidden_layers": 1}


def _last_layer(target: Llama) -> Mapping[str, Tensor]:
    """Return the tensors of the target's last layer in float32 on the CPU, by name."""
    layer = target.layers[-1]
    assert isinstance(layer, Layer)
    views = layer.tensors()
    return {name: v.float().cpu() for name, v in views.items() if isinstance(v, Tensor)}


def _noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.02
