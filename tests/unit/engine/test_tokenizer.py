"""A tokenizer file is read as its makers mean it, and control tokens can be spelt as text."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.errors import CheckpointError
from serve_spec.engine.tokenizer import Tokenizer
from tests.serving.texts import BOS, EOS, THINK, TURN, write_text_files


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer(write_text_files(tmp_path_factory.mktemp("bytes")))


def test_special_tokens_are_added_unless_told_not_to(tokenizer: Tokenizer) -> None:
    (bos,) = tokenizer.encode(BOS, add_special_tokens=False)
    plain = tokenizer.encode("ab", add_special_tokens=False)
    assert tokenizer.encode("ab") == [bos, *plain]


def test_added_tokens_are_known_with_their_kind(tokenizer: Tokenizer) -> None:
    assert tokenizer.added_tokens == {BOS: True, EOS: True, TURN: True, THINK: False}


TEXTS = st.lists(st.sampled_from(["a", " ", "\n", "é", "<", BOS, EOS, TURN, THINK])).map("".join)


@given(text=TEXTS)
def test_encoded_literally_no_text_has_an_added_token_in_it(
    tokenizer: Tokenizer, text: str
) -> None:
    literal = tokenizer.encode_literally(text)
    assert all(token_id < 256 for token_id in literal), "bytes alone"
    assert tokenizer.decode(literal) == text


@given(text=st.text(max_size=20))
def test_encoded_literally_a_text_without_added_tokens_is_what_it_is(
    tokenizer: Tokenizer, text: str
) -> None:
    usual = tokenizer.encode(text, add_special_tokens=False)
    assert tokenizer.encode_literally(text) == usual


def test_what_is_missing_or_broken_is_named(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"tokenizer\.json is missing"):
        Tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="can not be read"):
        Tokenizer(tmp_path)
