"""Metrics of the fleet by the names of vLLM and SGLang, made from those that Ray exports.

They are sums over the replicas and routers of one application on one node, with the labels
`model_name` and `node`. Every router answers the same, and needs no memory: Ray keeps the counters
of a process that has ended for as long as its node lives, and with the node its series end. A sum
over nodes would fall then, which Prometheus takes for a restart.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from serve_spec import metrics
from serve_spec.adaptive import PolicySettings
from serve_spec.config import ServeSpecConfig
from serve_spec.core.request import FinishReason
from serve_spec.metrics import Metric
from serve_spec.serving.statistics.telemetry import bounds, exported_names

_SAMPLE = re.compile(r"(\w+)\{(.*)\} (\S+)")
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')
_NODE = "NodeAddress"
"""Ray's label of a node."""

_NAMES = {exported for metric in metrics.METRICS for exported in exported_names(metric)}

# Names of distributions, in seconds and in tokens or choices.
_SECONDS = (
    ("vllm:inter_token_latency_seconds", metrics.GAP_S),
    ("sglang:inter_token_latency_seconds", metrics.GAP_S),
    ("vllm:request_queue_time_seconds", metrics.QUEUE_S),
    ("vllm:request_prefill_time_seconds", metrics.PREFILL_S),
    ("vllm:request_decode_time_seconds", metrics.DECODE_S),
    ("vllm:request_inference_time_seconds", metrics.INFERENCE_S),
)
_SIZES = (
    ("vllm:request_prompt_tokens", metrics.PROMPT_TOKENS),
    ("vllm:request_generation_tokens", metrics.GENERATION_TOKENS),
    ("vllm:request_max_num_generation_tokens", metrics.MAX_GENERATION_TOKENS),
    ("vllm:request_params_max_tokens", metrics.PARAMS_MAX_TOKENS),
    ("vllm:request_params_n", metrics.PARAMS_N),
)


class _Node:
    """The figures of one application on one node."""

    def __init__(self) -> None:
        self._samples: defaultdict[str, list[tuple[dict[str, str], float]]] = defaultdict(list)

    def add(self, name: str, labels: dict[str, str], value: float) -> None:
        """Add a sample."""
        self._samples[name].append((labels, value))

    def total(self, metric: Metric, **only: str) -> float:
        """Return the sum of a counter, or of what a distribution has observed."""
        return sum(value for _, value in self._matching(exported_names(metric)[-1], only))

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

    def buckets(self, metric: Metric, **only: str) -> list[float]:
        """Return the cumulative counts of a histogram or distribution, by upper bound."""
        found = dict.fromkeys(map(float, bounds(metric)), 0.0)
        for labels, value in self._matching(exported_names(metric)[0], only):
            bound = float(labels["le"])
            found[bound] = found.get(bound, 0.0) + value
        return [found[bound] for bound in sorted(found)]

    def _matching(self, name: str, only: dict[str, str]) -> Iterator[tuple[dict[str, str], float]]:
        for labels, value in self._samples[name]:
            if all(labels.get(key) == wanted for key, wanted in only.items()):
                yield labels, value


