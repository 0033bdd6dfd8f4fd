"""An expanded pair computes what its base computes: logits, features, drafts and texts."""

import json
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.expand import (
    LOAD_FORMAT,
    expand_draft,
    expand_target,
    main,
    open_head,
    sizes_of,
)
from benchmarks.expansion import Expansion, Widening, open_weights, widen
from serve_spec.config import ServeSpecConfig
from serve_spec.core.errors import CheckpointError
from serve_spec.engine.check import check_checkpoints
from serve_spec.models.drafts.base import DraftOptions
from serve_spec.models.drafts.checkpoint import open_draft
from serve_spec.models.drafts.loader import load_draft
from serve_spec.models.family import read_shape
from serve_spec.models.loader import load_target, open_target
from tests.helpers.checkpoints import (
    VOCAB,
    make_eagle,
    make_eagle3,
    make_target,
    read_checkpoint,
    write_checkpoint,
)
from tests.helpers.paged import PagedSequences, run_text
from tests.unit.models.draft_formats import as_speculators

# The layers compute in float32 at most; that widening is exact is shown where it is done.
TOLERANCE = 5e-5
FAMILIES = {
    "llama3": {},  # tied embeddings, scaled rotation
    "llama2": {"attention_bias": True, "mlp_bias": True},
    "mistral": {"sliding_window": 7},
    "qwen2": {},  # biases
    "qwen2_window": {"use_sliding_window": True, "sliding_window": 6, "max_window_layers": 5},
    "qwen3": {"layer_types": ["full_attention"] * 8},  # norms of queries and keys
}


def grown(hidden, ffn, layers, vocab, draft_vocab=None, noise=1.0):
    """A size without a base."""
    return Expansion("", hidden, ffn, layers, vocab, draft_vocab, noise, seed=0)


SIZES = {
    "width": grown(2, 2, 8, VOCAB),
    "odd": grown(3, 1, 9, VOCAB + 1),
    "depth": grown(1, 1, 13, VOCAB),
    "all": grown(2, 4, 19, 1000),
}
HEADS = {
    "eagle3": ("EAGLE3", {}),
    "eagle3_reduced": ("EAGLE3", {"draft_vocab": 100, "norm_before_residual": True}),
    "eagle3_two_layers": ("EAGLE3", {"num_layers": 2, "fc_bias": True, "own_embedding": True}),
    "eagle3_early": ("EAGLE3", {"eagle_aux_hidden_state_layer_ids": [0, 1, 7]}),
    "eagle": ("EAGLE", {}),
    "eagle_shared": ("EAGLE", {"fc_bias": False, "own_embedding": False, "num_layers": 2}),
}
# Parts that few published heads have, by shape for a target 32 wide.
RARE = {
    "input_norm": (96,),
    "fc_norm.0": (32,),
    "fc_norm.1": (32,),
    "fc_norm.2": (32,),
    "midlayer.self_attn.q_norm": (8,),
    "midlayer.self_attn.k_norm": (8,),
}
IDS = torch.arange(40) * 7 % VOCAB


def close(found, expected):
    scale = max(1.0, float(expected.abs().max()))
    return bool((found - expected).abs().max() <= TOLERANCE * scale)


def expand(base, size, directory):
    expand_target(replace(size, base=str(base)), directory)


def expand_head(base, target, size, directory):
    return expand_draft(replace(size, base=str(base)), target, directory)


def load_large(directory):
    return load_target(directory, torch.float32, load_format=LOAD_FORMAT)


def load_large_head(directory, target, algorithm):
    return load_draft(directory, target, algorithm, DraftOptions(load_format=LOAD_FORMAT))


def expanded(base, size, directory, noise=1.0):
    expand(base, replace(size, noise=noise), directory)
    return load_large(directory)


