"""Laws of incremental text: nothing shown can still change, and texts end where they must."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import models

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
    """Push tokens in runs of these sizes; return the texts taken and the number of tokens used."""
    parts, used, rest = [], 0, list(tokens)
    while rest and text.finish_reason is None:
        size = sizes.pop(0) if sizes else 1
        run, rest = rest[:size], rest[size:]
        used += text.push(run)
        parts.append(text.take())
    return parts, used


STOPS = st.sampled_from([(), ("an end that never comes",)])


@given(st.text(min_size=1, max_size=30), st.lists(st.integers(1, 8), max_size=30), STOPS)
def test_deltas_join_to_the_whole_text_however_tokens_arrive(tokenizer, text, sizes, stop):
    """Where stop strings are asked for, every token is read by itself."""
    tokens = list(text.encode())
    stream = output(tokenizer, stop=stop)
    parts, used = feed(stream, tokens, sizes)
    stream.push([], FinishReason.LENGTH)
    assert "".join(parts) + stream.take() == text
    assert used == len(tokens)
    assert "\ufffd" not in "".join(parts) or "\ufffd" in text


@pytest.fixture(scope="module")
def spacing(tmp_path_factory):
    """Write a space between any two tokens: <0>, <1>, w2, w3; the first two are added tokens."""
    words = HFTokenizer(models.WordLevel({"w2": 2, "w3": 3, "<0>": 0, "<1>": 1}, unk_token="w2"))
    words.add_special_tokens(["<0>"])
    words.add_tokens(["<1>"])
    folder = tmp_path_factory.mktemp("spacing")
    words.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


@given(
    tokens=st.lists(st.integers(0, 3), max_size=60),
    sizes=st.lists(st.integers(1, 8), max_size=60),
    stop=STOPS,
    shows=st.booleans(),
    spaces=st.booleans(),
)
def test_added_tokens_after_added_tokens_of_the_answer_have_a_space_only_if_wanted(
    spacing, tokens, sizes, stop, shows, spaces
):
    params = {"skip_special_tokens": not shows, "spaces_between_special_tokens": spaces}
    seq = Sequence("1", SamplingParams(max_tokens=99, stop=stop, **params), [2, 0], 2, 0)
    stream = OutputText(spacing, seq)
    parts, _ = feed(stream, tokens, sizes)
    expected, before = "", None
    for token in tokens:
        if shows or token != 0:
            joins = shows and not spaces and {before, token} <= {0, 1}
            expected += ("" if joins else " ") + ("<0>", "<1>", "w2", "w3")[token]
        before = token
    assert "".join(parts) == expected


@pytest.mark.parametrize(
    ("asked", "tokens", "text", "num_used"),
    [
        ({"stop": ("END", "zz")}, b"abcEN EN DENDxyz", "abcEN EN D", 13),
        ({"stop": ("END", "zz"), **KEEP}, b"abcEN ENDENDxyz", "abcEN END", 9),
        # Complete before `min_tokens`, or after.
        ({"stop": ("END",), "min_tokens": 5}, b"abENDxENDy", "abENDx", 9),
        ({"stop": ("END",), "min_tokens": 4}, b"abENDxENDy", "ab", 5),
    ],
)
@pytest.mark.parametrize("size", range(1, 9))
def test_a_stop_string_across_runs_is_found(tokenizer, asked, tokens, text, num_used, size):
    stream = output(tokenizer, **asked)
    parts, used = feed(stream, tokens, [size] * 20)
    assert ("".join(parts), used) == (text, num_used)
    assert stream.finish_reason is FinishReason.STOP
    if KEEP.items() <= asked.items():
        assert parts[0] == text[:size], "nothing is held back"


STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH
ENDS = {
    "earliest stop string": ({"stop": ("cde", "bcde")}, [], [*b"abcdef"], 5, "a", STOP),
    "eos": ({}, [EOS_ID], [97, EOS_ID, 98], 2, "a", STOP),
    "ignored eos": ({}, [], [97, EOS_ID, 98], 3, "ab", None),
    "max_tokens": ({"max_tokens": 3}, [], [*b"abcdef"], 3, "abc", LENGTH),
    "token at max_tokens": ({"max_tokens": 3}, [99], [*b"abc"], 3, "ab", STOP),
    "string at max_tokens": ({"max_tokens": 3, "stop": ("bc",)}, [], [*b"abcd"], 3, "a", STOP),
    "string before eos": ({"stop": ("b",)}, [EOS_ID], [97, 98, EOS_ID], 2, "a", STOP),
    "kept string": ({"stop": ("cde", "bcde"), **KEEP}, [], [*b"abcdef"], 5, "abcde", STOP),
    "kept token": (KEEP, [99], [97, 99, 98], 2, "ac", STOP),
    "kept eos is no text": (KEEP, [EOS_ID], [97, EOS_ID, 98], 2, "a", STOP),
    "kept eos is shown": ({**KEEP, **SHOW}, [EOS_ID], [97, EOS_ID, 98], 2, "a<eos>", STOP),
    "kept part of a character": (KEEP, [0xC3], [97, 0xC3], 2, "a\ufffd", STOP),
    "eos is cut": (SHOW, [EOS_ID], [97, EOS_ID], 2, "a", STOP),
    "special tokens are shown": (
        {**SHOW, "max_tokens": 3},
        [],
        [97, EOS_ID, 98],
        3,
        "a<eos>b",
        LENGTH,
    ),
}


@pytest.mark.parametrize(
    ("asked", "ends", "tokens", "num_used", "text", "reason"), ENDS.values(), ids=ENDS
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
