"""New drafts for a target, with initial weights, and their training against it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from recipes.training import unroll
from recipes.training.loop import Run, Trainer, compiled
from recipes.training.sampling import mixed_rows, windows
from recipes.training.settings import Phase, Recipe
from recipes.training.unroll import Lesson, Teacher
from recipes.training.weights import MasterWeights, export_checkpoint, initialise, new_llama
from serve_spec.core.errors import CheckpointError
from serve_spec.layers.formats.plain import PlainWeight
from serve_spec.layers.module import Layer, tensor_defaults
from serve_spec.models.config import read_json
from serve_spec.models.decoder import Decoder
from serve_spec.models.drafts.base import DraftHead, DraftOptions
from serve_spec.models.drafts.eagle import Eagle
from serve_spec.models.drafts.eagle3 import Eagle3, Eagle3Shape
from serve_spec.models.drafts.features import capture_layers
from serve_spec.models.drafts.medusa import Medusa, MedusaShape
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.shape import DecoderShape


@dataclass(frozen=True)
class NewDraft:
    """A draft to train: the inference model, its trainable weights and its config.json.

    maps: tensors of the file that are not trained.
    """

    model: Eagle | Eagle3 | Medusa | Decoder
    weights: MasterWeights
    config: dict[str, Any]
    maps: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def target_ids(self) -> Tensor | None:
        """The target's ids that it draws from, int64 [Vd]; None: all."""
        return self.model.target_ids if isinstance(self.model, Eagle3) else None

    def export(self, folder: Path) -> None:
        """Write its checkpoint to `folder`."""
        export_checkpoint(folder, {**self.weights.parameters, **self.maps}, self.config)

    @property
    def head(self) -> DraftHead:
        """The model of a draft that reads target features."""
        assert not isinstance(self.model, Decoder), "a stand-alone draft reads no features"
        return self.model


def new_draft(name: str, target: Decoder, recipe: Recipe, ids: Tensor | None = None) -> NewDraft:
    """Return the draft "eagle3", "eagle", "medusa" or "standalone"; raise ValueError for others.

    ids: of the target's tokens that an EAGLE-3 head draws from, int64 [Vd], ascending; None: all.
    """
    builders = {
        "eagle3": lambda target, recipe: _new_eagle3(target, recipe, ids),
        "eagle": _new_eagle,
        "medusa": _new_medusa,
        "standalone": _new_standalone,
    }
    if name not in builders:
        raise ValueError(f"drafter={name!r}: unknown; use one of {sorted(builders)}")
    with torch.no_grad():
        return builders[name](target, recipe)


def target_config(target: Decoder) -> dict[str, Any]:
    """Return the config.json of the folder that `target` was loaded from."""
    assert target.path is not None, "the target of drafts comes from a folder"
    return read_json(target.path / "config.json")


def _new_eagle3(target: Decoder, recipe: Recipe, ids: Tensor | None) -> NewDraft:
    """Initialize from the target's last layer, reading the target's highest feature."""
    shape, generator = _draft_layer(target), torch.Generator().manual_seed(recipe.seed)
    hidden, rows = shape.hidden_size, shape.vocab_size if ids is None else len(ids)
    head_shape = Eagle3Shape(
        layers=shape,
        capture=FeatureCapture(capture_layers(None, target.shape.num_layers)),
        target_hidden_size=hidden,
        draft_vocab_size=rows,
        fc_bias=False,
        input_norm=False,
        fc_norm=False,
        norm_before_residual=False,
        norm_output=False,
    )
    weight = target.embed_tokens.weight
    with tensor_defaults(weight.dtype, weight.device):
        head = Eagle3(head_shape, target, ids, DraftOptions())
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
    lm_head = target.lm_head.format
    assert isinstance(lm_head, PlainWeight), "a frozen target has plain weights"
    output = lm_head.weight if ids is None else lm_head.weight[ids]
    masters.fill({"norm.weight": target.norm.weight, "lm_head.weight": output})
    config = {
        **_layer_config(target, "LlamaForCausalLMEagle3"),
        "draft_vocab_size": rows,
        "target_hidden_size": hidden,
        "tie_word_embeddings": False,
    }
    return NewDraft(head, masters, config, _id_maps(ids, shape.vocab_size))


def _id_maps(ids: Tensor | None, vocab_size: int) -> dict[str, Tensor]:
    """Return `d2t` (offsets) and `t2d` (marks) of a head that draws from `ids`; none from all."""
    if ids is None:
        return {}
    reached = torch.zeros(vocab_size, dtype=torch.bool, device=ids.device)
    reached[ids] = True
    return {"d2t": ids - torch.arange(len(ids), device=ids.device), "t2d": reached}


