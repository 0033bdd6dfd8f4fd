"""Requests whose router is gone end: nobody hears what they say.

Ray ends a call when its caller cancels it, not when the caller dies: without this, a replica would
go on computing for nobody until each request has had all its tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from serve_spec.log import get_logger
from serve_spec.serving.outbox import Outbox

logger = get_logger(__name__)

# One question to Ray's control service per router with requests here.
_LOOK_EVERY_S = 1.0


async def close_unheard(
    outboxes: Mapping[Outbox, str],
    is_there: Callable[[str], bool],
    look_every_s: float = _LOOK_EVERY_S,
) -> None:
    """Closes the outboxes of senders that are gone; for ever.

    outboxes: the open ones and their senders, kept up to date by the caller.
    is_there: whether a sender lives; may block.
    """
    while True:
        await asyncio.sleep(look_every_s)
        for sender in set(outboxes.values()):
            if await asyncio.to_thread(is_there, sender):
                continue
            unheard = [outbox for outbox, of in outboxes.items() if of == sender]
            logger.warning("router %s is gone: %d submissions end", sender, len(unheard))
            for outbox in unheard:
                outbox.close()
