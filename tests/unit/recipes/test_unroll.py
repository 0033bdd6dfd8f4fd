"""Training: the unroll is what the drafter does when it drafts; models and their files."""

import json
from dataclasses import replace

import pytest
import torch
from transformers import LlamaForCausalLM

from recipes.training.drafts import new_draft
from recipes.training.sampling import continue_rows, gumbel_like
from recipes.training.settings import DRAFTERS, draft_recipe
from recipes.training.unroll import (
    Lesson,
    Teacher,
    draft_loss,
    features_of,
    forward_rows,
    medusa_loss,
    unroll,
    unroll_step,
)
from recipes.training.weights import SHARD_BYTES, MasterWeights, export_checkpoint, load_frozen
from serve_spec.core.errors import CheckpointError
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.loader import load_target
from serve_spec.models.weights import open_checkpoint
from tests.helpers.plain_heads import PlainHead

STEPS = 5


@pytest.fixture
def teacher(target_folder):
    model = load_frozen(target_folder, torch.device("cpu"), torch.float64)
    return Teacher(model, padding=STEPS + 1)


@pytest.mark.parametrize("family", ["eagle3", "eagle"])
def test_unroll_equals_drafting_step_by_step(teacher, target_folder, tmp_path, family):
    draft = new_draft(family, teacher.model, draft_recipe())
    export_checkpoint(tmp_path, draft.weights.parameters, draft.config, torch.float32)
    plain = PlainHead(tmp_path, target_folder)
    draft.weights.bind()
    head = draft.head
    tokens = torch.randint(0, 64, (1, 20), generator=torch.Generator().manual_seed(2))
    lesson = teacher(tokens)
    features = features_of(head, lesson)
    with torch.no_grad():
        unrolled = list(unroll(unroll_step(head), head.encode(features), lesson, STEPS))
        for row in (0, 7, 13):
            drafted, _ = plain.unroll(tokens[0, 1 : row + 1 + STEPS], features[: row + 1])
            found = torch.stack([states[row] for states in unrolled])
            # Softmax and norms run in float32 there.
            torch.testing.assert_close(found, drafted[row:], rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("family", ["eagle3", "eagle"])
def test_a_compiled_step_is_one_graph(teacher, family):
    """Graph breaks would make training on a GPU several times slower, and run kernels without
    gradients."""
    draft = new_draft(family, teacher.model, draft_recipe())
    lesson = teacher(torch.randint(0, 64, (2, 12), generator=torch.Generator().manual_seed(2)))
    step = unroll_step(draft.head)
    whole = torch.compile(step, backend="eager", dynamic=False, fullgraph=True)
    draft.weights.bind()
    start = draft.head.encode(features_of(draft.head, lesson))
    found = list(unroll(whole, start, lesson, STEPS))
    for state, expected in zip(found, unroll(step, start, lesson, STEPS), strict=True):
        torch.testing.assert_close(state, expected)
    found[-1].sum().backward()
    assert all(p.grad is not None for n, p in draft.weights.parameters.items() if "proj" in n)


def test_draft_loss_is_smallest_where_draft_and_target_agree():
    logits = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0))
    probs = logits.softmax(-1)
    everywhere = torch.ones(3)
    same, overlap = draft_loss(logits, probs, everywhere, overlap_weight=1.0)
    other, less = draft_loss(logits.flip(-1), probs, everywhere, overlap_weight=1.0)
    assert overlap.item() == pytest.approx(1.0, abs=1e-5)
    assert same < other
    assert less < overlap


def test_medusa_head_h_is_trained_on_token_j_plus_2_plus_h(teacher):
    """Heads that are the identity at row j reproduce the distribution of x_{j+1}. A lesson whose
    x_{j+2+h} has that distribution gives head h full overlap, and any other shift does not."""
    tokens = torch.randint(0, 64, (1, 12), generator=torch.Generator().manual_seed(3))
    lesson = teacher(tokens)
    draft = new_draft("medusa", teacher.model, replace(draft_recipe(), medusa_heads=3))
    draft.weights.bind()
    probs_of_next = teacher.model.logits(lesson.last[0]).softmax(-1)[None]
    for head in range(3):
        probs = torch.zeros_like(lesson.probs)
        # probs[:, i] is the distribution of x_{i+1}; head h at j is compared with i = j+1+h.
        probs[:, 1 + head : 1 + head + 12] = probs_of_next[:, : probs.shape[1] - 1 - head]
        shifted = Lesson(lesson.tokens, lesson.captured, lesson.last, probs, lesson.row_tokens)
        _, overlaps = medusa_loss(draft.head, shifted, decay=0.8, overlap_weight=0.0)
        assert [o > 0.999 for o in overlaps] == [h == head for h in range(3)]


