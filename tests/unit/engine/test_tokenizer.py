"""Tokenizer files are read as their makers mean them; special tokens can be encoded as text."""

import json
import threading
import time
from pathlib import Path

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

import serve_spec
from serve_spec.core.errors import CheckpointError, TextTooLong
from serve_spec.engine import tokenizer as module
from serve_spec.engine.tokenizer import TokenBytes, Tokenizer, max_token_bytes
from tests.helpers.checkpoints import BOS_ID, make_tokenizer
from tests.helpers.sentencepiece_models import CORPUS, SAMPLES, train_sentencepiece
from tests.serving.texts import BOS, EOS, THINK, TURN, write_text_files


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_text_files(tmp_path_factory.mktemp("bytes")))


def test_special_tokens_are_added_unless_asked_not_to(tokenizer):
    assert tokenizer.added_tokens == {BOS: True, EOS: True, TURN: True, THINK: False}
    (bos,) = tokenizer.encode(BOS, add_special_tokens=False)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [bos, *plain]


TEXTS = st.lists(st.sampled_from(["a", " ", "\n", "é", "<", BOS, EOS, TURN, THINK])).map("".join)


@given(text=TEXTS)
def test_encoded_literally_no_text_has_an_added_token_in_it(tokenizer, text):
    literal = tokenizer.encode_literally(text)
    assert all(token_id < 256 for token_id in literal), "bytes alone"
    assert tokenizer.decode(literal) == text
    if not any(name in text for name in (BOS, EOS, TURN, THINK)):
        assert literal == tokenizer.encode(text, add_special_tokens=False)


LONG = st.builds(str.__mul__, st.text("ab \n<é", min_size=1, max_size=6), st.integers(0, 40))


@given(text=TEXTS | LONG, max_tokens=st.integers(0, 40))
def test_a_text_is_refused_where_it_has_more_tokens_than_there_is_room_for(
    tokenizer, text, max_tokens
):
    token_ids = tokenizer.encode(text)
    if len(token_ids) <= max_tokens:
        assert tokenizer.encode(text, max_tokens=max_tokens) == token_ids
        return
    with pytest.raises(TextTooLong) as caught:
        tokenizer.encode(text, max_tokens=max_tokens)
    assert max_tokens < caught.value.at_least <= len(token_ids)


SHIPPED = Path(serve_spec.__file__).parent / "assets" / "tiny" / "target"


@pytest.mark.parametrize("text", ["ab " * 300_000, " " * 900_000, "<eos>" * 200_000, "é" * 900_000])
def test_a_long_text_is_refused_by_its_bytes_or_in_parts_without_encoding_all_of_it(
    text, monkeypatch
):
    tokenizer = Tokenizer(SHIPPED)
    lengths = []
    encode = module._encoding
    monkeypatch.setattr(
        module, "_encoding", lambda t, s, **k: lengths.append(len(s)) or encode(t, s, **k)
    )
    with pytest.raises(TextTooLong):
        tokenizer.encode(text, max_tokens=1000)
    assert lengths == [], "its bytes are too many for 1000 tokens"
    tokenizer.__dict__["max_token_bytes"] = None
    with pytest.raises(TextTooLong):
        tokenizer.encode(text, max_tokens=1000)
    assert sum(lengths) < len(text) / 2


@pytest.fixture(scope="module")
def shipped():
    return Tokenizer(SHIPPED)


@given(text=st.text(max_size=60) | LONG)
def test_no_token_covers_more_bytes_than_the_bound(tokenizer, shipped, text):
    for known in (tokenizer, shipped):
        assert known.max_token_bytes is not None
        num_tokens = len(known.encode(text, add_special_tokens=False))
        assert len(text.encode()) <= num_tokens * known.max_token_bytes


