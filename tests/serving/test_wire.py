"""A round as bytes is the round."""

import pickle

from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.errors import InvalidRequest
from serve_spec.core.request import FinishReason, SpeculationStats, TokenDelta, TokenLogprob
from serve_spec.serving.messages import (
    Accepted,
    Failed,
    Refused,
    ReplicaMessage,
    decode_replica_message,
    encode_replica_message,
)

TEXTS = st.text(st.characters(), max_size=5)  # half surrogate pairs, too
DELTAS = st.builds(
    TokenDelta,
    st.just("a"),
    st.lists(st.integers(0, 2**31), max_size=4).map(tuple),
    TEXTS,
    st.sampled_from([None, *FinishReason]),
    st.sampled_from([None, SpeculationStats(3)]),
    st.sampled_from([None, (TokenLogprob(1, -1.0, 1, ((2, -3.0),)),)]),
    st.sampled_from([None, (None,)]),
    st.integers(0, 3),
)
ITEMS = st.one_of(DELTAS, st.sampled_from([Accepted(3, "r1"), Failed("boom", overloaded=True)]))


@given(st.lists(ITEMS, max_size=5), st.booleans())
def test_what_is_decoded_is_what_was_encoded(items, is_closing):
    load = None if items else {"num_running": 1}
    message = ReplicaMessage([("a", item) for item in items], {"router": 2}, load, is_closing)
    assert decode_replica_message(encode_replica_message(message)) == message


def test_a_refusal_keeps_its_error():
    error = InvalidRequest("top_k", -3, "no")
    ((_, item),) = decode_replica_message(
        encode_replica_message(ReplicaMessage([("a", Refused(error))]))
    ).items
    assert isinstance(item, Refused)
    assert str(item.error) == str(error)


def test_an_item_that_cannot_be_read_fails_its_request_and_no_other():
    entries = [("a", b"no pickle"), ("b", (1,), "x"), ("c", pickle.dumps(Accepted(3, "r1")))]
    message = decode_replica_message(pickle.dumps((entries, {}, None, False)))
    (a, failed), *others = message.items
    assert a == "a"
    assert isinstance(failed, Failed)
    assert others == [("b", TokenDelta("b", (1,), "x")), ("c", Accepted(3, "r1"))]
