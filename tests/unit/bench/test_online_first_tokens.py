"""Laws of a server's own times to first token: sums of its counters, read once they are whole."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_spec.bench.online import first_tokens as online_first_tokens
from serve_spec.bench.online.first_tokens import (
    FirstTokenReader,
    FirstTokens,
    counter_name,
    first_tokens,
    mean_ms,
)
from serve_spec.metrics import FIRST_TOKEN_WAIT_MS, FIRST_TOKENS
from serve_spec.serving.ray_metrics import exported_names
from tests.unit.bench.online_fakes import Message, Receive, Send, serving

COUNTS = st.integers(1, 1000)


def exposition(replicas: Mapping[str, tuple[str, int, float]]) -> str:
    """What `/metrics` says of replicas: where each measures, requests, ms."""
    lines = ["# HELP ray_serve_spec_first_tokens_total Requests that got to a first token."]
    for name, (place, count, wait_ms) in replicas.items():
        labels = f'{{replica="{name}",measured_at="{place}"}}'
        lines += [
            f"{counter_name(FIRST_TOKENS)}{labels} {float(count)}",
            f"{counter_name(FIRST_TOKEN_WAIT_MS)}{labels} {wait_ms}",
            f'ray_serve_spec_requests_total{{measured_at="{place}",outcome="done"}} 9.0',
        ]
    return "\n".join(lines)


class MetricsApp:
    """Says of `/metrics` one text after the other, the last one for ever."""

    def __init__(self, *texts: str) -> None:
        self.texts = list(texts)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        text = self.texts.pop(0) if len(self.texts) > 1 else self.texts[0]
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": text.encode()})


def test_the_names_are_those_under_which_ray_exports_ours() -> None:
    for metric in (FIRST_TOKENS, FIRST_TOKEN_WAIT_MS):
        assert exported_names(metric) == (counter_name(metric),)


def test_replicas_and_routers_add_up_by_the_place_where_they_measure() -> None:
    text = exposition({"a": ("engine", 3, 30.0), "b": ("engine", 1, 50.0), "r": ("door", 4, 100.0)})
    assert first_tokens(text) == {"engine": FirstTokens(4, 80.0), "door": FirstTokens(4, 100.0)}
    assert first_tokens('ray_other_total{a="b"} 1.0\n# nothing') == {}


@given(COUNTS, COUNTS, st.floats(0, 1e6), st.floats(0, 1e6))
def test_a_mean_is_over_the_new_requests_alone(
    before: int, new: int, before_ms: float, mean: float
) -> None:
    then = FirstTokens(before, before_ms)
    now = FirstTokens(before + new, before_ms + new * mean)
    found = mean_ms({"door": then}, {"door": now, "engine": FirstTokens(new, new * mean)})
    assert found["door"] == pytest.approx(mean, abs=1e-3)
    assert found["engine"] == pytest.approx(mean)
    assert mean_ms({"door": now}, {"door": now}) == {}


def test_a_run_is_read_once_every_request_of_it_counts_at_every_place() -> None:
    first = exposition({"a": ("engine", 2, 20.0), "r": ("door", 2, 30.0)})
    half = exposition({"a": ("engine", 5, 90.0), "r": ("door", 2, 30.0)})
    whole = exposition({"a": ("engine", 6, 100.0), "r": ("door", 6, 130.0)})
    with serving(MetricsApp("", first, half, half, whole)) as url:
        reader = FirstTokenReader(url)
        assert reader.after(2) == {"engine": 10.0, "door": 15.0}
        assert reader.after(4) == {"engine": 20.0, "door": 25.0}


@pytest.mark.parametrize(
    "said", [lambda: "", lambda: exposition({"a": ("engine", 1, 1.0), "r": ("door", 1, 1.0)})]
)
def test_what_does_not_become_whole_is_not_told(
    said: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(online_first_tokens, "_WITHIN_S", 0.0)
    with serving(MetricsApp(said())) as url:
        assert FirstTokenReader(url).after(2) == {}
