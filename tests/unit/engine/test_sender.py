"""A sender never waits; merging loses nothing and keeps the order."""

import threading
from multiprocessing import Pipe

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.core.request import FinishReason, TokenDelta, TokenLogprob
from serve_spec.core.stats import SpeculationStats
from serve_spec.engine.messages import (
    EngineMessage,
    Reply,
    Sender,
    decode_message,
    encode,
    hang_up,
    merge,
)

decode = msgspec.msgpack.Decoder(list[tuple[int, str]]).decode


@given(
    rounds=st.lists(st.lists(st.integers(0, 3), min_size=3, max_size=3), min_size=1, max_size=12),
    taken=st.sets(st.integers(0, 11)),
)
def test_whenever_the_channel_takes_them_the_tokens_of_a_request_come_once_and_in_order(
    rounds, taken
):
    """Request 0 has log-probabilities, request 1 statistics with every delta."""
    waiting, messages = None, []
    for number, sizes in enumerate(rounds):
        deltas = []
        for index, size in enumerate(sizes):
            tokens = tuple(100 * number + i for i in range(size))
            logprobs = tuple(TokenLogprob(t, -1.0, 1) for t in tokens) if index == 0 else None
            stats = SpeculationStats(num_rounds=number + 1) if index == 1 else None
            reason = FinishReason.LENGTH if number == len(rounds) - 1 else None
            first = int(number == 0)
            said = stats, logprobs, None, first, 0.5 * first
            deltas.append(TokenDelta(str(index), tokens, "", reason, *said))
        message = EngineMessage(deltas=deltas, replies=[Reply(number, None)])
        if waiting is None:
            waiting = message
        else:
            merge(waiting, message)
        if number in taken or number == len(rounds) - 1:
            messages.append(decode_message(encode(waiting)))
            waiting = None
    assert [reply.number for m in messages for reply in m.replies] == [*range(len(rounds))]
    for index in range(3):
        found = [d for m in messages for d in m.deltas if d.request_id == str(index)]
        wanted = [100 * n + i for n, sizes in enumerate(rounds) for i in range(sizes[index])]
        assert [token for delta in found for token in delta.token_ids] == wanted
        assert [delta.finish_reason for delta in found[:-1]] == [None] * (len(found) - 1)
        assert found[-1].finish_reason is FinishReason.LENGTH
        assert sum(delta.num_cached_tokens for delta in found) == 1
        assert [delta.prefill_s for delta in found] == [0.5] + [0.0] * (len(found) - 1)
        if index == 0:
            assert [e.token_id for delta in found for e in delta.logprobs] == wanted
        if index == 1:
            assert [delta.speculation.num_rounds for delta in found] == [
                n + 1 for n in range(len(rounds))
            ]
        else:
            assert len(found) == len(messages)


def test_a_sender_never_waits_for_its_reader_and_keeps_the_order():
    ours, theirs = Pipe()
    sender = Sender[list[tuple[int, str]]](ours, encode, list.extend)
    sent = [(number, "x" * (100_000 if number % 100 == 50 else 1000)) for number in range(1000)]
    for message in sent:  # more than the socket has room for
        sender.put([message])
    closing = threading.Thread(target=sender.close)
    closing.start()
    found = []
    num_messages = 0
    while len(found) < len(sent):
        found += decode(theirs.recv_bytes())
        num_messages += 1
    closing.join()
    assert found == sent
    assert 10 < num_messages < len(sent), "what has room is sent at once, the rest merges"


def test_a_sender_ends_when_the_other_end_is_gone():
    ours, theirs = Pipe()
    sender = Sender[list[str]](ours, encode, list.extend)
    for _ in range(10):
        sender.put(["x" * 100_000])
    theirs.close()
    sender.put(["y"])
    hang_up(ours)
    sender.close()
