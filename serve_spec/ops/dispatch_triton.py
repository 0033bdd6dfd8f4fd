"""The beginning of every kernel."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Let the next kernel start, and wait for the one before; see `dispatch.dependent_launch`."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
