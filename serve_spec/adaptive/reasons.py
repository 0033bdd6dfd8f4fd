"""What the reasons of decisions mean, and the last decision as a sentence.

`/server_info`, the status page and docs/observability.md use both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from serve_spec.core.round import Reason

MEANINGS: Mapping[Reason, str] = {
    Reason.STATIC: "the depth is configured and never changes",
    Reason.WARM_UP: "too few rounds for a first decision",
    Reason.STEADY: "kept: no other depth is clearly better",
    Reason.GAIN: "more drafts: enough of them are accepted",
    Reason.LOSS: "fewer drafts: too few of them are accepted",
    Reason.PROBE: "a trial of drafting, or of another depth or tree, to measure whether it pays",
    Reason.DWELL: "a change is withheld: the last one is too recent",
    Reason.BACK_OFF: "the next trial is withheld: the last ones did not pay",
    Reason.RANGE: "the batch size moved to another range, which has its own decision",
    Reason.KV: "no drafts: free KV pages or the token budget ran short",
    Reason.LIMIT: "no drafts: no request may draft now, for want of an n-gram match, at its last "
    "token, or by its own limit",
    Reason.BASELINE: "a trial of plain rounds, to measure what drafting is compared with",
    Reason.GUARD: "no drafts: drafting was measured slower than plain decoding",
    Reason.FALLBACK: "no drafts: the policy failed and is built anew after 1,024 rounds",
    Reason.RECONFIGURED: "an operator changed the policy, or the costs of steps became known",
}


def explain(shown: Mapping[str, Any]) -> str:
    """Return the last decision in a controller's `snapshot` as a sentence.

    With predictions it compares drafting with plain decoding: "depth 2, 61 of 128 drafts: predicted
    46 tokens/ms against 43 plain at batch 64; guard off". Trials, and choices that are not
    predicted to be the fastest, have their reason, too. Without predictions the meaning of the
    reason is the sentence.
    """
    depth = shown["speculative_num_steps"]
    drafts = shown["speculative_num_draft_tokens"] - 1
    shape = f"{depth}x{drafts}" if drafts > depth else str(depth)
    reason = Reason(shown["last_reason"])
    predicted: Mapping[str, float] = shown.get("predicted_goodput") or {}
    chosen = f"depth {depth}" if depth else "plain decoding"
    if shown.get("fallback"):
        return f"{chosen}: {shown['fallback']}"
    others = {name: speed for name, speed in predicted.items() if name != shape}
    if shape not in predicted or not others:
        return f"{chosen}: {MEANINGS[reason]}"
    size = (shown.get("break_even") or {}).get("batch_size", 0)
    total, budget = drafts * size, shown.get("budget")
    is_trial = reason in (Reason.PROBE, Reason.BASELINE)
    if total and not is_trial:  # few requests of a trial draft
        verified = total if budget is None else min(budget, total)
        chosen += f", {verified} of {total} drafts"
    name = "0" if depth and "0" in others else max(others, key=lambda each: others[each])
    other = "plain" if name == "0" else f"at depth {name}"
    why = ""
    if is_trial or predicted[shape] < max(others.values()):
        why = f" ({reason}: {'a trial' if is_trial else MEANINGS[reason]})"
    return (
        f"{chosen}{why}: predicted {predicted[shape]:.3g} tokens/ms against {others[name]:.3g} "
        f"{other} at batch {size}; {_guard(shown)}"
    )


def _guard(shown: Mapping[str, Any]) -> str:
    """Return whether the guard of the present batch size keeps speculation off."""
    state = (shown.get("slots") or {}).get(shown.get("slot"), {})
    left = state.get("guard_rounds_left", 0)
    return f"guard on for {left} more rounds" if left else "guard off"