def two_sizes_of_each(names, *turns):
    """Return cases in which every name and every size comes up, with values by turns."""
    return [
        (name, [*SIZES][(2 * number + at) % 4], *(turn[(number // 2 + at) % 2] for turn in turns))
        for number, name in enumerate(names)
        for at in range(2)
    ]


@pytest.mark.parametrize(("family", "size", "noise"), two_sizes_of_each(FAMILIES, (0.0, 1.0)))
def test_logits_are_those_of_the_base(tmp_path, family, size, noise):
    name = family.removesuffix("_window")
    base = make_target(tmp_path / "small", name, layers=8, hidden=32, **FAMILIES[family])
    small = load_target(base, torch.float32)
    large = expanded(base, SIZES[size], tmp_path / "large", noise)
    expected, _ = run_text(small, IDS)
    found, _ = run_text(large, IDS)
    assert close(found[:, :VOCAB], expected)
    assert (found[:, VOCAB:] == float("-inf")).all()
    assert found.shape[1] == large.shape.vocab_size == SIZES[size].vocab_size
    assert large.shape.num_layers == SIZES[size].num_layers
    assert large.shape.hidden_size == SIZES[size].hidden_factor * 32


def draft(head, target, steps=5):
    """Drafts after `IDS`, greedy, as the drafter makes them: target ids, logits, hidden states."""
    _, features = run_text(target, IDS, head.capture)
    sequences = PagedSequences(head.caches, 1, len(IDS) + steps)
    # Any next tokens will do for the entries; the last one is 5.
    tokens = torch.cat((IDS[1:], torch.tensor([5])))
    hidden = head.forward(tokens, head.encode(features), sequences.extend([(0, len(IDS))]))[-1:]
    drafts, logits, states = [], [], []
    for _ in range(steps):
        states.append(hidden)
        logits.append(head.logits(hidden))
        choice = logits[-1].argmax(dim=-1)
        token = choice if head.target_ids is None else head.target_ids[choice]
        drafts.append(int(token))
        hidden = head.forward(token, hidden, sequences.extend([(0, 1)]))
    return drafts, torch.cat(logits), torch.cat(states)


@pytest.mark.parametrize(("case", "size"), two_sizes_of_each(HEADS))
def test_chains_of_drafts_are_those_of_the_base(tmp_path, target_dir, case, size):
    algorithm, options = HEADS[case]
    make = make_eagle3 if algorithm == "EAGLE3" else make_eagle
    base = make(tmp_path / "small", target_dir, **options)
    small_target = load_target(target_dir, torch.float32)
    large_target = expanded(target_dir, SIZES[size], tmp_path / "target")
    family = expand_head(base, small_target.shape, SIZES[size], tmp_path / "head")
    assert family == algorithm
    small = load_draft(base, small_target, algorithm)
    large = load_large_head(tmp_path / "head", large_target, algorithm)
    drafts, logits, hidden = draft(small, small_target)
    found_drafts, found_logits, found_hidden = draft(large, large_target)
    known = logits.shape[1]
    assert found_drafts == drafts
    assert close(found_logits[:, :known], logits)
    assert (found_logits[:, known:] == float("-inf")).all()
    assert close(found_hidden, hidden.repeat(1, SIZES[size].hidden_factor))
    added = SIZES[size].vocab_size - VOCAB
    assert found_logits.shape[1] - known == added


@pytest.mark.parametrize("parts", [("input_norm",), ("fc_norm.",), ("q_norm", "k_norm")])
def test_rare_parts_of_heads_grow_too(tmp_path, target_dir, parts):
    base = make_eagle3(tmp_path / "small", target_dir)
    config, tensors = read_checkpoint(base)
    generator = torch.Generator().manual_seed(0)
    for name, shape in RARE.items():
        if any(part in name for part in parts):
            tensors[f"{name}.weight"] = 1 + 0.3 * torch.randn(shape, generator=generator)
    write_checkpoint(base, config, tensors)
    small_target = load_target(target_dir, torch.float32)
    large_target = expanded(target_dir, SIZES["odd"], tmp_path / "target")
    expand_head(base, small_target.shape, SIZES["odd"], tmp_path / "head")
    _, _, hidden = draft(load_draft(base, small_target, "EAGLE3"), small_target)
    _, _, found = draft(load_large_head(tmp_path / "head", large_target, "EAGLE3"), large_target)
    assert close(found, hidden.repeat(1, 3))


def test_a_draft_vocabulary_grows_less_than_the_targets_if_asked(tmp_path, target_dir):
    base = make_eagle3(tmp_path / "small", target_dir, draft_vocab=100)
    factors = ["--hidden-factor", "2", "--layers", "9", "--vocab-size", "1000"]
    pair = ["--target", str(target_dir), "--draft", str(base)]
    large = tmp_path / "large"
    main([*pair, "--output-dir", str(large), *factors, "--draft-vocab-size", "500"])
    config = ServeSpecConfig.load(large / "expanded.yaml")
    target = load_large(config.model.folder)
    sizes = target.shape.hidden_size, target.shape.num_layers, target.shape.vocab_size
    assert sizes == (64, 9, 1000)
    head = load_large_head(config.draft_folder, target, "EAGLE3")
    assert head.target_ids.shape == (500,)
    assert (head.target_ids[:100] < VOCAB).all()
    assert (head.target_ids[100:] >= VOCAB).all()
    assert head.num_ids == 100


def test_the_shipped_pair_reaches_the_shape_of_llama_3_1_8b(tmp_path):
    pair = ["--target", "asset:tiny/target", "--draft", "asset:tiny/eagle3", "asset:tiny/eagle"]
    main([*pair, "--shape", "llama-3.1-8b", "--output-dir", str(tmp_path)])
    config = ServeSpecConfig.load(tmp_path / "expanded.yaml")
    assert config.model.folder == tmp_path / "target"
    assert config.draft_folder == tmp_path / "eagle3"
    check_checkpoints(config)
    recipe = json.loads((tmp_path / "target" / "expansion.json").read_text())
    assert recipe["base"] == "asset:tiny/target", "wherever the package lies"
    shape = read_shape(tmp_path / "target")
    sizes = (shape.hidden_size, shape.num_heads, shape.num_kv_heads, shape.head_dim)
    assert sizes == (4096, 32, 8, 128)
    assert (shape.num_layers, shape.vocab_size, shape.num_ids) == (32, 128256, 8192)
    file = open_target(tmp_path / "target", LOAD_FORMAT)
    model = file.skeleton()
    file.checkpoint.check(model.tensors())
    assert sum(parameter.numel() for parameter in model.parameters()) == 8_030_261_248
    for name, family in (("eagle3", "EAGLE3"), ("eagle", "EAGLE")):
        file = open_draft(tmp_path / name, load_format=LOAD_FORMAT)
        assert file.family == family
        assert file.config["hidden_size"] == 4096
    assert open_weights(tmp_path / "eagle3").shapes["lm_head.weight"] == (32000, 4096)
    written = sum(path.stat().st_size for path in tmp_path.rglob("*") if path.is_file())
    assert written < 2_000_000


def test_only_official_heads_are_expanded(tmp_path, target_dir):
    official = make_eagle3(tmp_path / "official", target_dir)
    assert open_head(official).family == "EAGLE3"
    as_speculators(official, tmp_path / "speculators")
    make_target(tmp_path / "model", "llama2")
    for name, word in (("speculators", "speculators checkpoint"), ("model", "STANDALONE")):
        with refused(word):
            open_head(tmp_path / name)


def refused(match):
    return pytest.raises(CheckpointError, match=match)


def test_sizes_that_do_not_fit_and_contradictions_are_refused(tmp_path, target_dir):
    shape = read_shape(target_dir)
    for size, match in (
        (grown(0, 1, 8, VOCAB), "hidden_factor=0"),
        (grown(1, 0, 8, VOCAB), "ffn_factor=0"),
        (grown(1, 1, 7, VOCAB), "num_layers=7"),
        (grown(1, 1, 8, VOCAB - 1), f"vocab_size={VOCAB - 1}"),
    ):
        with refused(match):
            expand(target_dir, size, tmp_path / "large")
    with refused("noise=1.5"):
        expand(target_dir, grown(2, 2, 8, VOCAB, noise=1.5), tmp_path / "large")
    with refused("shape='llama-3.1-8b': num_heads=32"):
        sizes_of("llama-3.1-8b", shape)
    assert not (tmp_path / "large").exists()


def test_the_command_refuses_in_one_line_what_does_not_fit(tmp_path, target_dir, capsys):
    head = make_eagle3(tmp_path / "target", target_dir)
    for arguments, problem in (
        (["--shape", "llama-3.1-8b", "--layers", "9"], "shape='llama-3.1-8b' and num_layers: give"),
        (["--hidden-factor", "0"], "hidden_factor=0: give"),
        (["--draft", str(head)], "another folder is called 'target'"),
    ):
        pair = ["--target", str(target_dir), "--output-dir", str(tmp_path / "large")]
        assert main([*pair, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert problem in line


def test_heads_that_do_not_fit_are_refused(tmp_path, target_dir):
    shape = read_shape(target_dir)
    thin = make_eagle3(
        tmp_path / "thin", target_dir, hidden_size=16, head_dim=8, own_embedding=True
    )
    with refused("hidden_size=16, but the target's is 32"):
        expand_head(thin, shape, SIZES["all"], tmp_path / "head")
    base = make_eagle3(tmp_path / "small", target_dir, draft_vocab=100)
    for rows in (99, 813):
        size = grown(2, 2, 8, 1000, rows)
        with refused(f"draft_vocab_size={rows}: the head has 100 ids, and 812 is the most"):
            expand_head(base, shape, size, tmp_path / "head")


def test_only_official_eagle_heads_are_expanded(tmp_path, target_dir):
    shape = read_shape(target_dir)
    as_speculators(make_eagle3(tmp_path / "eagle3", target_dir), tmp_path / "speculators")
    make_target(tmp_path / "model", "llama2")
    for name, problem in (("speculators", "speculators checkpoint"), ("model", "STANDALONE")):
        with refused(problem):
            expand_head(tmp_path / name, shape, SIZES["width"], tmp_path / "head")


def test_a_base_that_is_missing_or_an_expansion_is_refused(tmp_path, target_dir):
    def widen(base, directory):
        expand(base, SIZES["width"], directory)

    with refused("nothing at"):
        widen(tmp_path / "nowhere", tmp_path / "large")
    with refused("nothing at"):
        widen("asset:tiny/nowhere", tmp_path / "large")
    widen(target_dir, tmp_path / "large")
    with refused("is an expansion itself"):
        widen(tmp_path / "large", tmp_path / "larger")
    with refused(r"holds weights \(model\.safetensors\)"):
        widen(target_dir, target_dir)
    mixture = make_target(tmp_path / "mixture", "mixtral", layers=2, hidden=32)
    with refused("mixtures of experts are not expanded"):
        widen(mixture, tmp_path / "larger")
    recipe = json.loads((tmp_path / "large" / "expansion.json").read_text())
    (tmp_path / "large" / "expansion.json").write_text(json.dumps({**recipe, "base": "gone"}))
    with refused("nothing at"):
        load_large(tmp_path / "large")


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"noises": 1.0}, r"keys \['noises'\]"),
        ({"hidden_factor": 0}, "hidden_factor is 0"),
        ({"hidden_factor": "2"}, "hidden_factor is '2'"),
        ({"noise": True}, "noise=True"),
        ({"seed": None}, "seed an integer"),
        ({"num_layers": 9}, "missing model.layers.9|surplus model.layers"),
        ({"hidden_factor": 4}, "expected"),
    ],
)
def test_a_recipe_that_was_tampered_with_is_refused(tmp_path, target_dir, change, match):
    expand(target_dir, SIZES["width"], tmp_path)
    path = tmp_path / "expansion.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with refused(match):
        load_large(tmp_path)


EXACT = torch.float64
COPIES = (2, 3, 4, 5, 8, 16)


def matrix(rows, columns, seed=0, scale=1.0):
    """Random entries of very different sizes, each a bfloat16."""
    generator = torch.Generator().manual_seed(seed)
    size = torch.randn(rows, columns, generator=generator).mul(2.0).exp()
    return (torch.randn(rows, columns, generator=generator) * size * scale).bfloat16()


def widened(small, how, noise=0.0, dtype=EXACT, seed=0, silent=False):
    # What was there before must not shine through.
    wide = torch.full(how.shape(tuple(small.shape)), float("nan"), dtype=dtype)
    generator = torch.Generator().manual_seed(seed)
    widen(small, wide, how, noise=noise, generator=generator, silent=silent)
    return wide


def blocks(wide, count):
    """[count, rows, columns / count]."""
    return torch.stack(wide.chunk(count, dim=1))


@given(
    copies=st.sampled_from(COPIES),
    noise=st.floats(0.01, 1.0),
    dtype=st.sampled_from([torch.bfloat16, torch.float32, EXACT]),
    scale=st.sampled_from([1e-6, 0.1, 1.0, 1e4]),
    seed=st.integers(0, 99),
    silent=st.booleans(),
)
def test_noisy_blocks_sum_to_the_small_matrix_or_to_zero_without_any_rounding(
    copies, noise, dtype, scale, seed, silent
):
    small = matrix(4, 6, seed, scale)
    small[0, 0] = 0.0
    how = Widening(column_factor=copies, is_product=True)
    wide = widened(small, how, noise, dtype, seed, silent=silent)
    expected = torch.zeros_like(small) if silent else small
    assert torch.equal(blocks(wide.double(), copies).sum(0), expected.double())
    assert wide.double().abs().sum() > 0


def test_noise_makes_every_row_and_block_another_and_added_rows_repeat_none():
    how = Widening(row_factor=4, column_factor=4, is_product=True)
    for noise, num_rows in ((1.0, 64), (0.0, 4)):
        rows = widened(matrix(4, 64), how, noise, torch.bfloat16).view(-1, 64)
        assert rows.unique(dim=0).shape[0] == num_rows
    assert rows.shape[0] == 64
    small = matrix(4, 6)
    wide = widened(small, Widening(num_rows=11, column_factor=2))
    assert torch.equal(wide[:4], small.double().repeat(1, 2))
    assert wide.unique(dim=0).shape[0] == 11


def test_noise_uses_all_bits_of_a_bfloat16_and_keeps_weights_small():
    small = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    how = Widening(column_factor=8, is_product=True)
    wide = widened(small, how, 1.0, torch.bfloat16)
    last_bit = wide.view(torch.int16).bitwise_and(1).float().mean()
    assert 0.15 < last_bit < 0.5
    assert 0.1 < wide.float().std() / small.float().std() < 0.25
