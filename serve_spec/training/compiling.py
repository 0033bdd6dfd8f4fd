"""torch.compile where it pays: on a GPU. On a CPU the functions stay as they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
R = TypeVar("R")


def compiled(function: Callable[P, R], device: torch.device) -> Callable[P, R]:
    """`function`, compiled for fixed shapes when `device` is a GPU."""
    if device.type != "cuda":
        return function
    # Two row lengths and four drafters share some code: the default limit of 8 graphs is too few.
    torch._dynamo.config.recompile_limit = 32
    fast: Callable[P, R] = torch.compile(function, dynamic=False)
    return fast
