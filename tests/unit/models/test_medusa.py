"""Medusa heads equal a plain recomputation in both namings; what does not fit is refused."""

import pytest
import torch
from safetensors.torch import save_file

from serve_spec.core.errors import CheckpointError
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import load_target
from tests.helpers.checkpoints import make_target, read_checkpoint, write_checkpoint
from tests.unit.models.draft_formats import assert_close, medusa_tensors, official_medusa_names

HIDDEN, VOCAB = 32, 288


def load(directory, target):
    return load_draft(directory, target, "MEDUSA")


def refusal(directory, target):
    with pytest.raises(CheckpointError) as error:
        load(directory, target)
    return str(error.value)


def all_logits(medusa, hidden):
    return torch.stack([medusa.logits(hidden, step) for step in range(medusa.max_steps)])


def features(count=5):
    return torch.randn(count, HIDDEN, generator=torch.Generator().manual_seed(8))


def plain_logits(tensors, output, x):
    """[heads, T, rows], in float64, as plainly as possible. output: of heads without their own."""
    tensors = {name: tensor.double() for name, tensor in tensors.items()}
    num_heads = 1 + max(int(name.split(".")[1]) for name in tensors if "blocks." in name)
    heads = []
    for head in range(num_heads):
        state, block = x.double(), 0
        while (name := f"blocks.{head}.layers.{block}") + ".weight" in tensors:
            inner = state @ tensors[name + ".weight"].T + tensors.get(name + ".bias", 0.0)
            state = state + inner / (1 + torch.exp(-inner))
            block += 1
        own = tensors.get(f"lm_heads.{head}.weight", tensors.get("lm_head.weight"))
        heads.append(state @ (output.double() if own is None else own).T)
    return torch.stack(heads)


def target_output(target_dir):
    tensors = read_checkpoint(target_dir)[1]
    return tensors.get("lm_head.weight", tensors["model.embed_tokens.weight"])


@pytest.mark.parametrize(
    "heads",
    [
        {"rows": VOCAB},
        {"rows": VOCAB, "num_blocks": 3},
        {"rows": VOCAB, "bias": False},
        {"rows": VOCAB, "shared": True},
        {"rows": None},
        {"rows": VOCAB, "num_heads": 1},
    ],
)
def test_heads_in_vllms_naming_compute_what_their_tensors_say(tmp_path, target_dir, target, heads):
    tensors = medusa_tensors(HIDDEN, **{"num_heads": 3, **heads})
    write_checkpoint(tmp_path, {"model_type": "medusa", "num_heads": 3}, tensors)
    medusa = load(tmp_path, target)
    assert medusa.target_ids is None
    assert medusa.capture == FeatureCapture(layer_ids=None)
    found = all_logits(medusa, features())
    assert found.dtype == torch.float32
    assert_close(found, plain_logits(tensors, target_output(target_dir), features()))


@pytest.mark.parametrize(
    ("suffix", "num_blocks", "prefix"),
    [("pt", 1, ""), ("pt", 2, "medusa_head."), ("safetensors", 2, "")],
)
def test_heads_as_their_authors_save_them_are_counted_by_their_tensors(
    tmp_path, target, suffix, num_blocks, prefix
):
    tensors = medusa_tensors(HIDDEN, 5, num_blocks, VOCAB)
    saved = official_medusa_names(tensors, prefix)
    # The published config has 2, over a file of 5.
    write_checkpoint(tmp_path, {"medusa_num_heads": 2, "medusa_num_layers": 1}, {})
    (tmp_path / "model.safetensors").unlink()
    if suffix == "pt":
        torch.save(saved, tmp_path / "medusa_lm_head.pt")
    else:
        save_file(saved, tmp_path / "medusa_lm_head.safetensors")
    medusa = load(tmp_path, target)
    assert (medusa.heads_shape.num_heads, medusa.heads_shape.num_blocks) == (5, num_blocks)
    assert_close(all_logits(medusa, features()), plain_logits(tensors, torch.empty(0), features()))


