"""Memory whose old contents show."""

from contextlib import contextmanager

import torch


@contextmanager
def poisoned_memory():
    """New tensors hold NaN and the largest integers, so that what a kernel leaves out is seen."""
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before)