def test_the_training_forward_is_that_of_transformers(target, target_folder):
    public = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    theirs = public(tokens, output_hidden_states=True)
    teacher = Teacher(target, padding=1)
    lesson = teacher(tokens)
    logits = target.logits(lesson.last.flatten(0, 1)).view_as(theirs.logits)
    torch.testing.assert_close(logits, theirs.logits, rtol=1e-4, atol=1e-4)
    assert teacher.capture.layer_ids == (2, 4, 5)
    for mine, layer in zip(lesson.captured.chunk(3, dim=-1), (2, 4, 5), strict=True):
        torch.testing.assert_close(mine, theirs.hidden_states[layer], rtol=1e-4, atol=1e-4)


def test_every_trainable_weight_has_the_gradient_of_transformers(target, target_folder):
    """The joined weights of the inference model pass their gradients on to every tensor."""
    public = LlamaForCausalLM.from_pretrained(target_folder, dtype=torch.float32)
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    public(tokens).logits.square().mean().backward()
    masters = MasterWeights(target)
    masters.fill({n: p for n, p in public.state_dict().items() if n in masters.parameters})
    masters.bind()
    hidden, _ = forward_rows(target, tokens)
    target.logits(hidden.flatten(0, 1)).square().mean().backward()
    for name, parameter in public.named_parameters():
        theirs = masters.parameters[name].grad
        torch.testing.assert_close(theirs, parameter.grad, rtol=1e-3, atol=1e-5, msg=name)


def test_sampling_with_a_cache_follows_the_whole_sequence_forward(target_folder):
    target = load_target(target_folder, torch.float32)
    prompts = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([[0.0], [0.7], [1.0]])
    torch.manual_seed(0)
    noise = gumbel_like(torch.empty(3, 9, 64))
    tokens = continue_rows(target, prompts, 9, temperature, noise)
    hidden, _ = forward_rows(target, tokens)
    logits = target.logits(hidden.flatten(0, 1)).unflatten(0, tokens.shape)[:, 6:-1]
    expected = (logits + temperature[:, :, None] * noise).argmax(-1)
    assert torch.equal(tokens[:, 7:], expected)
    assert torch.equal(tokens[:, :7], prompts)


@pytest.mark.parametrize("name", DRAFTERS)
def test_an_exported_draft_is_the_same_draft_in_the_engine(target, target_folder, tmp_path, name):
    draft = new_draft(name, target, draft_recipe())
    export_checkpoint(tmp_path, draft.weights.parameters, draft.config, torch.float32)
    engine_target = load_target(target_folder, torch.float32)
    loaded = load_draft(tmp_path, engine_target, name.upper())
    if name == "standalone":
        return
    draft.weights.bind()
    hidden = torch.randn(3, loaded.hidden_size, generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        torch.testing.assert_close(
            loaded.logits(hidden), draft.head.logits(hidden), rtol=1e-4, atol=1e-4
        )


def test_draft_heads_have_the_public_tensor_names_and_configs(target):
    recipe = draft_recipe()
    attention = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    feed_forward = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layer = [*attention, *feed_forward, "post_attention_layernorm.weight"]
    names3 = {f"midlayer.{n}" for n in [*layer, "input_layernorm.weight", "hidden_norm.weight"]}
    head3 = new_draft("eagle3", target, recipe).weights.parameters
    assert set(head3) == names3 | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert head3["fc.weight"].shape == (32, 96)
    assert head3["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    head1 = new_draft("eagle", target, recipe).weights.parameters
    assert set(head1) == {f"layers.0.{n}" for n in layer} | {"fc.weight"}
    heads = new_draft("medusa", target, recipe).weights.parameters
    assert set(heads) == {f"blocks.{h}.layers.0.{w}" for h in range(4) for w in ("weight", "bias")}
    config = new_draft("eagle3", target, draft_recipe()).config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == config["vocab_size"] == 64
    assert config["rope_theta"] == 10000.0
    assert config["num_hidden_layers"] == 1
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert new_draft("medusa", target, draft_recipe()).config["original_lm_head"] is True


def test_an_unknown_drafter_and_a_missing_target_are_refused_by_name(target, tmp_path):
    with pytest.raises(ValueError, match="eagle3"):
        new_draft("eagle4", target, draft_recipe())
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_frozen(tmp_path, torch.device("cpu"), torch.float32)


def test_shards_are_small_and_indexed_and_a_smaller_export_leaves_none_behind(tmp_path):
    tensors = {f"layer.{i}": torch.full((1000, 1300), float(i)) for i in range(14)}
    export_checkpoint(tmp_path, tensors, {"model_type": "llama"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert len(files) == 3
    assert all(f.stat().st_size <= SHARD_BYTES for f in files)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == 14 * 1000 * 1300 * 2
    loaded = open_checkpoint(tmp_path)
    assert all(torch.equal(loaded.read(n).float(), tensors[n]) for n in tensors)
    export_checkpoint(tmp_path, {"t0": torch.zeros(3)}, {})
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