def test_one_matrix_may_be_stored_as_the_first_heads(tmp_path, target):
    tensors = medusa_tensors(HIDDEN, 3, 1, VOCAB, shared=True)
    shared = tensors["lm_head.weight"]
    renamed = {name.replace("lm_head.", "lm_heads.0."): t for name, t in tensors.items()}
    write_checkpoint(tmp_path, {"original_lm_head": True}, renamed)
    expected = plain_logits(tensors, shared, features())
    assert_close(all_logits(load(tmp_path, target), features()), expected)
    # Without the config's word it is a file that lost the others.
    write_checkpoint(tmp_path, {}, renamed)
    assert "missing lm_heads.1.weight, lm_heads.2.weight" in refusal(tmp_path, target)


@pytest.mark.parametrize("rows", [6, VOCAB, None])
def test_a_token_map_names_the_targets_ids_themselves(tmp_path, target_dir, target, rows):
    token_map = torch.tensor([7, 3, 200, 11, 12, 40])
    tensors = medusa_tensors(HIDDEN, 2, 1, rows)
    config = {"truncated_vocab_size": 6, "vocab_size": VOCAB}
    write_checkpoint(tmp_path, config, {**tensors, "token_map": token_map})
    medusa = load(tmp_path, target)
    assert torch.equal(medusa.target_ids, token_map)
    expected = plain_logits(tensors, target_output(target_dir), features())
    # Matrices of all of the vocabulary are read at the map's rows.
    expected = expected if rows == 6 else expected[:, :, token_map]
    assert_close(all_logits(medusa, features()), expected)


@pytest.mark.parametrize("mapped", [None, [285, 3, 279, 280]])
def test_ids_that_pad_the_targets_vocabulary_are_never_drafted(tmp_path, mapped):
    padded = make_target(tmp_path / "t", "llama2", hidden=HIDDEN, serve_spec_num_ids=280)
    ids = torch.arange(VOCAB) if mapped is None else torch.tensor(mapped)
    tensors = medusa_tensors(HIDDEN, 2, 1, len(ids))
    if mapped is not None:
        tensors["token_map"] = ids
    write_checkpoint(tmp_path / "m", {}, tensors)
    logits = all_logits(load(tmp_path / "m", load_target(padded, torch.float32)), features())
    assert torch.equal(torch.isinf(logits).all(dim=(0, 1)), ids >= 280)
    assert torch.isfinite(logits[:, :, ids < 280]).all()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"blocks.1.layers.0.weight": None}, ["missing blocks.1.layers.0.weight"]),
        ({"blocks.1.layers.0.bias": None}, ["missing blocks.1.layers.0.bias"]),
        ({"lm_heads.1.weight": None}, ["missing lm_heads.1.weight"]),
        ({"lm_heads.2.weight": torch.ones(VOCAB, HIDDEN)}, ["surplus lm_heads.2.weight"]),
        ({"lm_head.weight": torch.ones(VOCAB, HIDDEN)}, ["surplus lm_head.weight"]),
        ({"lm_heads.1.weight": torch.ones(9, HIDDEN)}, ["lm_heads.1.weight", "[9, 32]"]),
        ({"lm_heads.0.weight": torch.ones(9, HIDDEN)}, ["draft 9", "288", "no token_map"]),
        ({"token_map": torch.tensor([1, 1])}, ["token_map", "distinct", "288"]),
        ({"token_map": torch.tensor([1, 288])}, ["token_map", "1 .. 288"]),
        ({"token_map": torch.tensor([0.5])}, ["token_map", "float32"]),
        (
            {"token_map": torch.tensor([5]), "lm_heads.0.weight": torch.ones(9, HIDDEN)},
            ["token_map is [1]", "9 rows"],
        ),
        (
            {"layers.0.self_attn.q_proj.weight": torch.ones(HIDDEN, HIDDEN)},
            ["complete model beside its Medusa heads"],
        ),
    ],
)
def test_heads_that_do_not_fit_are_refused_by_name(tmp_path, target, change, words):
    tensors = {**medusa_tensors(HIDDEN, 2, 1, VOCAB), **change}
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    write_checkpoint(tmp_path, {}, kept)
    message = refusal(tmp_path, target)
    assert all(word in message for word in words), message


def test_heads_for_a_wider_target_are_refused(tmp_path, target):
    write_checkpoint(tmp_path, {}, medusa_tensors(64, 2, 1, VOCAB))
    with pytest.raises(CheckpointError, match=r"width 64.*hidden_size is 32"):
        load(tmp_path, target)
