"""Encode texts without blocking the event loop: long ones run in a thread, one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

T = TypeVar("T")

# About a millisecond of work.
_SHORT_CHARS = 4096
# One thread, so that many long texts do not take the cores from the engine.
_long_texts = ThreadPoolExecutor(1, thread_name_prefix="encode")


async def encode_async(num_chars: int, encode: Callable[[], T]) -> T:
    """Return `encode()`, computed in a thread if `num_chars` characters take long."""
    if num_chars <= _SHORT_CHARS:
        return encode()
    return await asyncio.get_running_loop().run_in_executor(_long_texts, encode)
