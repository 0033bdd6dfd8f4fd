"""Requests end when their router is gone.

Ray ends a call when its caller cancels it, not when the caller dies: without this, a replica would
go on computing until each request has had all its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serve_spec.log import get_logger
from serve_spec.serving.outbox import Outboxes

logger = get_logger(__name__)

# One question to Ray's control service per router with requests here.
_LOOK_EVERY_S = 1.0
# A router opens its stream within milliseconds of its first request.
_MAX_UNREAD_LOOKS = 30


async def end_orphaned(
    outboxes: Outboxes, is_there: Callable[[str], bool], look_every_s: float = _LOOK_EVERY_S
) -> None:
    """Close outboxes whose router is gone, or does not read them; never return.

    is_there: whether a router lives; may block.
    """
    while True:
        await asyncio.sleep(look_every_s)
        for outbox in outboxes:
            outbox.num_unread_looks = 0 if outbox.has_reader else outbox.num_unread_looks + 1
            is_read = outbox.num_unread_looks < _MAX_UNREAD_LOOKS
            if is_read and await asyncio.to_thread(is_there, outbox.sender):
                continue
            why = "is gone" if is_read else "does not read its stream"
            logger.warning("router %s %s: %d requests end", outbox.sender, why, len(outbox.answers))
            outboxes.close(outbox)
