"""Draft heads equal a plain recomputation, in every published variant, however entries arrive."""

import pytest
import torch

from serve_spec.models.drafts.base import DraftOptions
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.interfaces import FeatureCapture
from serve_spec.models.loader import load_target
from tests.helpers.checkpoints import (
    make_eagle,
    make_eagle3,
    make_mtp,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.paged import PagedSequences
from tests.helpers.plain_heads import PlainHead
from tests.unit.models.draft_formats import assert_close

LEGACY = ("low", "mid", "high")


def add_ones(size, *names):
    """Adds tensors about one to a file."""
    ones = 1.0 + 0.3 * torch.randn(size, generator=torch.Generator().manual_seed(5))
    return lambda file: file.update({name: ones.clone() for name in names})


def add_idle_maps(file):
    file["d2t"] = torch.zeros(288, dtype=torch.int64)
    file["t2d"] = torch.zeros(288, dtype=torch.bool)


def with_prefix(file):
    for name in list(file):
        file[f"model.{name}"] = file.pop(name)


# name -> (arguments of make_eagle3, change to the tensors)
EAGLE3 = {
    "plain": ({}, None),
    "reduced_vocabulary": ({"draft_vocab": 100}, None),
    "reduced_vocabulary_without_t2d": ({"draft_vocab": 100}, lambda file: file.pop("t2d")),
    "fc_bias": ({"fc_bias": True}, None),
    "norm_before_residual": ({"norm_before_residual": True}, None),
    "norm_output": ({"norm_output": True, "draft_vocab": 50}, None),
    "model_prefix": ({}, with_prefix),
    "two_layers": ({"num_layers": 2}, None),
    "own_embedding": ({"own_embedding": True}, None),
    "thin": ({"hidden_size": 16, "own_embedding": True, "head_dim": 8}, None),
    "grouped_heads": ({"num_key_value_heads": 2}, None),
    "wide_heads": ({"head_dim": 16}, None),
    "config_theta": ({"rope_theta": 300.0}, None),
    "input_norm": ({"norm_before_fc": True}, add_ones(96, "input_norm.weight")),
    "fc_norm": ({"fc_norm": True}, add_ones(32, *(f"fc_norm.{i}.weight" for i in range(3)))),
    "legacy_fc_norm": ({}, add_ones(32, *(f"aux_norm_{at}.weight" for at in LEGACY))),
    "qkv_bias": ({}, add_ones(32, *(f"midlayer.self_attn.{p}_proj.bias" for p in "qkv"))),
    "qk_norm": ({}, add_ones(8, *(f"midlayer.self_attn.{p}_norm.weight" for p in "qk"))),
    # What a trainer's published files hold beside the official layout.
    "specforge": ({"eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": False}}, None),
    "angelslim": ({"tie_word_embeddings": True, "rope_theta": 1e6, "num_hidden_layers": 40}, None),
    "modelopt": ({"layer_prefix": "layers.0.", "draft_vocab": 100}, None),
    # Maps that map nothing.
    "idle_maps": ({}, add_idle_maps),
}
EAGLE = {
    "plain": ({}, None),
    "no_embedding": ({"own_embedding": False}, None),
    "two_layers": ({"num_layers": 2}, None),
    "grouped_heads": ({"num_key_value_heads": 1}, None),
    "input_norm": ({}, add_ones(32, "layers.0.input_layernorm.weight")),
    "qkv_bias": (
        {"qkv_bias": True},
        add_ones(32, *(f"layers.0.self_attn.{p}_proj.bias" for p in "qkv")),
    ),
    "config_theta": ({"rope_theta": 500000.0}, None),
}


MTP = {"plain": ({"rope_scaling": None, "rope_theta": 300.0}, None)}
KINDS = {"EAGLE3": (make_eagle3, EAGLE3), "EAGLE": (make_eagle, EAGLE), "MTP": (make_mtp, MTP)}


class Duo:
    """A head loaded by the package, and the plain one."""

    def __init__(self, directory, target_dir, target, case):
        family, name = case.split(":")
        make, table = KINDS[family]
        arguments, change = table[name]
        make(directory, target_dir, **arguments)
        if change is not None:
            config, tensors = read_checkpoint(directory)
            change(tensors)
            write_checkpoint(directory, config, tensors, pickle=family == "EAGLE")
        self.ours = load_draft(directory, target, family)
        self.plain = PlainHead(directory, target_dir)


CASES = [f"{family}:{name}" for family, (_, table) in KINDS.items() for name in table]
DRAFTED = 4
LENGTHS = (23, 6)


@pytest.fixture(scope="module", params=CASES)
def duo(request, tmp_path_factory, target_dir, target):
    return Duo(tmp_path_factory.mktemp("head"), target_dir, target, request.param)


def scene(head):
    """Tokens (entries and drafts) and target features of two sequences."""
    generator = torch.Generator().manual_seed(3)
    tokens = [torch.randint(0, 288, (n + DRAFTED,), generator=generator) for n in LENGTHS]
    features = [torch.randn(n + DRAFTED, head.feature_dim, generator=generator) for n in LENGTHS]
    return tokens, features


def test_extending_in_chunks_and_then_drafting_equals_a_plain_unroll(duo):
    head = duo.ours
    tokens, features = scene(head)
    plain = [
        duo.plain.unroll(ids, rows[:n])
        for ids, rows, n in zip(tokens, features, LENGTHS, strict=True)
    ]
    sequences = PagedSequences(head.caches, 2, max(LENGTHS) + DRAFTED)
    hidden = [torch.empty(0, head.hidden_size) for _ in LENGTHS]
    for chunks in ([(0, 17)], [(1, 3), (0, 5)], [(0, 1), (1, 3)]):
        _extend(head, sequences, chunks, tokens, features, hidden)
    for _ in range(DRAFTED):
        ids = torch.stack([tokens[b][sequences.lengths[b]] for b in (0, 1)])
        feedback = torch.stack([hidden[b][-1] for b in (0, 1)])
        out = head.forward(ids, feedback, sequences.extend([(0, 1), (1, 1)]))
        hidden = [torch.cat((hidden[b], out[b : b + 1])) for b in (0, 1)]
    for found, (expected_hidden, expected_logits) in zip(hidden, plain, strict=True):
        assert_close(found, expected_hidden)
        assert_close(head.logits(found), expected_logits)