class Aliases:
    """The metrics of one application by other servers' names."""

    def __init__(self, config: ServeSpecConfig, application: str) -> None:
        self._model = config.model.names[0]
        self._depth = PolicySettings.of(config.speculative).max_depth
        self._application = application

    def render(self, exposition: str) -> str:
        """Return the aliases of the metrics in Prometheus' text format, in the same format."""
        nodes: defaultdict[str, _Node] = defaultdict(_Node)
        for name, labels, value in _samples(exposition):
            if labels.get("application") == self._application:
                nodes[labels.get(_NODE, "")].add(name, labels, value)
        families: dict[str, list[str]] = {}
        for address in sorted(nodes) or [""]:
            writer = _Writer(families, {"model_name": self._model, "node": address})
            node = nodes[address]
            self._counters(node, writer)
            self._gauges(node, writer)
            self._histograms(node, writer)
        return "".join(f"{line}\n" for lines in families.values() for line in lines)

    def _counters(self, node: _Node, writer: _Writer) -> None:
        prompts = node.total(metrics.PREFIX_QUERY_TOKENS)
        # Decode rounds do not emit a request's first token.
        firsts = node.total(metrics.FIRST_TOKENS, measured_at="engine")
        generated = firsts + node.total(metrics.OUTPUT_TOKENS)
        drafts = node.positions(metrics.POSITION_DRAFTED).get(1, 0.0)
        for name, text, value in (
            ("vllm:prompt_tokens", "Prompt tokens of admitted requests.", prompts),
            ("sglang:prompt_tokens", "Prompt tokens of admitted requests.", prompts),
            ("vllm:generation_tokens", "Tokens emitted.", generated),
            ("sglang:generation_tokens", "Tokens emitted.", generated),
            ("vllm:prefix_cache_queries", "Prompt tokens of admitted requests.", prompts),
            ("vllm:prefix_cache_hits", "Those found in the prefix cache.",
             node.total(metrics.PREFIX_HIT_TOKENS)),
            ("vllm:num_preemptions", "Requests preempted because the KV pages ran out.",
             node.total(metrics.PREEMPTIONS)),
            ("sglang:num_requests", "Finished requests.",
             node.total(metrics.REQUESTS, measured_at="router", outcome="done")),
            ("vllm:spec_decode_num_drafts", "Requests with drafts, by round.", drafts),
            ("sglang:spec_verify_calls", "Requests with drafts, by round.", drafts),
            ("vllm:spec_decode_num_draft_tokens", "Draft tokens verified.",
             node.total(metrics.DRAFT_TOKENS)),
            ("vllm:spec_decode_num_accepted_tokens", "Draft tokens accepted.",
             node.total(metrics.CORRECT_DRAFTS)),
        ):  # fmt: skip
            writer.family(f"{name}_total", "counter", text, [("", value)])
        ended = [
            (
                f'finished_reason="{reason.value}"',
                node.total(metrics.FINISHED, measured_at="router", finish_reason=reason.value),
            )
            for reason in FinishReason
        ]
        writer.family("vllm:request_success_total", "counter", "Requests that are done.", ended)
        accepted = node.positions(metrics.POSITION_ACCEPTED)
        depth = max([self._depth, *accepted])
        writer.family(
            "vllm:spec_decode_num_accepted_tokens_per_pos_total",
            "counter",
            "Draft tokens accepted by position, from 0.",
            [(f'position="{at}"', accepted.get(at + 1, 0.0)) for at in range(depth)],
        )

    def _gauges(self, node: _Node, writer: _Writer) -> None:
        running = sum(node.by_replica(metrics.RUNNING_SEQS))
        waiting = sum(
            sum(node.by_replica(metric)) for metric in (metrics.WAITING_SEQS, metrics.QUEUE_LEN)
        )
        used, free = (sum(node.by_replica(metrics.KV_PAGES, state=s)) for s in ("used", "free"))
        usage = _ratio(used, used + free)
        hits = node.total(metrics.PREFIX_HIT_TOKENS)
        correct, drafted = map(node.total, (metrics.CORRECT_DRAFTS, metrics.DRAFT_TOKENS))
        drafts = node.positions(metrics.POSITION_DRAFTED).get(1, 0.0)
        depths = node.by_replica(metrics.NUM_STEPS)
        depth = _ratio(sum(depths), len(depths))
        for name, text, value in (
            ("vllm:num_requests_running", "Running requests.", running),
            ("sglang:num_running_reqs", "Running requests.", running),
            ("vllm:num_requests_waiting", "Requests that wait, in routers or engines.", waiting),
            ("sglang:num_queue_reqs", "Requests that wait, in routers or engines.", waiting),
            ("vllm:kv_cache_usage_perc", "Fraction of KV pages in use, 0..1.", usage),
            ("vllm:gpu_cache_usage_perc", "Fraction of KV pages in use, 0..1.", usage),
            ("sglang:token_usage", "Fraction of KV pages in use, 0..1.", usage),
            ("sglang:cache_hit_rate", "Fraction of prompt tokens found in the prefix cache.",
             _ratio(hits, node.total(metrics.PREFIX_QUERY_TOKENS))),
            ("sglang:spec_accept_rate", "Fraction of verified draft tokens accepted.",
             _ratio(correct, drafted)),
            ("sglang:spec_accept_length", "Tokens of a request with drafts, by round.",
             1.0 + _ratio(correct, drafts)),
            ("sglang:spec_block_accept_length",
             "Expected tokens of a request, by round, had all its drafts been verified.",
             1.0 + _expected_of_all(node)),
            ("sglang:spec_cap_length", "Verified tokens of a request with drafts, by round.",
             1.0 + _ratio(drafted, drafts)),
            ("sglang:spec_num_steps", "Mean speculation depth of the replicas.", depth),
            ("sglang:spec_num_draft_tokens", "Mean tokens to verify of a request, with the last.",
             1.0 + depth),
        ):  # fmt: skip
            writer.family(name, "gauge", text, [("", value)])

    def _histograms(self, node: _Node, writer: _Writer) -> None:
        router = {"measured_at": "router"}
        first, later = "Time to first token, in s.", "Mean time per output token, by request, in s."
        whole = "Time from arrival to the last token, in s."
        # Ray knows the sum of a histogram only roughly, so a counter has it.
        for name, text, metric, total_ms in (
            ("vllm:time_to_first_token_seconds", first, metrics.TTFT_MS,
             metrics.FIRST_TOKEN_WAIT_MS),
            ("sglang:time_to_first_token_seconds", first, metrics.TTFT_MS,
             metrics.FIRST_TOKEN_WAIT_MS),
            ("vllm:request_time_per_output_token_seconds", later, metrics.TPOT_MS,
             metrics.TPOT_WAIT_MS),
            ("vllm:time_per_output_token_seconds", later, metrics.TPOT_MS, metrics.TPOT_WAIT_MS),
            ("vllm:e2e_request_latency_seconds", whole, metrics.REQUEST_MS,
             metrics.REQUEST_WAIT_MS),
            ("sglang:e2e_request_latency_seconds", whole, metrics.REQUEST_MS,
             metrics.REQUEST_WAIT_MS),
        ):  # fmt: skip
            scaled = replace(metric, buckets=tuple(bound / 1e3 for bound in metric.buckets))
            counts = node.buckets(metric, **router)
            writer.histogram(name, text, scaled, counts, node.total(total_ms, **router) / 1e3)
        for name, metric in _SECONDS:
            counts, total = node.buckets(metric, **router), node.total(metric, **router)
            writer.histogram(name, metric.help, metric, counts, total)
        for name, metric in _SIZES:
            writer.histogram(name, metric.help, metric, node.buckets(metric), node.total(metric))