def _new_eagle(target: Decoder, recipe: Recipe) -> NewDraft:
    """Initialize as a copy of the feature, with output matrices of zero.

    The layer is initialized from the target's last one. EAGLE-1 does not normalize its input, and
    features are far larger than that layer's usual input, so with its own output matrices the loss
    diverges. The token half of fc is scaled to half the size of a feature, because embeddings are
    small and a draft that ignores the token learns slowly.
    """
    shape, generator = _draft_layer(target), torch.Generator().manual_seed(recipe.seed)
    hidden, weight = shape.hidden_size, target.embed_tokens.weight
    with tensor_defaults(weight.dtype, weight.device):
        head = Eagle(
            shape, target, fc_bias=False, input_norm=False, own_head=False, options=DraftOptions()
        )
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


def _new_medusa(target: Decoder, recipe: Recipe) -> NewDraft:
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
        heads = Medusa(blocks, target, None, DraftOptions())
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


def _new_standalone(target: Decoder, recipe: Recipe) -> NewDraft:
    """Initialize a small random Llama with the target's vocabulary."""
    config = {**recipe.standalone, "vocab_size": target.shape.vocab_size}
    # Activations are float32 under autocast, as the target's are in its own training.
    draft = new_llama(config, target.embed_tokens.weight.device, torch.float32)
    masters = MasterWeights(draft)
    generator = torch.Generator().manual_seed(recipe.seed)
    initialise(masters, draft.shape.num_layers, generator)
    return NewDraft(draft, masters, config)


def _draft_layer(target: Decoder) -> DecoderShape:
    """Return the shape of a one-layer head with the sizes of the target's layers."""
    shape = target.shape
    if shape.qkv_bias or shape.output_bias or shape.qk_norm:
        raise CheckpointError(
            "the target's last layer, which initializes the "
            "draft, has biases or head norms; train a Medusa or a stand-alone draft"
        )
    return replace(shape, num_layers=1)


def _layer_config(target: Decoder, architecture: str) -> dict[str, Any]:
    config = target_config(target)
    return {**config, "architectures": [architecture], "num_hidden_layers": 1}


def _last_layer(target: Decoder) -> Mapping[str, Tensor]:
    """Return the tensors of the target's last layer in float32 on the CPU, by name."""
    layer = target.layers[-1]
    assert isinstance(layer, Layer)
    views = layer.tensors()
    return {name: v.float().cpu() for name, v in views.items() if isinstance(v, Tensor)}


def _noise(shape: torch.Size, generator: torch.Generator) -> Tensor:
    return torch.randn(shape, generator=generator) * 0.02


LessonLoss = Callable[[Lesson], tuple[Tensor, Tensor]]
"""Loss of one lesson, and the mean overlap sum(min(p, q)) per draft step."""


class Batch(NamedTuple):
    """Rows of a training step: tokens int64 [B, T]; counted: bool [B, T], see `Lesson`."""

    tokens: Tensor
    counted: Tensor | None = None


class Texts(Protocol):
    """What a draft is trained on, on the training device."""

    def batch(self, step: int, phase: Phase, rng: torch.Generator) -> Batch:
        """Return the rows of a step."""
        ...

    def held_out_batch(self, phase: Phase, rng: torch.Generator) -> Batch:
        """Return rows that no step has."""
        ...

    def draft_ids(self, size: int) -> Tensor:
        """Return the `size` most frequent ids, int64 [size], ascending."""
        ...


@dataclass(frozen=True)
class Corpus:
    """Rows of token streams [N] and of the on-policy pool [R, T] by turns."""

    train: Tensor
    held_out: Tensor
    pool: Tensor

    def batch(self, step: int, phase: Phase, rng: torch.Generator) -> Batch:
        num_tokens = phase.rows * phase.row_tokens
        return Batch(mixed_rows(step, self.train, self.pool, num_tokens, phase.row_tokens, rng))

    def held_out_batch(self, phase: Phase, rng: torch.Generator) -> Batch:
        return Batch(windows(self.held_out, phase.rows, phase.row_tokens, rng))

    def draft_ids(self, size: int) -> Tensor:
        return most_frequent(self.pool, size)


def most_frequent(tokens: Tensor, size: int) -> Tensor:
    """Return the `size` most frequent ids of `tokens`, int64 [size], ascending."""
    counts = tokens.flatten().int().bincount(minlength=size)
    return counts.sort(descending=True, stable=True).indices[:size].sort().values


