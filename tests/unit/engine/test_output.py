"""Laws of incremental text: nothing shown can still change, and texts end where they must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.request import FinishReason, SamplingParams
from serve_spec.core.sequence import Sequence
from serve_spec.engine.output import OutputText
from serve_spec.engine.tokenizer import Tokenizer
from tests.helpers.checkpoints import EOS_ID, make_tokenizer


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Token id = byte value: every multi-byte character spans several tokens."""
    return Tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def output(tokenizer: Tokenizer, **params: object) -> OutputText:
    seq = Sequence("1", SamplingParams(**{"max_tokens": 1000, **params}), list(b"x = "), 4, 0)
    return OutputText(tokenizer, seq, [EOS_ID])


def feed(text: OutputText, tokens: list[int], sizes: list[int]) -> tuple[list[str], int]:
    """Pushes tokens in runs of the given sizes; the pieces taken and the tokens used."""
    pieces, used, rest = [], 0, list(tokens)
    while rest and text.finish_reason is None:
        size = sizes.pop(0) if sizes else 1
        run, rest = rest[:size], rest[size:]
        used += text.push(run)
        pieces.append(text.take())
    return pieces, used


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 8), max_size=30))
def test_pieces_join_to_the_whole_text_however_tokens_arrive(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    tokens = list(text.encode())
    stream = output(tokenizer, max_tokens=len(tokens))
    pieces, used = feed(stream, tokens, sizes)
    assert "".join(pieces) == text
    assert used == len(tokens)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 8), max_size=30))
def test_a_run_that_is_read_at_once_says_what_its_tokens_say_one_by_one(
    tokenizer: Tokenizer, text: str, sizes: list[int]
) -> None:
    """Where stop strings are asked for, every token is read by itself."""
    at_once, watched = output(tokenizer), output(tokenizer, stop=("an end that never comes",))
    tokens = list(text.encode())
    while tokens:
        size = sizes.pop(0) if sizes else 1
        run, tokens = tokens[:size], tokens[size:]
        for stream in (at_once, watched):
            stream.push(run)
            stream.take()
        assert at_once.text == watched.text


def test_a_stop_string_across_runs_is_cut_off_and_never_shown(tokenizer: Tokenizer) -> None:
    for size in range(1, 9):
        stream = output(tokenizer, stop=("END", "zz"))
        pieces, used = feed(stream, list(b"abcEN EN DENDxyz"), [size] * 20)
        assert "".join(pieces) == "abcEN EN D"
        assert used == len("abcEN EN DEND")
        assert stream.finish_reason is FinishReason.STOP


def test_a_stop_string_that_is_complete_by_min_tokens_does_not_end_the_text(
    tokenizer: Tokenizer,
) -> None:
    for size in range(1, 9):
        stream = output(tokenizer, stop=("END",), min_tokens=5)
        pieces, used = feed(stream, list(b"abENDxENDy"), [size] * 20)
        assert ("".join(pieces), used) == ("abENDx", 9)
        stream = output(tokenizer, stop=("END",), min_tokens=4)
        pieces, used = feed(stream, list(b"abENDxENDy"), [size] * 20)
        assert ("".join(pieces), used) == ("ab", 5)


def test_the_earliest_of_several_stop_strings_wins(tokenizer: Tokenizer) -> None:
    stream = output(tokenizer, stop=("cde", "bcde"))
    stream.push(list(b"abcdef"))
    assert stream.take() == "a"


def test_eos_ends_the_text_unless_it_is_ignored(tokenizer: Tokenizer) -> None:
    stream = output(tokenizer)
    assert stream.push([97, EOS_ID, 98]) == 2
    assert (stream.take(), stream.finish_reason) == ("a", FinishReason.STOP)
    stream = output(tokenizer, ignore_eos=True)
    assert stream.push([97, EOS_ID, 98]) == 3
    assert (stream.take(), stream.finish_reason) == ("ab", None)


def test_max_tokens_ends_the_text_inside_an_accepted_run(tokenizer: Tokenizer) -> None:
    stream = output(tokenizer, max_tokens=3)
    assert stream.push(list(b"abcdef")) == 3
    assert (stream.take(), stream.finish_reason) == ("abc", FinishReason.LENGTH)


def test_a_stop_on_the_last_allowed_token_counts_as_stop(tokenizer: Tokenizer) -> None:
    stream = output(tokenizer, max_tokens=3, stop_token_ids=(99,))
    assert stream.push(list(b"abc")) == 3
    assert stream.finish_reason is FinishReason.STOP
