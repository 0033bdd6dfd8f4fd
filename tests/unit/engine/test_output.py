"""Laws of incremental text: nothing shown can still change, and texts end where they must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.request import FinishReason, SamplingParams, SpeculationStats, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.engine.output import OutputText
from serve_spec.engine.tokenizer import Tokenizer
from tests.helpers.checkpoints import EOS_ID, make_tokenizer

KEEP = {"include_stop_str_in_output": True}
SHOW = {"skip_special_tokens": False}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """Token id = byte value: every multi-byte character spans several tokens."""
    return Tokenizer(make_tokenizer(tmp_path_factory.mktemp("tokenizer")))


def sequence(**params):
    return Sequence("1", SamplingParams(**{"max_tokens": 1000, **params}), list(b"x = "), 4, 0)


def output(tokenizer, **params):
    return OutputText(tokenizer, sequence(**params))


def feed(text, tokens, sizes):
    """Pushes tokens in runs of the given sizes; the pieces taken and the tokens used."""
    pieces, used, rest = [], 0, list(tokens)
    while rest and text.finish_reason is None:
        size = sizes.pop(0) if sizes else 1
        run, rest = rest[:size], rest[size:]
        used += text.push(run)
        pieces.append(text.take())
    return pieces, used


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 8), max_size=30))
def test_pieces_join_to_the_whole_text_however_tokens_arrive(tokenizer, text, sizes):
    tokens = list(text.encode())
    stream = output(tokenizer)
    pieces, used = feed(stream, tokens, sizes)
    stream.push([], FinishReason.LENGTH)
    assert "".join(pieces) + stream.take() == text
    assert used == len(tokens)
    assert "\ufffd" not in "".join(pieces) or "\ufffd" in text


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 8), max_size=30))
def test_a_run_that_is_read_at_once_says_what_its_tokens_say_one_by_one(tokenizer, text, sizes):
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


def test_a_stop_string_across_runs_is_cut_off_and_never_shown(tokenizer):
    for size in range(1, 9):
        stream = output(tokenizer, stop=("END", "zz"))
        pieces, used = feed(stream, list(b"abcEN EN DENDxyz"), [size] * 20)
        assert "".join(pieces) == "abcEN EN D"
        assert used == len("abcEN EN DEND")
        assert stream.finish_reason is FinishReason.STOP


def test_a_stop_string_across_runs_is_kept_and_shown_at_once_if_asked_for(tokenizer):
    for size in range(1, 9):
        stream = output(tokenizer, stop=("END", "zz"), **KEEP)
        pieces, used = feed(stream, list(b"abcEN ENDENDxyz"), [size] * 20)
        assert ("".join(pieces), used) == ("abcEN END", len("abcEN END"))
        first = min(size, used)
        assert pieces[0] == "abcEN END"[:first], "nothing is held back"


def test_a_stop_string_that_is_complete_by_min_tokens_does_not_end_the_text(tokenizer):
    for size in range(1, 9):
        stream = output(tokenizer, stop=("END",), min_tokens=5)
        pieces, used = feed(stream, list(b"abENDxENDy"), [size] * 20)
        assert ("".join(pieces), used) == ("abENDx", 9)
        stream = output(tokenizer, stop=("END",), min_tokens=4)
        pieces, used = feed(stream, list(b"abENDxENDy"), [size] * 20)
        assert ("".join(pieces), used) == ("ab", 5)


@pytest.mark.parametrize(
    ("asked", "ends", "tokens", "num_used", "text", "reason"),
    [
        ({"stop": ("cde", "bcde")}, [], [*b"abcdef"], 5, "a", FinishReason.STOP),
        ({}, [EOS_ID], [97, EOS_ID, 98], 2, "a", FinishReason.STOP),
        ({}, [], [97, EOS_ID, 98], 3, "ab", None),
        ({"max_tokens": 3}, [], [*b"abcdef"], 3, "abc", FinishReason.LENGTH),
        ({"max_tokens": 3}, [99], [*b"abc"], 3, "ab", FinishReason.STOP),
        ({"max_tokens": 3, "stop": ("bc",)}, [], [*b"abcd"], 3, "a", FinishReason.STOP),
        ({"stop": ("b",)}, [EOS_ID], [97, 98, EOS_ID], 2, "a", FinishReason.STOP),
        ({"stop": ("cde", "bcde"), **KEEP}, [], [*b"abcdef"], 5, "abcde", FinishReason.STOP),
        (KEEP, [99], [97, 99, 98], 2, "ac", FinishReason.STOP),
        (KEEP, [EOS_ID], [97, EOS_ID, 98], 2, "a", FinishReason.STOP),
        ({**KEEP, **SHOW}, [EOS_ID], [97, EOS_ID, 98], 2, "a<eos>", FinishReason.STOP),
        (KEEP, [0xC3], [97, 0xC3], 2, "a\ufffd", FinishReason.STOP),
        (SHOW, [EOS_ID], [97, EOS_ID], 2, "a", FinishReason.STOP),
        ({**SHOW, "max_tokens": 3}, [], [97, EOS_ID, 98], 3, "a<eos>b", FinishReason.LENGTH),
    ],
    ids=[
        "earliest stop string",
        "eos",
        "ignored eos",
        "max_tokens",
        "stop at max_tokens",
        "stop string at max_tokens",
        "stop string before eos",
        "kept stop string",
        "kept stop token",
        "kept eos is no text",
        "kept eos is shown",
        "kept stop token is part of a character",
        "eos is cut",
        "special tokens are shown",
    ],
)
def test_a_text_ends_inside_an_accepted_run(tokenizer, asked, ends, tokens, num_used, text, reason):
    seq = sequence(**asked)
    seq.end_token_ids = frozenset(ends)
    count, why = seq.cut(tokens)
    stats = SpeculationStats(num_correct_drafts=count - 1)
    delta = OutputText(tokenizer, seq).add(TokenDelta("1", tuple(tokens[:count]), "", why, stats))
    assert (delta.token_ids, delta.text, delta.finish_reason) == (
        tuple(tokens[:num_used]),
        text,
        reason,
    )
    assert delta.speculation is not None
    assert delta.speculation.num_correct_drafts == num_used - 1
