"""Masks of a round: by each request's own text, whatever was known of it before."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.draft import DraftShape
from serve_spec.core.grammar import Grammar
from serve_spec.core.plan import EditedText, ScheduledRequest
from serve_spec.core.request import SamplingParams
from serve_spec.structured.compiler import GrammarCompiler
from serve_spec.structured.masks import Grammars, allows, follow
from tests.helpers.checkpoints import EOS_ID
from tests.helpers.grammars import PARENTHESES, byte_compiler, ids_of

DIGITS = Grammar.regex("[0-9]{2,4}")
ZERO_TO_NINE = set(b"0123456789")


def row(name, text, num_steps=0, held=(), **params):
    """Return a decoding request with a prompt of three tokens."""
    given = SamplingParams(**{"grammar": DIGITS, **params})
    generated = tuple(text.encode())
    return ScheduledRequest(
        name,
        token_ids=(generated or (1,))[-1:],
        start=2 + len(generated),
        samples=True,
        page_ids=(),
        params=given,
        seed=0,
        shape=DraftShape.chain(num_steps),
        edited=EditedText(3, held_ids=held) if given.edits_scores else None,
        generated_ids=generated if given.masks_text else (),
    )


def allowed(masks):
    """What each draw may be; None: anything."""
    return [None if place < 0 else ids_of(masks.words[place]) for place in masks.places]


def masks_of(*rows, drafts=()):
    return Grammars(byte_compiler()).round_masks(rows, drafts or [()] * len(rows))


def test_every_draw_has_the_mask_of_its_own_text():
    rows = [row("a", "1", 2), row("b", "", grammar=None), row("c", "123", 1), row("d", "1234")]
    masks = masks_of(*rows, drafts=(b"23", b"", b"4", b"x"))
    assert masks.num_drafts == (2, 0, 1, 0)
    more = ZERO_TO_NINE | {EOS_ID}
    assert allowed(masks) == [ZERO_TO_NINE, more, more, None, more, {EOS_ID}, {EOS_ID}]


def test_drafts_end_before_the_first_that_cannot_be_drawn_or_have_no_mask_behind_it():
    rows = [row("a", "1", 3), row("b", "", 2, grammar=None), row("c", "12", 3), row("d", "1", 2)]
    masks = masks_of(*rows, drafts=(b"2x3", b"xx", (EOS_ID, 50, 51), (-1, 50)))
    assert masks.num_drafts == (1, 2, 1, 1)
    padded = masks_of(row("a", "1", 1), drafts=(b"2xx",))
    assert padded.num_drafts == (1,), "padding behind the drafts is not read"
    more = ZERO_TO_NINE | {EOS_ID}
    found = allowed(masks)
    assert found == [ZERO_TO_NINE, more, None, None, None, more, None, ZERO_TO_NINE, None]
    rows = [row("a", "1", 3), row("c", "12", 2)]
    grammars = Grammars(byte_compiler())
    masks = grammars.round_masks(rows, [b"2x3", (EOS_ID, 50)], keeps_all=True)
    assert masks.num_drafts == (3, 2)
    more = ZERO_TO_NINE | {EOS_ID}
    assert allowed(masks) == [ZERO_TO_NINE, more, None, None, more, None, None]


def test_a_bad_word_is_not_completed_along_any_path_of_drafts():
    """Nodes without a ban need no mask; a draft that completes a word ends its chain."""
    words = {"grammar": None, "bad_words": [[*b"12"], [*b"345"]]}
    everything = set(range(byte_compiler().vocab_size))
    masks = masks_of(row("a", "1", 3, **words), drafts=(b"341",))
    assert allowed(masks) == [
        everything - {*b"2"},
        None,
        everything - {*b"5"},
        everything - {*b"2"},
    ]
    assert masks_of(row("a", "x", 3, **words), drafts=(b"12x",)).num_drafts == (1,)
    assert masks_of(row("a", "34", 2, **words), drafts=(b"5x",)).num_drafts == (0,)


def test_words_that_would_leave_nothing_yield_to_the_grammar():
    (ids,) = allowed(masks_of(row("a", "1", bad_words=[[*b"12"], [*b"34"]])))
    assert ids == ZERO_TO_NINE - {*b"2"}
    padded = GrammarCompiler(tuple, 64, (), num_ids=52)
    last = {"grammar": None, "bad_words": [[*b"12"]], "bad_token_ids": (*range(50), 51)}
    masks = Grammars(padded).round_masks([row("a", "1", **last)], [()])
    assert allowed(masks) == [{*range(52)}], "padding is not drawn where nothing else is left"
    only_one = {"grammar": Grammar.regex("12"), "bad_words": [[*b"12"]]}
    assert allowed(masks_of(row("a", "1", **only_one))) == [{*b"2"}]


def test_what_a_round_knew_before_changes_nothing():
    grammars = Grammars(byte_compiler())
    other = Grammar.ebnf(PARENTHESES)
    for name, text, grammar in [
        ("a", "", DIGITS),
        ("a", "12", DIGITS),
        ("a", "12", DIGITS),
        ("a", "1", DIGITS),
        ("a", "23", DIGITS),
        ("a", "", other),
        ("b", "((", other),
        ("a", "(", other),
    ]:
        one = row(name, text, 1, grammar=grammar)
        found = grammars.round_masks([one], [b"("])
        fresh = Grammars(byte_compiler()).round_masks([one], [b"("])
        assert (found.num_drafts, allowed(found)) == (fresh.num_drafts, allowed(fresh))
    grammars.forget("a")
    grammars.forget("b")
    assert not grammars._texts


@pytest.mark.parametrize(
    ("text", "params", "expected"),
    [
        ("1", {"bad_token_ids": (*b"345",)}, ZERO_TO_NINE - set(b"345")),
        ("1", {"allowed_token_ids": (*b"12ab",)}, set(b"12")),
        ("1", {"allowed_token_ids": (*b"12",), "bad_token_ids": (*b"1",)}, set(b"2")),
        ("1", {"allowed_token_ids": (*b"ab",)}, ZERO_TO_NINE),
        ("12", {"allowed_token_ids": (*b"ab",)}, ZERO_TO_NINE | {EOS_ID}),
        ("1", {"bad_token_ids": (*ZERO_TO_NINE,)}, ZERO_TO_NINE),
        ("12", {"bad_token_ids": (*ZERO_TO_NINE,)}, {EOS_ID}),
        ("12", {"min_tokens": 3}, ZERO_TO_NINE),
        ("123", {"min_tokens": 3}, ZERO_TO_NINE | {EOS_ID}),
        ("1234", {"min_tokens": 9}, {EOS_ID}),
    ],
)
def test_other_rules_hold_as_far_as_they_leave_anything(text, params, expected):
    masks = masks_of(row("a", text, held=(EOS_ID,), **params))
    assert allowed(masks) == [expected]


def test_drafts_that_other_rules_forbid_are_not_verified_either():
    params = {"bad_token_ids": (*b"3",), "min_tokens": 3}
    one = row("a", "1", 3, held=(EOS_ID,), **params)
    assert masks_of(one, drafts=(b"23",)).num_drafts == (1,)
    assert masks_of(one, drafts=((50, EOS_ID),)).num_drafts == (1,)
    assert masks_of(one, drafts=((50, 50, EOS_ID),)).num_drafts == (3,)


def test_a_text_that_exceeds_the_limits_or_is_not_of_its_grammar_ends():
    heavy = Grammar.regex("x((a{1,100}){1,100}){1,100}")
    length = next(n for n in range(99) if is_too_much(heavy, n))
    one = row("a", "x" + "a" * length, 2, grammar=heavy)
    found = masks_of(one, row("b", "1"), drafts=(b"aa", b""))
    assert found.num_drafts == (0, 0)
    assert allowed(found) == [{EOS_ID}, ZERO_TO_NINE], "others go on"
    assert allowed(masks_of(row("a", "1")._replace(generated_ids=(97, 98)))) == [{EOS_ID}]


def test_limits_count_each_text_apart():
    heavy = Grammar.regex("x((a{1,100}){1,100}){1,100}")
    byte_compiler().matcher(heavy, anew=True)
    masks_of(row("a", "x" + "a" * 40, grammar=heavy))
    assert allowed(masks_of(row("b", "xa", grammar=heavy))) == [{ord("a"), EOS_ID}]


def is_too_much(heavy, num_letters):
    matcher = byte_compiler().matcher(heavy, anew=True)
    matcher.advance([*b"x", *b"a" * num_letters])
    return matcher.mask() is None


GRAMMARS = [Grammar.ebnf(PARENTHESES), Grammar.regex("(ab|ba)*a?"), Grammar.choice(["aba", "b)("])]
tokens = st.sampled_from([*b"ab()", EOS_ID, -1])
trees = st.lists(st.tuples(tokens, st.integers(0, 7)), max_size=8)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(GRAMMARS), trees, st.booleans(), st.text("ab(", max_size=2))
def test_a_draft_is_legal_where_the_text_before_it_may_go_on_with_it(grammar, tree, is_chain, text):
    """For trees in any order in which parents come first."""
    matcher = byte_compiler().matcher(grammar)
    if not matcher.advance(list(text.encode())):
        return
    token_ids = [token for token, _ in tree]
    parents = [i - 1 if is_chain else parent % (i + 1) - 1 for i, (_, parent) in enumerate(tree)]
    root, ends = matcher.mask(), byte_compiler().ends
    assert root is not None
    paths = []

    def mask_at(path):
        paths.append(path)
        mask = matcher.mask()
        return ends if mask is None else mask

    nodes = follow(matcher, root, token_ids, parents, ends, mask_at)
    assert ids_of(matcher.mask()) == ids_of(root), "the matcher is back"
    seen = []
    for node, parent in enumerate(parents):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        before, last = [token_ids[i] for i in path[:-1]], token_ids[node]
        plain = byte_compiler().matcher(grammar)
        is_reached = not {EOS_ID, -1} & set(before) and plain.advance(list(text.encode()) + before)
        mask = plain.mask() if is_reached else None
        is_legal = mask is not None and (last == -1 or allows(mask, last))
        assert nodes[node].is_legal == is_legal
        if is_legal and last not in (EOS_ID, -1):
            assert plain.advance([last])
            after = plain.mask()
            assert ids_of(nodes[node].mask) == ({EOS_ID} if after is None else ids_of(after))
            seen.append([*before, last])
        else:
            assert nodes[node].mask is None
        assert parent < node
    assert paths == seen