@pytest.mark.parametrize("asked", [(1, 0), (0, 0)])
def test_tokens_whose_output_is_not_asked_for_leave_the_same_entries(duo, asked):
    head = duo.ours
    assert head.ends_early == (head.shape.num_layers == 1)
    if not head.ends_early:
        return
    tokens, features = scene(head)
    whole, some = (PagedSequences(head.caches, 2, max(LENGTHS)) for _ in range(2))
    ids = torch.cat([tokens[b][:n] for b, n in enumerate(LENGTHS)])
    encoded = head.encode(torch.cat([features[b][:n] for b, n in enumerate(LENGTHS)]))
    chunks = list(enumerate(LENGTHS))
    expected = head.forward(ids, encoded, whole.extend(chunks))
    found = head.forward(ids, encoded, some.extend(chunks, asked))
    ends = torch.tensor(LENGTHS).cumsum(0) - 1
    expected = expected[ends[torch.tensor(asked).bool()]]
    assert found.shape == expected.shape
    if sum(asked):
        assert_close(found, expected)
    assert all(map(torch.equal, some.pool.tensors, whole.pool.tensors))


def _extend(head, sequences, chunks, tokens, features, hidden):
    spans = [(b, slice(sequences.lengths[b], sequences.lengths[b] + n)) for b, n in chunks]
    ids = torch.cat([tokens[b][span] for b, span in spans])
    encoded = head.encode(torch.cat([features[b][span] for b, span in spans]))
    kept = encoded.clone()
    out = head.forward(ids, encoded, sequences.extend(chunks))
    assert torch.equal(encoded, kept), "forward must not change its inputs"
    for (b, _), rows in zip(chunks, out.split([n for _, n in chunks]), strict=True):
        hidden[b] = torch.cat((hidden[b], rows))


def test_draft_ids_of_the_targets_padding_are_never_drafted(tmp_path):
    """Of 288 ids the last eight pad the vocabulary; a reduced one may reach some of them."""
    padded = make_target(tmp_path / "t", "llama2", hidden=32, serve_spec_num_ids=280)
    target = load_target(padded, torch.float32)
    for seed in range(4):
        make_eagle3(tmp_path / "head", padded, draft_vocab=200, seed=seed)
        head = load_draft(tmp_path / "head", target, "EAGLE3")
        is_padding = head.target_ids >= 280
        assert is_padding.any(), "the test needs ids of the padding"
        logits = head.logits(torch.ones(2, 32))
        assert torch.equal(torch.isinf(logits).all(dim=0), is_padding)
        assert torch.isfinite(logits[:, ~is_padding]).all()


# The target has 8 layers.
@pytest.mark.parametrize(
    ("ids", "options", "captured"),
    [
        (None, DraftOptions(), (2, 4, 5)),
        ([], DraftOptions(), (2, 4, 5)),
        ([1, 3, 4], DraftOptions(), (2, 4, 5)),
        ([2, 4, 5], DraftOptions(), (2, 4, 5)),
        ([2, 4, 8], DraftOptions(), (2, 4, 8)),
        ([1, 4, 7], DraftOptions(), (2, 5, 8)),
        ([3, 4, 6], DraftOptions(), (4, 5, 7)),
        ([3, 4, 6], DraftOptions(aux_layers_mean="input"), (3, 4, 6)),
        ([2, 4, 5], DraftOptions(aux_layers_mean="output"), (3, 5, 6)),
        ([3, 4, 6], DraftOptions(aux_layer_ids=(0, 1, 8)), (0, 1, 8)),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_captured_layers_follow_either_convention(
    tmp_path, target_dir, target, ids, options, captured, nested
):
    keys = {} if ids is None else {"eagle_aux_hidden_state_layer_ids": ids}
    make_eagle3(tmp_path, target_dir, **({"eagle_config": keys} if nested else keys))
    head = load_draft(tmp_path, target, "EAGLE3", options)
    assert head.capture == FeatureCapture(captured)


def test_the_targets_embedding_is_shared_with_a_frozen_copy_of_it(tmp_path, target_dir, target):
    make_eagle(tmp_path, target_dir)
    config, tensors = read_checkpoint(tmp_path)
    tensors["embed_tokens.weight"] = tensors["embed_tokens.weight"].half()
    write_checkpoint(tmp_path, config, tensors, pickle=True)
    head = load_draft(tmp_path, target, "EAGLE")
    assert head.embed_tokens is target.embed_tokens


def test_heads_take_the_dtype_of_their_target(tmp_path, target_dir):
    make_eagle3(tmp_path, target_dir, draft_vocab=100)
    half = load_target(target_dir, torch.bfloat16)
    head = load_draft(tmp_path, half, "EAGLE3")
    assert {p.dtype for p in head.parameters()} == {torch.bfloat16}
    sequences = PagedSequences(head.caches, 1, 5, dtype=torch.bfloat16)
    encoded = head.encode(torch.ones(5, head.feature_dim, dtype=torch.bfloat16))
    hidden = head.forward(torch.arange(5), encoded, sequences.extend([(0, 5)]))
    assert head.logits(hidden).dtype == torch.float32
