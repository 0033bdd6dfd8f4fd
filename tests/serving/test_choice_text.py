"""A choice says its echo once, and every token's log-probability once, however it comes in."""

from __future__ import annotations

from collections.abc import Sequence

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.request import TokenDelta
from serve_spec.engine.spelling import Spelling
from serve_spec.serving.choice_text import ChoiceText, Echo
from serve_spec.serving.logprobs import CompletionLogprobs, joined
from tests.serving.fakes import delta
from tests.serving.lawful_logprobs import entries_of, prompt_entries


def spell(token_id: int) -> Spelling:
    return Spelling(bytes([token_id]))


def rounds(prompt: bytes, text: str, cuts: Sequence[int]) -> list[TokenDelta]:
    """An answer in pieces; text comes with the token that completes it."""
    said = text.encode()
    ends = sorted({*(cut for cut in cuts if 0 < cut < len(said)), len(said)})
    deltas, start, num_characters = [], 0, 0
    for end in ends:
        known = said[:end].decode(errors="ignore")
        piece = delta(known[num_characters:], *said[start:end])
        entries = entries_of(prompt + said[:start], said[start:end], 2)
        deltas.append(piece._replace(logprobs=entries))
        start, num_characters = end, len(known)
    deltas[0] = deltas[0]._replace(prompt_logprobs=prompt_entries(prompt, 2))
    return deltas


@given(
    st.text(min_size=1, max_size=9),
    st.text(min_size=1, max_size=20),
    st.lists(st.integers(0, 60), max_size=6),
    st.booleans(),
)
def test_in_any_pieces_it_says_what_it_says_at_once(
    prompt: str, text: str, cuts: list[int], echoed: bool
) -> None:
    ids = list(prompt.encode())
    echo = Echo(prompt, ids) if echoed else None
    deltas = rounds(prompt.encode(), text, cuts)
    whole_text, whole = ChoiceText(echo, spell).next(deltas)
    choice = ChoiceText(echo, spell)
    pieces: CompletionLogprobs | None = None
    texts = []
    for piece in deltas:
        said, shown = choice.next([piece])
        texts.append(said)
        pieces = shown if pieces is None else joined(pieces, shown)
    assert ("".join(texts), pieces) == (whole_text, whole)
    assert whole_text == (prompt if echoed else "") + text
    begins = [whole_text.encode()[:i].decode(errors="ignore") for i in range(len(whole["tokens"]))]
    assert len(begins) == len(whole_text.encode())
    assert whole["text_offset"] == [len(before) for before in begins]


def test_without_log_probabilities_it_says_text_alone() -> None:
    choice = ChoiceText(Echo("before "), None)
    assert choice.next([delta("a", 1), delta("b", 2)]) == ("before ab", None)
    assert choice.next([delta("c", 3)]) == ("c", None)


def test_a_prompt_without_an_answer_is_said_alone() -> None:
    scored = delta("")._replace(prompt_logprobs=prompt_entries(b"ab", 0))
    text, shown = ChoiceText(Echo("ab", [97, 98]), spell).next([scored])
    assert text == "ab"
    assert shown["tokens"] == ["a", "b"]
    assert shown["token_logprobs"][0] is None
