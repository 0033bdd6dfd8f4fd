"""Laws of incremental text: nothing shown can still change, and texts end where they must."""

from itertools import takewhile

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HFTokenizer
from tokenizers import decoders, models

from serve_spec.core.request import FinishReason, SamplingParams, TokenDelta
from serve_spec.core.sequence import Sequence
from serve_spec.core.stats import SpeculationStats
from serve_spec.engine.output import OutputText
from serve_spec.engine.tokenizer import BYTE_CHARACTERS, Tokenizer
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


_BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
_MARKED = ["▁", "▁a", "b", "▁▁", ".", "\ufffd", "🎉"]
_LEVEL = {byte: character for character, byte in BYTE_CHARACTERS.items()}
_SPANNING = (b"\xa9\xf0", b"\x9f\x8e", b"\x89 \xf0\x9f", b"a\xef\xbf", "\ufffd".encode(), b" b")
_LLAMA = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
KINDS = {
    "byte-level": (
        [*BYTE_CHARACTERS, *("".join(map(_LEVEL.get, data)) for data in _SPANNING)],
        decoders.ByteLevel(),
    ),
    "byte fallback": (_BYTES + _MARKED, decoders.Sequence(_LLAMA)),
    "byte fallback, stripped": (
        _BYTES + _MARKED,
        decoders.Sequence([*_LLAMA, decoders.Strip(" ", left=1, right=0)]),
    ),
    "metaspace": (_MARKED, decoders.Metaspace()),
    "pieces": (["a", "##b", ".", "'", "##s", "\ufffd", "##🎉"], decoders.WordPiece()),
    "suffixes": (["a", "b</w>", "🎉</w>", "\ufffd", "\ufffd</w>"], decoders.BPEDecoder()),
    "no decoder": (["a", "b", "🎉", "\ufffd"], None),
}
SPECIAL = ["<s>", "</s>"]


@pytest.fixture(scope="module", params=KINDS)
def kind(request, tmp_path_factory):
    names, decoder = KINDS[request.param]
    vocab = {name: place for place, name in enumerate(names)}
    made = HFTokenizer(models.WordLevel(vocab, unk_token="a"))
    if decoder is not None:
        made.decoder = decoder
    made.add_special_tokens(SPECIAL)
    folder = tmp_path_factory.mktemp("kind")
    made.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


CHARACTERS = ["🎉", "é", "\ufffd", "語", "a", " "]


@st.composite
def token_ids(draw, tokenizer):
    """Draw tokens among which bytes often make characters, and some ids without a token."""
    data = {token: tokenizer.token_bytes(token).data for token in range(tokenizer.vocab_size)}
    byte_ids = {each[0]: token for token, each in data.items() if len(each) == 1}
    spelled = [
        [byte_ids[byte] for byte in character.encode()]
        for character in CHARACTERS
        if byte_ids.keys() >= set(character.encode())
    ]
    single = st.integers(0, tokenizer.vocab_size + 1).map(lambda token: [token])
    parts = st.one_of(st.sampled_from(spelled), single) if spelled else single
    return [token for part in draw(st.lists(parts, max_size=30)) for token in part]


@given(data=st.data(), sizes=st.lists(st.integers(1, 40), max_size=60), shows=st.booleans())
@pytest.mark.parametrize("reason", [*FinishReason])
def test_the_parts_of_a_text_join_to_the_text_of_all_its_tokens(kind, data, sizes, shows, reason):
    """The answer is what its tokens add to the text of the prompt, for every tokenizer."""
    prompt, answer = data.draw(token_ids(kind)), data.draw(token_ids(kind))
    before = kind.decode(prompt, skip_special_tokens=not shows)
    whole = kind.decode(prompt + answer, skip_special_tokens=not shows)
    same = takewhile(lambda pair: pair[0] == pair[1], zip(before, whole, strict=False))
    expected = whole[len([*same]) :]
    places = st.tuples(st.integers(0, len(expected)), st.integers(1, 4))
    start, length = data.draw(places)
    stop = expected[start : start + length] if data.draw(st.booleans()) else ""
    params = SamplingParams(
        max_tokens=9999, stop=(stop,) if stop else (), skip_special_tokens=not shows
    )
    num_emitted = data.draw(st.integers(0, len(answer)))

    def text_from(first):
        seq = Sequence("1", params, [*prompt, *answer[:first]], len(prompt), 0)
        stream = OutputText(kind, seq)
        parts, _ = feed(stream, answer[first:], list(sizes))
        if stream.finish_reason is None:
            stream.push([EOS_ID] if reason is FinishReason.STOP else [], reason)
        assert stream.finish_reason is (FinishReason.STOP if stop else reason)
        return "".join([*parts, stream.take()])

    text = text_from(0)
    assert text == (expected[: expected.index(stop)] if stop else expected)
    emitted = OutputText(kind, Sequence("1", params, prompt, len(prompt), 0))
    parts, _ = feed(emitted, answer[:num_emitted], list(sizes))
    if emitted.finish_reason is None:
        assert "".join(parts) + text_from(num_emitted) == text, "continued by another replica"


def test_reading_a_token_costs_the_same_after_any_number_of_tokens(kind, monkeypatch):
    lengths, decode = [], kind.decode
    monkeypatch.setattr(
        kind, "decode", lambda ids, **k: lengths.append(len(ids)) or decode(ids, **k)
    )
    stream = OutputText(kind, Sequence("1", SamplingParams(max_tokens=9999), [], 0, 0))
    tokens = [*range(kind.vocab_size)] * 3
    for token in tokens:
        stream.push([token])
    assert max(lengths) <= 25
    assert len(lengths) <= 2 * len(tokens)


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
    stats = SpeculationStats(num_correct_drafts=count - 1, newest=(count - 1, 0))
    delta = OutputText(tokenizer, seq).add(TokenDelta("1", tuple(tokens[:count]), "", why, stats))
    assert (delta.token_ids, delta.text, delta.finish_reason) == (
        tuple(tokens[:num_used]),
        text,
        reason,
    )
    assert delta.speculation is not None
    assert delta.speculation.num_correct_drafts == num_used - 1
