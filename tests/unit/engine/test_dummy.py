"""Random weights of a config's shape: models without any weight file, for load tests."""

import json

import pytest
import torch

from serve_spec import LLM
from serve_spec.core.errors import CheckpointError
from serve_spec.core.request import SamplingParams
from serve_spec.models import DraftOptions, load_draft, load_target
from tests.helpers.checkpoints import VOCAB, make_eagle, make_eagle3, make_target
from tests.helpers.engines import texts
from tests.helpers.paged import PagedSequences
from tests.helpers.ranks import on_ranks

PROMPTS = [[5, 6, 7, 5], [9, 8, 9, 8, 9]]
PARAMS = SamplingParams(max_tokens=20, temperature=0.8, seed=3, ignore_eos=True)
SIZES = {"num_hidden_layers": 1, "hidden_act": "silu", "num_attention_heads": 4}
HEADS = {
    "eagle": ("EAGLE", make_eagle, {"bias": True}),
    "eagle without a bias": ("EAGLE", make_eagle, {"fc_bias": False, "bias": False}),
    "eagle of two layers": ("EAGLE", make_eagle, {"num_layers": 2, "num_hidden_layers": 2}),
    "eagle3": ("EAGLE3", make_eagle3, {}),
    "eagle3 with its own ids": ("EAGLE3", make_eagle3, {"draft_vocab": 100}),
}


@pytest.fixture
def target(tmp_path):
    folder = make_target(tmp_path / "target", "qwen2", layers=6, hidden=32)
    (folder / "model.safetensors").unlink()
    return folder


def without_weights(folder):
    for pattern in ("*.bin", "*.safetensors"):
        for file in folder.glob(pattern):
            file.unlink()
    return folder


def shapes_of(model):
    return {name: tuple(tensor.shape) for name, tensor in model.tensors().items()}


def engine(target, **keys):
    sizes = {"max_model_len": 64, "num_pages": 32, "device": "cpu", "speculative_num_steps": 3}
    return LLM(str(target), load_format="dummy", speculative_adaptive=False, **sizes, **keys)


@pytest.mark.parametrize("name", HEADS)
def test_a_dummy_head_has_the_tensors_of_a_real_one(tmp_path, name):
    algorithm, make, config = HEADS[name]
    folder = make_target(tmp_path / "target", hidden=32)
    head = make(tmp_path / "head", folder, **config)
    target = load_target(folder, torch.float32)
    stored = load_draft(head, target, algorithm)
    dummy = load_draft(without_weights(head), target, algorithm, DraftOptions(dummy=True))
    assert shapes_of(dummy) == shapes_of(stored)
    assert (dummy.target_ids is None) == (stored.target_ids is None)


@pytest.mark.parametrize(
    ("algorithm", "config"),
    [
        ("EAGLE", SIZES),
        ("EAGLE3", {**SIZES, "draft_vocab_size": 64}),
        ("EAGLE3", {**SIZES, "norm_before_fc": True, "model_type": "qwen3", "head_dim": 8}),
        ("MEDUSA", {"medusa_num_heads": 3, "medusa_num_layers": 2}),
        ("STANDALONE", None),
    ],
)
def test_dummy_weights_serve_the_same_text_with_drafts_and_without(
    target, tmp_path, algorithm, config
):
    draft = target
    if config is not None:
        draft = tmp_path / "draft"
        draft.mkdir()
        own = {"hidden_size": 32, "intermediate_size": 64, "vocab_size": VOCAB, **config}
        (draft / "config.json").write_text(json.dumps(own))
    plain = engine(target)
    drafting = engine(
        target, speculative_algorithm=algorithm, speculative_draft_model_path=str(draft)
    )
    assert texts(drafting.generate(PROMPTS, PARAMS)) == texts(plain.generate(PROMPTS, PARAMS))
    assert drafting.generate(PROMPTS, PARAMS)[0].speculation.num_draft_tokens > 0
    for llm in (plain, drafting):
        llm.shutdown()


def test_every_rank_has_its_part_of_the_same_dummy_weights(target):
    ids = torch.arange(20)

    def logits(model):
        ctx = PagedSequences(model.rank_shape, 1, len(ids)).extend([(0, len(ids))])
        return model.logits(model.forward(ids, ctx).hidden)

    def run(parallel):
        return logits(load_target(target, torch.float32, parallel=parallel, dummy=True))

    whole = logits(load_target(target, torch.float32, dummy=True))
    for part in on_ranks(2, run):
        torch.testing.assert_close(part, whole, rtol=1e-4, atol=1e-4)


def test_only_safetensors_are_read_where_they_are_asked_for(tmp_path):
    folder = make_target(tmp_path / "target", hidden=32)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match=r"load_format='safetensors': .*'auto'"):
        LLM(str(folder), load_format="safetensors", device="cpu")
