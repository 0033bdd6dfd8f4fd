"""Laws of models and files: equal to the public classes, shards small and complete."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from serve_spec.training.checkpoint import (
    SHARD_BYTES,
    export_checkpoint,
    load_tensors,
    plan_shards,
)
from serve_spec.training.eagle import eagle_from
from serve_spec.training.eagle3 import eagle3_config, eagle3_from
from serve_spec.training.llama import Llama, llama_config
from serve_spec.training.medusa import MedusaHeads, medusa_config
from serve_spec.training.rollout import continue_rows, gumbel_like
from serve_spec.training.settings import LlamaShape
from serve_spec.training.target import load_llama

SHAPE = LlamaShape(
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_hidden_layers=8,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    max_position_embeddings=64,
)


@pytest.fixture(scope="module")
def target() -> Llama:
    model = Llama(SHAPE)
    model.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(1 + 4 * (weight.ndim == 2))
    return model.requires_grad_(False)


def test_an_exported_target_is_the_same_model_in_transformers(
    target: Llama, tmp_path: Path
) -> None:
    export_checkpoint(tmp_path, target.state_dict(), llama_config(SHAPE), dtype=torch.float32)
    public = LlamaForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    tokens = torch.randint(0, 64, (2, 20), generator=torch.Generator().manual_seed(1))
    ours = target(tokens, SHAPE.captures)
    theirs = public(tokens, output_hidden_states=True)
    torch.testing.assert_close(target.logits(ours.last), theirs.logits, rtol=1e-4, atol=1e-4)
    for mine, layer in zip(ours.captured, SHAPE.captures, strict=True):
        torch.testing.assert_close(mine, theirs.hidden_states[layer], rtol=1e-4, atol=1e-4)
    again = load_llama(tmp_path, torch.device("cpu"), torch.float32)
    assert torch.equal(target.logits(ours.last), again.logits(again(tokens).last))


def test_sampling_with_a_cache_follows_the_whole_sequence_forward(target: Llama) -> None:
    prompts = torch.randint(0, 64, (3, 7), generator=torch.Generator().manual_seed(1))
    temperature = torch.tensor([[0.0], [0.7], [1.0]])
    torch.manual_seed(0)
    noise = gumbel_like(torch.empty(3, 9, 64))
    tokens = continue_rows(target, prompts, 9, temperature, noise)
    logits = target.logits(target(tokens).last)[:, 6:-1]
    expected = (logits + temperature[:, :, None] * noise).argmax(-1)
    assert torch.equal(tokens[:, 7:], expected)
    assert torch.equal(tokens[:, :7], prompts)


def test_draft_heads_have_the_public_tensor_names(target: Llama) -> None:
    generator = torch.Generator().manual_seed(0)
    attention = [f"self_attn.{p}_proj.weight" for p in "qkvo"]
    feed_forward = [f"mlp.{p}_proj.weight" for p in ("gate", "up", "down")]
    layer = [*attention, *feed_forward, "post_attention_layernorm.weight"]
    names3 = {f"midlayer.{n}" for n in [*layer, "input_layernorm.weight", "hidden_norm.weight"]}
    head3 = eagle3_from(target, generator).state_dict()
    assert set(head3) == names3 | {"fc.weight", "norm.weight", "lm_head.weight"}
    assert head3["fc.weight"].shape == (32, 96)
    assert head3["midlayer.self_attn.q_proj.weight"].shape == (32, 64)
    head1 = eagle_from(target, generator).state_dict()
    assert set(head1) == {f"layers.0.{n}" for n in layer} | {"fc.weight"}
    heads = MedusaHeads(SHAPE, 2, target.embedding).state_dict()
    assert set(heads) == {f"blocks.{h}.layers.0.{w}" for h in (0, 1) for w in ("weight", "bias")}


def test_head_configs_say_what_engines_look_for() -> None:
    config = eagle3_config(LlamaShape())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["draft_vocab_size"] == config["vocab_size"] == 8192
    assert config["rope_theta"] == 10000.0
    assert config["num_hidden_layers"] == 1
    assert "eagle_aux_hidden_state_layer_ids" not in config
    assert medusa_config(LlamaShape(), 4)["original_lm_head"] is True


def test_shards_are_small_and_the_index_is_complete(tmp_path: Path) -> None:
    tensors = {f"layer.{i}": torch.full((1000, 1300), float(i)) for i in range(14)}
    export_checkpoint(tmp_path, tensors, {"model_type": "llama"})
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(tmp_path.glob("*.safetensors"))
    assert {f.name for f in files} == set(index["weight_map"].values())
    assert len(files) == 3
    assert all(f.stat().st_size <= SHARD_BYTES for f in files)
    assert set(index["weight_map"]) == set(tensors)
    assert index["metadata"]["total_size"] == 14 * 1000 * 1300 * 2
    loaded = load_tensors(tmp_path, torch.device("cpu"))
    assert all(torch.equal(loaded[n].float(), tensors[n]) for n in tensors)


def test_a_smaller_export_leaves_no_stale_shard_behind(tmp_path: Path) -> None:
    export_checkpoint(tmp_path, {f"t{i}": torch.zeros(3_000_000) for i in range(6)}, {})
    export_checkpoint(tmp_path, {"t0": torch.zeros(3)}, {})
    assert sorted(f.name for f in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


def test_a_tensor_larger_than_a_shard_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="tensor big has 20"):
        plan_shards({"small": 5, "big": 20}, limit=10)
