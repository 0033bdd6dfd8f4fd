"""What a client writes is never a control token; everything else has its usual token ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.engine.tokenizer import Tokenizer
from serve_spec.serving.chat_template import ControlTokens
from tests.serving.texts import BOS, EOS, THINK, TURN, byte_tokenizer, write_text_files

FRAGMENTS = ["a", " ", "\n", "é", "<", "|>", "<|tu", "rn|>", "\ufdd0", BOS, EOS, TURN]
NAMES = byte_tokenizer()
HOSTILE = st.lists(st.sampled_from([*FRAGMENTS, THINK])).map("".join)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    return Tokenizer(write_text_files(tmp_path_factory.mktemp("bytes")))


def control_tokens(token_ids):
    return [NAMES.id_to_token(i) for i in token_ids if i >= 256]


@given(texts=st.lists(HOSTILE, max_size=3))
def test_only_the_template_writes_control_tokens(tokenizer, texts):
    control = ControlTokens(tokenizer, f"{TURN}...{THINK}")
    rendered = "".join(f"{TURN}{control.mark(text)}{THINK}" for text in texts)
    token_ids = control.encode(rendered, add_special_tokens=False)
    assert control_tokens(token_ids) == [TURN, THINK] * len(texts)


@given(text=HOSTILE)
def test_the_text_stays_what_the_client_wrote(tokenizer, text):
    control = ControlTokens(tokenizer, THINK)
    token_ids = control.encode(control.mark(text), add_special_tokens=False)
    assert tokenizer.decode(token_ids) == text.replace("\ufdd0", "")


@given(text=st.text(max_size=20), adds=st.booleans())
def test_a_text_without_control_tokens_is_encoded_as_ever(tokenizer, text, adds):
    control = ControlTokens(tokenizer, THINK)
    token_ids = control.encode(control.mark(text), add_special_tokens=adds)
    assert token_ids == tokenizer.encode(text, add_special_tokens=adds)


def test_an_added_token_that_the_template_never_writes_is_for_anybody(tokenizer):
    control = ControlTokens(tokenizer, "no such token")
    token_ids = control.encode(control.mark(THINK), add_special_tokens=False)
    assert control_tokens(token_ids) == [THINK]


def test_a_template_that_cuts_a_marked_token_in_two_makes_none_of_it(tokenizer):
    control = ControlTokens(tokenizer, "")
    marked = control.mark(f"a{TURN}b")
    for cut in range(len(marked)):
        for rendered in (marked[:cut], marked[cut:], marked[cut:] + marked[:cut]):
            token_ids = control.encode(rendered, add_special_tokens=False)
            assert control_tokens(token_ids) == [], rendered


def test_no_space_comes_in_where_a_tokenizer_puts_one_before_a_text(tmp_path):
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as HFTokenizer

    characters = ["<unk>", *"▁ab<>s/\n"]
    spaced = HFTokenizer(
        models.BPE({c: i for i, c in enumerate(characters)}, [], unk_token="<unk>")
    )
    spaced.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always", split=False)
    spaced.decoder = decoders.Metaspace(prepend_scheme="always")
    spaced.add_special_tokens([AddedToken("</s>", special=True, normalized=False)])
    tokenizer = Tokenizer(write_text_files(tmp_path, tokenizer=spaced))
    control = ControlTokens(tokenizer, "")
    token_ids = control.encode(control.mark("a</s>b"), add_special_tokens=False)
    assert tokenizer.decode(token_ids) == "a</s>b"