@pytest.mark.parametrize(
    ("change", "bound"),
    [
        ({}, 4),
        ({"normalizer": {"type": "NFC"}}, None),
        ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Prepend"}]}}, 4),
        ({"normalizer": {"type": "Replace", "pattern": {"Regex": " +"}, "content": ""}}, None),
        ({"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}}, 4),
        ({"pre_tokenizer": {"type": "Whitespace"}}, None),
        ({"pre_tokenizer": {"type": "Split", "behavior": "Removed"}}, None),
        ({"added_tokens": [{"content": "<longest>", "lstrip": False, "rstrip": False}]}, 9),
        ({"added_tokens": [{"content": "<s>", "lstrip": True, "rstrip": False}]}, None),
        ({"model": {"type": "BPE", "vocab": {"ab": 0}, "unk_token": "ab"}}, None),
        ({"model": {"type": "WordPiece", "vocab": {"ab": 0}}}, None),
        ({"model": {"type": "Unigram", "vocab": [["▁a", 0.0]], "byte_fallback": True}}, 4),
    ],
    ids=str,
)
def test_a_tokenizer_that_may_drop_text_has_no_bound(change, bound):
    plain = {
        "normalizer": None,
        "pre_tokenizer": None,
        "added_tokens": [],
        "model": {"type": "BPE", "vocab": {"<0x0A>": 0, "▁a": 1}, "byte_fallback": True},
    }
    assert max_token_bytes({**plain, **change}) == bound


def test_merges_of_a_sentencepiece_model_have_the_order_of_scores_whatever_the_ids(tmp_path):
    """As in Mistral's files, where ids were assigned again."""
    train_sentencepiece(tmp_path, "bpe")
    from sentencepiece import SentencePieceProcessor, sentencepiece_model_pb2

    model = sentencepiece_model_pb2.ModelProto()
    file = tmp_path / "tokenizer.model"
    model.ParseFromString(file.read_bytes())
    normal = [piece for piece in model.pieces if piece.type == piece.NORMAL]
    others = [piece for piece in model.pieces if piece.type != piece.NORMAL]
    del model.pieces[:]
    model.pieces.extend([*others, *reversed(normal)])
    file.write_bytes(model.SerializeToString())
    tokenizer = Tokenizer(tmp_path)
    theirs = SentencePieceProcessor(str(file))
    for text in (*SAMPLES[:2], CORPUS.read_text()):
        assert tokenizer.encode(text, add_special_tokens=False) == theirs.encode(text)


@pytest.mark.parametrize("adds_bos", [None, True, False])
def test_a_sentencepiece_model_alone_is_converted(tmp_path, adds_bos):
    theirs = train_sentencepiece(tmp_path, "bpe")
    if adds_bos is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": adds_bos}))
    tokenizer = Tokenizer(tmp_path)
    first = [] if adds_bos is False else [theirs.bos_id()]
    for text in SAMPLES[:2]:
        assert tokenizer.encode(text) == [*first, *theirs.encode(text)]
        assert tokenizer.decode(tokenizer.encode(text)) == text
        data = [tokenizer.token_bytes(token).data for token in theirs.encode(text)]
        assert b"".join(data).decode() == f" {text}"


def test_bytes_that_are_no_characters_are_decoded_as_sentencepiece_does(tmp_path):
    """The library's decoder would lose the characters next to them."""
    theirs = train_sentencepiece(tmp_path, "bpe")
    tokenizer = Tokenizer(tmp_path)
    first = theirs.piece_to_id("<0x00>")
    character = st.sampled_from(["🎉", "é", "\ufffd"]).map(str.encode)
    byte = st.integers(0, 255).map(lambda each: bytes([each]))
    words = st.lists(st.integers(first + 256, theirs.vocab_size() - 1), max_size=2)

    @given(st.lists(st.one_of(character, byte, words), max_size=12))
    def check(parts):
        ids = [each + first * isinstance(part, bytes) for part in parts for each in part]
        # The library takes a first byte that is a space for the space before the first word.
        assume(ids[:1] != [first + ord(" ")])
        assert tokenizer.decode(ids) == theirs.decode(ids)

    check()


def test_a_sentencepiece_model_that_would_make_other_tokens_is_refused(tmp_path):
    train_sentencepiece(tmp_path, "unigram")
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be converted.*fast"):
        Tokenizer(tmp_path)


def test_a_vocabulary_with_merges_is_converted(tmp_path):
    vocab = dict.fromkeys(module.BYTE_CHARACTERS) | {"he": None, "<|endoftext|>": None}
    numbered = {token: number for number, token in enumerate(vocab)}
    (tmp_path / "vocab.json").write_text(json.dumps(numbered))
    (tmp_path / "merges.txt").write_text("#version: 0.2\nh e\n")
    (tmp_path / "config.json").write_text('{"model_type": "qwen2"}')
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.encode("he") == [numbered["he"]]
    for text in SAMPLES:
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_a_file_that_is_missing_broken_or_needs_a_package_is_named(tmp_path, monkeypatch):
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.model").write_bytes(b"no model")
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model: .*pip install sentencepiece"):
        Tokenizer(tmp_path)
    monkeypatch.setattr(module, "find_spec", lambda name: name)
    with pytest.raises(CheckpointError, match=r"tokenizer\.model cannot be converted"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="cannot be read"):
        Tokenizer(tmp_path)


def test_other_threads_run_while_a_text_is_encoded():
    tokenizer = Tokenizer(SHIPPED)
    encoding = threading.Thread(target=tokenizer.encode, args=("def f(x): return x\n" * 20_000,))
    encoding.start()
    count = 0
    while encoding.is_alive():
        count += 1
        time.sleep(0.001)
    assert count > 10, "had it held the interpreter, there would have been one look"


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer(folder)


@pytest.fixture(scope="module")
def sentencepiece_like(tmp_path_factory):
    """As Llama 2's files are: a mark for spaces, names for bytes."""
    names = ["<unk>", "▁the", "re", "▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: place for place, name in enumerate(names)}
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>"])
    return saved(tokenizer, tmp_path_factory.mktemp("sentencepiece"))


def saved(tokenizer, folder):
    tokenizer.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(st.text(max_size=30))
def test_the_bytes_of_byte_level_tokens_are_those_of_the_text(byte_level, text):
    data = [byte_level.token_bytes(token).data for token in byte_level.encode(text)]
    assert b"".join(data) == text.encode()
    assert byte_level.token_bytes(BOS_ID) == TokenBytes(b"<bos>", is_special=True)
    assert byte_level.token_bytes(280) == TokenBytes(b""), "an id without a token"


@given(st.lists(st.integers(1, 260), min_size=1, max_size=12))
def test_marked_spaces_and_named_bytes_have_the_bytes_of_the_decoder(sentencepiece_like, token_ids):
    data = b"".join(sentencepiece_like.token_bytes(token).data for token in token_ids)
    decoded = sentencepiece_like.decode(token_ids)
    if "\ufffd" not in decoded:
        assert data.decode() == decoded
    assert sentencepiece_like.token_bytes(0) == TokenBytes(b"<unk>", is_special=True)


def test_words_of_a_byte_level_sequence_of_decoders_are_bytes_too(tmp_path):
    tokenizer = HFTokenizer(models.BPE(vocab={"Ġa": 0, "Ã": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    known = saved(tokenizer, tmp_path)
    assert [known.token_bytes(token).data for token in (0, 1)] == [b" a", b"\xc3"]


def test_a_token_of_a_byte_level_vocabulary_that_names_no_bytes_has_those_of_its_text(tmp_path):
    tokenizer = HFTokenizer(models.BPE(vocab={"a語": 0}, merges=[]))
    tokenizer.decoder = decoders.ByteLevel()
    known = saved(tokenizer, tmp_path)
    assert known.token_bytes(0).data.decode() == known.decode([0]) == "a語"
