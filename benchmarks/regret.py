"""What an arm lost against the best fixed depth of each phase, and against not speculating."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

Rates = Mapping[str, Sequence[float | None]]
"""Tokens per time of every arm, phase by phase; None where an arm was not run."""


def best_arms(rates: Rates, statics: Collection[str]) -> list[str]:
    """The fastest of `statics` in every phase; each phase was run by one of them at least."""
    num_phases = len(next(iter(rates.values())))
    return [max(statics, key=lambda arm: rates[arm][phase] or 0.0) for phase in range(num_phases)]


def phase_regrets(rates: Rates, arm: str, best: Sequence[str]) -> list[float | None]:
    """How much faster the best arm of each phase was: 0.1 is a tenth; negative: `arm` won.

    None where one of the two was not run.
    """
    return [
        fastest / mine - 1 if mine is not None and fastest is not None else None
        for mine, fastest in zip(rates[arm], _rates_of(rates, best), strict=True)
    ]


def trace_regret(
    rates: Rates, arm: str, best: Sequence[str], num_tokens: Sequence[int]
) -> float | None:
    """Time of the whole trace over the time with the best arm of each phase, minus 1.

    num_tokens: of every phase. None if a phase is missing.
    """
    mine = trace_time(rates[arm], num_tokens)
    fastest = trace_time(_rates_of(rates, best), num_tokens)
    return None if mine is None or fastest is None else mine / fastest - 1


def trace_time(rates: Sequence[float | None], num_tokens: Sequence[int]) -> float | None:
    """Time of all phases at these rates; None if one is missing."""
    total = 0.0
    for rate, tokens in zip(rates, num_tokens, strict=True):
        if rate is None:
            return None
        total += tokens / rate
    return total


def relative_rates(rates: Rates, arm: str, baseline: str) -> list[float | None]:
    """The arm's speed over the baseline's, phase by phase; None where one was not run."""
    return [
        mine / plain if mine is not None and plain is not None else None
        for mine, plain in zip(rates[arm], rates[baseline], strict=True)
    ]


def _rates_of(rates: Rates, arms: Sequence[str]) -> list[float | None]:
    return [rates[arm][phase] for phase, arm in enumerate(arms)]
