"""Metrics of the fleet by the names of vLLM and SGLang, made from those that Ray exports.

They are sums over the replicas and routers of one application, with the label `model_name`. Every
series exists from the start. Counters of processes that have ended stay in the sums for as long as
the router lives: a counter that falls would look like a restart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator

from serve_spec import metrics
from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason
from serve_spec.metrics import Metric
from serve_spec.serving.statistics.telemetry import exported_names

_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')

_TYPES = {
    exported: metric.kind for metric in metrics.METRICS for exported in exported_names(metric)
}


class _Fleet:
    """The figures of one application. latest: samples of the newest exposition, `NAME{LABELS}`."""

    def __init__(self, samples: dict[tuple[str, str], float], latest: set[tuple[str, str]]) -> None:
        self._samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)
        for (name, labels), value in samples.items():
            if _TYPES[name] != "gauge" or (name, labels) in latest:
                self._samples[name].append((dict(_LABEL.findall(labels)), value))

    def total(self, metric: Metric, **only: str) -> float:
        """Return the sum of a counter."""
        return sum(value for _, value in self._matching(exported_names(metric)[0], only))

    def by_replica(self, metric: Metric, **only: str) -> list[float]:
        """Return a gauge of each replica: the maximum, as series of dead processes remain."""
        found: dict[str, float] = {}
        for labels, value in self._matching(exported_names(metric)[0], only):
            replica = labels.get("replica", "")
            found[replica] = max(value, found.get(replica, value))
        return list(found.values())

    def positions(self, metric: Metric) -> dict[int, float]:
        """Return the sums of a counter by draft position, from 1."""
        found: defaultdict[int, float] = defaultdict(float)
        for labels, value in self._matching(exported_names(metric)[0], {}):
            found[int(labels["position"])] += value
        return found

    def histogram(self, metric: Metric, **only: str) -> tuple[dict[float, float], float, float]:
        """Return the cumulative buckets by upper bound, the count and the sum."""
        buckets, count, total = exported_names(metric)
        found = dict.fromkeys((*metric.buckets, float("inf")), 0.0)
        for labels, value in self._matching(buckets, only):
            bound = float(labels["le"])
            found[bound] = found.get(bound, 0.0) + value
        sums = [sum(value for _, value in self._matching(name, only)) for name in (count, total)]
        return found, sums[0], sums[1]

    def _matching(self, name: str, only: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for labels, value in self._samples[name]:
            if all(labels.get(key) == wanted for key, wanted in only.items()):
                yield labels, value


class Aliases:
    """The metrics of one application by other servers' names; keeps counters between calls."""

    def __init__(self, config: ServeSpecConfig, application: str) -> None:
        self._label = f'model_name="{_escaped(config.model.names[0])}"'
        self._depth = PolicySettings.of(config.speculative).max_depth
        self._application = ("application", application)
        self._samples: dict[tuple[str, str], float] = {}

    def render(self, exposition: str) -> str:
        """Return the aliases of the metrics in Prometheus' text format, in the same format."""
        latest = set()
        for name, labels, value in _samples(exposition):
            if self._application in _LABEL.findall(labels):
                self._samples[name, labels] = value
                latest.add((name, labels))
        fleet = _Fleet(self._samples, latest)
        lines = [*self._counters(fleet), *self._gauges(fleet), *self._histograms(fleet)]
        return "".join(f"{line}\n" for line in lines)

    def _counters(self, fleet: _Fleet) -> Iterator[str]:
        prompts = fleet.total(metrics.PREFIX_QUERY_TOKENS)
        # Decode rounds do not emit a request's first token.
        firsts = fleet.total(metrics.FIRST_TOKENS, measured_at="engine")
        generated = firsts + fleet.total(metrics.OUTPUT_TOKENS)
        drafts = fleet.positions(metrics.POSITION_DRAFTED).get(1, 0.0)
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", prompts),
            ("sglang:prompt_tokens", "Prompt tokens of admitted requests.", prompts),
            ("vllm:generation_tokens", "Tokens emitted.", generated),
            ("sglang:generation_tokens", "Tokens emitted.", generated),
            ("vllm:prefix_cache_queries", "Prompt tokens of admitted requests.", prompts),
            ("vllm:prefix_cache_hits", "Those found in the prefix cache.",
             fleet.total(metrics.PREFIX_HIT_TOKENS)),
            ("vllm:num_preemptions", "Requests preempted because the KV pages ran out.",
             fleet.total(metrics.PREEMPTIONS)),
            ("sglang:num_requests", "Finished requests.",
             fleet.total(metrics.REQUESTS, measured_at="router", outcome="done")),
            ("vllm:spec_decode_num_drafts", "Requests with drafts, by round.", drafts),
            ("sglang:spec_verify_calls", "Requests with drafts, by round.", drafts),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.",
             fleet.total(metrics.DRAFT_TOKENS)),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.",
             fleet.total(metrics.CORRECT_DRAFTS)),
        ):  # fmt: skip
            yield from self._family(f"{name}_total", "counter", text, [("", value)])
        ended = [
            (
                f'finished_reason="{reason.value}"',
                fleet.total(metrics.FINISHED, measured_at="router", finish_reason=reason.value),
            )
            for reason in FinishReason
        ]
        yield from self._family(
            "vllm:request_success_total", "counter", "Requests that are done.", ended
        )
        accepted = fleet.positions(metrics.POSITION_ACCEPTED)
        depth = max([self._depth, *accepted])
        yield from self._family(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Draft tokens accepted by position, from 0.",
            [(f'position="{at}"', accepted.get(at + 1, 0.0)) for at in range(depth)],
        )

    def _gauges(self, fleet: _Fleet) -> Iterator[str]:
        running = sum(fleet.by_replica(metrics.RUNNING_SEQS))
        waiting = sum(
            sum(fleet.by_replica(metric)) for metric in (metrics.WAITING_SEQS, metrics.QUEUE_LEN)
        )
        used, free = (sum(fleet.by_replica(metrics.KV_PAGES, state=s)) for s in ("used", "free"))
        usage = _ratio(used, used + free)
        hits = fleet.total(metrics.PREFIX_HIT_TOKENS)
        correct, drafted = map(fleet.total, (metrics.CORRECT_DRAFTS, metrics.DRAFT_TOKENS))
        drafts = fleet.positions(metrics.POSITION_DRAFTED).get(1, 0.0)
        depths = fleet.by_replica(metrics.NUM_STEPS)
        for name, text, value in (
            ("vllm:num_requests_running", "Running requests.", running),
            ("sglang:num_running_reqs", "Running requests.", running),
            ("vllm:num_requests_waiting", "Requests that wait, in routers or engines.", waiting),
            ("sglang:num_queue_reqs", "Requests that wait, in routers or engines.", waiting),
            ("vllm:kv_cache_usage_perc", "Fraction of KV pages in use, 0..1.", usage),
            ("sglang:token_usage", "Fraction of KV pages in use, 0..1.", usage),
            ("sglang:cache_hit_rate", "Fraction of prompt tokens found in the prefix cache.",
             _ratio(hits, fleet.total(metrics.PREFIX_QUERY_TOKENS))),
            ("sglang:spec_accept_rate", "Fraction of verified draft tokens accepted.",
             _ratio(correct, drafted)),
            ("sglang:spec_accept_length", "Tokens of a request with drafts, by round.",
             1.0 + _ratio(correct, drafts)),
            ("sglang:spec_num_steps", "Mean speculation depth of the replicas.",
             _ratio(sum(depths), len(depths))),
        ):  # fmt: skip
            yield from self._family(name, "gauge", text, [("", value)])

    def _histograms(self, fleet: _Fleet) -> Iterator[str]:
        first, later = "Time to first token, in s.", "Mean time per output token, by request, in s."
        whole = "Time from arrival to the last token, in s."
        for name, text, metric in (
            ("vllm:time_to_first_token_seconds", first, metrics.TTFT_MS),
            ("sglang:time_to_first_token_seconds", first, metrics.TTFT_MS),
            ("vllm:request_time_per_output_token_seconds", later, metrics.TPOT_MS),
            ("vllm:time_per_output_token_seconds", later, metrics.TPOT_MS),
            ("vllm:e2e_request_latency_seconds", whole, metrics.REQUEST_MS),
            ("sglang:e2e_request_latency_seconds", whole, metrics.REQUEST_MS),
        ):
            buckets, count, total_ms = fleet.histogram(metric, measured_at="router")
            if metric is metrics.TTFT_MS:  # Ray knows the sum of a histogram only roughly
                total_ms = fleet.total(metrics.FIRST_TOKEN_WAIT_MS, measured_at="router")
            bounds = [("+Inf" if b == float("inf") else f"{b / 1e3:g}") for b in sorted(buckets)]
            rows = zip(bounds, (buckets[b] for b in sorted(buckets)), strict=True)
            yield f"# HELP {name} {text}"
            yield f"# TYPE {name} histogram"
            for bound, value in rows:
                yield self._line(f"{name}_bucket", f'le="{bound}"', value)
            yield self._line(f"{name}_count", "", count)
            yield self._line(f"{name}_sum", "", total_ms / 1e3)

    def _family(
        self, name: str, kind: str, text: str, values: Iterable[tuple[str, float]]
    ) -> Iterator[str]:
        yield f"# HELP {name} {text}"
        yield f"# TYPE {name} {kind}"
        for labels, value in values:
            yield self._line(name, labels, value)

    def _line(self, name: str, labels: str, value: float) -> str:
        return f"{name}{{{','.join(filter(None, (self._label, labels)))}}} {float(value)}"


def _samples(exposition: str) -> Iterator[tuple[str, str, float]]:
    """Yield the name, labels and value of serve_spec's samples."""
    for line in exposition.splitlines():
        found = _SAMPLE.match(line)
        if found is not None and found[1] in _TYPES:
            yield found[1], found[2], float(found[3])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
