"""Weight files: every layout is read, and nothing wrong with them passes in silence."""

import json
import pickle
import shutil

import pytest
import torch
from safetensors.torch import save_file

from serve_spec.core.errors import CheckpointError
from serve_spec.models import load_target
from tests.helpers.checkpoints import make_target, read_checkpoint, write_checkpoint
from tests.helpers.paged import PagedSequences

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture
def made(tmp_path):
    return make_target(tmp_path / "target", "llama2", hidden=32, layers=2)


def logits(model):
    ctx = PagedSequences(model.shape, 1, 12).extend([(0, 12)])
    return model.logits(model.forward(torch.arange(12), ctx).hidden)


def rewrite(directory, change, **config):
    settings, tensors = read_checkpoint(directory)
    change(tensors)
    write_checkpoint(directory, {**settings, **config}, tensors)


def refusal(directory):
    with pytest.raises(CheckpointError) as error:
        load_target(directory, torch.float32)
    return str(error.value)


def shard(directory, whole="model.safetensors", save=save_file):
    """Splits the file in two with an index; returns the index's map."""
    _, tensors = read_checkpoint(directory)
    (directory / whole).unlink()
    stem, suffix = whole.split(".")
    weight_map = {}
    for number in (0, 1):
        name = f"{stem}-{number + 1}-of-2.{suffix}"
        part = {key: value for key, value in tensors.items() if len(key) % 2 == number}
        save(part, directory / name)
        weight_map |= dict.fromkeys(part, name)
    _write_index(directory, weight_map, whole)
    return weight_map


def _write_index(directory, weight_map, whole="model.safetensors"):
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / f"{whole}.index.json").write_text(json.dumps(index))


def test_shards_and_pickles_give_the_same_model_as_one_file(made, tmp_path):
    expected = logits(load_target(made, torch.float32))
    pickled = write_checkpoint(tmp_path / "pickled", *read_checkpoint(made), pickle=True)

    def is_same(folder):
        return torch.equal(logits(load_target(folder, torch.float32)), expected)

    assert is_same(pickled)
    tensors = read_checkpoint(made)[1]
    torch.save(tensors, pickled / "pytorch_model.bin", _use_new_zipfile_serialization=False)
    assert is_same(pickled)
    shard(made)
    assert is_same(made)
    shard(pickled, "pytorch_model.bin", torch.save)
    assert is_same(pickled)


def test_stored_half_precision_is_cast(made):
    rewrite(made, lambda t: t.update({k: v.half() for k, v in t.items()}))
    model = load_target(made, torch.bfloat16)
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}


def test_stored_rotary_frequencies_are_harmless(made):
    rewrite(
        made, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)})
    )
    load_target(made, torch.float32)


def test_a_stored_lm_head_wins_over_tied_embeddings(made):
    expected = logits(load_target(made, torch.float32))
    rewrite(made, lambda t: None, tie_word_embeddings=True)
    assert torch.equal(logits(load_target(made, torch.float32)), expected)


@pytest.mark.parametrize(
    ("key", "expected"),
    [
        ("vocab_size", "[288, 32], expected [1000000000, 32]"),
        ("hidden_size", "[32, 32], expected [1000000000, 32]"),
        ("intermediate_size", "[64, 32], expected [1000000000, 32]"),
        ("head_dim", "[32, 32], expected [4000000000, 32]"),
        ("num_hidden_layers", "more than 4096; correct it"),
        ("max_position_embeddings", "more than 2097152; set max_model_len"),
    ],
)
def test_absurd_sizes_of_a_config_are_refused_by_key_before_memory_is_taken(made, key, expected):
    rewrite(made, lambda t: None, **{key: 10**9})
    message = refusal(made)
    assert f"{made}/config.json: " in message
    assert key in message
    assert "1000000000" in message or key == "head_dim"
    assert expected in message


def test_a_model_of_many_positions_may_be_used_for_fewer(made):
    rewrite(made, lambda t: None, max_position_embeddings=10**9)
    assert load_target(made, torch.float32, max_model_len=64).max_model_len == 64


def keep_one_of_a_layer(tensors):
    for name in list(tensors):
        if name.startswith("model.layers.1.") and name != Q_PROJ:
            del tensors[name]


BIAS = "model.layers.0.self_attn.q_proj.bias"


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda t: t.pop("lm_head.weight"), ["missing lm_head.weight"]),
        (lambda t: t.pop(Q_PROJ), [f"missing {Q_PROJ}"]),
        (keep_one_of_a_layer, ["(8 in all)"]),
        (lambda t: t.update({BIAS: torch.ones(32)}), [f"surplus {BIAS}"]),
        (lambda t: t.update({Q_PROJ: torch.ones(16, 32)}), [Q_PROJ, "[16, 32]", "[32, 32]"]),
        (lambda t: t.update({Q_PROJ: torch.ones(32, 32, dtype=torch.int8)}), [Q_PROJ]),
    ],
    ids=["no lm_head", "missing", "many missing", "surplus", "another shape", "quantised"],
)
def test_tensors_that_do_not_fit_are_refused_by_name(made, change, words):
    rewrite(made, change)
    message = refusal(made)
    assert [word for word in words if word not in message] == []


def test_a_file_that_is_damaged_or_cut_short_is_refused(made):
    path = made / "model.safetensors"
    whole = path.read_bytes()
    for content in (whole[:4], whole[:40], whole[:5000], whole[:8] + b"\xff" * 32 + whole[40:]):
        path.write_bytes(content)
        assert "model.safetensors is damaged or cut short" in refusal(made)


def test_a_pickle_that_is_unsafe_cut_short_or_of_something_else_is_refused(made):
    settings, tensors = read_checkpoint(made)
    path = made / "pytorch_model.bin"
    write_checkpoint(made, settings, tensors, pickle=True)
    (made / "model.safetensors").unlink(missing_ok=True)
    for content in (path.read_bytes()[:5000], pickle.dumps({"x": print}, protocol=2)):
        path.write_bytes(content)
        assert "pytorch_model.bin cannot be read" in refusal(made)
    torch.save({"epoch": 3}, path)
    assert "epoch" in refusal(made)


def test_a_directory_without_weights_lists_what_it_holds(made):
    (made / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"no weights.*config\.json"):
        load_target(made, torch.float32)


def test_an_index_at_odds_with_its_shards_is_refused(made):
    weight_map = shard(made)
    shutil.copy(made / "model-1-of-2.safetensors", made / "again.safetensors")
    first = next(name for name, file in weight_map.items() if file.startswith("model-1"))
    other = {"model-1-of-2.safetensors": "model-2-of-2.safetensors"}
    elsewhere = other.get(weight_map[Q_PROJ], "model-1-of-2.safetensors")
    for changed, word in (
        ({**weight_map, Q_PROJ: elsewhere}, Q_PROJ),
        ({**weight_map, first: "again.safetensors"}, "in both"),
        ({}, "weight_map"),
    ):
        _write_index(made, changed)
        assert word in refusal(made)
    _write_index(made, weight_map)
    (made / "model-2-of-2.safetensors").unlink()
    assert "absent model-2-of-2.safetensors" in refusal(made)
