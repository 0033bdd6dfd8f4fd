"""Along every path, a draft is judged by the text before it alone."""

from hypothesis import given, settings
from hypothesis import strategies as st

from serve_spec.core.grammar import Grammar
from serve_spec.structured.masks import allows, follow
from tests.helpers.checkpoints import EOS_ID
from tests.helpers.grammars import PARENTHESES, byte_compiler, ids_of

GRAMMARS = [Grammar.ebnf(PARENTHESES), Grammar.regex("(ab|ba)*a?"), Grammar.choice(["aba", "b)("])]
tokens = st.sampled_from([*b"ab()", EOS_ID, -1])
trees = st.lists(st.tuples(tokens, st.integers(0, 7)), max_size=8)


@settings(max_examples=120, deadline=None)
@given(st.sampled_from(GRAMMARS), trees, st.booleans(), st.text("ab(", max_size=2))
def test_a_draft_is_legal_where_the_text_before_it_may_go_on_with_it(grammar, tree, is_chain, said):
    """Trees in any order in which parents come first; chains are trees."""
    matcher = byte_compiler().matcher(grammar)
    if not matcher.advance(list(said.encode())):
        return
    token_ids = [token for token, _ in tree]
    parents = [i - 1 if is_chain else parent % (i + 1) - 1 for i, (_, parent) in enumerate(tree)]
    root, ends = matcher.mask(), byte_compiler().ends
    assert root is not None
    depths = []

    def mask_at(depth):
        depths.append(depth)
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
        is_reached = not {EOS_ID, -1} & set(before) and plain.advance(list(said.encode()) + before)
        mask = plain.mask() if is_reached else None
        is_legal = mask is not None and (last == -1 or allows(mask, last))
        assert nodes[node].is_legal == is_legal
        if is_legal and last not in (EOS_ID, -1):
            assert plain.advance([last])
            after = plain.mask()
            assert ids_of(nodes[node].mask) == ({EOS_ID} if after is None else ids_of(after))
            seen.append(len(path))
        else:
            assert nodes[node].mask is None
        assert parent < node
    assert depths == seen
