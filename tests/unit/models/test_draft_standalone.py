"""A whole model may draft for another if both mean the same by their ids."""

import json

import pytest
import torch

from serve_spec.core.errors import CheckpointError
from serve_spec.models.drafts.checkpoint import read_vocabulary
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.loader import load_target
from tests.helpers.checkpoints import make_eagle, make_target
from tests.helpers.paged import run_text


def load(directory, target):
    return load_draft(directory, target, "STANDALONE")


def refusal(directory, target):
    with pytest.raises(CheckpointError) as error:
        load(directory, target)
    return str(error.value)


def change_token(directory, token, token_id):
    path = directory / "tokenizer.json"
    content = json.loads(path.read_text())
    content["model"]["vocab"][token] = token_id
    path.write_text(json.dumps(content))


@pytest.mark.parametrize("family", ["llama2", "qwen3"])
def test_a_draft_computes_what_it_computes_as_a_target(tmp_path, target, family):
    make_target(tmp_path, family, layers=2, max_position_embeddings=16)
    draft = load(tmp_path, target).model
    ids = torch.arange(40)
    alone = load_target(tmp_path, torch.float32, max_model_len=512)
    # Its own 16 positions do not bound it: its positions are the target's.
    assert draft.max_model_len == target.max_model_len
    assert torch.equal(*(run_text(model, ids)[0] for model in (draft, alone)))


def test_equal_sizes_do_without_a_tokenizer_and_a_smaller_padding_loses_nothing(tmp_path, target):
    make_target(tmp_path / "equal", "llama2", layers=1)
    (tmp_path / "equal" / "tokenizer.json").unlink()
    make_target(tmp_path / "smaller", "llama2", layers=1, vocab=270)
    for name in ("equal", "smaller"):
        assert load(tmp_path / name, target).num_ids is None


def test_other_tokens_of_the_same_number_are_refused(tmp_path, target):
    make_target(tmp_path, "llama2", layers=1)
    change_token(tmp_path, "a", 98)
    message = refusal(tmp_path, target)
    assert "token 'a' has id 98, but 97 in" in message
    assert "target's own tokenizer" in message


def test_other_sizes_are_refused_unless_the_tokenizers_agree(tmp_path, target):
    make_target(tmp_path, "llama2", layers=1, vocab=300)
    draft = load(tmp_path, target)
    assert draft.num_ids == 288
    logits = draft.logits(torch.ones(1, draft.hidden_size))
    assert logits.shape[1] == 288, "ids that only the draft has are never drafted"
    assert torch.isfinite(logits).all()
    (tmp_path / "tokenizer.json").unlink()
    message = refusal(tmp_path, target)
    assert all(word in message for word in ("vocab_size=300", "288", "tokenizer.json")), message


def test_a_head_is_no_whole_model(tmp_path, target, target_dir):
    make_eagle(tmp_path, target_dir)
    message = refusal(tmp_path, target)
    assert "family EAGLE" in message
    assert "'STANDALONE'" in message


def test_vocabularies_of_every_tokenizer_model_are_read(tmp_path):
    added = [{"content": "<eos>", "id": 2}]
    for vocab in ({"a": 0, "b": 1}, [["a", -1.0], ["b", -2.5]]):
        content = {"model": {"vocab": vocab}, "added_tokens": added}
        (tmp_path / "tokenizer.json").write_text(json.dumps(content))
        assert read_vocabulary(tmp_path) == {"a": 0, "b": 1, "<eos>": 2}
    assert read_vocabulary(tmp_path / "elsewhere") is None
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="holds no vocabulary"):
        read_vocabulary(tmp_path)
