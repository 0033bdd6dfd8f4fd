"""How kernels wait for each other; see `dispatch.dependent_launch`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def wait_for_previous(DEPENDENT: tl.constexpr):
    """Let the next kernel start, and wait for the one before."""
    let_next_start(DEPENDENT)
    wait(DEPENDENT)


@triton.jit
def let_next_start(DEPENDENT: tl.constexpr):
    """Let the next kernel start; it waits itself before it reads what this one writes."""
    if DEPENDENT:
        tl.extra.cuda.gdc_launch_dependents()


@triton.jit
def wait(DEPENDENT: tl.constexpr):
    """Wait for the kernel before. Waiting again costs nothing."""
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()


@triton.jit
def let_next_read(DEPENDENT: tl.constexpr):
    """Let the next kernels start; they may read what this one wrote before they wait."""
    if DEPENDENT:
        tl.inline_asm_elementwise(
            "fence.acq_rel.gpu; // $0", "=r", [], dtype=tl.int32, is_pure=False, pack=1
        )
        tl.debug_barrier()
        tl.extra.cuda.gdc_launch_dependents()
