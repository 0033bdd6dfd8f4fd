"""`News` as bytes: one message per engine round, so that its encoding is cheap.

Most items are deltas of tokens and text alone. They travel as plain tuples. Every other item is
encoded by itself, so that one that cannot be read ends its own request and no other.
"""

from __future__ import annotations

import pickle

from serve_spec.core.request import TokenDelta
from serve_spec.log import get_logger
from serve_spec.serving.messages import Failed, Items, News, ReplicaItem

logger = get_logger(__name__)

_NOTHING_ELSE = TokenDelta("", (), "")[3:]


def encode(news: News) -> bytes:
    """Return the bytes that `decode` reads."""
    entries = [
        (request_id, item[1], item[2])
        if type(item) is TokenDelta and item[3:] == _NOTHING_ELSE
        else (request_id, pickle.dumps(item, pickle.HIGHEST_PROTOCOL))
        for request_id, item in news.items
    ]
    message = (news.session, entries, news.rows, news.is_over)
    return pickle.dumps(message, pickle.HIGHEST_PROTOCOL)


def decode(message: bytes) -> News:
    """Return the news in a message; an item that cannot be read becomes `Failed`."""
    session, entries, rows, is_over = pickle.loads(message)
    items: Items = [
        (entry[0], TokenDelta(*entry) if len(entry) == 3 else _decoded(*entry)) for entry in entries
    ]
    return News(session, items, rows, is_over)


def _decoded(request_id: str, data: bytes) -> ReplicaItem:
    try:
        item: ReplicaItem = pickle.loads(data)
    except Exception as error:
        logger.error("request %s: an item of its replica cannot be read: %r", request_id, error)
        return Failed(f"an item of the replica cannot be read ({type(error).__name__})")
    return item
