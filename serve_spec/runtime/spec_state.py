"""One tier: everything shaped by one choice of num_steps."""

from __future__ import annotations

from dataclasses import dataclass

from serve_spec.core.context import AttentionBackend


@dataclass(frozen=True)
class SpecRuntimeState:
    """A tier, built once at start. Choosing it is one look-up, changing it one reference.

    The three stages are the drafter's chain steps, the target's verification and the drafter's
    catch-up over accepted tokens ("extend"); each owns its attention state. Without a drafter
    there is only verification.
    """

    num_steps: int
    draft: AttentionBackend | None
    verify: AttentionBackend
    extend: AttentionBackend | None
