"""What single tokens say, put together, is the text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models, pre_tokenizers

from serve_spec.engine.spelling import Speller, Spelling
from serve_spec.engine.tokenizer import Tokenizer
from tests.helpers.checkpoints import BOS_ID, make_tokenizer


@pytest.fixture(scope="module")
def byte_level(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    folder: Path = tmp_path_factory.mktemp("tokenizer")
    make_tokenizer(folder)
    return Tokenizer(folder)


def sentencepiece_like() -> HFTokenizer:
    """As Llama 2's files are: a mark for spaces, names for bytes."""
    names = ["<unk>", "▁the", "re", "▁", "é", *(f"<0x{byte:02X}>" for byte in range(256))]
    vocab = {name: place for place, name in enumerate(names)}
    tokenizer = HFTokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    tokenizer.add_special_tokens(["<unk>"])
    return tokenizer


@given(st.text(max_size=30))
def test_tokens_of_a_byte_level_vocabulary_spell_the_text(byte_level: Tokenizer, text: str) -> None:
    spelled = [byte_level.spell(token) for token in byte_level.encode(text)]
    assert b"".join(spelling.said for spelling in spelled) == text.encode()


def test_a_special_token_says_its_name_and_that_it_is_special(byte_level: Tokenizer) -> None:
    assert byte_level.spell(BOS_ID) == Spelling(b"<bos>", is_special=True)


def test_an_id_without_a_token_says_nothing(byte_level: Tokenizer) -> None:
    assert byte_level.spell(280) == Spelling(b"")


@given(st.lists(st.integers(1, 260), min_size=1, max_size=12))
def test_marked_spaces_and_named_bytes_spell_what_the_decoder_says(token_ids: list[int]) -> None:
    tokenizer = sentencepiece_like()
    said = b"".join(Speller(tokenizer)(token).said for token in token_ids)
    decoded = tokenizer.decode(token_ids)
    if "\ufffd" not in decoded:
        assert said.decode() == decoded
    assert Speller(tokenizer)(0) == Spelling(b"<unk>", is_special=True)


def test_words_of_a_byte_level_sequence_of_decoders_are_bytes_too() -> None:
    tokenizer = HFTokenizer(models.BPE(vocab={"Ġa": 0, "Ã": 1}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Fuse()])
    assert [Speller(tokenizer)(token).said for token in (0, 1)] == [b" a", b"\xc3"]