class _Writer:
    """Adds the samples of one node to families of metrics, with its labels."""

    def __init__(self, families: dict[str, list[str]], labels: Mapping[str, str]) -> None:
        self._families = families
        self._labels = [f'{name}="{_escaped(value)}"' for name, value in labels.items() if value]

    def family(self, name: str, kind: str, text: str, values: Iterable[tuple[str, float]]) -> None:
        """Add samples of a counter or gauge: further labels and value of each."""
        lines = self._declared(name, kind, text)
        lines += [self._line(name, labels, value) for labels, value in values]

    def histogram(
        self, name: str, text: str, metric: Metric, counts: Sequence[float], total: float
    ) -> None:
        """Add a histogram with the bounds of `metric`."""
        lines = self._declared(name, "histogram", text)
        for bound, count in zip(bounds(metric), counts, strict=True):
            lines.append(self._line(f"{name}_bucket", f'le="{bound}"', count))
        lines.append(self._line(f"{name}_count", "", counts[-1]))
        lines.append(self._line(f"{name}_sum", "", total))

    def _declared(self, name: str, kind: str, text: str) -> list[str]:
        head = [f"# HELP {name} {text}", f"# TYPE {name} {kind}"]
        return self._families.setdefault(name, head)

    def _line(self, name: str, labels: str, value: float) -> str:
        return f"{name}{{{','.join(filter(None, (*self._labels, labels)))}}} {float(value)}"


def _expected_of_all(node: _Node) -> float:
    """Return the accepted drafts of a request and round if no budget had left any unverified."""
    proposed, reached, accepted = map(
        node.positions,
        (metrics.POSITION_PROPOSED, metrics.POSITION_REACHED, metrics.POSITION_ACCEPTED),
    )
    expected, reaches = 0.0, 1.0
    for position in sorted(proposed):
        reaches *= _ratio(accepted.get(position, 0.0), reached.get(position, 0.0))
        expected += reaches * _ratio(proposed[position], proposed[1])
    return expected


def _samples(exposition: str) -> Iterator[tuple[str, dict[str, str], float]]:
    """Yield the name, labels and value of serve_spec's samples."""
    for line in exposition.splitlines():
        found = _SAMPLE.match(line)
        if found is not None and found[1] in _NAMES:
            yield found[1], dict(_LABEL.findall(found[2])), float(found[3])


def _ratio(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def _escaped(text: str) -> str:
    return text.replace("\\", r"\\").replace('"', r"\"").replace("\n", r"\n")