def train_head(
    name: str, recipe: Recipe, target: Decoder, texts: Texts, run: Run, out: Path
) -> None:
    """Train drafter `name` on texts, then export it to `out`."""
    phase = recipe.phases[name]
    size = recipe.draft_vocab_size if name == "eagle3" else None
    draft = new_draft(name, target, recipe, None if size is None else texts.draft_ids(size))
    teacher = Teacher(target, padding=recipe.unroll_steps + 1, ids=draft.target_ids)
    loss_of = lesson_loss(name, recipe, draft, teacher.device)
    rng = torch.Generator().manual_seed(recipe.seed + 1)
    fixed = torch.Generator().manual_seed(recipe.seed + 2)
    watch = [texts.held_out_batch(phase, fixed) for _ in range(phase.heldout_batches)]

    def loss_fn(step: int) -> tuple[Tensor, Mapping[str, Tensor]]:
        loss, overlaps = loss_of(teacher(*texts.batch(step, phase, rng)))
        return loss, {"overlap": overlaps}

    def heldout() -> Tensor:
        return torch.stack([loss_of(teacher(*batch))[0].detach() for batch in watch]).mean()

    Trainer(draft.weights.parameters, phase, run, rng, heldout).train(loss_fn)
    draft.export(out)


def lesson_loss(name: str, recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    """Return the loss of draft `name` as a function of a lesson."""
    losses = {"medusa": _medusa_loss, "standalone": _distillation_loss}
    inner = losses.get(name, _unrolled_loss)(recipe, draft, device)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        draft.weights.bind()
        return inner(lesson)

    return loss


def _unrolled_loss(recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    head = draft.head
    encode, step = compiled(head.encode, device), compiled(unroll.unroll_step(head), device)

    def step_loss(state: Tensor, probs: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        logits = head.logits(state).unflatten(0, probs.shape[:2])
        return unroll.draft_loss(logits, probs, weight, recipe.overlap_weight)

    fast_loss = compiled(step_loss, device)
    # EAGLE-1 states are predictions of the target's features.
    feature_weight = recipe.feature_weight if isinstance(head, Eagle) else 0.0

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        start = encode(unroll.features_of(head, lesson))
        states = unroll.unroll(step, start, lesson, recipe.unroll_steps)
        parts, kept = [], []
        for index, state in enumerate(states):
            parts.append(fast_loss(state, lesson.probs_from(1 + index), lesson.weight(index)))
            kept.append(state)
        total, overlaps = unroll.sum_losses(parts, recipe.unroll_decay)
        if feature_weight:
            predicted = kept[0].unflatten(0, lesson.last.shape[:2])[:, :-1]
            gap = F.smooth_l1_loss(predicted.float(), lesson.last[:, 1:].float())
            total = total + feature_weight * gap
        return total, overlaps

    return loss


def _medusa_loss(recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    head = draft.head
    return _compiled_lesson_loss(
        lambda lesson: unroll.medusa_loss(head, lesson, recipe.unroll_decay, recipe.overlap_weight),
        device,
    )


def _distillation_loss(recipe: Recipe, draft: NewDraft, device: torch.device) -> LessonLoss:
    """Return the loss of a stand-alone draft: the target's distribution at every position."""
    model = draft.model
    assert isinstance(model, Decoder)

    def loss(lesson: Lesson) -> tuple[Tensor, Tensor]:
        tokens = lesson.tokens_from(0)
        with torch.autocast(tokens.device.type, torch.bfloat16, enabled=tokens.is_cuda):
            hidden, _ = unroll.forward_rows(model, tokens)
            logits = model.logits(hidden.flatten(0, 1)).unflatten(0, tokens.shape)
        total, overlap = unroll.draft_loss(
            logits, lesson.probs_from(0), lesson.weight(-1), recipe.overlap_weight
        )
        return total, overlap[None]

    return _compiled_lesson_loss(loss, device)


def _compiled_lesson_loss(loss: LessonLoss, device: torch.device) -> LessonLoss:
    """Compile a loss over the tensors of a lesson; the dataclass stays outside the graph."""

    def of_tensors(
        tokens: Tensor, last: Tensor, probs: Tensor, counted: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        return loss(Lesson(tokens, last, last, probs, last.shape[1], counted))

    fast = compiled(of_tensors, device)
    return lambda lesson: fast(lesson.tokens, lesson.last, lesson.probs, lesson.counted)
