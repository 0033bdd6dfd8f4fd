"""Trained models and their files: equal to the public classes, shards small and complete."""

import json

import pytest
import torch
from transformers import LlamaForCausalLM

from serve_spec.core.errors import CheckpointError
from serve_spec.models import load_draft, load_target
from serve_spec.models.weights import open_checkpoint
from serve_spec.training.drafts import new_draft
from serve_spec.training.sampling import continue_rows, gumbel_like
from serve_spec.training.settings import DRAFTERS, draft_recipe
from serve_spec.training.unroll import Teacher, forward_rows
from serve_spec.training.weights import SHARD_BYTES, MasterWeights, export_checkpoint, load_frozen


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


def test_head_configs_hold_the_keys_that_engines_read(target):
    config = new_draft("eagle3", target, draft_recipe()).config
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == config["vocab_size"] == 64
    assert config["rope_theta"] == 10000.0
    assert config["num_hidden_layers"] == 1
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert new_draft("medusa", target, draft_recipe()).config["original_lm_head"] is True


def test_an_unknown_drafter_names_the_known_ones(target):
    with pytest.raises(ValueError, match="eagle3"):
        new_draft("eagle4", target, draft_recipe())


def test_a_missing_target_is_refused_by_name(tmp_path):
    with pytest.raises(CheckpointError, match=r"config\.json"):
        load_frozen(tmp_path, torch.device("cpu"), torch.float32)


def test_shards_are_small_and_the_index_is_complete(tmp_path):
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


def test_a_smaller_export_leaves_no_stale_shard_behind(tmp_path):
    export_checkpoint(tmp_path, {f"t{i}": torch.zeros(3_000_000) for i in range(6)}, {})
    export_checkpoint(tmp_path, {"t0": torch.zeros(3)}, {})
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]
